"""Budgeted: samplers whose guarantee is a budget of Rényi divergence at one order.

Budget and order are fixed before any data are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from equidp.accounting.budget import ORDERS, SLACK, Budget, orders_beside, renyi, smallest, total_for
from equidp.accounting.epsilon import epsilon_of, renyi_curve
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.errors import EquidpError
from equidp.mechanism.parts import Combination, Run, Sampler, Sampling


class Budgeted(Sampler):
    """A sampler that costs no more, at integer orders, than its `releases` and T steps at its `sampling_rate` and σ."""

    used_by: ClassVar[str] = "this sampler"
    """The algorithm that introduced it."""
    noises: ClassVar[tuple[str, ...]] = ()
    """Settings that say how noisy its releases are."""
    fractional: ClassVar[bool] = False
    """Whether its charges hold at every real order. If so, the order may be a fraction if a target ε is given."""

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan itself.

        Raises:
            EquidpError: the number of trials follows a law, whose bound needs Rényi divergences of many orders.
        """
        if plan.trials.law is not None:
            raise EquidpError(
                f"privacy.trials_law={plan.trials.law} does not go with {self.used_by}, whose budget is of one Rényi "
                "order: declare privacy.max_trials instead."
            )
        return plan

    def objection(self, combination: Combination) -> str | None:
        """Refuse parts that release more in a step: the budget does not include it."""
        if combination.side_release is not None:
            return "its budget does not pay for a side release"
        return "its budget does not pay for a private acceptance" if combination.acceptance.charges else None

    def budget(self, plan: Plan) -> Budget:
        """Return the order α*, the total R* and ε, from public facts alone."""
        return _budget(self, plan)

    def calibrated(self, plan: Plan, target: float) -> Plan:
        """Return the plan with the noise that the costliest case needs; a run may need less."""
        return replace(plan, epsilon=target, noise_multiplier=_worst(self, plan, target)[0])


class BudgetedSampling(Sampling):
    """A budgeted sampler during one run."""

    def __init__(self, part: Budgeted, run: Run) -> None:
        super().__init__(part, run)
        self.budget, self.spent = part.budget(run.plan), 0.0

    def has_room(self, events: Sequence[Event]) -> bool:
        """Whether the budget has room for these events beside those in the ledger.

        The ledger may hold more than a saved state knows, because after a crash steps are charged that were not taken.
        """
        self.spent = renyi(self.run.ledger.done, self.budget.order)
        return not self._over(renyi(events, self.budget.order))

    def spend(self, event: Event) -> None:
        """Count the event of a step; the run ends if it would exceed the budget."""
        cost = renyi([event], self.budget.order)
        self.spent += cost
        self.exhausted = self._over(cost)

    def _over(self, cost: float) -> bool:
        return self.spent + cost > self.budget.total * (1 + SLACK)

    def released(self, exact: Tensor, sensitivity: float, noise_multiplier: float) -> Tensor:
        """Charge a release, sum its value over all processes, and return it with noise."""
        self.run.ledger.append(Event(1.0, noise_multiplier))
        total = self.run.reduce(exact)
        return self.run.random.perturb(total, sensitivity=sensitivity, noise_multiplier=noise_multiplier)


def _best(part: Budgeted, plan: Plan, noise: float, orders: tuple[float, ...] = ORDERS) -> Budget:
    """Return the budget at the order that gives the smallest ε for the costliest case at a constant σ."""
    costliest = [*part.releases(plan), Event(part.sampling_rate(plan), noise, plan.steps)]
    cap = plan.trials.cap
    totals = zip(orders, renyi_curve(costliest, orders), strict=True)
    budgets = [Budget(order, total, epsilon_of(cap * total, order, plan.delta), cap) for order, total in totals]
    return min(budgets, key=lambda budget: budget.epsilon)


@lru_cache(maxsize=64)
def _worst(part: Budgeted, plan: Plan, target: float) -> tuple[float, float]:
    """Return the constant σ with which the costliest case meets the target, and the order at which it does.

    Raises:
        EquidpError: no noise meets the target, because the releases alone cost more.
    """
    noise = smallest(lambda sigma: _best(part, plan, sigma).epsilon <= target, low=0.05)
    if noise is None:
        raise EquidpError(
            f"privacy.epsilon={target:g} cannot be reached: what is released besides the gradients costs more at "
            f"δ = {plan.delta:g}. Raise {' and '.join(part.noises)}, or train fewer epochs."
        )
    orders: tuple[float, ...] = ORDERS
    if part.fractional:
        orders = orders_beside(_best(part, plan, noise).order)
        noise = (
            smallest(lambda sigma: _best(part, plan, sigma, orders).epsilon <= target, low=noise / 2, high=noise)
            or noise
        )
    return noise, _best(part, plan, noise, orders).order


@lru_cache(maxsize=64)
def _budget(part: Budgeted, plan: Plan) -> Budget:
    if plan.epsilon is None:
        return _best(part, plan, plan.noise_multiplier)
    order, cap = _worst(part, plan, plan.epsilon)[1], plan.trials.cap
    return Budget(order, total_for(plan.epsilon, order, plan.delta) / cap, plan.epsilon, cap)
