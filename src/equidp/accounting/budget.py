"""Budget: how much Rényi divergence of one order a run may spend if its noise is chosen while it runs.

Composition theorems need events that are fixed in advance. If a step's event depends on earlier outputs, a *filter* can
be used instead (Feldman and Zrnic 2021, Theorem 4.3). It keeps the sum of the Rényi divergences spent so far below a
total. Order and total are fixed in advance, and the run has the guarantee of that total. So the ε of such a run is
converted from its total, never from what happened to be spent.

Budgets of several trials add up at one order, because the order is fixed before the first trial: K runs that are each
kept below R* have K·R* together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equidp.accounting.epsilon import epsilon_of, renyi_curve
from equidp.accounting.events import Event

ORDERS = (*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 256)
"""Integer Rényi orders α that a budget may have. At these the sampled Gaussian's divergence is a finite sum."""

TENTHS = range(1, 10)
"""Tenths between two of these orders, which are tried next. They are above 2, because below 2 dp_accounting's series
seldom converges."""

SLACK = 1e-9
"""Relative allowance for rounding when a sum of many equal charges is compared with a total."""


@dataclass(frozen=True)
class Budget:
    """The limit of a run's Rényi divergence.

    Attributes:
        order: α*.
        total: R*, the limit for one run.
        epsilon: ε of `trials` such runs together.
        trials: how many runs.
    """

    order: float
    total: float
    epsilon: float
    trials: int = 1

    def holds(self, events: Sequence[Event]) -> bool:
        """Whether these events together stay within the budget."""
        return renyi(events, self.order) <= self.total * (1 + SLACK)


def renyi(events: Sequence[Event], order: float) -> float:
    """Return a bound on the Rényi divergence of all events together at one order; it is exact at an integer."""
    return renyi_curve(events, (order,))[0]


def orders_beside(order: float) -> tuple[float, ...]:
    """Return an integer order and the fractional ones on both sides of it, above 2."""
    near = [order + sign * tenth / 10 for sign in (-1, 1) for tenth in TENTHS]
    return (order, *(one for one in near if one > min(ORDERS)))


def total_for(epsilon: float, order: float, delta: float) -> float:
    """Return the R* that is converted to this ε; it is negative if the order cannot give this ε."""
    return epsilon - epsilon_of(0.0, order, delta)


def smallest(fits: Callable[[float], bool], low: float = 1e-2, high: float = 1e6) -> float | None:
    """Return the smallest x in [low, high] that `fits`, to a relative 1e-6 from above; None if not even `high` fits.

    If x fits, every larger number must fit, too.
    """
    if not fits(high):
        return None
    if fits(low):
        return low
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
