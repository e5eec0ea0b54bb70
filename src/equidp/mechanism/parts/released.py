"""Which weights leave the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from equidp.mechanism.parts.base import Part, Run, Running


class Released(Part):
    """Which weights leave the run: the trained ones. Any function of a run's iterates is post-processing."""

    def start(self, run: Run) -> Releasing:
        """The released weights during one run."""
        return Releasing(run)


class Releasing(Running):
    """Released weights during one run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def follow(self) -> None:
        """Called after every step that was taken, at the new parameters."""

    def weights(self) -> Tensor | None:
        """`[d]` weights that leave the run if it ends here; None for the trained ones."""
        return None


class ExponentialAverage(Released):
    """θ̄_t = β_t·θ̄_{t−1} + (1 − β_t)·θ_t with θ̄_0 = θ_0 and β_t = min(β, (1 + t)/(10 + t)) (De et al. 2022, §3)."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """β."""

    def start(self, run: Run) -> Releasing:
        """The average θ̄ during the run."""
        return Averaging(self, run)


class Averaging(Releasing):
    """An exponential average during one run."""

    remembered = ("average", "taken")

    def __init__(self, part: ExponentialAverage, run: Run) -> None:
        super().__init__(run)
        self.part = part
        self.average, self.taken = run.engine.flatten(), 0

    def follow(self) -> None:
        """Update θ̄_t from the new parameters."""
        self.taken += 1
        decay = min(self.part.decay, (1 + self.taken) / (10 + self.taken))
        self.average.lerp_(self.run.engine.flatten(), 1 - decay)

    def weights(self) -> Tensor:
        """θ̄, `[d]`."""
        return self.average
