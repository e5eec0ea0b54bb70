"""SA-DPSGD: candidate steps are accepted or refused as in simulated annealing ("based on Simulated Annealing", Alg. 2).

A step of DP-SGD leads from θ to a candidate θ'. With an energy J, ΔE = J(θ') − J(θ), it is accepted if ΔE ≤ 0,
otherwise with probability exp(−ΔE·Q), and in any case after μ_0 refusals in a row. Q = Q_0·τ, τ the number accepted so
far (Q_0 until the first). A refusal restores parameters, optimiser and momentum.

Where we depart from the text, and why:
- J is the mean loss over *public* records that are neither in the training part nor in the test part. So acceptance is
  post-processing, and the public records have no guarantee. The paper takes the test set, which biases its accuracy;
  `energy: test` does so, too, only to reproduce the paper.
- Every candidate is charged, accepted or not, because accepted steps tell which candidates were refused. The paper
  charges accepted steps only, arguing that refused ones are never seen. But what is seen depends on them.
- `stop_on: published_epsilon` stops as the paper does, when the paper's own ε of the accepted steps is used up. How
  many candidates this takes depends on outputs. So the run's ε is that of the cap τ*·(μ_0 + 1), fixed in advance (at
  most T).
- `energy: private` needs no public records: for every candidate a fresh Poisson sample V at rate q_J releases

      ΔẼ = (1/(q_J·N))·[Σ_V (clip(ℓ(θ'), 0, c) − clip(ℓ(θ), 0, c)) + σ_J·c·ξ]

  A record's term lies in [−c, c]: sensitivity c, event (q_J, σ_J), charged for every candidate.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from equidp.accounting.epsilon import published_epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm, Outcome, Published
from equidp.mechanism.parts import Acceptance, Accepting, FlatClip, NoiseLevel, Positive, Run, noise_level
from equidp.mechanism.poisson import poisson_sample
from equidp.options import refuse_idle

Count = Annotated[int, Field(ge=1)]


class Annealing(Acceptance):
    """Accept a worse candidate with probability exp(−ΔE·Q)."""

    initial_temperature: Positive = 10.0
    """Q_0."""
    max_rejections: Annotated[int, Field(ge=0)] = 10
    """μ_0."""
    energy: Literal["public", "private", "test"] = "public"
    energy_records: Count = 1024
    """Number of public records in J, or the expected size q_J·N of V."""
    energy_noise_multiplier: NoiseLevel = "10x"
    """σ_J, private energy only."""
    loss_bound: Positive = 4.0
    """c, private energy only."""
    stop_on: Literal["candidates", "published_epsilon"] = "candidates"
    published_epsilon: Positive | None = None
    """The ε, by the paper's count, at which `stop_on: published_epsilon` stops."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        refuse_apart(self)
        return self

    @property
    def always(self) -> bool:
        """False, because steps may be refused."""
        return False

    @property
    def public_records(self) -> int:
        """The number of public records that the energy needs."""
        return self.energy_records if self.energy == "public" else 0

    @property
    def on_test(self) -> bool:
        """Whether the energy is the loss of test records, as in the paper."""
        return self.energy == "test"

    @property
    def released(self) -> str:
        """Decisions, and what a private energy releases."""
        if self.energy == "test":
            return (
                "Which candidate steps were accepted, as the loss of *test* records decided: figures of test records "
                "are of a model chosen by them, and say nothing of other records."
            )
        if self.energy == "public":
            return "Which candidate steps were accepted, as the loss of public records decided."
        return "The noised change of a sample's clipped losses, for every candidate step."

    @property
    def may_stop(self) -> bool:
        """Whether the run may stop early, because the paper's ε of accepted steps is reached."""
        return self.stop_on == "published_epsilon"

    @property
    def charges(self) -> bool:
        """Whether each candidate is charged, because a private energy is released for it."""
        return self.energy == "private"

    def energy_rate(self, plan: Plan) -> float:
        """q_J."""
        return min(1.0, self.energy_records / plan.records)

    def candidate_events(self, plan: Plan) -> tuple[Event, ...]:
        """(q_J, σ_J) for a private energy."""
        if self.energy != "private":
            return ()
        return (Event(self.energy_rate(plan), noise_level(self.energy_noise_multiplier, plan)),)

    def cap(self, plan: Plan, sampling_rate: float) -> int:
        """T, or min(T, τ*·(μ_0 + 1))."""
        return min(plan.steps, self.allowed_steps(plan, sampling_rate) * (self.max_rejections + 1))

    def allowed_steps(self, plan: Plan, sampling_rate: float) -> int:
        """τ*, the number of accepted steps that the paper's ε allows; T if no such ε is given."""
        if self.published_epsilon is None:
            return plan.steps
        low, high = 0, plan.steps
        while low < high:
            middle = (low + high + 1) // 2
            fits = published_count(plan, sampling_rate, middle) <= self.published_epsilon
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(low, 1)

    def start(self, run: Run) -> Accepting:
        """Begin to count steps, and to keep the energy of the current iterate."""
        return PrivateAnnealing(self, run) if self.energy == "private" else PublicAnnealing(self, run)


class _Annealing(Accepting):
    """The counters and the decision, which both energies share."""

    remembered: ClassVar[tuple[str, ...]] = ("accepted", "rejected", "refused_in_a_row", "finished")
    accepted: int

    def __init__(self, part: Annealing, run: Run) -> None:
        self.part, self.run = part, run
        self.accepted, self.rejected, self.refused_in_a_row = 0, 0, 0
        self.allowed = part.allowed_steps(run.plan, run.sampling_rate) if part.may_stop else None

    @property
    def temperature(self) -> float:
        """Q."""
        return self.part.initial_temperature * max(self.accepted, 1)

    def decide(self, change: float) -> bool:
        """Return whether a candidate whose energy differs by `change` is accepted. A coin is always drawn."""
        coin = float(self.run.random.uniform(1, "acceptance"))
        forced = self.refused_in_a_row >= self.part.max_rejections
        if forced or change <= 0 or coin < math.exp(-change * self.temperature if change > 0 else -math.inf):
            self.accepted, self.refused_in_a_row = self.accepted + 1, 0
            self.finished = self.allowed is not None and self.accepted >= self.allowed
            return True
        self.rejected, self.refused_in_a_row = self.rejected + 1, self.refused_in_a_row + 1
        return False

    def shown(self) -> dict[str, float]:
        """Counts of steps; they follow from released values."""
        return {"accepted_steps": float(self.accepted), "rejected_steps": float(self.rejected)}


class PublicAnnealing(_Annealing):
    """Energy on public (or test) records; no event of its own."""

    remembered = (*_Annealing.remembered, "current")
    current: float | None = None

    def begin(self) -> None:
        """Compute J(θ) before the first step; in every step if the loss follows released values, which change."""
        if self.current is None or self.run.combination.objective.reads:
            self.current = self.run.public_loss(self.part.energy_records)

    def accept(self) -> bool:
        """Compare J(θ') with J(θ)."""
        assert self.current is not None
        candidate = self.run.public_loss(self.part.energy_records)
        accepted = self.decide(candidate - self.current)
        self.current = candidate if accepted else self.current
        return accepted


class PrivateAnnealing(_Annealing):
    """Energy on a fresh sample of training records, noised, charged per candidate."""

    _units: Tensor
    _before: Tensor

    def begin(self) -> None:
        """Draw V, and compute its losses at θ; `accept` drops both."""
        run = self.run
        rate = self.part.energy_rate(run.plan)
        self._units = poisson_sample(run.random, rate, run.population.size, run.population.device)
        self._before = self._clipped()

    def accept(self) -> bool:
        """Release ΔẼ, and decide by it."""
        part, run = self.part, self.run
        (event,) = part.candidate_events(run.plan)
        run.ledger.append(event)
        change = run.reduce((self._clipped() - self._before).double().sum().view(1))
        noised = float(run.random.perturb(change, sensitivity=part.loss_bound, noise_multiplier=event.noise_multiplier))
        self._units, self._before = self._units[:0], self._before[:0]
        return self.decide(noised / (event.sampling_rate * run.plan.records))

    def _clipped(self) -> Tensor:
        losses = self.run.losses(self._units)
        return torch.nan_to_num(losses, nan=self.part.loss_bound).clamp(0.0, self.part.loss_bound)


def published_count(plan: Plan, sampling_rate: float, accepted: int) -> float:
    """Return the paper's ε of so many accepted steps: Theorem 1 with the logarithm it lacks, classic conversion."""
    event = Event(sampling_rate, plan.noise_multiplier, max(accepted, 1))
    return published_epsilon([event], plan.delta, "classic")


def published(algorithm: Algorithm, plan: Plan, outcome: Outcome | None) -> Published:
    """Return the paper's figure, which counts accepted steps only and is no guarantee."""
    accepted = plan.steps if outcome is None else outcome.accepted_steps
    formula = (
        f"RDP of the {accepted} accepted steps alone, classic conversion, integer orders 2 to 64; refused candidates "
        "are left out, so this figure is no guarantee"
    )
    return Published(published_count(plan, algorithm.sampler.sampling_rate(plan), accepted), formula, guarantee=False)


def refuse_apart(settings: Annealing | SADPSGD) -> None:
    """Refuse settings that have no effect without another setting.

    Raises:
        ValueError: there is such a setting; pydantic reports it with its class.
    """
    if (settings.stop_on == "published_epsilon") != (settings.published_epsilon is not None):
        raise ValueError("stop_on=published_epsilon and a value of published_epsilon belong together")
    if settings.energy != "private":
        refuse_idle(settings, ("energy_noise_multiplier", "loss_bound"), "energy is private")


class SADPSGD(AlgorithmSettings):
    """Settings of SA-DPSGD."""

    clip_norm: Positive = 0.1
    """C, the bound on each record's gradient."""
    initial_temperature: Positive = 10.0
    """Q_0."""
    max_rejections: Annotated[int, Field(ge=0)] = 10
    """μ_0: after so many refusals in a row a candidate is always accepted (5 on CIFAR-10)."""
    energy: Literal["public", "private", "test"] = "public"
    """The records whose loss is J: `public` ones, `private` ones (noised), or `test` ones as in the paper. Take `test`
    only to reproduce the paper: test records then decide on the model, and a secure run refuses it."""
    energy_records: Count = 1024
    """Number of public or test records in J, or expected size of the private sample."""
    energy_noise_multiplier: NoiseLevel = "10x"
    """σ_J, private energy only; a ratio such as "10x" is to the noise multiplier."""
    loss_bound: Positive = 4.0
    """c, the bound on a record's loss, private energy only."""
    stop_on: Literal["candidates", "published_epsilon"] = "candidates"
    """Stop after T candidates, or when the paper's ε of the accepted steps reaches `published_epsilon`."""
    published_epsilon: Positive | None = None
    """The paper's ε at which the run stops. It is no guarantee; the run's ε is that of the most candidates that it
    could have taken."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        refuse_apart(self)
        return self

    def annealing(self) -> Annealing:
        """Return the acceptance of these settings."""
        return Annealing(**self.model_dump(exclude={"clip_norm"}))

    def build(self) -> Algorithm:
        """DP-SGD with annealed acceptance."""
        return Algorithm(
            name="sa_dpsgd",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            acceptance=self.annealing(),
            published=published,
        )
