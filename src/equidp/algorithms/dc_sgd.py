"""DC-SGD: the bound read off a noised histogram of the norms (Wei et al. 2025, "DC-SGD: DP-SGD with Dynamic Clipping
through Gradient Norm Distribution Estimation", arXiv 2503.22988).

    h̃_j = #{i: e_{j−1} < n_i ≤ e_j} + N(0, σ_H²),   public edges 0 = e_0 < … < e_m = R; longer n count in the last bin
    P:  C_{t+1} = e_j, the first bin at which Σ_{l≤j} h̃_l⁺ reaches p·Σ_l h̃_l⁺
    E:  C_{t+1} = argmin over edges C of σ_t²·C²·d/B² + (1/B)·Σ_j h̃_j·max(e_j − C, 0)², over h̃_j above 2·σ_H

E weighs the noise of the mean gradient against the square of the length by which clipping shortens a gradient.
w = min(1, C_t/n), Δ = C_t. A record moves exactly one bin by one, whatever its norm, and the gradient by at most Δ. A
step with a histogram is one event, (σ⁻² + σ_H⁻²)^(−1/2). If `every` is above 1, the steps between are charged (q, σ).

Where we depart from the text. The mean clipping error divides by the expected B, because |S| is private. The edges
begin at R/100 and e_{j+1}/e_j is constant, because norms fall by orders of magnitude in training. Counts are clamped
at 0. In E, a count up to twice its noise is dropped, because an empty bin of long norms would outweigh all others. If
no count is left, C stays.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.dpsgd_quantile import Share
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, NoiseLevel, Positive, Public, SideRelease, StepFacts, counts, noise_level

Bins = Annotated[int, Field(ge=2, le=1000)]
Every = Annotated[int, Field(ge=1)]


class NormHistogram(SideRelease):
    """The noised histogram, and the bound at a quantile of it."""

    additive: ClassVar[bool] = True
    steers: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    defaults: ClassVar[dict[str, float]] = {"clip_norm": 1.0}

    bins: Bins = 20
    largest_norm: Positive = 10.0
    """R."""
    count_noise_multiplier: NoiseLevel = "3x"
    """σ_H."""
    quantile: Share = 0.5
    """p."""

    @property
    def released(self) -> str:
        """The histogram."""
        return "The noised numbers of gradients in each range of lengths."

    def noise(self, plan: Plan) -> float:
        """σ_H."""
        return noise_level(self.count_noise_multiplier, plan)

    def edges(self, device: torch.device) -> Tensor:
        """`[bins]`, e_1 to e_m: public."""
        below = 1 - torch.arange(self.bins, device=device) / (self.bins - 1)
        return self.largest_norm * 0.01**below

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """`[bins]`."""
        return counts(torch.bucketize(norms, self.edges(norms.device)[:-1]), self.bins)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """C_{t+1}."""
        counted = self.kept(noised, facts)
        found = self.edges(noised.device).index_select(0, self.chosen(counted, facts).reshape(1)).squeeze(0)
        return {"clip_norm": torch.where(counted.sum() > 0, found, public["clip_norm"])}

    def kept(self, noised: Tensor, facts: StepFacts) -> Tensor:
        """`[bins]` counts as they are used."""
        return noised.clamp(min=0)

    def chosen(self, counted: Tensor, facts: StepFacts) -> Tensor:
        """Return the number of the bin whose edge is the next bound, `()`."""
        reached = counted.cumsum(0) >= self.quantile * counted.sum()
        return reached.int().argmax()


class LeastError(NormHistogram):
    """The noised histogram, and the bound of the least expected error."""

    def kept(self, noised: Tensor, facts: StepFacts) -> Tensor:
        """`[bins]` counts, where those up to twice their noise are 0."""
        return torch.where(noised > 2 * self.noise(facts.plan), noised, 0.0)

    def chosen(self, counted: Tensor, facts: StepFacts) -> Tensor:
        """The bin of the least error, `()`."""
        edges, size = self.edges(counted.device), facts.plan.batch_size
        noise = (facts.noise_multiplier * edges / size) ** 2 * facts.dimension
        taken = (edges - edges[:, None]).clamp(min=0) ** 2  # [candidate, bin]
        return (noise + taken @ (counted / size)).argmin()


class DCSGDE(AlgorithmSettings):
    """Settings of DC-SGD by the least error."""

    clip_norm: Positive = 1.0
    """C_0, the first bound."""
    bins: Bins = 20
    """m, ranges of the histogram."""
    largest_norm: Positive = 10.0
    """R, the last edge and the largest bound; the first is R/100."""
    count_noise_multiplier: NoiseLevel = "3x"
    """σ_H, noise on each count; a ratio such as "3x" is to the noise multiplier."""
    every: Every = 1
    """Steps from one histogram to the next; the steps between do not pay for it."""

    def build(self) -> Algorithm:
        """Flat clipping at the bound of the least error."""
        return self.built("dc_sgd_e", LeastError)

    def built(self, name: str, kind: type[NormHistogram]) -> Algorithm:
        """Return flat clipping at the bound that this kind of histogram gives."""
        release = kind(**self.model_dump(exclude={"clip_norm"}))
        return Algorithm(name=name, weights=FlatClip(), initial={"clip_norm": self.clip_norm}, side_release=release)


class DCSGDP(DCSGDE):
    """Settings of DC-SGD by a quantile."""

    quantile: Share = 0.5
    """p: the share of gradients within the next bound."""

    def build(self) -> Algorithm:
        """Flat clipping at a quantile."""
        return self.built("dc_sgd_p", NormHistogram)
