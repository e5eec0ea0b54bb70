"""What every algorithm's settings promise: frozen, validated, and able to build the algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod

from equidp.engine.algorithm import Algorithm
from equidp.engine.parts import Part


class AlgorithmSettings(Part, ABC):
    """Settings of one algorithm, with its paper's names and defaults. Unknown keys are refused."""

    @abstractmethod
    def build(self) -> Algorithm:
        """The combination of parts these settings stand for."""
