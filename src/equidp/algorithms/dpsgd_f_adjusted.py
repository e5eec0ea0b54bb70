"""DPSGD-F with logit adjustment: this project's own, for rare classes; one more use of what DPSGD-F releases already.

A rare class loses because it is rare: whatever the bounds, cross-entropy learns its share along with its looks. Where
the groups are the classes, the remembered counts of `dpsgd_f_smooth` tell the shares, and the loss can be told them
instead of the model (Menon et al. 2021, "Long-tail learning via logit adjustment"). With m̂, ô those averages and z a
record's outputs,

    b̂^k = max(m̂^k + ô^k, 1),   π̂^k = b̂^k/Σb̂,   ℓ(z, y) = −log softmax(z + τ·log π̂)_y

and bounds C^k, weights and Δ are `dpsgd_f_smooth`'s, of the gradients of that loss. τ = 0 is `dpsgd_f_smooth`; τ = 1
asks for the classifier that is best where all classes are equally likely; what is trained little, under noise, gains by
more. Unlike weights for rare groups (`dpsgd_f_balanced`, `naive`) this costs no noise: Δ stays.

A step's loss is made of the counts of earlier steps, which are noised: given them it depends on the record alone, so
events, ε and Δ are DPSGD-F's own.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.algorithms.dpsgd_f_smooth import DPSGDFSmooth, SmoothedClipCounts
from equidp.engine.algorithm import Algorithm
from equidp.engine.losses import Loss, Shifted
from equidp.engine.parts import Objective, Plan, Public, Pursuing

SHARES = "group_shares"

Adjustment = Annotated[float, Field(ge=0, le=10)]


class ClipCountsAndShares(SmoothedClipCounts):
    """The remembered counts, turned into bounds C^k and shares π̂^k."""

    steers: ClassVar[frozenset[str]] = frozenset({SHARES})
    defaults: ClassVar[dict[str, float]] = {SHARES: 1.0}

    def later(self, noised: Tensor, public: Public, plan: Plan) -> dict[str, Tensor]:
        """The sums to go on from, and π̂^k, `[K]`."""
        kept = super().later(noised, public, plan)
        (average,) = kept.values()
        above, not_above = (average[:-1] / average[-1]).chunk(2)
        sizes = (above + not_above).clamp(min=1.0)
        return {**kept, SHARES: sizes / sizes.sum()}


class LogitAdjusted(Objective):
    """Cross-entropy of outputs to which τ·log π̂ is added."""

    reads: ClassVar[frozenset[str]] = frozenset({SHARES})
    by_class: ClassVar[bool] = True

    adjustment: Adjustment = 1.5
    """τ."""

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        """Begins with equal shares."""
        return Adjusting(self, Shifted(loss, torch.zeros(plan.groups, device=device)))


class Adjusting(Pursuing):
    """Logit adjustment during one run."""

    def __init__(self, part: LogitAdjusted, loss: Shifted) -> None:
        super().__init__(loss)
        self.part, self.shift = part, loss.shift

    def follow(self, public: Public) -> None:
        """τ·log π̂; in place, as recorded passes read it where it lies."""
        self.shift.copy_(self.part.adjustment * public[SHARES].log())


class DPSGDFAdjusted(DPSGDFSmooth):
    """Settings of DPSGD-F with remembered counts and logit adjustment. The groups have to be the classes."""

    adjustment: Adjustment = 1.5
    """τ, how far the loss allows for the classes' shares: 0 not at all, 1 until rare and common ones weigh alike."""

    def build(self) -> Algorithm:
        """`dpsgd_f_smooth` with another objective, whose shares its side release gives."""
        smooth = super().build()
        release = smooth.side_release
        assert isinstance(release, SmoothedClipCounts)
        return dataclasses.replace(
            smooth,
            name="dpsgd_f_adjusted",
            objective=LogitAdjusted(adjustment=self.adjustment),
            initial={**smooth.initial, **ClipCountsAndShares.defaults},
            side_release=ClipCountsAndShares(**release.model_dump()),
        )
