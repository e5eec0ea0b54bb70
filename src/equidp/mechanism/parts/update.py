"""What the optimiser is given."""

from __future__ import annotations

from torch import Tensor

from equidp.mechanism.parts.base import Part, Run, Running
from equidp.mechanism.parts.facts import StepFacts


class Update(Part):
    """What the optimiser is given: the noisy sum as it is. Any function of noisy sums is post-processing."""

    def start(self, run: Run) -> Updating:
        """The update at work."""
        return Updating()


class Updating(Running):
    """An update during one run."""

    def direction(self, noisy_sum: Tensor, facts: StepFacts) -> Tensor:
        """The direction, flat `[d]`, made from the step's noisy sum `[d]`; the loop divides it by B afterwards."""
        return noisy_sum
