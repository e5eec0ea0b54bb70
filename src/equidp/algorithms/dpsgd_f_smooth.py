"""DPSGD-F with remembered counts: this project's own. It makes better use of DPSGD-F's released counts.

DPSGD-F sets each step's bounds C^k from that step's noised counts alone. With ten groups in a batch of 256 the noise is
as large as the counts: the bounds jump, and Δ = max_k C^k is that of the group whose bound the noise raises most. Here
the noised counts are averaged over the steps before they are used,

    s_t = β·s_{t−1} + (1 − β)·(m̃, õ)_t,   s_0 = 0,   (m̂, ô)_t = s_t/(1 − β^t),

and m̂, ô replace m̃, õ in DPSGD-F's equations. Clamping at 0 comes after the averaging, so it biases rare groups less.
An average of noised values is post-processing: events, ε and the bound on each record are DPSGD-F's own, and Δ is still
over all K groups. The price is a lag of about 1/(1 − β) steps.
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
        """`[2K + 1]`: s_t, and its weight 1 − β^t, which is the same average of ones."""
        return {REMEMBERED: averaged(noised, public.get(REMEMBERED), self.memory)}

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """The bounds that the averaged counts (m̂, ô) give."""
        average = public[REMEMBERED]
        return self.of_counts(average[:-1] / average[-1], public, facts)

    def of_counts(self, counts: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Return C^k, `[K]`, from (m̂, ô), `[2K]`."""
        return super().now(counts, public, facts)


def averaged(noised: Tensor, before: Tensor | None, kept: float) -> Tensor:
    """Return `[n + 1]`: β·before + (1 − β)·noised, where β is `kept`; and its weight, the same average of ones."""
    latest = torch.cat([noised, noised.new_ones(1)])
    return (1 - kept) * latest + (0.0 if before is None else kept * before)


class DPSGDFSmooth(DPSGDF):
    """Settings of DPSGD-F with remembered counts."""

    memory: Memory = 0.99
    """β, the share of the average that a step keeps; 0 is DPSGD-F."""

    def build(self) -> Algorithm:
        """DPSGD-F with remembered counts."""
        return self.with_counts("dpsgd_f_smooth", SmoothedClipCounts, memory=self.memory)
