"""What a stated ε is of: every other figure of the statement is of the same events, trials and budget."""

from __future__ import annotations

import math

import pytest

from equidp.accounting.accounted import Accounted
from equidp.accounting.budget import Budget
from equidp.accounting.epsilon import epsilon, epsilon_of
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.accounting.replacement import replace_one_epsilon, twice
from equidp.accounting.trade_off import delta_of, trade_off
from equidp.accounting.trials import Trials

DELTA = 1e-5
PLANNED = (Event(0.1, 2.0, 20),)
CHARGED = (Event(0.1, 2.0, 25),)
"""By a life that took five steps again."""


def plan(**given: object) -> Plan:
    return Plan(1000, 100, 2, 2, DELTA, 2.0, **given)  # type: ignore[arg-type]


def test_all_figures_under_a_cap_are_of_what_this_run_charged_and_of_the_others_as_planned() -> None:
    accounted = Accounted(plan(trials=Trials(3)), CHARGED, PLANNED, None)
    together = (Event(0.1, 2.0, 25 + 2 * 20),)
    assert accounted.charged == together
    assert accounted.epsilon() == epsilon(together, DELTA)
    assert accounted.epsilon(1e-7) == epsilon(together, 1e-7)
    assert accounted.replace_one() == replace_one_epsilon(together, DELTA)
    assert accounted.trade_off() == trade_off(together, DELTA, accounted.epsilon().value)


def test_all_figures_under_a_budget_are_of_it_times_the_trials_whatever_was_charged() -> None:
    order, total = 8.0, 0.1
    budget = Budget(order, total, epsilon_of(3 * total, order, DELTA), 3)
    accounted = Accounted(plan(trials=Trials(3)), PLANNED, PLANNED, budget)
    value = accounted.epsilon().value
    assert (value, accounted.epsilon().pld) == (budget.epsilon, None)
    stricter = accounted.epsilon(1e-7).value
    assert stricter == epsilon_of(3 * total, order, 1e-7) > value
    assert accounted.replace_one() == twice(lambda delta: epsilon_of(3 * total, order, delta), DELTA)
    curve = accounted.trade_off()
    assert curve is not None
    assert curve.bound == "rdp"
    at = curve.epsilons.index(value)
    assert curve.deltas[at] == DELTA
    for one, delta in list(zip(curve.epsilons, curve.deltas, strict=True))[:-1:100]:
        assert delta == pytest.approx(delta_of(3 * total, order, one))


def test_all_figures_under_a_law_are_of_the_choice_and_not_of_one_trial() -> None:
    trials = Trials(law="geometric", mean=5.0)
    accounted = Accounted(plan(trials=trials), PLANNED, PLANNED, None)
    value = accounted.epsilon().value
    assert value == trials.epsilon(PLANNED, DELTA).value > epsilon(PLANNED, DELTA).value
    # two trials with their worst pair of records are in no bound of the choice: two steps are
    assert accounted.replace_one() == twice(lambda delta: trials.epsilon(PLANNED, delta).value, DELTA)
    curve = accounted.trade_off()
    assert curve is not None
    assert (curve.bound, curve.epsilons[-1], curve.deltas[-1]) == ("rdp", value, DELTA)
    for one, delta in list(zip(curve.epsilons, curve.deltas, strict=True))[:-1:250]:
        assert delta == pytest.approx(min(1.0, trials.delta(PLANNED, one)))


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("ledger", [PLANNED, CHARGED])
def test_the_statement_has_the_events_that_epsilon_is_of_unless_the_ledger_is_these(
    fixed: bool, ledger: tuple[Event, ...]
) -> None:
    entries = Accounted(plan(), PLANNED, PLANNED, None).statement_entries(fixed=fixed, ledger=ledger)
    told = {"charged": [event.to_dict() for event in PLANNED]}
    assert entries == ({} if fixed and ledger == PLANNED else told)


def test_the_statement_has_the_budget_that_epsilon_is_of() -> None:
    accounted = Accounted(plan(), PLANNED, PLANNED, Budget(8.0, 0.1, 1.0))
    assert accounted.statement_entries(fixed=True, ledger=PLANNED) == {"filter_order": 8.0, "filter_total": 0.1}


def test_a_budget_of_several_trials_holds_no_more_of_one_run() -> None:
    step, budget = Event(1.0, 2.0), Budget(8.0, 3 * 1.0, math.inf, 4)  # D_8 of a step is 8/(2·4) = 1
    assert budget.holds([step] * 3)
    assert not budget.holds([step] * 4)
