"""DPSGD-Global and DPSGD-Global-Adapt: gradients are scaled instead of clipped, so that they keep their proportions.

Global (Bu et al. 2021, "On the Convergence and Calibration of Deep Learning with DP"): w = C/Z if n ≤ Z, else 0, so a
gradient longer than the strict bound Z is dropped. Adapt (Esipova et al. 2023, "Disparate Impact in Differential
Privacy from Gradient Misalignment"): w = C/max(Z_t, n), and Z_t follows the noised share of gradients above τ·Z_t:

    b̃ = (#{n_i > τ·Z_t} + N(0, σ_b²))/B,   Z_{t+1} = Z_t·exp(−η_Z + b̃)

Δ = C in both. The count and the gradient come from one sample and are one event, (σ⁻² + σ_b⁻²)^(−1/2).

With `counted: below` the other gradients are counted, b̃ = 1 − (#{n_i ≤ τ·Z_t} + N(0, σ_b²))/B. A gradient that is
counted adds at most τ·Δ to the sum, and a gradient that adds Δ is not counted. So the event is
max(τ²/σ² + 1/σ_b², 1/σ²)^(−1/2). From σ_b = σ/√(1 − τ²) on this is σ itself, and the count costs nothing (proof:
`joint_noise`). The price is that b̃ also varies with |S|, by about √B/B.

Where we depart from the text: the count is divided by the expected B, not by |S|, which is private; and Z_t is kept in
a range of finite numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import (
    HUGE,
    TINY,
    Added,
    NoiseLevel,
    Positive,
    Public,
    SideRelease,
    StepFacts,
    WeightRule,
    noise_level,
)

Counted = Literal["above", "below"]

START: Mapping[str, float] = {"clip_norm": 1.0, "strict_clip_norm": 50.0}


class ScaleOrDrop(WeightRule):
    """w = C/Z if n ≤ Z, else 0."""

    reads: ClassVar[frozenset[str]] = frozenset(START)
    defaults: ClassVar[Mapping[str, float]] = START

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """C/Z or 0."""
        strict = public["strict_clip_norm"]
        return torch.where(norms <= strict, public["clip_norm"] / strict, 0.0)

    def bound(self, public: Public) -> Tensor:
        """C, reached at n = Z."""
        return public["clip_norm"]

    def reach(self, unit: str, upto: float) -> float:
        """n ≤ τ·Z adds C·n/Z ≤ min(τ, 1)·C, or nothing."""
        return min(1.0, upto) if unit == "strict_clip_norm" else 1.0


class ScaleOrClip(WeightRule):
    """w = C/max(Z, n)."""

    reads: ClassVar[frozenset[str]] = frozenset(START)
    defaults: ClassVar[Mapping[str, float]] = START

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """C/max(Z, n)."""
        return public["clip_norm"] / torch.maximum(public["strict_clip_norm"].expand_as(norms), norms)

    def bound(self, public: Public) -> Tensor:
        """C, for every n ≥ Z."""
        return public["clip_norm"]

    def reach(self, unit: str, upto: float) -> float:
        """n ≤ τ·Z adds C·n/max(Z, n) ≤ min(τ, 1)·C."""
        return min(1.0, upto) if unit == "strict_clip_norm" else 1.0


class StrictBoundCount(SideRelease):
    """The noised number of gradients above τ·Z, or not above it, by which Z is adapted."""

    additive: ClassVar[bool] = True
    steers: ClassVar[frozenset[str]] = frozenset({"strict_clip_norm"})
    defaults: ClassVar[Mapping[str, float]] = {"strict_clip_norm": 50.0}

    strict_clip_learning_rate: Positive = 0.1
    """η_Z."""
    threshold: Positive = 0.7
    """τ."""
    count_noise_multiplier: NoiseLevel = 10.0
    """σ_b."""
    counted: Counted = "above"
    """Which gradients are counted."""

    @property
    def released(self) -> str:
        """The count."""
        which = "near" if self.counted == "above" else "not near"
        return f"The noised number of gradients {which} the strict bound, in every batch."

    def noise(self, plan: Plan) -> float:
        """σ_b."""
        return noise_level(self.count_noise_multiplier, plan)

    def added(self) -> tuple[Added, ...]:
        """1 for gradients that are counted. Only if the short ones are counted, this saves noise."""
        if self.counted == "above":
            return super().added()
        return Added(1.0, self.threshold, "strict_clip_norm"), Added(0.0)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """#{n_i > τ·Z} or #{n_i ≤ τ·Z}, `[1]`."""
        threshold = self.threshold * public["strict_clip_norm"]
        found = norms > threshold if self.counted == "above" else norms <= threshold
        return found.sum(0, keepdim=True, dtype=torch.float32)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Z_{t+1}."""
        share = noised.squeeze(0) / facts.plan.batch_size
        if self.counted == "below":
            share = 1.0 - share
        grown = share.sub_(self.strict_clip_learning_rate).exp_().mul_(public["strict_clip_norm"])
        return {"strict_clip_norm": grown.clamp_(TINY, HUGE)}


class DPSGDGlobal(AlgorithmSettings):
    """Settings of DPSGD-Global."""

    clip_norm: Positive = 1.0
    """C, the length to which a gradient of length Z is scaled."""
    strict_clip_norm: Positive = 50.0
    """Z; longer gradients are dropped."""

    def build(self) -> Algorithm:
        """Scaling by C/Z, longer gradients dropped."""
        return Algorithm(name="dpsgd_global", weights=ScaleOrDrop(), initial=self.model_dump())


class DPSGDGlobalAdapt(AlgorithmSettings):
    """Settings of DPSGD-Global-Adapt."""

    clip_norm: Positive = 1.0
    """C, the length to which a gradient of length Z is scaled."""
    strict_clip_norm: Positive = 50.0
    """Z_0, the first strict bound."""
    strict_clip_learning_rate: Positive = 0.1
    """η_Z, how fast Z falls while few gradients are near it."""
    threshold: Positive = 0.7
    """τ: a gradient is near Z if it exceeds τ·Z."""
    count_noise_multiplier: NoiseLevel = 10.0
    """σ_b, noise on that count; a ratio such as "10x" is to the noise multiplier."""
    counted: Counted = "above"
    """Whether gradients `above` τ·Z are counted, as in the paper, or those `below`. To count those below costs no ε if
    σ_b is at least σ/√(1 − τ²) ("1.41x" at 0.7)."""

    def build(self) -> Algorithm:
        """Scaling by C/max(Z, n), Z adapted."""
        return Algorithm(
            name="dpsgd_global_adapt",
            weights=ScaleOrClip(),
            initial=self.model_dump(include=set(START)),
            side_release=StrictBoundCount(**self.model_dump(exclude=set(START))),
        )
