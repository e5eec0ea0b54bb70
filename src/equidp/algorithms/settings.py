"""Settings: the base class of all algorithms' settings. They are frozen and validated, and build the algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Part


class AlgorithmSettings(Part, ABC):
    """Settings of one algorithm, with its paper's names and defaults. Unknown keys are refused.

    Attributes:
        features: name of a fixed map of the records that the algorithm trains on, or None.
        below_options: whether settings are given as `<algorithm>.options.<name>`, and not as `<algorithm>.<name>`.
    """

    features: ClassVar[str | None] = None
    below_options: ClassVar[bool] = True

    @abstractmethod
    def build(self) -> Algorithm:
        """Return the combination of parts that these settings describe."""
