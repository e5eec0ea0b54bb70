"""DPIS: importance sampling by gradient norm; all sampled records add the same length ("…via Importance Sampling").

Algorithm 1 with its §3.4 (rejection sampling), §3.5 (adaptive clipping, AC) and §4.2 (budget allocation). N_0 is the
declared number of records, b the expected batch size, C_e the clip norm of epoch e. All noise is Gaussian:

    Ñ = N + N(0, σ_N²)                                                     once; event (1, σ_N)
    K̃ = clamp(Σ_i min(n_i, C_e) + N(0, σ_K²C_e²), b·C_e(1 + 1e-6), Ñ·C_e)  per epoch, over all N; event (1, σ_K)
    ĝ_i = min(k·max(min(n_i, C_e), g_L), K̃/b)                             proposals, private, per record
    each step:  X_q: i with probability b·ĝ_i/K̃;   n̄_i = min(n_i, C_e, ĝ_i)
                X_p: i ∈ X_q with probability n̄_i/ĝ_i;  then ĝ_i is computed again from n_i
                ĝ = (1/b)·(Σ_{X_p} (K̃/Ñ)·g_i/n_i + σ_e·C_e·ξ),  event (b·C_e/K̃, σ_e·C_e·Ñ/K̃)
    AC:         K* = Σ_i min(n_i, C*) + N(0, σ_K²C*²), event (1, σ_K);  C_{e+1} = max(0.01·C_1, λ·K*/Ñ)

Where we depart from the text, and why:
- the printed update divides by q·p where an unbiased estimate needs q·p/b;
- the paper releases K from a b/N sample divided by b/N and claims amplification for it, but the division raises the
  sensitivity as much. We sum over all N records, whose norms are computed anyway, and claim none;
- if q_i is capped at 1, the bound K̃/Ñ fails. So the *proposal* is capped, at K̃/b;
- σ_e depends on earlier outputs, which composition does not allow. So it is chosen within a Rényi budget of one order;
  budget and order are fixed before any data are used (`accounting/budget.py`). The reported ε is the budget's;
- K* comes from the same pass as K̃, at the epoch's start, and is not released in the last epoch.

Whether a record is included depends on its own ĝ_i, which is private and may be out of date. This does no harm. Draw
the coins of the *other* records in advance: their law is the same with and without the record z. Given them and the
outputs so far, the sum of the others is fixed, and z adds a vector of length K̃/Ñ with some probability ≤ b·C_e/K̃. The
Rényi divergence in both directions grows with that probability, and it is jointly quasi-convex over the draws. All of
this holds at every real order α > 1, and so do the filter and the conversion to ε. So with a target ε, α* may be a
fraction.

With a constant σ_e the largest divergence *at integer orders* is that of K̃ = Ñ·C. Write q = b/Ñ, K̃ = f·Ñ·C,
s = f/σ_e, and L for the ratio of the densities of N(s, 1) and N(0, 1). Then e^((α−1)·D_α) is

    E[(1 + (q/f)·(L − 1))^α] = Σ_k (α choose k)·(q/σ_e)^k·E[(L − 1)^k]/s^k,    L − 1 = Σ_{m≥1} s^m·He_m/m!.

Products of Hermite polynomials have means of at least 0 under N(0, 1), so each term grows with s, and so with f. If α
is no integer, some (α choose k) are negative, and this proves nothing. So if the noise is given, and ε is announced
from this case, α* is an integer. If ε is given, the case only says how much is reserved for later epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from equidp.accounting.budget import renyi, smallest
from equidp.accounting.epsilon import published_epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan, Segment
from equidp.algorithms.budgeted import Budgeted, BudgetedSampling
from equidp.algorithms.settings import AlgorithmSettings
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm, Outcome, Published
from equidp.mechanism.parts import (
    Combination,
    Constant,
    Contribution,
    Draw,
    Positive,
    Public,
    Run,
    Sampling,
    WeightRule,
)
from equidp.mechanism.poisson import positions
from equidp.options import refuse_idle

OF_ADAPTIVE_CLIP = ("clip_multiplier", "external_clip_norm")

MARGIN = 1e-6
"""K̃ exceeds b·C by this share, so that no inclusion probability reaches 1."""

Fraction = Annotated[float, Field(ge=0, le=1)]


class ConstantLength(WeightRule):
    """w = (K̃/Ñ)/n: every record that is kept adds exactly the length K̃/Ñ."""

    reads: ClassVar[frozenset[str]] = frozenset({"contribution"})
    defaults: ClassVar[Mapping[str, float]] = {}

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """(K̃/Ñ)/n, and 0 for a zero gradient."""
        longest = torch.finfo(norms.dtype).max
        return torch.where(norms > 0, (public["contribution"] / norms).clamp(max=longest), 0.0)

    def bound(self, public: Public) -> Tensor:
        """K̃/Ñ."""
        return public["contribution"]


class ImportanceSampler(Budgeted):
    """Inclusion in proportion to the clipped gradient norm, by proposal and rejection."""

    gives: ClassVar[frozenset[str]] = frozenset({"contribution"})
    used_by: ClassVar[str] = "dpis"
    noises: ClassVar[tuple[str, ...]] = ("count_noise_fraction", "sum_noise_fraction")
    fractional: ClassVar[bool] = True

    proposal_multiplier: Annotated[float, Field(ge=1)] = 5.0
    """k."""
    norm_floor: Positive | None = None
    """g_L; 0.01·C_e unless given."""
    first_phase_fraction: Fraction = 0.8
    """a_E: the share of epochs in which the budget reserves the worst case for later epochs."""
    count_noise_fraction: Positive = 0.02
    """σ_N/N_0."""
    sum_noise_fraction: Positive = 0.02
    """σ_K/N_0."""
    adaptive_clip: bool = False
    """AC: C_{e+1} from K*."""
    clip_multiplier: Positive = 1.0
    """λ."""
    external_clip_norm: Positive | None = None
    """C*; 4·C_1 unless given."""
    declared_records: Annotated[int, Field(ge=1)] | None = None
    """N_0, if the number of records is private, too; the plan's N unless given."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if not self.adaptive_clip:
            refuse_idle(self, OF_ADAPTIVE_CLIP, "adaptive_clip is true")
        return self

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan with N_0 records, from which steps and rates follow."""
        plan = super().adapt(plan)
        return plan if self.declared_records is None else replace(plan, records=self.declared_records)

    def sampling_rate(self, plan: Plan) -> float:
        """b/N_0, the rate of the costliest case at integer orders, K̃ = Ñ·C and Ñ = N_0."""
        return plan.sampling_rate

    def releases(self, plan: Plan) -> tuple[Event, ...]:
        """Ñ once, K̃ in every epoch, K* in every epoch but the last."""
        return (
            Event(1.0, self.count_noise_fraction * plan.records),
            Event(1.0, self.sum_noise_fraction * plan.records, self.sums_from(plan, 0)),
        )

    def sums_from(self, plan: Plan, epoch: int) -> int:
        """Return how many K̃ and K* are released from this epoch on.

        Each epoch has steps, because no batch is larger than the data.
        """
        epochs = plan.epochs - epoch
        return 2 * epochs - 1 if self.adaptive_clip and epochs else epochs

    def start(self, run: Run) -> Sampling:
        """Proposals of every record."""
        return ImportanceSampling(self, run)

    def description(self, unit: str) -> str:
        """Importance sampling. The bound on a step's rates is b·C_e/K̃, which is above b/N_0 if norms are below C_e."""
        return (
            f"Poisson: every {unit} enters a batch independently, with a probability of its own that is at most the "
            "sampling rate that the ledger has for that step"
        )

    @property
    def released(self) -> str:
        """Ñ, K̃ and K*."""
        mean = ", and once more within a wider bound" if self.adaptive_clip else ""
        return f"The noised number of records, once, and the noised sum of their clipped norms in every epoch{mean}."

    def objection(self, combination: Combination) -> str | None:
        """Refuse other weight rules, schedules and contributions: noise and proof are for one kind of step."""
        if "contribution" not in (combination.weights.reads if combination.weights else ()):
            return "it goes with the weight rule constant_length, whose records all add the same length"
        if type(combination.schedule) is not Constant:
            return "it chooses the noise itself, so the schedule must be constant"
        if type(combination.contribution) is not Contribution:
            return "its proposals are norms of plain gradients"
        return super().objection(combination)


class ImportanceSampling(BudgetedSampling):
    """Importance sampling during one run."""

    remembered = ("clip", "next_clip", "records", "norm_sum", "gradient_noise", "rate", "proposals", "exhausted")

    def __init__(self, part: ImportanceSampler, run: Run) -> None:
        super().__init__(part, run)
        self.part = part
        self.first_clip = self.clip = self.next_clip = float(run.combination.initial["clip_norm"])
        self.records = self.norm_sum = self.gradient_noise = 0.0
        self.proposals = torch.zeros(run.population.size, dtype=torch.float64, device=run.population.device)
        self._too_small = torch.zeros((), device=run.population.device)

    # the public side of an epoch

    @property
    def contribution(self) -> float:
        """K̃/Ñ, which is also the sensitivity."""
        return self.norm_sum / self.records

    def public(self) -> dict[str, Tensor]:
        """K̃/Ñ and C_e."""
        device = self.run.population.device
        return {
            "contribution": torch.tensor(self.contribution, device=device),
            "clip_norm": torch.tensor(self.clip, device=device),
        }

    def noise(self, segment: Segment) -> float:
        """σ_e·C_e over the sensitivity K̃/Ñ."""
        return self.gradient_noise * self.clip / self.contribution

    def shown(self) -> dict[str, float]:
        """Noised values, and values that are derived from them."""
        return {
            "gradient_noise": self.gradient_noise,
            "sampling_rate": self.rate,
            "records_estimate": self.records,
            "norm_sum": self.norm_sum,
        }

    # what happens before an epoch's first step

    def begin_epoch(self, epoch: int) -> None:
        """Release K̃ (and Ñ, K*), set all proposals, and choose the epoch's noise; end if the budget has no room."""
        part, plan = self.part, self.run.plan
        self.exhausted = not self.has_room(self._opening(epoch))
        if self.exhausted:
            return
        self.clip = self.next_clip
        if not self.records:
            self.records = self._released(float(self.run.population.size), 1.0, part.count_noise_fraction)
            self._refuse_small_data()
        norms = self.run.norms_of_all().double()
        norms = torch.where(norms.isfinite(), norms, 0.0)
        clipped = norms.clamp(max=self.clip)
        raw = self._released(float(clipped.sum()), self.clip, part.sum_noise_fraction)
        lowest = plan.batch_size * self.clip * (1 + MARGIN)
        self.norm_sum = min(max(raw, lowest), self.records * self.clip)
        if part.adaptive_clip and part.sums_from(plan, epoch + 1):
            outer = part.external_clip_norm or 4 * self.first_clip
            total = self._released(float(norms.clamp(max=outer).sum()), outer, part.sum_noise_fraction)
            self.next_clip = max(0.01 * self.first_clip, part.clip_multiplier * total / self.records)
        self.rate = plan.batch_size * self.clip / self.norm_sum
        self.proposals = self._proposals(clipped)
        self._choose_noise(epoch)

    def _opening(self, epoch: int) -> list[Event]:
        """Return the events of the releases at the epoch's beginning."""
        part, plan = self.part, self.run.plan
        sums = part.sums_from(plan, epoch) - part.sums_from(plan, epoch + 1)
        count = [] if self.records else [Event(1.0, part.count_noise_fraction * plan.records)]
        return [*count, Event(1.0, part.sum_noise_fraction * plan.records, sums)]

    def _released(self, exact: float, sensitivity: float, noise_fraction: float) -> float:
        total = torch.tensor([exact], dtype=torch.float64, device=self.run.population.device)
        return float(self.released(total, sensitivity, noise_fraction * self.run.plan.records))

    def _refuse_small_data(self) -> None:
        if self.run.plan.batch_size * (1 + MARGIN) >= self.records:
            raise EquidpError(
                f"training.batch_size={self.run.plan.batch_size} is not below the noised number of records "
                f"{self.records:.0f}, which importance sampling needs: lower it."
            )

    def _choose_noise(self, epoch: int) -> None:
        """Choose the smallest σ_e with which past events, this epoch and all later ones stay within the budget."""
        plan, order = self.run.plan, self.budget.order
        lengths = plan.epoch_lengths()
        now, later = lengths[epoch], sum(lengths[epoch + 1 :])
        first_phase = epoch < self.part.first_phase_fraction * plan.epochs
        self.spent = renyi(self.run.ledger.done, order)
        sums = self.part.sums_from(plan, epoch + 1)
        fixed = self.spent + sums * renyi([Event(1.0, self.part.sum_noise_fraction * plan.records)], order)

        def fits(noise: float) -> bool:
            today = renyi([self._event(noise)], order)
            cautious = first_phase or plan.epsilon is None
            then = renyi([Event(plan.batch_size / self.records, noise)], order) if cautious else today
            return fixed + now * today + later * then <= self.budget.total

        found = smallest(fits)
        self.exhausted = found is None
        self.gradient_noise = found or math.inf
        if plan.epsilon is None:  # the user gave the noise: it is kept, unless Ñ is too small for it
            self.gradient_noise = max(plan.noise_multiplier, self.gradient_noise)

    def _event(self, noise: float) -> Event:
        return Event(self.rate, noise * self.clip / self.contribution)

    # steps

    def draw(self) -> Draw:
        """Draw X_q, with a second coin for each record; end the run if the budget has no room for another step."""
        self.spend(self._event(self.gradient_noise))
        units = positions(self.run.random.bernoulli(self.rates(), len(self.proposals)))
        return Draw(units, self.run.random.uniform(len(units)))

    def rates(self) -> Tensor:
        """b·ĝ_i/K̃, `[n]`."""
        return self.proposals * (self.run.plan.batch_size / self.norm_sum)

    def kept(self, draw: Draw, norms: Tensor) -> Tensor:
        """Whether each record of X_q is in X_p, `[u]`; also sets the proposals of X_q."""
        assert draw.coins is not None
        proposed = self.proposals[draw.units]
        clipped = torch.where(norms.isfinite(), norms, 0.0).double().clamp(max=self.clip)
        self._too_small = (proposed < clipped).float().sum()
        keep = draw.coins < torch.minimum(clipped, proposed) / proposed
        self.proposals[draw.units] = self._proposals(clipped)
        return keep

    def _proposals(self, clipped: Tensor) -> Tensor:
        """min(k·max(n̄, g_L), K̃/b): the cap keeps every rate below 1, and K̃/Ñ a bound."""
        floor = self.part.norm_floor or 0.01 * self.clip
        longest = self.norm_sum / self.run.plan.batch_size
        return (self.part.proposal_multiplier * clipped.clamp(min=floor)).clamp(max=longest)

    def diagnostics(self) -> dict[str, Tensor]:
        """The number of records of X_q whose norm exceeds their proposal, which biases the estimate."""
        return {"nonprivate/outgrown_proposals": self._too_small}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run; the ledger says what is spent."""
        super().load_state_dict(state)
        room = self.has_room([self._event(self.gradient_noise)] if self.norm_sum else [])
        self.exhausted = self.exhausted or bool(self.norm_sum and not room)


def published(algorithm: Algorithm, plan: Plan, outcome: Outcome | None) -> Published:
    """The paper's accounting: everything by RDP, with the release of K amplified at b/N although it is not."""
    sampler = algorithm.sampler
    events = algorithm.events(plan) if outcome is None else outcome.events
    count, *others = events
    plain = [event for event in others if event.sampling_rate == 1]
    sums = sum(e.count for e in plain) + count.count - 1
    steps = [event for event in others if event.sampling_rate < 1]
    assert isinstance(sampler, ImportanceSampler)
    amplified = Event(plan.sampling_rate, sampler.sum_noise_fraction * plan.records, max(sums, 1))
    value = published_epsilon([Event(1.0, count.noise_multiplier), amplified, *steps], plan.delta, "improved")
    formula = (
        "RDP of Ñ, K̃ (amplified at b/N, which does not hold) and gradients at the noise the run came to use, improved "
        "conversion, integer orders 2 to 64"
    )
    return Published(value, formula, guarantee=False)


class DPIS(AlgorithmSettings):
    """Settings of DPIS."""

    clip_norm: Positive = 1.0
    """C_1, the first epoch's bound."""
    proposal_multiplier: Annotated[float, Field(ge=1)] = 5.0
    """k: a record is proposed with k times its last known norm; so k·b gradients are computed per step."""
    norm_floor: Positive | None = None
    """g_L, the smallest norm for a proposal, so that records with small gradients are not forgotten; 0.01·C_e unless
    given."""
    first_phase_fraction: Fraction = 0.8
    """a_E: the share of epochs in which the budget reserves the worst case for later epochs."""
    count_noise_fraction: Positive = 0.02
    """σ_N over the declared number of records."""
    sum_noise_fraction: Positive = 0.02
    """σ_K over the declared number of records."""
    adaptive_clip: bool = False
    """Whether the bound follows the mean norm from epoch to epoch."""
    clip_multiplier: Positive = 1.0
    """λ: the next bound divided by the noised mean norm."""
    external_clip_norm: Positive | None = None
    """C*, to which norms are cut for that mean; 4·C_1 unless given."""
    declared_records: Annotated[int, Field(ge=1)] | None = None
    """N_0, a public number near the number of records. Give it if that number itself is to be protected. Then do not
    publish what reveals it: groups.csv and the pages (sizes of groups), and files of sgd and of other algorithms (N).
    If the test part is drawn, do not publish the number of test records either (metrics.json, MLflow), because it is
    `data.test_fraction` of all records."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if not self.adaptive_clip:
            refuse_idle(self, OF_ADAPTIVE_CLIP, "adaptive_clip is true")
        return self

    def build(self) -> Algorithm:
        """Importance sampling, constant length, noise within a budget."""
        return Algorithm(
            name="dpis",
            weights=ConstantLength(),
            initial={"clip_norm": self.clip_norm},
            sampler=ImportanceSampler(**self.model_dump(exclude={"clip_norm"})),
            published=published,
        )
