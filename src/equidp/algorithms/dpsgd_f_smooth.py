"""DPSGD-F with counts that remember: this project's own, a sharper use of what DPSGD-F releases already.

DPSGD-F sets each step's bounds C^k from that step's noised counts alone. With ten groups in a batch of 256 the noise is
as large as the counts: the bounds jump, and Δ = max_k C^k follows the luckiest group. Here the noised counts are
averaged over the steps before anything is made of them,

    s_t = β·s_{t−1} + (1 − β)·(m̃, õ)_t,   s_0 = 0,   (m̂, ô)_t = s_t/(1 − β^t),

and m̂, ô take the place of m̃, õ in DPSGD-F's equations; clamping at 0 comes after the averaging, where it biases rare
groups less. An average of noised values is post-processing: events, ε and bound on each record are DPSGD-F's own, and
Δ is still over all K groups. What it costs is lag: about 1/(1 − β) steps.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.algorithms.dpsgd_f import DPSGDF, GroupClipCounts
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Public, StepFacts

Memory = Annotated[float, Field(ge=0, lt=1)]

REMEMBERED = "remembered_counts"


class SmoothedClipCounts(GroupClipCounts):
    """DPSGD-F's counts, averaged over the steps so far with weights that fall as β^age."""

    keeps: ClassVar[frozenset[str]] = frozenset({REMEMBERED})
    memory: Memory = 0.99

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """`[2K + 1]`: s_t, and its weight 1 − β^t, which the same average of ones comes to."""
        return {REMEMBERED: averaged(noised, public.get(REMEMBERED), self.memory)}

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """What the averaged counts (m̂, ô) say."""
        average = public[REMEMBERED]
        return self.of_counts(average[:-1] / average[-1], public, facts)

    def of_counts(self, counts: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """C^k, `[K]`, of (m̂, ô), `[2K]`."""
        return super().now(counts, public, facts)


def averaged(noised: Tensor, before: Tensor | None, kept: float) -> Tensor:
    """`[n + 1]`: β·before + (1 − β)·noised, β what is kept, and the weight of it all, as of an average of ones."""
    latest = torch.cat([noised, noised.new_ones(1)])
    return (1 - kept) * latest + (0.0 if before is None else kept * before)


class DPSGDFSmooth(DPSGDF):
    """Settings of DPSGD-F with remembered counts."""

    memory: Memory = 0.99
    """β, the share of the average that a step keeps; 0 is DPSGD-F."""

    def build(self) -> Algorithm:
        """DPSGD-F with counts that remember."""
        return self.with_counts("dpsgd_f_smooth", SmoothedClipCounts, memory=self.memory)
