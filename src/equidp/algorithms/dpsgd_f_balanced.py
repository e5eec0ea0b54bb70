"""DPSGD-F with weights for rare groups: this project's own. It uses DPSGD-F's released counts once more.

A larger bound C^k clips the gradients of a badly served group less, but a rare group remains a small part of the sum.
The released counts also tell a group's size: it is the sum of the averaged counts m̂ and ô of `dpsgd_f_smooth`, clamped
at 0.

    b̂^k = m̂^k + ô^k,   θ^k = ((B/K) / max(b̂^k, 1))^p,   w_i = θ^{k(i)}·min(1, C^{k(i)}/n_i),   Δ = max_k θ^k·C^k

with DPSGD-F's C^k. p = 0 is `dpsgd_f_smooth`. With p = 1 every group counts alike, as in `naive`, and the rarest group
makes Δ large. p = ½ has most of the gain, with the square root of that increase. θ^k is made of noised values, so
events and ε are DPSGD-F's own. Δ is over all K groups.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from equidp.algorithms.dpsgd_f_smooth import DPSGDFSmooth, SmoothedClipCounts
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Public, StepFacts

Balance = Annotated[float, Field(ge=0, le=1)]


class BalancedClipCounts(SmoothedClipCounts):
    """The remembered counts, turned into bounds C^k and weights θ^k."""

    gives: ClassVar[frozenset[str]] = frozenset({"clip_norm", "scale"})
    balance: Balance = 0.5

    def of_counts(self, counts: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """C^k and θ^k, `[K]` each, of (m̂, ô), `[2K]`."""
        above, not_above = counts.clamp(min=0.0).chunk(2)
        expected = facts.plan.batch_size / facts.plan.groups
        scale = (expected / (above + not_above).clamp(min=1.0)).pow(self.balance)
        return {**super().of_counts(counts, public, facts), "scale": scale}


class DPSGDFBalanced(DPSGDFSmooth):
    """Settings of DPSGD-F with remembered counts and weights for rare groups."""

    balance: Balance = 0.5
    """p, how much more weight rare groups get: 0 none; 1 so much that all groups count alike."""

    def build(self) -> Algorithm:
        """`dpsgd_f_smooth` with its side release replaced."""
        return self.with_counts("dpsgd_f_balanced", BalancedClipCounts, memory=self.memory, balance=self.balance)
