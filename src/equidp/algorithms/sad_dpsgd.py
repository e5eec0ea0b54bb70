"""SAD-DPSGD: noise that rises and a clip norm that falls, by phases ("Steps Adaptive Decay DPSGD", Algorithms 1 and 2).

T steps are cut into n phases of lengths L_i = γ·L_{i+1} (for γ < 1 the first is the shortest). In phase i

    σ_i = β·σ_{i+1},   C_i = a·C_{i+1}

so training starts with little noise and a large bound, when the rare classes are learnt. Each of the L_i steps has
sensitivity C_i and event (B/N, σ_i): the schedule that is calibrated is the one that is trained. Boundaries lie at
round(T·cumulative share). Where we depart from the published code: it calibrates one schedule and trains its reverse.
`schedule_report` gives the figures that the paper's Figures 3 to 5 draw. Its mean and variance weight phases by their
lengths, where the paper prints (1/n)Σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from equidp.accounting.plan import Plan, Segment
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import HUGE, Combination, FlatClip, Positive, Schedule

Count = Annotated[int, Field(ge=1, le=1000)]


class DecayingPhases(Schedule):
    """Phases of growing length; factors are relative to the last phase."""

    phases: Count = 3
    """n."""
    noise_decay: Positive = 0.8
    """β."""
    phase_decay: Positive = 0.9
    """γ."""
    clip_decay: Positive = 5 / 3
    """a."""

    def lengths(self, steps: int) -> list[int]:
        """Return the number of steps of each phase. They sum to `steps`; in a short run a phase may have none."""
        shares = [self.phase_decay ** (self.phases - 1 - i) for i in range(self.phases)]
        ends = [round(steps * sum(shares[: i + 1]) / sum(shares)) for i in range(self.phases)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """One segment per phase that has steps."""
        left = range(self.phases - 1, -1, -1)  # phases still to come
        return tuple(
            Segment(length, noise=self.noise_decay**to_come, clip=self.clip_decay**to_come)
            for length, to_come in zip(self.lengths(plan.steps), left, strict=True)
            if length
        )

    def objection(self, combination: Combination) -> str | None:
        """Refuse a changing clip norm if the weight rule does not read it, and factors that may overflow."""
        for name in ("noise_decay", "phase_decay", "clip_decay"):
            if (self.phases - 1) * abs(math.log10(getattr(self, name))) > math.log10(HUGE):
                return f"its first and last of {self.phases} phases are too far apart; set {name} nearer to 1"
        reads = combination.weights.reads if combination.weights else frozenset()
        if self.clip_decay == 1 or "clip_norm" in reads:
            return None
        return f"it moves clip_norm, which {type(combination.weights).__name__} does not read; set clip_decay to 1"


@dataclass(frozen=True)
class PhaseReport:
    """One schedule in figures.

    Attributes:
        lengths, noise, clip_norms: of each phase that has steps.
        mean_noise: μ = Σ L_i·σ_i/T.
        noise_variance: Σ L_i·(σ_i − μ)²/T.
    """

    lengths: tuple[int, ...]
    noise: tuple[float, ...]
    clip_norms: tuple[float, ...]
    mean_noise: float
    noise_variance: float


def schedule_report(schedule: DecayingPhases, plan: Plan, clip_norm: float = 1.0) -> PhaseReport:
    """Return the figures that the paper draws of a schedule: phase lengths, σ, C, and the spread of σ over the steps.

    Args:
        schedule: β, γ, a, n.
        plan: its `noise_multiplier` is the last phase's σ.
        clip_norm: the last phase's C.
    """
    segments = schedule.segments(plan)
    noise = [plan.noise_multiplier * s.noise for s in segments]
    mean = sum(s.steps * sigma for s, sigma in zip(segments, noise, strict=True)) / plan.steps
    spread = sum(s.steps * (sigma - mean) ** 2 for s, sigma in zip(segments, noise, strict=True)) / plan.steps
    clips = tuple(clip_norm * s.clip for s in segments)
    return PhaseReport(tuple(s.steps for s in segments), tuple(noise), clips, mean, spread)


class SADDPSGD(AlgorithmSettings):
    """Settings of SAD-DPSGD."""

    phases: Count = 3
    """n, the number of phases."""
    noise_decay: Positive = 0.8
    """β: a phase's noise divided by the next phase's."""
    phase_decay: Positive = 0.9
    """γ: a phase's length divided by the next phase's."""
    clip_decay: Positive = 5 / 3
    """a: a phase's clip norm over the next phase's (not printed; the authors' code shrinks it by 0.6)."""
    clip_norm: Positive = 1.0
    """C_n, the *last* phase's bound."""

    def build(self) -> Algorithm:
        """Flat clipping on decaying phases."""
        return Algorithm(
            name="sad_dpsgd",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            schedule=DecayingPhases(**self.model_dump(exclude={"clip_norm"})),
        )
