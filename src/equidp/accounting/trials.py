"""Trials: what it costs to train several times on the same records and to choose one of the models.

The number of trials must be declared before the first trial. A number that is counted afterwards depends on results, so
no bound follows from it. Two declarations are possible.

**A cap K** (`cap`). All events of K trials are charged, even if there are fewer trials. So all trials may be published.
Events of trials compose like events of steps: Rényi divergences add up, and privacy loss distributions compose.

**A law** (`law`, `mean`). The number K ≥ 1 is drawn from the law, independently of the data, before the first trial.
Only the trial with the best score is ever shown, without its rank and without K. The score must be part of what a trial
releases: it is private itself, or measured on records that no trial trains on. The bound (Papernot and Steinke 2022) is
derived here again:

Let Q be the law of one trial's output. Outputs are ordered by score, with a fixed order among equals. Let
f(x) = E[x^K]. The selected output is y with probability A(y) = f(Q(≤y)) − f(Q(<y)) = Q(y)·E[f'(X)], with X uniform on
[Q(<y), Q(≤y)]. For a neighbour take X' from the same uniform number. Then X and X' are the probabilities q and q' of
the same event under Q and Q'. The function (u, v) → u^λ·v^(1−λ) is jointly convex for λ > 1, so by Jensen's inequality

    Σ_y A(y)^λ A'(y)^(1−λ) ≤ Σ_y Q(y)^λ Q'(y)^(1−λ) · max f'(q)^λ f'(q')^(1−λ),
    D_λ(A‖A') ≤ D_λ(Q‖Q') + ln(max f'(q)^λ f'(q')^(1−λ)) / (λ−1).

*Truncated negative binomial law* of shape η (1: geometric, 0: logarithmic) and stopping parameter γ: f'(x) =
E[K]·(γ/w)^(1+η) with w = 1 − (1−γ)x ∈ [γ, 1]. w = γ + (1−γ)(1−q) is itself the probability of an event. So for every
order β > 1 with divergence R(β) in both directions, w' ≤ w^(1−1/β)·e^((1−1/β)R(β)). Therefore

    f'(q)^λ f'(q')^(1−λ) = E[K]·[(w'/w)^(λ−1)·γ/w]^(1+η) ≤ E[K]·[e^((λ−1)(1−1/β)R(β))·γ·w^(−(λ−1)/β−1)]^(1+η),

which is largest at w = γ, and

    D_λ(A‖A') ≤ R(λ) + ln E[K]/(λ−1) + (1+η)·min_β [(1−1/β)·R(β) + ln(1/γ)/β].

*Poisson law* of rate μ, drawn again while the number is 0: f'(x) = E[K]·e^(μ(x−1)). With p = 1 − q the exponent is
μ((λ−1)p' − λp). At ε̂ = ln(λ/(λ−1)) a trial is (ε̂, δ̂)-DP for some δ̂, so (λ−1)p' ≤ λp + (λ−1)δ̂, and

    D_λ(A‖A') ≤ R(λ) + μ·δ̂ + ln E[K]/(λ−1),    μ ≤ E[K].

dp_accounting computes both bounds, and uses E[K] ≥ μ instead of μ. Here `mean` is always E[K] of a number that is at
least 1. Trials may differ in their settings if the divergences of each trial are at most R. The bound is on Rényi
divergences, so no privacy loss distribution is known for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import dp_accounting as dp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq

from equidp.accounting.calibration import calibrate, divergences, smallest_noise_of_few
from equidp.accounting.epsilon import (
    LIVE_ORDERS,
    Epsilon,
    blocks,
    epsilon,
    epsilon_of,
    epsilon_path,
    live_epsilon,
    orders_left_out_in_silence,
)
from equidp.accounting.events import Event, canonical, merged
from equidp.errors import EquidpError

Law = Literal["geometric", "negative_binomial", "poisson"]

LAW_ORDERS = tuple(sorted({*RdpAccountant().orders.tolist(), *map(float, LIVE_ORDERS)}))
"""dp_accounting's own orders and more large ones. Each bound uses two of them."""

MOST_TRIALS = 10**9
"""The most trials that are drawn, even if rounding keeps the sum of the law's probabilities below the drawn number."""

LEAST = -700.0
"""ln of a probability. Smaller ones are left out of the sum of probabilities, because they change no digit of it."""

ROUNDED, FLOOR = 1e-12, dp.GaussianDpEvent(1e7)
"""For the Poisson law: a divergence R so small that rounding may leave nothing of it, and an event that is then added.
It is needed because dp_accounting takes δ̂ from ln(1 − e^−R). It adds 1e-14 to R, and can only raise the bound."""

SHAPE = 0.5
"""η of the negative binomial law, unless another is given."""


@dataclass(frozen=True)
class Trials:
    """For how many trainings on the same records a guarantee is; declared before the first training.

    Attributes:
        cap: K; the events of all K trials are charged; 1 with a law.
        law: law of the number of trials, or None for a cap.
        mean: E[K] of the law, at least 1; None without a law.
        shape: η ≥ 0 of the negative binomial law (0: logarithmic, 1: geometric); None for the other laws.
        orders: Rényi orders that are used for a law; None: all of the accountant's. If trials differ, their divergences
            need a bound at these orders only.
    """

    cap: int = 1
    law: Law | None = None
    mean: float | None = None
    shape: float | None = None
    orders: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.orders is not None:
            object.__setattr__(self, "orders", tuple(map(float, self.orders)))
        if (self.law is None) != (self.mean is None):
            raise EquidpError("privacy.trials_law and privacy.trials_mean belong together: give both or none.")
        if self.law is not None and self.cap != 1:
            raise EquidpError(
                "privacy.max_trials and privacy.trials_law are two ways to declare the number of trials: give one."
            )
        if self.shape is not None and self.law != "negative_binomial":
            raise EquidpError("privacy.trials_shape belongs to privacy.trials_law=negative_binomial: leave it out.")

    @property
    def single(self) -> bool:
        """Whether there is only one trial."""
        return self.cap == 1 and self.law is None

    def charged(self, run: Sequence[Event], planned: Sequence[Event] | None = None) -> tuple[Event, ...]:
        """Return the events of all trials under a cap: this run's, and K−1 times the planned ones (or this run's)."""
        others = (run if planned is None else planned) if self.cap > 1 else ()
        return merged((*run, *(replace(event, count=event.count * (self.cap - 1)) for event in others)))

    def epsilon(self, run: Sequence[Event], delta: float, planned: Sequence[Event] | None = None) -> Epsilon:
        """Return ε of all trials under a cap, or of the choice and the chosen model under a law.

        Args:
            run: events of this run.
            delta: δ.
            planned: events of every other trial, if this run charged more than planned.
        """
        if self.law is None:
            return epsilon(self.charged(run, planned), delta)
        return Epsilon(float(self._selected(run).get_epsilon(delta)), None)

    def live_epsilon(self, run: Sequence[Event], delta: float) -> float:
        """Return a quick bound on `epsilon` during a run, as if all trials were as far as this one."""
        if self.law is None:
            return live_epsilon(self.charged(run), delta)
        return float(self._selected(run, LIVE_ORDERS).get_epsilon(delta)) if run else 0.0

    def epsilon_path(self, epochs: Sequence[Sequence[Event]], delta: float) -> list[float]:
        """Return, for each epoch, `epsilon` of trials that ended after it."""
        if self.law is None:
            return [point.value for point in epsilon_path([self.charged(events) for events in epochs], delta)]
        spent: list[Event] = []
        path = []
        for count, events in blocks(epochs):
            spent += events
            path += [self.live_epsilon(spent, delta)] * count
        whole = self.epsilon(spent, delta).value if spent else 0.0
        return [*(min(one, whole) for one in path[:-1]), whole]

    def delta(self, run: Sequence[Event], target: float) -> float:
        """Return δ at ε = `target` under a law."""
        return float(self._selected(run).get_delta(target))

    def calibrate(self, events_for: Callable[[float], Sequence[Event]], target: float, delta: float) -> float:
        """Return the smallest noise multiplier with which all trials meet the target; see `calibration.calibrate`."""
        if self.law is None:
            return calibrate(lambda noise: self.charged(events_for(noise)), target, delta)
        return smallest_noise_of_few(lambda noise: self.epsilon(events_for(noise), delta).value, target)

    def draw(self, uniform: float) -> int:
        """Return the number of trials for a uniform number in [0, 1), by the inverse of the law.

        P(k+1)/P(k) is (1−γ)(k+η)/(k+1), or μ/(k+1). So probabilities are added from P(1) on until the sum exceeds the
        uniform number. A uniform number of 53 bits changes each probability by less than 1e-15. Over 100,000 trials
        rounding changes the sum by less than 1e-9.
        """
        assert self.mean is not None
        if self.mean <= 1 + 1e-6:  # one trial costs no more than the law does
            return 1
        if self.law == "poisson":
            rate = brentq(lambda mu: mu / -math.expm1(-mu) - self.mean, 1e-12, self.mean)
            log_chance = math.log(rate) - rate - math.log(-math.expm1(-rate))
            ratio = lambda k: rate / (k + 1)  # noqa: E731
        else:
            gamma, eta = brentq(lambda one: _mean(one, self.eta) - self.mean, 1e-12, 1 - 1e-12), self.eta
            log_none = eta * math.log(gamma)
            scale = math.log(1 / gamma) if eta == 0 else -math.expm1(log_none) / eta
            log_chance = math.log1p(-gamma) - math.log(scale) + log_none
            ratio = lambda k: (1 - gamma) * (k + eta) / (k + 1)  # noqa: E731
        k = 1
        while log_chance < LEAST:
            k, log_chance = k + 1, log_chance + math.log(ratio(k))
        chance = reached = math.exp(log_chance)
        while reached <= uniform and k < MOST_TRIALS:
            chance *= ratio(k)
            k, reached = k + 1, reached + chance
        return k

    def telling(self, run: Sequence[Event], delta: float) -> Trials:
        """Return the same law with only the one or two orders that give its ε: one for the release, one for the choice.

        They are found from public events before the first trial, so they are fixed whatever happens. An order at which
        a trial's divergence is not known is left out, such as many fractional ones: with an infinite divergence no
        other trial could be compared.
        """
        found = self._selected(run)
        orders = tuple(map(float, found.orders))
        rows = zip(orders, map(float, found.rdp), divergences(run, orders), strict=True)
        by_order = {order: of for order, of, alone in rows if order > 1 and 0 < alone < math.inf}
        best = min(by_order, key=lambda order: epsilon_of(by_order[order], order, delta))
        pairs = [replace(self, orders=tuple(sorted({best, other}))) for other in by_order]
        return min(pairs, key=lambda trials: trials.epsilon(run, delta).value)

    def to_dict(self) -> dict:
        """Return the declaration as written to privacy.json; `orders` is there if only some orders are used."""
        if self.law is None:
            return {"max": self.cap}
        shape = {"shape": self.eta} if self.law == "negative_binomial" else {}
        orders = {} if self.orders is None else {"orders": list(self.orders)}
        return {"law": self.law, "mean": self.mean, **shape, **orders}

    def _selected(self, run: Sequence[Event], orders: tuple[float, ...] | None = None) -> RdpAccountant:
        return selected(dp.ComposedDpEvent(tuple(e.as_dp_event() for e in canonical(run))), self, orders=orders)

    @property
    def eta(self) -> float:
        """η of the law; the Poisson law is the limit of large η."""
        if self.law == "negative_binomial":
            return SHAPE if self.shape is None else self.shape
        return {"geometric": 1.0, "poisson": math.inf}[str(self.law)]


def _mean(gamma: float, eta: float) -> float:
    """Return E[K] of the truncated negative binomial law."""
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


@lru_cache(maxsize=256)
def selected(
    trial: dp.DpEvent,
    trials: Trials,
    relation: dp.NeighboringRelation | None = None,
    orders: tuple[float, ...] | None = None,
) -> RdpAccountant:
    """Return an accountant that holds the best of a random number of trials, each of which has the event `trial`.

    Args:
        trial: everything that one trial releases.
        trials: a declaration with a law.
        relation: of neighbours; None: a record is added or removed.
        orders: `LAW_ORDERS` unless given, which take 80 ms for each distinct event; `LIVE_ORDERS` take a third of that.
    """
    assert trials.mean is not None
    chosen = trials.orders or orders or LAW_ORDERS  # if trials differ, the bound holds only at the declared orders
    neighbours = relation or dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = RdpAccountant(chosen, neighbours)
    with orders_left_out_in_silence():
        if trials.law == "poisson" and min(RdpAccountant(chosen, neighbours).compose(trial).rdp) < ROUNDED:
            trial = dp.ComposedDpEvent((trial, FLOOR))
        accountant.compose(RepeatAndSelectDpEvent(trial, float(trials.mean), trials.eta))
    return accountant
