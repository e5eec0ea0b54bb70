"""Epsilon: ε of a list of events, by Rényi DP, by privacy loss distributions (PLD), and by the papers' formulas.

The arithmetic is dp_accounting's. This module takes the smaller of its two sound bounds.

Adjacency is always that the slot of one record (or unit) is emptied. Everything in the `Plan` is public.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dp_accounting import pld, rdp

from equidp.accounting.events import Event, canonical, lowered, merged
from equidp.system.logs import held_back

SEARCH_INTERVAL = 1e-3
"""Interval of PLD's grid in searches and for curves by epoch: fast, and ε is at most about 0.5 % larger."""

REPORT_INTERVAL = 1e-4
"""Interval of PLD's grid for every reported ε. Both intervals are pessimistic: the bound holds at any interval."""

COARSER_FROM = 10.0
"""If ε by RDP is above this, the interval of PLD's grid grows with it. At the same interval the number of points would
grow with ε, and take a minute for digits that say nothing. The bound remains pessimistic, by less than 1e-5 of ε at
`REPORT_INTERVAL`."""

PLD_LIMIT = 2e3
"""If ε by RDP is above this, PLD is not used: its grid would take gigabytes for a figure that promises nothing."""

PLD_STEPS = 300_000
"""If one sampled event has more steps than this, PLD is not used. Each step's privacy loss is rounded to a grid, which
costs more ε and more time with more steps: at ten million steps minutes and gigabytes for each value of the noise."""

ROUNDING = 2.0**-50
"""The most that rounding may take from the δ of a composed privacy loss, for each step and each composition, because
dp_accounting takes powers of Fourier transforms in double precision. The largest loss that was found is a fifth of
this. It matters if δ is tiny and steps are many: after 290,000 steps at q = 1e-4 and σ = 0.6, PLD alone would say
ε = 3.63 at δ = 1e-12, but 4.42 is true."""

POINTS = 500
"""The most values of ε along a run. If there are more epochs, several of them share the value after the last one."""

PUBLISHED_ORDERS = range(2, 65)
"""The integer Rényi orders over which the papers minimise."""

LIVE_ORDERS = (*PUBLISHED_ORDERS, 80, 128, 256, 512)
"""Integer Rényi orders of the live figure."""

Conversion = Literal["classic", "improved"]


@dataclass(frozen=True)
class Epsilon:
    """ε of a list of events at one δ: both sound bounds, and the smaller of them.

    `pld` is None if only Rényi divergence bounds the run, because its noise was chosen within a Rényi budget.
    """

    rdp: float
    pld: float | None

    @property
    def value(self) -> float:
        """The ε that we state. Both bounds hold for events that are fixed before training, so the smaller one holds.

        Raises:
            ValueError: a bound is NaN, which no comparison with a target would notice.
        """
        if math.isnan(self.rdp) or math.isnan(self.pld or 0.0):
            raise ValueError(f"{self} bounds nothing: please report it with the settings.")
        if self.pld is None or math.isinf(self.pld):
            return self.rdp
        # if rounding leaves nothing of the Rényi divergences, PLD decides
        return min(self.rdp, self.pld) if self.rdp > 0 else self.pld


def epsilon(events: Sequence[Event], delta: float, *, interval: float = REPORT_INTERVAL) -> Epsilon:
    """Return ε of events that are fixed before training, by RDP (improved conversion) and by PLD.

    Examples:
        >>> from equidp.accounting.events import Event
        >>> found = epsilon([Event(sampling_rate=0.01, noise_multiplier=1.0, count=1000)], delta=1e-5)
        >>> round(found.rdp, 2), round(found.pld, 2), found.value == found.pld
        (2.1, 1.83, True)
    """
    runs = canonical(events)
    return Epsilon(rdp_epsilon(runs, delta), pld_epsilon(runs, delta, interval))


def rdp_epsilon(events: Sequence[Event], delta: float) -> float:
    """Return ε by dp_accounting's RDP accountant, in milliseconds."""
    return _rdp_epsilon(canonical(events), delta)


def pld_epsilon(events: Sequence[Event], delta: float, interval: float) -> float:
    """Return ε by dp_accounting's PLD accountant; infinite if it is not used (`asks_pld`), or δ is too small for it."""
    return _pld_epsilon(canonical(events), delta, interval)


def published_epsilon(
    events: Sequence[Event], delta: float, conversion: Conversion, orders: Sequence[int] = PUBLISHED_ORDERS
) -> float:
    """Return ε by a paper's own conversion of RDP at integer orders.

    `classic`: ε = τ + ln(1/δ)/(α−1) (Mironov 2017, Prop. 3). `improved`: ε = τ + ln((α−1)/α) − (ln δ + ln α)/(α−1)
    (Balle et al. 2020, Thm. 21). The figure is shown beside ours; it is never the ε that we state.
    """
    if not events:
        return 0.0
    totals = zip(renyi_curve(lowered(merged(events)), orders), orders, strict=True)
    if conversion == "classic":
        figures = [total + math.log(1 / delta) / (order - 1) for total, order in totals]
    else:
        figures = [epsilon_of(total, order, delta) for total, order in totals]
    return max(0.0, min(figures))


def renyi_curve(events: Sequence[Event], orders: Sequence[float]) -> list[float]:
    """Return bounds on the Rényi divergence of all events together at some orders α > 1; they are exact at integers."""
    totals = [0.0] * len(orders)
    for event in merged(events):
        curve = _rdp_curve(event.sampling_rate, event.noise_multiplier, tuple(orders))
        totals = [total + event.count * one for total, one in zip(totals, curve, strict=True)]
    return totals


def epsilon_of(total: float, order: float, delta: float) -> float:
    """Return ε = R + ln((α−1)/α) − (ln δ + ln α)/(α−1) (Balle et al. 2020, Theorem 21; Canonne et al. 2020)."""
    return total + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)


def live_epsilon(events: Sequence[Event], delta: float) -> float:
    """Return a sound ε in microseconds, for progress bars: RDP at integer orders, improved conversion."""
    return published_epsilon(events, delta, "improved", LIVE_ORDERS)


def asks_pld(events: Sequence[Event], delta: float) -> bool:
    """Whether PLD is used for these events: they exceed neither `PLD_LIMIT` nor `PLD_STEPS`."""
    steps = max((event.count for event in events if event.sampling_rate < 1), default=0)
    return steps <= PLD_STEPS and rdp_epsilon(events, delta) <= PLD_LIMIT


def grid_interval(events: Sequence[Event], delta: float, finest: float) -> float:
    """Return the interval of PLD's grid for all these events together: `finest`, or a larger one (`COARSER_FROM`)."""
    return finest * max(1.0, rdp_epsilon(events, delta) / COARSER_FROM)


def rounded_away(events: Sequence[Event]) -> float:
    """Return by how much δ may be larger, at any ε, than PLD says of these events together, because of `ROUNDING`."""
    return ROUNDING * sum(1 + (event.count if event.sampling_rate < 1 else 0) for event in events)


def composed(accountant: pld.PLDAccountant, events: Sequence[Event], delta: float) -> float:
    """Return ε of these events by an empty accountant, at δ less its rounding; infinite if nothing is left of δ."""
    within = delta - rounded_away(events)
    if within <= 0:
        return math.inf
    for event in events:
        accountant.compose(event.as_dp_event())
    return float(accountant.get_epsilon(within))


def blocks(epochs: Sequence[Sequence[Event]]) -> Iterator[tuple[int, list[Event]]]:
    """Give at most `POINTS` blocks of consecutive epochs, each as its number of epochs and their events."""
    every = -(-len(epochs) // POINTS)
    for start in range(0, len(epochs), every):
        block = epochs[start : start + every]
        yield len(block), [event for events in block for event in events]


def epsilon_path(epochs: Sequence[Sequence[Event]], delta: float) -> list[Epsilon]:
    """Return ε after each epoch, composed step by step.

    Here PLD uses the coarse interval, and RDP integer orders. The ε of a part of a run never exceeds that of the whole
    run. So the curve is capped by the whole run's reported figure, and ends in it.
    """
    return list(_epsilon_path(tuple(map(tuple, epochs)), delta)) if any(epochs) else []


@lru_cache(maxsize=16)
def _epsilon_path(epochs: tuple[tuple[Event, ...], ...], delta: float) -> tuple[Epsilon, ...]:
    """Return the path, and keep it: a curve takes about a second, and algorithms that are compared share events."""
    every = [event for events in epochs for event in events]
    whole, interval = epsilon(every, delta), grid_interval(every, delta, SEARCH_INTERVAL)
    by_pld = whole.value
    spent: tuple[Event, ...] = ()
    rounding = 0.0
    loss = None if math.isinf(whole.pld or 0.0) else pld.privacy_loss_distribution.identity(interval)
    path: list[Epsilon] = []
    for count, events in blocks(epochs):
        spent = merged((*spent, *events))
        if loss is not None:
            for event in merged(events):
                loss = loss.compose(_pld(event, interval))
                rounding += ROUNDING  # for this composition; `rounded_away` has the rounding of the steps
            within = max(0.0, delta - rounded_away(spent) - rounding)
            by_pld = min(float(loss.get_epsilon_for_delta(within)), whole.value)
        path += [Epsilon(min(live_epsilon(spent, delta), whole.rdp), by_pld)] * count
    return tuple(path)


def orders_left_out_in_silence() -> AbstractContextManager[None]:
    """Return a context in which dp_accounting does not warn of Rényi orders that it leaves out: ε only gets larger."""
    return held_back("absl", below=logging.ERROR)


@lru_cache(maxsize=4096)
def _rdp_epsilon(events: tuple[Event, ...], delta: float) -> float:
    accountant = rdp.RdpAccountant()
    with orders_left_out_in_silence():
        for event in events:
            accountant.compose(event.as_dp_event())
        found = float(accountant.get_epsilon(delta))
    if found > 0:
        return found
    # dp_accounting returns 0 if a divergence is below δ², or below 0 by rounding; the conversion does not need the
    # digits that rounding may have taken
    totals = zip(accountant.rdp, accountant.orders, strict=True)
    return max(0.0, min(float(epsilon_of(max(total, 0.0), order, delta)) for total, order in totals))


@lru_cache(maxsize=4096)
def _pld_epsilon(events: tuple[Event, ...], delta: float, interval: float) -> float:
    if not asks_pld(events, delta):
        return math.inf
    interval = grid_interval(events, delta, interval)
    return composed(pld.PLDAccountant(value_discretization_interval=interval), events, delta)


@lru_cache(maxsize=256)
def _pld(event: Event, interval: float) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """Return the privacy loss distribution of an event under add-or-remove."""
    once = pld.privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier, sampling_prob=event.sampling_rate, value_discretization_interval=interval
    )
    return once.self_compose(event.count)


@lru_cache(maxsize=1024)
def _rdp_curve(sampling_rate: float, noise_multiplier: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Return RDP of one event at these orders.

    At a fractional order this is the smaller of two bounds. For the first one dp_accounting sums its series without the
    signs of the terms, which can only raise it. It is ∞ if that does not converge, often below order 2. The second
    bound follows from the integers beside α: (α−1)·D_α(P‖Q) = ln E_Q[(P/Q)^α] is convex in α by Hölder's inequality,
    and so below its chord (at α = 1 it is 0). Of the two directions D(P‖Q), where P is sampled, is the larger one at
    every α > 1 (Mironov, Talwar and Zhang 2019, Theorem 5).
    """
    needed = sorted({n for order in orders for n in (order, math.floor(order), math.ceil(order)) if n > 1})
    with orders_left_out_in_silence():
        accountant = rdp.RdpAccountant(needed).compose(Event(sampling_rate, noise_multiplier).as_dp_event())
    found = dict(zip(needed, map(float, accountant.rdp), strict=True))
    return tuple(min(found[order], _chord(found, order)) for order in orders)


def _chord(found: Mapping[float, float], order: float) -> float:
    """Return the bound on D_α that follows from those at the integers beside α."""
    below, share = math.floor(order), order % 1
    if not share:
        return found[order]
    low = (below - 1) * found.get(below, 0.0)
    return ((1 - share) * low + share * below * found[below + 1]) / (order - 1)
