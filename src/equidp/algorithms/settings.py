"""What every algorithm's settings promise: frozen, validated, and able to build the algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Part


class AlgorithmSettings(Part, ABC):
    """Settings of one algorithm, with its paper's names and defaults. Unknown keys are refused.

    Attributes:
        features: name of a fixed map of the records that the algorithm trains on, or None.
        below_options: settings are typed as `<algorithm>.options.<name>`; otherwise as `<algorithm>.<name>`.
    """

    features: ClassVar[str | None] = None
    below_options: ClassVar[bool] = True

    @abstractmethod
    def build(self) -> Algorithm:
        """The combination of parts these settings stand for."""
