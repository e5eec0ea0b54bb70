"""DP-SGD-Decay: noise that falls exponentially (Yu et al. 2019, "Differentially Private Model Publishing…").

    σ_e = σ_0·e^{−k·e},   epoch e of step t is ⌊t·E/T⌋

Otherwise DP-SGD; every step is charged at its own σ.
"""

from __future__ import annotations

import math

from equidp.accounting.plan import Plan, Segment, by_epoch
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, Positive, Schedule


class ExponentialDecay(Schedule):
    """Noise factors e^{−k·e}."""

    noise_decay: Positive = 0.005
    """k, per epoch."""

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """One segment per epoch."""
        return by_epoch(plan, [math.exp(-self.noise_decay * epoch) for epoch in range(plan.epochs)])


class DPSGDDecay(AlgorithmSettings):
    """Settings of DP-SGD-Decay."""

    clip_norm: Positive = 1.0
    """C, the bound on each record's gradient."""
    noise_decay: Positive = 0.005
    """k, per epoch."""

    def build(self) -> Algorithm:
        """Flat clipping, exponentially decaying noise."""
        return Algorithm(
            name="dpsgd_decay",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            schedule=ExponentialDecay(noise_decay=self.noise_decay),
        )
