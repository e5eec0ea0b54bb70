"""Auto-DPSGD-L and Auto-DPSGD-S: each gradient has its own clip norm, and the noise falls (baselines of SAD-DPSGD).

    C_i = clamp(ω·n_i, C_lo, C_hi),   w_i = min(1, C_i/n_i),   Δ = C_hi
    L: σ_e = σ_0·(1 − ρ·e/E)         S: σ_e = σ_0·R^{phase(e)}, phases of equal length

Where we depart from published code: it takes ω·n if that lies between the bounds, and C_lo otherwise; the clamp is our
reading, with the same Δ. It also sets the noise from the *last sample's* threshold, although another record may add up
to C_hi: that is not differentially private. Here Δ is always C_hi.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from equidp.accounting.plan import Plan, Segment, by_epoch
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Positive, Public, Schedule, WeightRule

Share = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(gt=0, le=1)]


class OwnThreshold(WeightRule):
    """w = min(1, clamp(ω·n, C_lo, C_hi)/n)."""

    reads: ClassVar[frozenset[str]] = frozenset({"clip_norm", "min_clip_norm"})
    defaults: ClassVar[Mapping[str, float]] = {"clip_norm": 1.0, "min_clip_norm": 0.5}

    norm_fraction: Positive = 0.5
    """ω."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """min(1, C_i/n_i), and 1 for a zero gradient; `clip_norm` is C_hi."""
        own = torch.maximum(self.norm_fraction * norms, public["min_clip_norm"].expand_as(norms))
        return (torch.minimum(own, public["clip_norm"].expand_as(norms)) / norms).clamp(max=1.0)

    def bound(self, public: Public) -> Tensor:
        """C_hi, which every n ≥ C_hi/ω reaches; the thresholds of a batch's records have no part in it."""
        return public["clip_norm"]


class LinearFall(Schedule):
    """Noise factors 1 − ρ·e/E."""

    noise_drop: Share = 0.4
    """ρ."""

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """One segment per epoch."""
        return by_epoch(plan, [1 - self.noise_drop * epoch / plan.epochs for epoch in range(plan.epochs)])


class StepFall(Schedule):
    """Noise factors R^phase, with n phases of equally many epochs."""

    phases: Annotated[int, Field(ge=1)] = 3
    """n."""
    noise_decay: Ratio = 0.8
    """R."""

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """One segment per epoch; phase of epoch e is ⌊e·n/E⌋."""
        return by_epoch(
            plan, [self.noise_decay ** (epoch * self.phases // plan.epochs) for epoch in range(plan.epochs)]
        )


class _AutoDPSGD(AlgorithmSettings):
    """Settings of both algorithms."""

    norm_fraction: Positive = 0.5
    """ω: the share of its own norm that a gradient is cut to."""
    min_clip_norm: Positive = 0.5
    """C_lo (20 on ResNet)."""
    max_clip_norm: Positive = 1.0
    """C_hi, which is the sensitivity (40 on ResNet)."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_clip_norm < self.min_clip_norm:
            raise ValueError("max_clip_norm must not be below min_clip_norm")
        return self

    def _algorithm(self, name: str, schedule: Schedule) -> Algorithm:
        return Algorithm(
            name=name,
            weights=OwnThreshold(norm_fraction=self.norm_fraction),
            initial={"clip_norm": self.max_clip_norm, "min_clip_norm": self.min_clip_norm},
            schedule=schedule,
        )


class AutoDPSGDL(_AutoDPSGD):
    """Settings of Auto-DPSGD-L."""

    noise_drop: Share = 0.4
    """ρ: the share of σ_0 by which the noise has fallen at the end."""

    def build(self) -> Algorithm:
        """Own thresholds, linearly falling noise."""
        return self._algorithm("auto_dpsgd_l", LinearFall(noise_drop=self.noise_drop))


class AutoDPSGDS(_AutoDPSGD):
    """Settings of Auto-DPSGD-S."""

    phases: Annotated[int, Field(ge=1)] = 3
    """n, phases of equally many epochs."""
    noise_decay: Ratio = 0.8
    """R: a phase's noise divided by the previous phase's."""

    def build(self) -> Algorithm:
        """Own thresholds, noise falling by steps."""
        return self._algorithm("auto_dpsgd_s", StepFall(phases=self.phases, noise_decay=self.noise_decay))
