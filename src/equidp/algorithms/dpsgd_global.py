"""DPSGD-Global and DPSGD-Global-Adapt: scale instead of clip, so that gradients keep their proportions.

Global (Bu et al. 2021, "On the Convergence and Calibration of Deep Learning with DP"): w = C/Z if n ≤ Z, else 0: a
gradient longer than the strict bound Z is dropped. Adapt (Esipova et al. 2023, "Disparate Impact in Differential
Privacy from Gradient Misalignment"): w = C/max(Z_t, n), with Z_t led by the noised share of gradients above τ·Z_t:

    b̃ = (#{n_i > τ·Z_t} + N(0, σ_b²))/B,   Z_{t+1} = Z_t·exp(−η_Z + b̃)

Δ = C in both. The count and the gradient come from one sample and are one event. Where we depart from the text: the
count is divided by the expected B, not by |S|, which is private; and Z_t is kept in a range of finite numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import (
    HUGE,
    TINY,
    NoiseLevel,
    Positive,
    Public,
    SideRelease,
    StepFacts,
    WeightRule,
    noise_level,
)

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


class StrictBoundCount(SideRelease):
    """The noised number of gradients above τ·Z, which leads Z."""

    steers: ClassVar[frozenset[str]] = frozenset({"strict_clip_norm"})
    defaults: ClassVar[Mapping[str, float]] = {"strict_clip_norm": 50.0}

    strict_clip_learning_rate: Positive = 0.1
    """η_Z."""
    threshold: Positive = 0.7
    """τ."""
    count_noise_multiplier: NoiseLevel = 10.0
    """σ_b."""

    @property
    def released(self) -> str:
        """The count."""
        return "The noised number of gradients near the strict bound, in every batch."

    def noise(self, plan: Plan) -> float:
        """σ_b."""
        return noise_level(self.count_noise_multiplier, plan)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """#{n_i > τ·Z}, `[1]`."""
        return (norms > self.threshold * public["strict_clip_norm"]).sum(0, keepdim=True, dtype=torch.float32)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Z_{t+1}."""
        share = noised.squeeze(0) / facts.plan.batch_size
        grown = share.sub_(self.strict_clip_learning_rate).exp_().mul_(public["strict_clip_norm"])
        return {"strict_clip_norm": grown.clamp_(TINY, HUGE)}


class DPSGDGlobal(AlgorithmSettings):
    """Settings of DPSGD-Global."""

    clip_norm: Positive = 1.0
    """C, what a gradient of length Z is scaled to."""
    strict_clip_norm: Positive = 50.0
    """Z, beyond which a gradient is dropped."""

    def build(self) -> Algorithm:
        """Scaling by C/Z, longer gradients dropped."""
        return Algorithm(name="dpsgd_global", weights=ScaleOrDrop(), initial=self.model_dump())


class DPSGDGlobalAdapt(AlgorithmSettings):
    """Settings of DPSGD-Global-Adapt."""

    clip_norm: Positive = 1.0
    """C, what a gradient of length Z is scaled to."""
    strict_clip_norm: Positive = 50.0
    """Z_0, the first strict bound."""
    strict_clip_learning_rate: Positive = 0.1
    """η_Z, how fast Z falls while few gradients come near it."""
    threshold: Positive = 0.7
    """τ: a gradient counts as near when it exceeds τ·Z."""
    count_noise_multiplier: NoiseLevel = 10.0
    """σ_b, noise on that count; a ratio such as "10x" is to the noise multiplier."""

    def build(self) -> Algorithm:
        """Scaling by C/max(Z, n), Z adapted."""
        return Algorithm(
            name="dpsgd_global_adapt",
            weights=ScaleOrClip(),
            initial={"clip_norm": self.clip_norm, "strict_clip_norm": self.strict_clip_norm},
            side_release=StrictBoundCount(
                strict_clip_learning_rate=self.strict_clip_learning_rate,
                threshold=self.threshold,
                count_noise_multiplier=self.count_noise_multiplier,
            ),
        )
