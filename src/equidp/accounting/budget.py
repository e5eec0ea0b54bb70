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

SLACK = 1e-9
"""Relative rounding allowance when sums of many equal charges are compared with a total."""


@dataclass(frozen=True)
class Budget:
    """Rényi divergence `total` (R*) of one run at integer `order` (α*), and the ε that `trials` such runs stand for."""

    order: int
    total: float
    epsilon: float
    trials: int = 1

    def holds(self, events: Sequence[Event]) -> bool:
        """Whether these events together stay within the budget."""
        return renyi(events, self.order) <= self.total * (1 + SLACK)


def renyi(events: Sequence[Event], order: int) -> float:
    """Rényi divergence of all events together at an integer order."""
    return renyi_curve(events, (order,))[0]


def total_for(epsilon: float, order: int, delta: float) -> float:
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
