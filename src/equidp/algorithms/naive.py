"""Naïve reweighting, the baseline of DPSGD-F (Xu, Du, Wu, "Removing Disparate Impact…", §5.3).

Every group is given an equal share of the batch by weights made of its noised size b̃^k:

    θ^k = (B/K)/max(b̃^k, 1),   w_i = θ^{k(i)}·min(1, C_0/n_i),   Δ = C_0·max_k θ^k

One event per step: the K counts (L2 sensitivity 1, noise σ_1) and the gradient (σ_2) come from the same sample, so they
are one Gaussian of σ^eff = (σ_1⁻² + σ_2⁻²)^(−1/2). Where we depart from public code: counts are noised before use; Δ is
taken over all K groups (an absent group has the largest θ); the two releases are not charged as if their samples were
independent. A noised count below 1, even a negative one, is taken as 1.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm, published_by
from equidp.mechanism.parts import FlatClip, NoiseLevel, Positive, Public, SideRelease, StepFacts, counts, noise_level


class GroupSizeCounts(SideRelease):
    """b̃^k, the noised number of records of each group in the batch, turned into the weights θ^k."""

    additive: ClassVar[bool] = True
    gives: ClassVar[frozenset[str]] = frozenset({"scale"})
    count_noise_multiplier: NoiseLevel = "10x"

    @property
    def released(self) -> str:
        """b̃^k."""
        return "The noised number of each group's records in every batch."

    def noise(self, plan: Plan) -> float:
        """σ_1."""
        return noise_level(self.count_noise_multiplier, plan)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """b^k, `[K]`: a record is in one group, so it moves one entry by one."""
        return counts(groups, plan.groups)

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """θ^k, `[K]`."""
        return {"scale": noised.clamp(min=1.0).reciprocal_().mul_(facts.plan.batch_size / facts.plan.groups)}


class Naive(AlgorithmSettings):
    """Settings of the reweighting baseline."""

    base_clip_norm: Positive = 1.0
    """C_0, the bound on each record's gradient before reweighting."""
    count_noise_multiplier: NoiseLevel = "10x"
    """σ_1, noise on each group's count; a ratio such as "10x" is to the noise multiplier σ_2."""

    def build(self) -> Algorithm:
        """Flat clipping at C_0, scaled per group."""
        return Algorithm(
            name="naive",
            weights=FlatClip(),
            initial={"clip_norm": self.base_clip_norm},
            side_release=GroupSizeCounts(count_noise_multiplier=self.count_noise_multiplier),
            published=published_by("classic"),
        )
