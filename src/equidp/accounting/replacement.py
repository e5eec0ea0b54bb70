"""Replacement: what a run guarantees if a record is *replaced* by another one.

All other figures are for a record whose slot is emptied, while N stays. If x' replaces x, a step's release moves by at
most twice as much. Let u be the shift of the sum by x, divided by the noise, and v the shift by x', so |u|, |v| ≤ 1/σ.
For the Poisson-sampled Gaussian the worst pair is u = −v, and dp_accounting has its privacy loss distribution.

Proof for any number of dimensions. Let S be a set of outputs, P_w a standard Gaussian at w, and z = Φ⁻¹(P_u(S)). By the
lemma of Neyman and Pearson P_0(S) ≥ Φ(z − 1/σ) and P_v(S) ≥ Φ(z − 2/σ). The hockey-stick divergence at e^ε ≥ 1 is the
largest value of

    (1−q)(1−e^ε)·P_0(S) + q·P_u(S) − q·e^ε·P_v(S)
        ≤ (1−q)(1−e^ε)·Φ(z − 1/σ) + q·Φ(z) − q·e^ε·Φ(z − 2/σ),

because the factors of P_0 and P_v are not positive. The right side is the value of a half line for u = −v of length 1/σ
in one dimension. By reflection both directions are alike, which also gives the case e^ε < 1. So this pair dominates,
and adaptive composition preserves that (Zhu, Dong and Wang 2022, Theorem 10). Without sampling it is the Gaussian at
twice the distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from dp_accounting import NeighboringRelation, pld

from equidp.accounting.epsilon import SEARCH_INTERVAL, asks_pld, composed, grid_interval
from equidp.accounting.events import Event, canonical


def replace_one_epsilon(events: Sequence[Event], delta: float) -> float | None:
    """Return ε at δ if one record is replaced; None if the grid of the privacy loss would be too large."""
    found = _replaced(canonical(events), delta)
    return found if math.isfinite(found) else None


@lru_cache(maxsize=256)
def _replaced(events: tuple[Event, ...], delta: float) -> float:
    doubled = [Event(event.sampling_rate, max(event.noise_multiplier / 2, 1e-6), event.count) for event in events]
    if not asks_pld(doubled, delta):
        return math.inf
    interval = grid_interval(events, delta, SEARCH_INTERVAL)
    return composed(pld.PLDAccountant(NeighboringRelation.REPLACE_ONE, interval), events, delta)


def twice(epsilon_at: Callable[[float], float], delta: float) -> float | None:
    """Return ε at δ if one record is replaced in two steps: its slot is emptied, and filled again.

    If one step is (ε', δ')-DP, two steps are (2ε', (1 + e^ε')·δ')-DP. This is for mechanisms of which no more is known.

    Args:
        epsilon_at: gives ε' of one step at any δ' in (0, 1).
        delta: δ of both steps together.

    Returns:
        2ε' at the largest δ' that does not exceed δ, to 1e-3 in ln δ'; None if there is none.
    """
    low, high = math.log(delta) - 600.0, math.log(delta / 2)

    def fits(log_delta: float) -> bool:
        return math.log1p(math.exp(min(epsilon_at(math.exp(log_delta)), 700.0))) + log_delta <= math.log(delta)

    if low < -700 or not fits(low):
        return None
    while high > low + 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 2 * epsilon_at(math.exp(low))
