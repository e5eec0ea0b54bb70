"""What a statement's ε is of, where a run was left or has parts that charge; and which split it names."""

from __future__ import annotations

import dataclasses

import pytest

from equidp.accounting.events import Event, merged
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Membership
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Outcome
from equidp.mechanism.parts import PoissonSampler
from equidp.training.statement import _charging, accounted_for, membership_facts

PLAN = Plan(records=1000, batch_size=100, epochs=2, groups=2, delta=1e-5, noise_multiplier=2.0)
DPSGD = algorithm_settings("dpsgd").build()


def of_steps(count: int) -> Event:
    return Event(0.1, 2.0, count)


@pytest.mark.parametrize(("charged", "run"), [(5, 20), (8, 23), (20, 35)])
def test_of_a_run_that_was_left_the_whole_plan_counts_and_steps_taken_again(charged: int, run: int) -> None:
    """When it was left may follow from what it showed: had it gone on, its ε would be of no less."""
    accounted = accounted_for(DPSGD, PLAN, Outcome((of_steps(charged),), 5, 5), left=True)
    assert (merged(accounted.run), accounted.planned) == ((of_steps(run),), (of_steps(20),))


@pytest.mark.parametrize("events", [(of_steps(4),), (of_steps(5), Event(0.1, 1.0, 1)), ()])
def test_a_run_that_was_left_with_less_than_its_steps_or_with_others_is_not_covered(events: tuple[Event, ...]) -> None:
    with pytest.raises(EquidpError, match="The ledger differs from the plan"):
        accounted_for(DPSGD, PLAN, Outcome(events, 5, 5), left=True)


class Told(PoissonSampler):
    """Releases something before the first step."""

    def releases(self, plan: Plan) -> tuple[Event, ...]:
        return (Event(1.0, 50.0),)


@pytest.mark.parametrize("charged", [(), (Event(1.0, 50.0),), (Event(1.0, 50.0), of_steps(5))])
def test_a_run_that_was_left_before_its_sampler_released_anything_counts_as_planned(charged: tuple[Event, ...]) -> None:
    told, steps = dataclasses.replace(DPSGD, sampler=Told()), sum(event.count for event in charged[1:])
    assert told.fixed
    accounted = accounted_for(told, PLAN, Outcome(charged, steps, steps), left=True)
    assert merged(accounted.run) == (Event(1.0, 50.0), of_steps(20))


def test_a_sampler_with_a_budget_charges() -> None:
    dpis = algorithm_settings("dpis").build()
    assert _charging(dpis, PLAN) == [dpis.sampler]
    assert _charging(DPSGD, PLAN) == []


def test_parts_that_were_given_are_told_of_a_split_by_hash_alone() -> None:
    by_hash = Membership("hash", key="k")
    assert membership_facts(by_hash) == {"how": "hash", "key": "k"}
    assert membership_facts(dataclasses.replace(by_hash, given=True)) == {"how": "hash", "key": "k", "given": True}
    assert "given" not in (membership_facts(dataclasses.replace(by_hash, how="provider", given=True)) or {})
    assert membership_facts(None) is None
