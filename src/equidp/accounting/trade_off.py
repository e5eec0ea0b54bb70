"""Trade-off: the smallest rate of misses that an attacker with a given rate of false alarms can have.

An attacker sees what a run released, and must say whether a record was among the training records. The attacker's rate
of false alarms, α, is for records that were not among them. Then the rate of misses, for records that were, is at least
f(α). A run that is (ε, δ(ε))-DP at *many* ε has a curve f above that of any single pair. Each ε ≥ 0 gives two tangents
(Dong, Roth and Su 2022, Proposition 2.5),

    f(α) ≥ 1 − δ(ε) − e^ε·α    and    f(α) ≥ e^−ε·(1 − δ(ε) − α).

The largest of finitely many tangents lies below f, so it can only understate the guarantee. δ(ε) is dp_accounting's,
which rounds up. The curve is for both directions at once, so it is symmetric: f is its own inverse, and tangents of the
first kind determine it up to its fixed point c = f(c).

μ is the smallest number whose Gaussian curve G_μ(α) = Φ(Φ⁻¹(1 − α) − μ) lies nowhere above f, for rates α and f(α) of
at least δ. Below δ nothing is promised, and no μ would be large enough. Between two corners of f the difference f − G_μ
is concave, so μ = max [Φ⁻¹(1 − α) − Φ⁻¹(f(α))] over the corners in [δ, c] and the ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from dp_accounting import ComposedDpEvent, pld, rdp
from scipy.stats import norm

from equidp.accounting.epsilon import (
    PLD_LIMIT,
    SEARCH_INTERVAL,
    asks_pld,
    grid_interval,
    orders_left_out_in_silence,
    rdp_epsilon,
    rounded_away,
)
from equidp.accounting.events import Event, canonical

TANGENTS = 1000
"""Number of values of ε, from 0 to ln(1/δ). Beyond that a tangent is below 0 for every α of at least δ."""

POINTS = 40
"""Number of false-alarm rates up to 1/2 in `to_dict`; there are as many above 1/2."""

ROUND_RATES = (1e-3, 0.01, 0.05, 0.1)
"""More rates in `to_dict`, which readers ask for."""

DIGITS = 6

STEEPEST = 700.0
"""The largest ε for which e^ε is computed."""


@dataclass(frozen=True)
class TradeOff:
    """A curve as the largest of its tangents.

    Attributes:
        epsilons: ε ≥ 0 of the tangents, `[k]`.
        deltas: δ(ε), `[k]`.
        delta: the smallest rate for which the curve is stated.
        bound: `pld` or `rdp`, from which δ(ε) follows.
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    delta: float
    bound: str

    @cached_property
    def slopes(self) -> np.ndarray:
        """e^ε, `[k]`. An ε that would overflow is lowered, to a tangent that is above 0 at no rate above 1e-304."""
        return np.exp(np.minimum(self.epsilons, STEEPEST))

    def misses(self, false_alarms: float) -> float:
        """Return f(α)."""
        slopes, deltas = self.slopes, np.asarray(self.deltas)
        first, second = 1 - deltas - slopes * false_alarms, (1 - deltas - false_alarms) / slopes
        return float(max(0.0, first.max(), second.max()))

    def recognised(self, false_alarms: float) -> float:
        """Return 1 − f(α), the largest share of the training records that is recognised."""
        return 1 - self.misses(false_alarms)

    @cached_property
    def mu(self) -> float | None:
        """The smallest μ, rounded up to three decimals; None if f reaches 0 at a rate of at least δ."""
        slopes, deltas = self.slopes, np.asarray(self.deltas)
        fixed = float(np.max((1 - deltas) / (1 + slopes)))  # c, the largest rate where a tangent crosses the diagonal
        if fixed <= self.delta:
            return None
        inner = [alpha for alpha in self._corners() if self.delta < alpha < fixed]
        needed = [norm.isf(alpha) - norm.ppf(self.misses(alpha)) for alpha in (self.delta, *inner, fixed)]
        largest = max(needed)
        return math.ceil(1e3 * max(largest, 0.0)) / 1e3 if math.isfinite(largest) else None

    def _corners(self) -> list[float]:
        """Return the rates at which neighbouring tangents meet, of those on the lower hull of δ over e^ε.

        All other tangents are below these.
        """
        hull: list[tuple[float, float]] = []
        for slope, delta in sorted(zip(self.slopes, self.deltas, strict=True)):
            while len(hull) > 1 and _meet(hull[-2], (slope, delta)) >= _meet(hull[-2], hull[-1]):
                hull.pop()
            if not hull or slope > hull[-1][0]:
                hull.append((slope, delta))
        return [_meet(left, right) for left, right in pairwise(hull)]

    def to_dict(self) -> dict:
        """Return the curve as written to privacy.json: rates of false alarms, and rates of misses rounded down."""
        lower = np.geomspace(self.delta, 0.5, POINTS)
        round_rates = (rate for rate in ROUND_RATES if rate >= self.delta)
        alphas = sorted({float(f"{alpha:.{DIGITS}g}") for alpha in (*lower, *(1 - lower), *round_rates)})
        return {
            "bound": self.bound,
            "mu": self.mu,
            "mu_from": self.delta,
            "false_alarms": alphas,
            "misses": [math.floor(self.misses(alpha) * 10**DIGITS) / 10**DIGITS for alpha in alphas],
            "recognised_at_1_percent": math.ceil(self.recognised(0.01) * 10**DIGITS) / 10**DIGITS,
        }


def _meet(left: tuple[float, float], right: tuple[float, float]) -> float:
    """Return the α at which the tangents of two pairs (e^ε, δ) meet."""
    return (left[1] - right[1]) / (right[0] - left[0])


def trade_off(events: Sequence[Event], delta: float, epsilon: float) -> TradeOff | None:
    """Return the curve of events that are fixed before training.

    It follows from privacy loss distributions, or beyond `PLD_STEPS` from Rényi divergences. None beyond `PLD_LIMIT`.

    Args:
        events: everything charged.
        delta: the run's δ, the smallest rate of false alarms for which the curve holds.
        epsilon: the run's ε at δ, which gives another tangent; if it follows from RDP, PLD may be looser.
    """
    return _by_pld(canonical(events), delta, epsilon)


def trade_off_by(delta_at: Callable[[float], float], delta: float, epsilon: float) -> TradeOff:
    """Return the curve that follows from any sound δ(ε), such as a conversion of Rényi divergences."""
    grid = _grid(delta)
    found = [min(1.0, max(0.0, delta_at(float(one)))) for one in grid]
    return TradeOff((*map(float, grid), epsilon), (*found, delta), delta, "rdp")


def delta_of(total: float, order: float, epsilon: float) -> float:
    """Return δ at ε for a Rényi divergence R at one order, the inverse of `epsilon.epsilon_of`."""
    return math.exp(min(0.0, (order - 1) * (total - epsilon + math.log((order - 1) / order)) - math.log(order)))


def _grid(delta: float) -> np.ndarray:
    return np.linspace(0.0, math.log(1 / delta), TANGENTS)


@lru_cache(maxsize=64)
def _by_pld(events: tuple[Event, ...], delta: float, epsilon: float) -> TradeOff | None:
    if rdp_epsilon(events, delta) > PLD_LIMIT:
        return None
    if not asks_pld(events, delta):
        accountant = rdp.RdpAccountant()
        with orders_left_out_in_silence():
            accountant.compose(ComposedDpEvent([event.as_dp_event() for event in events]))
        return trade_off_by(lambda one: float(accountant.get_delta(one)), delta, epsilon)
    interval = grid_interval(events, delta, SEARCH_INTERVAL)
    loss = pld.privacy_loss_distribution.identity(interval)
    for event in events:
        loss = loss.compose(_loss(event, interval))
    grid = _grid(delta)
    found = (np.asarray(loss.get_delta_for_epsilon(grid)) + rounded_away(events)).clip(0.0, 1.0)
    return TradeOff((*map(float, grid), epsilon), (*map(float, found), delta), delta, "pld")


def _loss(event: Event, interval: float) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """Return the privacy loss of an event's releases together; without sampling they are one Gaussian."""
    plain = event.sampling_rate == 1
    once = pld.privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier / (math.sqrt(event.count) if plain else 1.0),
        value_discretization_interval=interval,
        sampling_prob=event.sampling_rate,
    )
    return once if plain else once.self_compose(event.count)
