"""ASC: groups that are hard to learn are sampled more often and clipped shorter (Cairney-Leeming, Sanyal, Lampert 2026,
"Adaptive Sampling and Clipping for Private Worst-Case Group Optimization", arXiv 2602.10820).

    Ñ_k = N_k + N(0, σ_N²), floored, scaled to Σ_k Ñ_k = N                    once; one event (1, σ_N)
    ℓ̃_k = clamp((Σ_{i∈k} min(ℓ_i, L) + N(0, σ_L²L²))/Ñ_k, 0, L)               every epoch, over all N; event (1, σ_L)
    e_k = exp(η·mean of ℓ̃_k over the epochs so far),   q_k = min(1, B·e_k/Σ_j Ñ_j·e_j)
    C_k = C·min(1, ρB/(N·q_k)),   each step: i ∈ k with probability q_k, w = min(1, C_k/n), noise σ·C

A record of group k has the event (q_k, σ·C/C_k). It is charged as (q, σ) with q = ρB/N for every k, because its own
event costs no more in Rényi divergence of any integer order α.

Proof. C_k ≤ C and q_k·C_k ≤ q·C. Compared with noise alone, N(0, 1), the output is E_{m~ν} N(m, 1). Under ν, m is
μ_k = C_k/(σC) with probability q_k, else 0. With L the likelihood ratio of the two,

    E_0 L^α = E exp(Σ_{i<j} m_i·m_j)   over independent m_1 … m_α ~ ν,

which grows in every m_i ≥ 0 and is convex in each. Replace ν by the law (q, 1/σ), one m_i after the other. This law has
no smaller mean and is more spread out (if q_k > q: keep each μ_k as 1/σ with probability μ_k·σ, else 0), so the
expectation does not fall. The other direction of a sampled Gaussian is never the larger one (Mironov, Talwar, Zhang
2019). All of this holds given the released values, so q_k and C_k may depend on them, and divergences of one order add
up over the steps.

At orders that are no integers, and pointwise, it does not hold: at ε = 0 a short vector that is drawn often shows more
than a long one that is drawn seldom. So ε is that of a budget of one integer order, as for `dpis`. Neither PLD nor the
groups' own events are used.

Δ = C: Σ_k Ñ_k·q_k ≤ B = Σ_k Ñ_k·B/N, so the group with the smallest rate has q_k ≤ B/N. So in every epoch some C_k is
C, which is public. We found no code of the paper. Where we depart from the text: how the weights e_k follow from the
losses, and the noise of losses and sizes, are ours; ε is one figure for all groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.budget import renyi
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.algorithms.budgeted import Budgeted, BudgetedSampling
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Combination, Constant, Draw, FlatClip, Positive, Run, Sampling
from equidp.mechanism.poisson import positions

AtLeastOne = Annotated[float, Field(ge=1, le=1e6)]
Steepness = Annotated[float, Field(ge=0, le=20)]


class GroupSampler(Budgeted):
    """A sampling rate and a clip norm for each group, by the group's noised loss."""

    gives: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    used_by: ClassVar[str] = "asc"
    noises: ClassVar[tuple[str, ...]] = ("size_noise_fraction", "loss_noise_fraction")

    rate_limit: AtLeastOne = 2.0
    """ρ."""
    steepness: Steepness = 1.0
    """η."""
    loss_limit: Positive = 3.0
    """L."""
    size_noise_fraction: Positive = 0.01
    """σ_N/N."""
    loss_noise_fraction: Positive = 0.02
    """σ_L/N."""

    def sampling_rate(self, plan: Plan) -> float:
        """q = ρB/N, at most 1."""
        return min(1.0, self.rate_limit * plan.sampling_rate)

    def releases(self, plan: Plan) -> tuple[Event, ...]:
        """Ñ once, ℓ̃ in every epoch. Each epoch has steps, because no batch is larger than the data."""
        sizes, losses = self.size_noise_fraction * plan.records, self.loss_noise_fraction * plan.records
        return Event(1.0, sizes), Event(1.0, losses, plan.epochs)

    def start(self, run: Run) -> Sampling:
        """Rates of every group."""
        return GroupSampling(self, run)

    def description(self, unit: str) -> str:
        """Sampling by groups; a record's own event costs no more than the ledger's."""
        return (
            f"Poisson: every {unit} enters a batch independently with its group's probability; a group that is above "
            "the ledger's sampling rate has a clip norm as much below the noise's"
        )

    @property
    def released(self) -> str:
        """Ñ and ℓ̃."""
        return "The noised sizes of the groups, once, and the noised sum of each group's losses in every epoch."

    def objection(self, combination: Combination) -> str | None:
        """Refuse other weight rules and schedules: the proof needs records that add at most their group's clip norm."""
        if type(combination.weights).bound is not FlatClip.bound:  # type: ignore[union-attr]
            return "it goes with the weight rule flat, whose bound is the group's clip norm"
        if type(combination.schedule) is not Constant:
            return "its rates go with one noise, so the schedule must be constant"
        return super().objection(combination)


class GroupSampling(BudgetedSampling):
    """Sampling by groups during one run."""

    remembered = ("sizes", "losses", "epochs", "group_rates", "exhausted")

    def __init__(self, part: GroupSampler, run: Run) -> None:
        super().__init__(part, run)
        self.part, self.clip, self.epochs = part, float(run.combination.initial["clip_norm"]), 0
        self.sizes = self.losses = torch.zeros(run.plan.groups, dtype=torch.float64, device=run.population.device)
        self.group_rates = torch.full_like(self.sizes, run.plan.sampling_rate)

    def begin_epoch(self, epoch: int) -> None:
        """Release ℓ̃ (and Ñ), and choose rates and clip norms; end the run if the budget has no room."""
        plan, part, population = self.run.plan, self.part, self.run.population
        sizes, losses = (event.noise_multiplier for event in part.releases(plan))
        opening = [Event(1.0, losses)] if self.epochs else [Event(1.0, sizes), Event(1.0, losses)]
        self.exhausted = not self.has_room([*opening, self._event()])
        if self.exhausted:
            return
        if not self.epochs:
            ones = torch.ones((), dtype=torch.float64, device=population.device).expand(population.size)
            counted = torch.zeros_like(self.sizes).index_add_(0, population.groups, ones)  # float32 would lose records
            noised = self.released(counted, 1.0, sizes).clamp(min=1 + sizes)
            self.sizes = noised * (plan.records / noised.sum())
        each = self.run.losses(torch.arange(population.size, device=population.device)).double()
        each = torch.nan_to_num(each, nan=part.loss_limit, posinf=part.loss_limit).clamp(0, part.loss_limit)
        exact = torch.zeros_like(self.sizes).index_add_(0, population.groups, each)
        means = self.released(exact, part.loss_limit, losses) / self.sizes
        self.losses, self.epochs = self.losses + means.clamp(0, part.loss_limit), self.epochs + 1
        tilted = torch.exp(part.steepness * self.losses / self.epochs)
        self.group_rates = (plan.batch_size * tilted / (self.sizes @ tilted)).clamp(max=1.0)
        self.spent = renyi(self.run.ledger.done, self.budget.order)

    def _event(self) -> Event:
        return Event(self.rate, self.run.plan.noise_multiplier)

    def draw(self) -> Draw:
        """Draw each unit at its group's rate; end the run if the budget has no room for another step."""
        self.spend(self._event())
        return Draw(positions(self.run.random.bernoulli(self.rates(), self.run.population.size)))

    def rates(self) -> Tensor:
        """q_k of each unit's group, `[n]`."""
        return self.group_rates[self.run.population.groups]

    def public(self) -> dict[str, Tensor]:
        """C_k, `[K]`."""
        return {"clip_norm": (self.clip * (self.rate / self.group_rates).clamp(max=1.0)).float()}

    def shown(self) -> dict[str, float]:
        """q_k, which is made of noised values."""
        return {f"sampling_rate/{k}": rate for k, rate in enumerate(self.group_rates.tolist())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run; the ledger says what is spent."""
        super().load_state_dict(state)
        self.exhausted = not self.has_room([self._event()]) or self.exhausted


class ASC(AlgorithmSettings):
    """Settings of ASC."""

    clip_norm: Positive = 1.0
    """C, the largest bound of any group, and the sensitivity of the noise."""
    rate_limit: AtLeastOne = 2.0
    """ρ: the sampling rate that is charged, over B/N. A group that is sampled more often than that has a bound as much
    smaller. 1 gives no group more weight in the sum, only less variance; more than 1 costs noise."""
    steepness: Steepness = 1.0
    """η: rates are in proportion to exp(η·loss)."""
    loss_limit: Positive = 3.0
    """L, the bound to which a record's loss is cut."""
    size_noise_fraction: Positive = 0.01
    """σ_N, noise on the groups' sizes, over the declared number of records."""
    loss_noise_fraction: Positive = 0.02
    """σ_L, noise on the groups' summed losses in units of L, over the declared number of records."""

    def build(self) -> Algorithm:
        """Sampling by groups, flat clipping at the group's bound."""
        return Algorithm(
            name="asc",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            sampler=GroupSampler(**self.model_dump(exclude={"clip_norm"})),
        )
