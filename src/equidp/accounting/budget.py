"""A budget: how much Rényi divergence of one order a run may spend, where the noise is chosen while it runs.

Composition theorems want the events fixed in advance. Where a step's event depends on earlier outputs, the sum of the
Rényi divergences spent so far, at an order fixed in advance, may be held below a total fixed in advance: such a
*filter* (Feldman and Zrnic 2021, Theorem 4.3) gives the guarantee of that total. The ε of a filtered run is the one
its total stands for, never a conversion of what happened to be spent.

Budgets of several trials add up at one order: K runs that are each held below R* have K·R* together, as the order is
fixed before the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equidp.accounting.epsilon import epsilon_of, renyi_curve
from equidp.accounting.events import Event

ORDERS = (*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 256)
"""Integer Rényi orders α considered for a budget; the sampled Gaussian's divergence is a finite sum there."""

TENTHS = range(1, 10)
"""Between two of these orders, the orders tried next; above 2, as below dp_accounting's series seldom converges."""

SLACK = 1e-9
"""Relative rounding allowance when sums of many equal charges are compared with a total."""


@dataclass(frozen=True)
class Budget:
    """Rényi divergence `total` (R*) of one run at `order` (α*), and the ε that `trials` such runs stand for."""

    order: float
    total: float
    epsilon: float
    trials: int = 1

    def holds(self, events: Sequence[Event]) -> bool:
        """Whether these events together stay within the budget."""
        return renyi(events, self.order) <= self.total * (1 + SLACK)


def renyi(events: Sequence[Event], order: float) -> float:
    """A bound on the Rényi divergence of all events together at one order; exact at an integer."""
    return renyi_curve(events, (order,))[0]


def orders_beside(order: float) -> tuple[float, ...]:
    """An integer order and fractional ones on both sides of it, none below 2."""
    near = [order + sign * tenth / 10 for sign in (-1, 1) for tenth in TENTHS]
    return (order, *(one for one in near if one > min(ORDERS)))


def total_for(epsilon: float, order: float, delta: float) -> float:
    """R* whose conversion is ε; negative where the order cannot give that ε."""
    return epsilon - epsilon_of(0.0, order, delta)


def smallest(fits: Callable[[float], bool], low: float = 1e-2, high: float = 1e6) -> float | None:
    """The smallest x in [low, high] that `fits`, to 1e-6 relative and from above; None where even `high` does not.

    `fits` must stay true once true.
    """
    if not fits(high):
        return None
    if fits(low):
        return low
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
