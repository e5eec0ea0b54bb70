"""Accounted: the events or the budget that the stated ε follows from, and other figures of the same.

The other figures are ε for the replacement of a record, and the trade-off curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equidp.accounting.budget import Budget
from equidp.accounting.epsilon import Epsilon, epsilon_of
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.accounting.replacement import replace_one_epsilon, twice
from equidp.accounting.trade_off import TradeOff, delta_of, trade_off, trade_off_by


@dataclass(frozen=True)
class Accounted:
    """The basis of ε: the events of a run, or the budget that limited them, for all declared trials.

    Attributes:
        plan: the run's public facts.
        run: events of this run, or the most that it could have charged.
        planned: events of each other trial.
        budget: a Rényi budget that is used instead of the events, or None.
    """

    plan: Plan
    run: tuple[Event, ...]
    planned: tuple[Event, ...]
    budget: Budget | None

    @property
    def charged(self) -> tuple[Event, ...]:
        """The events of all trials, if their number has a cap."""
        return self.plan.trials.charged(self.run, self.planned)

    def epsilon(self, delta: float | None = None) -> Epsilon:
        """Return ε at δ, by default the plan's δ."""
        delta = delta or self.plan.delta
        if self.budget is None:
            return self.plan.trials.epsilon(self.run, delta, self.planned)
        if delta == self.plan.delta:
            return Epsilon(self.budget.epsilon, None)
        return Epsilon(epsilon_of(self.budget.trials * self.budget.total, self.budget.order, delta), None)

    def replace_one(self) -> float | None:
        """Return ε for the replacement of a record: by the worst pair of each event, or else by two steps."""
        by_events = self.budget is None and self.plan.trials.law is None
        found = replace_one_epsilon(self.charged, self.plan.delta) if by_events else None
        return twice(lambda delta: self.epsilon(delta).rdp, self.plan.delta) if found is None else found

    def trade_off(self) -> TradeOff | None:
        """Return the trade-off curve: by privacy loss distributions, or else from Rényi divergences."""
        delta, value = self.plan.delta, self.epsilon().value
        if self.budget is not None:
            total, order = self.budget.trials * self.budget.total, self.budget.order
            return trade_off_by(lambda one: delta_of(total, order, one), delta, value)
        if self.plan.trials.law is not None:
            return trade_off_by(lambda one: self.plan.trials.delta(self.run, one), delta, value)
        return trade_off(self.charged, delta, value)

    def statement_entries(self, *, fixed: bool, ledger: tuple[Event, ...]) -> dict[str, Any]:
        """Return the entries of privacy.json beside the ledger, if ε does not follow from the ledger."""
        if self.budget is not None:
            return {"filter_order": self.budget.order, "filter_total": self.budget.total}
        if fixed and self.charged == ledger:
            return {}
        return {"charged": [event.to_dict() for event in self.charged]}
