"""Calibration: the smallest noise multiplier with which a schedule of events meets a target ε."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial

import dp_accounting as dp
from dp_accounting import pld, rdp
from tqdm import tqdm

from equidp.accounting.epsilon import (
    REPORT_INTERVAL,
    SEARCH_INTERVAL,
    epsilon,
    grid_interval,
    live_epsilon,
    orders_left_out_in_silence,
    pld_epsilon,
    rdp_epsilon,
    rounded_away,
)
from equidp.accounting.events import Event, canonical
from equidp.errors import EquidpError

logger = logging.getLogger(__name__)

TIGHTENING, TIGHTENINGS = 0.998, 6
"""Factor of a step, and number of steps, in which the noise multiplier that was found with the coarse discretisation is
lowered with the fine one."""

ENOUGH = 0.99
"""Share of the target. If a noise gives a smaller ε than this share, another noise is searched."""

SAID_AFTER = 10.0
"""Seconds of solving until a log says that it goes on. Each further message comes after twice the time."""

LARGE_NOISE = 1e3
"""Used as "infinite gradient noise", to see what the side releases cost on their own. With far larger values Rényi
divergences are below the rounding error, where no accountant can be trusted."""

MOST_NOISE = 1e6
"""The largest noise that is tried."""


def calibrate(events_for: Callable[[float], Sequence[Event]], target: float, delta: float) -> float:
    """Return the smallest noise multiplier with which all events of a schedule cost at most ε = `target` at `delta`.

    Args:
        events_for: gives the run's events for a noise multiplier; ε must fall as the noise grows.
        target: ε > 0.
        delta: δ in (0, 1).

    Raises:
        EquidpError: the target cannot be met even with infinite gradient noise; the message names that ε.
    """
    begun, due = time.monotonic(), SAID_AFTER
    # a schedule of many different events takes a minute: a terminal shows progress, a log file gets messages
    with tqdm(desc=f"noise for ε = {target:g}", unit="evaluation", delay=2, leave=False, disable=None) as progress:

        def counted(noise: float) -> Sequence[Event]:
            nonlocal due
            progress.update()
            events = events_for(noise)
            if progress.disable and (taken := time.monotonic() - begun) > due:
                due = 2 * taken
                message = "Solving for the noise that ε = %g needs, with %d different events: %.0f s so far."
                logger.info(message, target, len(canonical(events)), taken)
            return events

        return _calibrated(counted, target, delta)


def _calibrated(events_for: Callable[[float], Sequence[Event]], target: float, delta: float) -> float:
    _refuse_unreachable(events_for, target, delta)

    def finely(noise: float) -> float:
        return epsilon(events_for(noise), delta).value

    proposed = None
    # `live_epsilon` is never below the ε that its largest order gives for no divergence: then it finds no bracket
    if live_epsilon(events_for(MOST_NOISE), delta) <= target:
        proposed = _proposed(events_for, target, delta)
    if proposed is not None:
        noise, least = proposed
        if least <= finely(noise) <= target:
            return noise
    return smallest_noise(finely, target)


def _proposed(
    events_for: Callable[[float], Sequence[Event]], target: float, delta: float
) -> tuple[float, float] | None:
    """Return a noise by the tighter of the two bounds, and an ε; None if no noise is found.

    If the noise gives a smaller ε than this one, it is larger than needed. The ε is 0 if the bound itself shows that no
    smaller noise meets the target.
    """
    low, high = _bracket(lambda noise: live_epsilon(events_for(noise), delta), target)
    if pld_epsilon(events_for(high), delta, SEARCH_INTERVAL) <= target:
        return _proposed_by_pld(events_for, target, delta, high)
    # here RDP is tighter, or PLD's grid is too coarse
    found = _searched(events_for, rdp.RdpAccountant, (low, 2 * high), target, delta, tol=high * 1e-5)
    return None if found is None else (found, ENOUGH * target)


def _proposed_by_pld(
    events_for: Callable[[float], Sequence[Event]], target: float, delta: float, high: float
) -> tuple[float, float]:
    """Return the same as `_proposed`, if PLD shows that the noise `high` meets the target."""
    met = high
    while pld_epsilon(events_for(0.9 * met), delta, SEARCH_INTERVAL) <= target:
        met *= 0.9
    events = canonical(events_for(high))
    within, interval = delta - rounded_away(events), grid_interval(events, delta, SEARCH_INTERVAL)
    coarsely = partial(pld.PLDAccountant, value_discretization_interval=interval)
    coarse = _searched(events_for, coarsely, (0.9 * met, high), target, within, tol=high * 5e-4)
    if coarse is None or math.isinf(pld_epsilon(events_for(coarse), delta, SEARCH_INTERVAL)):
        return min(met, smallest_noise(lambda noise: rdp_epsilon(events_for(noise), delta), target)), 0.0
    found = tightened(events_for, coarse, target, delta)
    came_to_target = found > coarse * TIGHTENING ** (TIGHTENINGS - 0.5)
    return found, 0.0 if came_to_target else ENOUGH * target


def _searched(
    events_for: Callable[[float], Sequence[Event]],
    make: Callable[[], dp.PrivacyAccountant],
    bracket: tuple[float, float],
    target: float,
    delta: float,
    *,
    tol: float,
) -> float | None:
    """Return the noise that dp_accounting's own search finds; None if the bracket does not hold one.

    This happens if rounding leaves nothing of a small Rényi divergence, or if PLD reaches its limit below the target.
    """
    with orders_left_out_in_silence(), suppress(ValueError):
        return dp.calibrate_dp_mechanism(
            make,
            lambda noise: dp.ComposedDpEvent([e.as_dp_event() for e in canonical(events_for(noise))]),
            target,
            delta,
            dp.ExplicitBracketInterval(*bracket),
            tol=tol,
        )
    return None


def _refuse_unreachable(events_for: Callable[[float], Sequence[Event]], target: float, delta: float) -> None:
    """Refuse a target that is not met even with infinite gradient noise; the message names the ε of that noise."""
    alone = events_for(LARGE_NOISE)
    floor = live_epsilon(alone, delta)  # a quick bound, which is often below the target already
    if floor > target and (floor := epsilon(alone, delta, interval=SEARCH_INTERVAL).value) > target:
        pairs = zip(alone, events_for(3 * LARGE_NOISE), strict=True)
        stay = [less for less, more in pairs if more.noise_multiplier <= 2 * less.noise_multiplier]
        affordable = not stay or epsilon(stay, delta, interval=SEARCH_INTERVAL).value <= target
        if affordable:  # so the events that depend on the noise cost too much
            raise EquidpError(
                f"privacy.epsilon={target:g} cannot be reached: even a noise multiplier of {LARGE_NOISE:g} is charged "
                f"ε = {floor:.3g} at δ = {delta:g}. Raise privacy.epsilon, or train fewer steps."
            )
        raise EquidpError(
            f"privacy.epsilon={target:g} cannot be reached: the side releases of this algorithm cost ε = {floor:.3g} "
            f"at δ = {delta:g} on their own. Raise their noise (count_noise_multiplier, best as a ratio, '10x'), "
            f"raise privacy.epsilon, or train fewer steps."
        )


def tightened(events_for: Callable[[float], Sequence[Event]], coarse: float, target: float, delta: float) -> float:
    """Lower a noise found with the coarse discretisation, by a few evaluations at the reporting interval."""
    best = coarse
    for _ in range(TIGHTENINGS):
        candidate = best * TIGHTENING
        if pld_epsilon(events_for(candidate), delta, REPORT_INTERVAL) > target:
            break
        best = candidate
    return best


PRECISION = 1e-5
"""Relative precision of the smallest noise."""


def smallest_noise(cost: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier with `cost` at most `target`, to a relative 1e-5. `cost` falls as noise grows.

    Raises:
        EquidpError: no noise meets the target, or none is needed.
    """
    return _bracket(cost, target, PRECISION)[1]


def smallest_noise_of_few(cost: Callable[[float], float], target: float) -> float:
    """Return a noise as `smallest_noise` does, within the same 1e-5, with fewer evaluations of a slow cost.

    Between two noises, one on either side of the target, the cost is nearly a power of the noise. So the next noise to
    try is just beyond the point where this power meets the target. Every third time, or if there is no such point, it
    is the middle.

    Raises:
        EquidpError: no noise meets the target, or none is needed.
    """
    known = lru_cache(maxsize=None)(cost)
    low, high = _bracket(known, target, 1.0)
    tries, aside = 0, PRECISION / 3
    while high > low * (1 + PRECISION):
        tries += 1
        excess, slack = known(low) / target, known(high) / target
        middle = math.sqrt(low * high)
        if tries % 3 and 0 < slack <= 1 < excess < math.inf and slack < excess:
            met = low * (high / low) ** (math.log(excess) / math.log(excess / slack))
            beside = met * (1 + aside) if high > met * (1 + aside) * (1 + aside) else met * (1 - aside)
            middle = min(max(beside, low * (1 + aside)), high * (1 - aside))
        low, high = (low, middle) if known(middle) <= target else (middle, high)
    return high


def noise_within(
    events_for: Callable[[float], Sequence[Event]], reference: Sequence[Event], orders: Sequence[float]
) -> float:
    """Return the smallest noise multiplier whose events have at `orders` no larger Rényi divergence than the reference.

    A bound that is shown at these orders for trials with the reference's events then holds for trials with these
    events, and for a mixture of both.

    Raises:
        ValueError: at one of these orders the reference's divergence is infinite, or 0 by rounding.
    """
    most = divergences(reference, orders)
    if not all(0 < most_at < math.inf for most_at in most):  # ∞/∞ is NaN, and NaN is never above the target
        raise ValueError(f"Divergences of {most} at the orders {tuple(orders)} bound no other's.")

    def excess(noise: float) -> float:
        return max(a / b for a, b in zip(divergences(events_for(noise), orders), most, strict=True))

    return smallest_noise(excess, 1.0)


def divergences(events: Sequence[Event], orders: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return the Rényi divergences of these events at these orders, by default all of the accountant's orders."""
    return _divergences(canonical(events), None if orders is None else tuple(orders))


@lru_cache(maxsize=256)
def _divergences(events: tuple[Event, ...], orders: tuple[float, ...] | None) -> tuple[float, ...]:
    accountant = rdp.RdpAccountant(orders)
    with orders_left_out_in_silence():
        accountant.compose(dp.ComposedDpEvent([event.as_dp_event() for event in events]))
    return tuple(map(float, accountant.rdp))


def _bracket(cost: Callable[[float], float], target: float, precision: float = 1e-3) -> tuple[float, float]:
    """Return noise multipliers on either side of the target, no further apart than a relative `precision`.

    `cost` falls as noise grows. A cost that is NaN meets no target.
    """
    high = 1.0
    while not cost(high) <= target:
        high *= 2
        if high > MOST_NOISE:
            raise EquidpError(f"privacy.epsilon={target:g} cannot be reached with any noise for this schedule.")
    low = high / 2
    while cost(low) <= target:
        high, low = low, low / 2
        if low < 1e-3:
            raise EquidpError(f"privacy.epsilon={target:g} is so large that no noise would be needed; lower it.")
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return low, high
