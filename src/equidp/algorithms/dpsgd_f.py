"""DPSGD-F: per-group adaptive clipping (Xu, Du, Wu, "Removing Disparate Impact…", Algorithm 2).

A group whose gradients exceed C_0 more often than average gets a larger bound. Let m^k and o^k be the numbers of the
batch's gradients of group k that are above C_0 and not above it. Each is noised with σ_1 and clamped at 0:

    b̃^k = m̃^k + õ^k,   ρ^k = m̃^k/b̃^k (0 if b̃^k = 0),   ρ = Σm̃^k/B  (`ratio_over: counted`: Σm̃^k/Σb̃^k)
    C^k = min(C_max, C_0·(1 + ρ^k/ρ))   (C_0 where ρ = 0),   w_i = min(1, C^{k(i)}/n_i),   Δ = max_k C^k

One event per step, as for `naive`: a record moves one of the 2K counts by one. Where we depart from the text and from
public code: Δ is over all K groups, not only those in the batch; the counts are noised before anything uses them; both
releases are one fused event; C^k is bounded, because ρ → 0 makes the ratio explode; an empty batch releases noise, too.
If few gradients exceed C_0, clamping biases the noised counts of rare groups upwards, and so C^k. Privacy is not
affected.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm, published_by
from equidp.mechanism.parts import (
    HUGE,
    TINY,
    Combination,
    FlatClip,
    NoiseLevel,
    Positive,
    Public,
    SideRelease,
    StepFacts,
    counts,
    noise_level,
)


class GroupClipCounts(SideRelease):
    """m̃^k and õ^k, turned into a clip norm for each group. The threshold is the current `clip_norm` (C_0)."""

    additive: ClassVar[bool] = True
    gives: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    count_noise_multiplier: NoiseLevel = "10x"
    max_clip_ratio: Positive = 10.0
    ratio_over: Literal["batch", "counted"] = "batch"

    @property
    def released(self) -> str:
        """m̃^k and õ^k."""
        return "The noised numbers of each group's gradients above and not above the base bound, in every batch."

    def noise(self, plan: Plan) -> float:
        """σ_1."""
        return noise_level(self.count_noise_multiplier, plan)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """(m^1..m^K, o^1..o^K), `[2K]`: a record moves exactly one entry by one."""
        entries = torch.add(groups, norms <= public["clip_norm"], alpha=plan.groups)
        return counts(entries, 2 * plan.groups)

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """C^k, `[K]`."""
        above, not_above = noised.clamp(min=0.0).chunk(2)
        counted = above + not_above
        group_ratio = above / counted.clamp(min=TINY)
        ratio = above.sum() / (facts.plan.batch_size if self.ratio_over == "batch" else counted.sum().clamp(min=TINY))
        growth = group_ratio / ratio.clamp(min=TINY)  # if the ratio is 0, so are all group ratios, and 0/TINY = 0
        return {"clip_norm": public["clip_norm"] * (1.0 + growth).clamp(max=self.max_clip_ratio)}

    def objection(self, combination: Combination) -> str | None:
        """Refuse a weight rule without `clip_norm`, because gradients above this bound are counted."""
        if combination.weights is None or "clip_norm" in combination.weights.reads:
            return super().objection(combination)
        return f"it counts gradients above clip_norm, which {type(combination.weights).__name__} does not use"


class DPSGDF(AlgorithmSettings):
    """Settings of DPSGD-F."""

    base_clip_norm: Positive = 1.0
    """C_0, the threshold of the counts and the smallest bound."""
    count_noise_multiplier: NoiseLevel = "10x"
    """σ_1, noise on each of the 2K counts; a ratio such as "10x" is to the noise multiplier σ_2."""
    max_clip_norm: Positive | None = None
    """C_max, the largest bound; 10·C_0 unless given."""
    ratio_over: Literal["batch", "counted"] = "batch"
    """Whether ρ is divided by the expected batch size B or by the counted records Σb̃^k."""

    @model_validator(mode="after")
    def _ordered(self) -> DPSGDF:
        if self.max_clip_norm is not None and self.max_clip_norm < self.base_clip_norm:
            raise ValueError("max_clip_norm must not be below base_clip_norm")
        if self.max_clip_norm is not None and self.max_clip_norm / self.base_clip_norm > HUGE:
            raise ValueError("max_clip_norm must not be more than 1e12 times base_clip_norm")
        return self

    def build(self) -> Algorithm:
        """Flat clipping at C^k, released with the batch."""
        return self.with_counts("dpsgd_f", GroupClipCounts)

    def with_counts(self, name: str, kind: type[GroupClipCounts], **own: Any) -> Algorithm:
        """Return flat clipping at the C^k that counts of this kind give; `own` are the kind's additional settings."""
        ratio = 10.0 if self.max_clip_norm is None else self.max_clip_norm / self.base_clip_norm
        given = self.model_dump(include={"count_noise_multiplier", "ratio_over"})
        return Algorithm(
            name=name,
            weights=FlatClip(),
            initial={"clip_norm": self.base_clip_norm, **kind.defaults},
            side_release=kind(max_clip_ratio=ratio, **given, **own),
            published=published_by("classic"),
        )
