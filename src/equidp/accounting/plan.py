"""The plan of a run: its public facts, fixed before any record is read, and the segments of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from equidp.accounting.trials import Trials
from equidp.errors import EquidpError

LONGEST = 1_000_000_000
"""The most steps of a run."""


@dataclass(frozen=True)
class Plan:
    """Public facts of one training run.

    Attributes:
        records: the declared number N of privacy units in the training part.
        batch_size: expected batch size B.
        epochs: expected passes over the data E.
        groups: number of groups K of the partition used in training.
        delta: δ.
        noise_multiplier: the scalar that calibration solves for; 0 only for the non-private baseline.
        epsilon: the target that the noise was calibrated to; None if the noise itself was given.
        classes: number of classes of each group, if the partition is a product that ends in the classes.
        trials: how many trainings ε is for; it may be given as the mapping that `dataclasses.asdict` makes of it.
    """

    records: int
    batch_size: int
    epochs: int
    groups: int
    delta: float
    noise_multiplier: float
    epsilon: float | None = None
    classes: int = 0
    trials: Trials = field(default_factory=Trials)

    def __post_init__(self) -> None:
        if isinstance(self.trials, Mapping):
            object.__setattr__(self, "trials", Trials(**self.trials))
        if self.batch_size > self.records:
            raise EquidpError(
                f"training.batch_size={self.batch_size} exceeds the {self.records} training records (or units of "
                "them): lower it."
            )
        if (steps := self.epochs * self.records // self.batch_size) > LONGEST:
            raise EquidpError(
                f"{self.epochs} epochs of {self.records} records in batches of {self.batch_size} are {steps} steps, "
                f"which would not end: lower training.epochs, for {LONGEST} steps at most."
            )

    @property
    def sampling_rate(self) -> float:
        """q = B/N."""
        return self.batch_size / self.records

    @property
    def classes_each(self) -> int:
        """Number of classes of each group if the partition is a product that ends in the classes; else all groups."""
        return self.classes or self.groups

    @property
    def steps(self) -> int:
        """T = round(E·N/B), at least 1."""
        return max(1, round(self.epochs * self.records / self.batch_size))

    def epoch(self, step: int) -> int:
        """Return the epoch of step t, ⌊t·E/T⌋."""
        return step * self.epochs // self.steps

    def epoch_lengths(self) -> list[int]:
        """Return the number of steps in each epoch; they sum to T."""
        ends = [-(-(e + 1) * self.steps // self.epochs) for e in range(self.epochs)]
        return [b - a for a, b in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Segment:
    """Consecutive steps with one noise factor (times σ) and one clip factor (times C)."""

    steps: int
    noise: float = 1.0
    clip: float = 1.0


def segment_at(segments: Sequence[Segment], step: int) -> Segment:
    """Return the segment of step t."""
    for segment in segments:
        if step < segment.steps:
            return segment
        step -= segment.steps
    raise IndexError("step beyond the schedule")


def by_epoch(plan: Plan, factors: Sequence[float]) -> tuple[Segment, ...]:
    """Return a segment for each epoch, with its noise factor. Each has steps: no batch is larger than the data."""
    return tuple(Segment(length, noise) for length, noise in zip(plan.epoch_lengths(), factors, strict=True))
