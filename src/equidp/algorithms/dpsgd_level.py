"""One bound, and a loss that allows for how rare and how hard each class is: this project's own, for the worst class.

A class is served badly because it is rare, or because it is hard: it is so close to other classes that its records keep
long gradients. `dpsgd_f_adjusted` allows for rare classes. Its counts also show which classes are hard: m^k of the b^k
records of class k in a batch have gradients above C. Let m̂^k be the noised counts averaged as in `dpsgd_f_smooth`, and
b̂^k and π̂^k those of `dpsgd_f_adjusted`. Then

    ρ^k = min(1, max(0, m̂^k)/b̂^k),   ℓ(z, y) = −log softmax(z + τ·(log π̂ − κ·ρ))_y,   w_i = min(1, C/n_i),   Δ = C

Why it helps: a model that can fit a shift of its outputs fits z + shift to the classes as they are. So z, by which
records are classified, is higher by τ·κ·ρ^k for a hard class. ρ^k follows from z + shift, so it does not grow by its
own effect, and nothing runs away. The shift is linear in ρ^k, not in its logarithm, for two reasons: ρ^k stays within
[0, 1] whatever the noise of m̂^k; and the shift depends less on C, which defines a long gradient.

All classes have the same bound, where DPSGD-F has one for each group, so Δ stays C. A step's loss is made of the counts
of earlier steps, which are noised. Given them it depends on the record alone. So a step has the event of DPSGD-F,
(q, (σ_1⁻² + σ_2⁻²)^(−1/2)). κ = 0 is `dpsgd_f_adjusted` with `max_clip_norm` = `base_clip_norm`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from equidp.algorithms.dpsgd_f_adjusted import COUNTED, SHARES, Adjustment, ClipCountsAndShares, LogitAdjusted
from equidp.algorithms.dpsgd_f_smooth import REMEMBERED, Memory
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm, published_by
from equidp.mechanism.parts import FlatClip, NoiseLevel, Positive, Public, StepFacts

Margin = Annotated[float, Field(ge=0, le=10)]


class SharesAndMargins(ClipCountsAndShares):
    """The remembered counts, turned into shares that are smaller for classes with long gradients, but no bounds."""

    gives: ClassVar[frozenset[str]] = frozenset()
    margin: Margin = 4.0
    """κ."""

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """The sums that the next step continues, and π̂^k·exp(−κ·ρ^k) divided by their sum, `[K]`."""
        found = super().later(noised, public, facts)
        average, sizes = found[REMEMBERED], self.sizes(found[COUNTED], facts)
        above = (average[:-1] / average[-1]).chunk(2)[0]
        shares = found[SHARES] * (-self.margin * (above / sizes).clamp(0.0, 1.0)).exp()
        return {**found, SHARES: shares / shares.sum()}

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Nothing: the bound stays."""
        return {}


class DPSGDLevel(AlgorithmSettings):
    """Settings of one bound and a loss for rare and hard classes. Its groups are the classes."""

    clip_norm: Positive = 1.0
    """C, the bound, and the threshold of the counts."""
    count_noise_multiplier: NoiseLevel = "5x"
    """σ_1, noise on each of the 2K counts; a ratio such as "5x" is to the noise multiplier σ_2."""
    memory: Memory = 0.99
    """β, the share of the average of long gradients that a step keeps."""
    adjustment: Adjustment = 1.0
    """τ, how far the loss allows for the classes' shares and margins: 0 is DP-SGD."""
    margin: Margin = 4.0
    """κ, how much more the loss allows for a class whose gradients are all above C than for a class where none is; 0:
    the loss allows for rare classes only."""

    def build(self) -> Algorithm:
        """Flat clipping of the gradients of an adjusted loss."""
        return Algorithm(
            name="dpsgd_level",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm, **SharesAndMargins.defaults},
            objective=LogitAdjusted(adjustment=self.adjustment),
            side_release=SharesAndMargins(**self.model_dump(exclude={"clip_norm", "adjustment"})),
            published=published_by("classic"),
        )
