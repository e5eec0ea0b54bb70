"""DPSGD-F with logit adjustment: this project's own, for rare classes. It uses DPSGD-F's released counts once more.

A rare class is predicted too seldom because it is rare: with any bounds, a model trained by cross-entropy also learns
how frequent each class is. If the groups are the classes, the released counts tell the classes' shares. Then these
shares can be put into the loss, so that the model need not learn them (Menon et al. 2021, "Long-tail learning via logit
adjustment"). After t steps, with z a record's outputs,

    b̂^k = max(mean over the steps of m̃^k + õ^k, σ_1·√(2/t), B/N),   π̂^k = b̂^k/Σb̂,
    ℓ(z, y) = −log softmax(z + τ·log π̂)_y

The bounds C^k, the weights and Δ are those of `dpsgd_f_smooth`, for the gradients of this loss. The shares do not
change, so their average is over all steps. No class's estimate is below the standard deviation of this average, nor
below one record. So in the first steps, which are mostly noise, all classes have the same share.

τ = 0 is `dpsgd_f_smooth`. τ = 1 asks for the classifier that is best if all classes are equally likely. If a class is
so rare that little of it is learnt, a larger τ may serve it better. Unlike weights for rare groups (`dpsgd_f_balanced`,
`naive`) this costs no noise: Δ stays the same.

A step's loss is made of the counts of earlier steps, which are noised. Given them it depends on the record alone, so
event and Δ are DPSGD-F's own.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.dpsgd_f_smooth import DPSGDFSmooth, SmoothedClipCounts
from equidp.gradients.losses import Loss, Shifted
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import NoiseLevel, Objective, Public, Pursuing, StepFacts

SHARES, COUNTED = "group_shares", "counted_sizes"

Adjustment = Annotated[float, Field(ge=0, le=10)]


class ClipCountsAndShares(SmoothedClipCounts):
    """The remembered counts, turned into bounds C^k and shares π̂^k."""

    keeps: ClassVar[frozenset[str]] = SmoothedClipCounts.keeps | {COUNTED}
    steers: ClassVar[frozenset[str]] = frozenset({SHARES})
    defaults: ClassVar[dict[str, float]] = {SHARES: 1.0}

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """The sums that the next step continues, and π̂^k, `[K]`."""
        counted = counted_until(noised, public)
        sizes = self.sizes(counted, facts)
        return {**super().later(noised, public, facts), COUNTED: counted, SHARES: sizes / sizes.sum()}

    def sizes(self, counted: Tensor, facts: StepFacts) -> Tensor:
        """Return b̂^k, `[K]`, from the sums over all steps and the number of steps, `[K + 1]`."""
        return sizes_of(counted, self.noise(facts.plan), facts.plan)[0]


def counted_until(noised: Tensor, public: Public) -> Tensor:
    """Return `[K + 1]`: for each group the sum of both noised counts over all steps so far; and the number of steps."""
    one, other = noised.chunk(2)
    counted = torch.cat([one + other, noised.new_ones(1)])
    return counted + public.get(COUNTED, 0.0)


def sizes_of(counted: Tensor, noise: float, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return b̂^k, `[K]`, and its lower limit `()`.

    Args:
        counted: of `counted_until`.
        noise: σ_1, the noise of each count.
        plan: its sampling rate B/N is one record's.
    """
    steps = counted[-1]
    least = (noise * (2 / steps).sqrt()).clamp(min=plan.sampling_rate)
    return torch.maximum(counted[:-1] / steps, least), least


class LogitAdjusted(Objective):
    """Cross-entropy of outputs to which τ·log π̂ is added."""

    reads: ClassVar[frozenset[str]] = frozenset({SHARES})
    by_class: ClassVar[bool] = True

    adjustment: Adjustment = 1.0
    """τ."""

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        """Begin with equal shares."""
        return Adjusting(self, Shifted(loss, torch.zeros(plan.groups, device=device)))


class Adjusting(Pursuing):
    """Logit adjustment during one run."""

    in_place: ClassVar[bool] = True

    def __init__(self, part: LogitAdjusted, loss: Shifted) -> None:
        super().__init__(loss)
        self.part, self.shift = part, loss.shift

    def follow(self, public: Public) -> None:
        """τ·log π̂."""
        self.shift.copy_(self.part.adjustment * public[SHARES].log())


class DPSGDFAdjusted(DPSGDFSmooth):
    """Settings of DPSGD-F with remembered counts and logit adjustment. Its groups are the classes."""

    count_noise_multiplier: NoiseLevel = "5x"
    """σ_1, noise on each of the 2K counts; half of DPSGD-F's, because shares are made of the counts. The gradients need
    2 % more noise than without counts."""
    adjustment: Adjustment = 1.0
    """τ, how far the loss allows for the classes' shares: 0 not at all; 1 as if rare and common classes were equally
    likely."""

    def build(self) -> Algorithm:
        """`dpsgd_f_smooth` with another objective, whose shares its side release gives."""
        counted = self.with_counts("dpsgd_f_adjusted", ClipCountsAndShares, memory=self.memory)
        return dataclasses.replace(counted, objective=LogitAdjusted(adjustment=self.adjustment))
