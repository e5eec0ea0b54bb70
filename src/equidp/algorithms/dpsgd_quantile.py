"""Adaptive clipping to a quantile (Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping").

    b̃ = (#{n_i ≤ C_t} + N(0, σ_b²))/B,   C_{t+1} = max(C_min, C_t·exp(−η_C·(b̃ − target)))

Flat clipping at C_t, Δ = C_t. Count and gradient come from one sample and are one event, (σ⁻² + σ_b⁻²)^(−1/2). With
`centred` the released statistic is Σ(1[n_i ≤ C_t] − ½). Its sensitivity is ½, so σ_b counts double. Then b̃ is this
statistic divided by B, plus ½.

With `counts_below` κ only gradients within κ·C_t are counted, and κ·C_t follows the quantile. A gradient that is
counted adds at most κ·Δ to the sum, and a gradient that adds Δ is not counted. So the event is

    σ^eff = max(κ²/σ² + 1/σ_b², 1/σ²)^(−1/2),   σ itself if σ_b ≥ σ/√(1 − κ²): then the count costs nothing

(proof: `joint_noise`; κ = 1 is the paper's count). If the count is centred, every record moves it, and nothing is
saved. The paper charges the count as centred (Theorem 1), even where its text adds up 0 and 1:
(σ⁻² + (2σ_b)⁻²)^(−1/2). Where we depart from the text: B is the expected batch size; `min_clip_norm` is a floor of ours
(0 is the paper's rule); and C_t is kept in a range of finite numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.epsilon import published_epsilon
from equidp.accounting.events import Event, fuse
from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm, Outcome, Published, published_by
from equidp.mechanism.parts import (
    HUGE,
    TINY,
    Added,
    FlatClip,
    NoiseLevel,
    Positive,
    Public,
    SideRelease,
    StepFacts,
    noise_level,
)

Share = Annotated[float, Field(gt=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, le=HUGE)]


class QuantileCount(SideRelease):
    """The noised number of gradients within C, by which C is led to a quantile of the norms."""

    additive: ClassVar[bool] = True
    steers: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    defaults: ClassVar[Mapping[str, float]] = {"clip_norm": 1.0}

    target_quantile: Share = 0.5
    clip_learning_rate: Positive = 0.2
    """η_C."""
    count_noise_multiplier: NoiseLevel | None = None
    """σ_b; B/20 unless given."""
    min_clip_norm: NotNegative = 0.0
    """C_min."""
    centred: bool = False
    """Count each record as ±½ instead of 0 or 1."""
    counts_below: Positive = 1.0
    """κ: the gradients within κ·C are counted."""

    @property
    def released(self) -> str:
        """The count."""
        part = "" if self.counts_below == 1 else f"{self.counts_below:g} of "
        return f"The noised number of gradients within {part}the bound, in every batch."

    def noise(self, plan: Plan) -> float:
        """σ_b."""
        level = plan.batch_size / 20 if self.count_noise_multiplier is None else self.count_noise_multiplier
        return noise_level(level, plan)

    def sensitivity(self) -> float:
        """1, or ½ if the count is centred."""
        return 0.5 if self.centred else 1.0

    def added(self) -> tuple[Added, ...]:
        """1 within κ·C and 0 beyond it; ½ for all records if the count is centred."""
        if self.centred:
            return super().added()
        return Added(1.0, self.counts_below, "clip_norm"), Added(0.0)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """#{n_i ≤ κ·C}, `[1]`; if centred, less ½ for each record."""
        within = (norms <= self.counts_below * public["clip_norm"]).sum(0, keepdim=True, dtype=torch.float32)
        return within - len(norms) / 2 if self.centred else within

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """C_{t+1}."""
        beyond = noised.squeeze(0) / facts.plan.batch_size - (self.target_quantile - 0.5 * self.centred)
        led = beyond.mul_(-self.clip_learning_rate).exp_().mul_(public["clip_norm"])
        return {"clip_norm": led.clamp_(max(self.min_clip_norm, TINY), HUGE)}


def published(algorithm: Algorithm, plan: Plan, outcome: Outcome | None) -> Published:
    """Return the paper's figure: count and gradients are one release, and the count is charged as centred.

    A count with `counts_below` < 1 is not in the paper, and is left out.
    """
    side = algorithm.side_release
    assert isinstance(side, QuantileCount)
    if side.counts_below < 1:
        return published_by("improved")(algorithm, plan, outcome)
    rate = algorithm.sampler.sampling_rate(plan)
    events = [
        Event(rate, fuse(plan.noise_multiplier * segment.noise, 2 * side.noise(plan)), segment.steps)
        for segment in algorithm.schedule.segments(plan)
    ]
    formula = "RDP of gradients and count as one release, improved conversion, integer orders 2 to 64"
    if not side.centred:
        formula += "; the count of 0 and 1 is charged as one of ±½, half of what a record moves"
    return Published(published_epsilon(events, plan.delta, "improved"), formula, guarantee=side.centred)


class DPSGDQuantile(AlgorithmSettings):
    """Settings of quantile clipping."""

    clip_norm: Positive = 1.0
    """C_0, the first bound."""
    target_quantile: Share = 0.5
    """The share of gradients that should be within the bound."""
    clip_learning_rate: Positive = 0.2
    """η_C."""
    count_noise_multiplier: NoiseLevel | None = None
    """σ_b, noise on the count; B/20 unless given, in `dpsgd_bounded` B/10. A ratio such as "10x" is to the noise
    multiplier."""
    min_clip_norm: NotNegative = 0.0
    """C_min, a floor under the bound."""
    centred: bool = False
    """Count each record as ±½: half the sensitivity, so σ_b counts double."""
    counts_below: Positive = 1.0
    """κ: count gradients within κ·C; then κ·C follows the quantile. A count that is not centred costs no ε if κ is
    below 1 and σ_b at least σ/√(1 − κ²) ("1.16x" at 0.5); in `soft_adaclip` if σ_b is at least σ·cosh(κ) ("1.55x" at
    1)."""

    def build(self) -> Algorithm:
        """Flat clipping at an adapted bound."""
        return Algorithm(
            name="dpsgd_quantile",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            side_release=QuantileCount(**self.model_dump(exclude={"clip_norm"})),
            published=published,
        )
