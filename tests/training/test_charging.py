"""What a run enters in the ledger of its data set, once, before it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from equidp.accounting.dataset_ledger import DatasetLedger, total_epsilon
from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event, canonical, counted
from equidp.accounting.plan import Plan
from equidp.accounting.trials import Trials
from equidp.data.records import Membership
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Outcome
from equidp.parameters import Settings, resolve
from equidp.pipelines.ingestion.nodes import divide
from equidp.pipelines.training.nodes import Trained, plan_training, train_network
from equidp.training.charging import _split, enter, enter_more, planned, repeated, stated_beyond
from equidp.training.journal import block_of
from equidp.training.statement import privacy_statement

pytestmark = pytest.mark.usefixtures("coarse")

PLAN = Plan(records=1000, batch_size=100, epochs=2, groups=2, delta=1e-5, noise_multiplier=2.0)
HASH = Membership("hash", key="seed=0")


def settings(*, resume: bool = False, **privacy: Any) -> Settings:
    given = {"noise_multiplier": 2.0, "delta": 1e-5, "secure": True, "evaluation": {"epsilon": 1.0}} | privacy
    return resolve({"dataset": "digits", "model": {"name": "logistic"}, "privacy": given, "resume": resume})


def entered(tmp_path: Path, of: Settings, membership: Membership | None = HASH) -> str:
    due = planned(of.algorithm("dpsgd"), PLAN)
    place = tmp_path / "run"
    return enter(tmp_path, place, of, {}, membership, {("training", "train"): due}, algorithm="dpsgd")


def test_a_run_enters_its_training_and_its_figures_and_one_that_goes_on_enters_nothing(tmp_path: Path) -> None:
    run = entered(tmp_path, settings())
    found = DatasetLedger(tmp_path, "digits").entries()
    assert [(one.what, one.part) for one in found] == [("training", "train"), ("figures", "test")]
    assert found[0].events == (Event(0.1, 2.0, 20),)
    assert entered(tmp_path, settings(resume=True)) == run
    assert len(DatasetLedger(tmp_path, "digits").entries()) == 2
    assert entered(tmp_path, settings()) != run
    assert len(DatasetLedger(tmp_path, "digits").entries()) == 4


def test_a_run_that_goes_on_with_other_settings_is_entered_anew_and_within_the_limit(tmp_path: Path) -> None:
    first = entered(tmp_path, settings())
    other = settings(resume=True, evaluation={"epsilon": 4.0})
    with pytest.raises(EquidpError, match=r"dpsgd was not trained"):
        entered(tmp_path, settings(resume=True, evaluation={"epsilon": 4.0}, total_epsilon=4.0))
    second = entered(tmp_path, other)
    assert second != first
    assert len(DatasetLedger(tmp_path, "digits").entries()) == 4
    assert (entered(tmp_path, settings(resume=True)), entered(tmp_path, other)) == (first, second)
    assert len(DatasetLedger(tmp_path, "digits").entries()) == 4


def test_a_workplace_that_was_copied_to_another_label_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Both take the steps that were left, each with other noise, and one of them was in no total."""
    first, other = entered(tmp_path, settings()), dataclasses.replace(settings(resume=True), run_label="other")
    assert entered(tmp_path, settings(resume=True)) == first
    second = entered(tmp_path, other)
    assert second != first
    assert entered(tmp_path, other) == second
    assert len(DatasetLedger(tmp_path, "digits").entries()) == 4


def test_what_a_continued_training_was_charged_more_is_entered_once(tmp_path: Path) -> None:
    of = settings()
    run = entered(tmp_path, of)
    for more in ((), (Event(0.1, 2.0, 3),), (Event(0.1, 2.0, 3),), (Event(0.1, 2.0, 5),)):
        enter_more(tmp_path, of, run, more)
    later = DatasetLedger(tmp_path, "digits").entries()[2:]
    assert [one.events for one in later] == [(Event(0.1, 2.0, 3),), (Event(0.1, 2.0, 2),)]


def test_figures_of_another_part_pay_for_no_step_that_was_taken_again(tmp_path: Path) -> None:
    of = settings()
    run = entered(tmp_path, of)
    figures = DatasetLedger(tmp_path, "digits").entries()[1].events
    enter_more(tmp_path, of, run, figures)
    assert [(one.part, one.events) for one in DatasetLedger(tmp_path, "digits").entries()[2:]] == [("train", figures)]


def test_under_a_law_each_later_entry_is_of_all_events_and_is_entered_once(tmp_path: Path) -> None:
    of = settings(trials_law="geometric", trials_mean=3.0)
    due = planned(of.algorithm("dpsgd"), dataclasses.replace(PLAN, trials=of.privacy.trials))
    run = enter(tmp_path, tmp_path / "run", of, {}, HASH, {("training", "train"): due}, algorithm="dpsgd")
    for count in (0, 3, 3, 5, 5):
        enter_more(tmp_path, of, run, (Event(0.1, 1.0, count),) if count else ())
    later = DatasetLedger(tmp_path, "digits").entries()[2:]
    assert [one.events for one in later] == [(*due["events"], Event(0.1, 1.0, count)) for count in (3, 5)]


def test_a_run_that_has_trained_is_in_the_ledger_whatever_became_of_the_file_meanwhile(tmp_path: Path) -> None:
    """An older copy put back, or the folder moved away, while it trained: what it spent would be nowhere."""
    of, limited = settings(), settings(total_epsilon=0.1)
    entered(tmp_path, of)
    older = (tmp_path / "ledger.jsonl").read_bytes()
    run = entered(tmp_path, of)
    before = DatasetLedger(tmp_path, "digits").entries()
    due = {("training", "train"): planned(of.algorithm("dpsgd"), PLAN)}
    for kept in (None, older, (tmp_path / "ledger.jsonl").read_bytes()):
        (tmp_path / "ledger.jsonl").unlink() if kept is None else (tmp_path / "ledger.jsonl").write_bytes(kept)
        if kept in (None, older):
            with pytest.raises(EquidpError, match=rf"has lost the entry of this run \({run}\): put the file back"):
                enter_more(tmp_path, of, run, ())
        # no limit undoes what has been trained
        assert enter(tmp_path, tmp_path / "run", limited, {}, HASH, due, algorithm="dpsgd", run=run) == run
        after = DatasetLedger(tmp_path, "digits").entries()
        assert after == (before if kept is not None else before[2:])
        enter_more(tmp_path, of, run, ())


@pytest.mark.parametrize("cap", [1, 3])
def test_the_ledger_holds_what_the_statement_of_a_run_that_may_stop_charges_after_a_crash(
    tmp_path: Path, cap: int
) -> None:
    options = {"stop_on": "published_epsilon", "published_epsilon": 2.0}
    privacy = {"noise_multiplier": 2.0, "delta": 1e-5, "secure": True, "max_trials": cap}
    chosen = {"dataset": "digits", "model": {"name": "logistic"}, "sa_dpsgd": {"options": options}}
    of = resolve(chosen | {"privacy": privacy})
    algorithm, plan = of.algorithm("sa_dpsgd"), dataclasses.replace(PLAN, epochs=10, trials=Trials(cap))
    due = planned(algorithm, plan)
    run = enter(tmp_path, tmp_path / "run", of, {}, HASH, {("training", "train"): due}, algorithm="sa_dpsgd")
    charged = tuple(dataclasses.replace(event, count=20) for event in due["events"])  # 15 of them in a life that died
    given: dict[str, Any] = {"privacy": of.privacy, "training": of.training, "seed": 0, "membership": HASH}
    statement = privacy_statement(algorithm, plan, Outcome(charged, accepted_steps=5, steps=5), **given)
    enter_more(tmp_path, of, run, stated_beyond(statement, plan.trials, due["events"]))
    found = DatasetLedger(tmp_path, "digits").entries()
    every = [*(event for one in found for event in one.events), *list(due["events"]) * (cap - 1)]
    assert epsilon(canonical(every), 1e-5).value == pytest.approx(statement["epsilon"])
    assert counted(found[1].events) == counted(charged)


def test_a_run_beyond_the_data_sets_total_is_refused_before_it_trains(tmp_path: Path) -> None:
    entered(tmp_path, settings())
    once = total_epsilon(DatasetLedger(tmp_path, "digits").entries(), 1e-5)
    with pytest.raises(EquidpError, match=r"dpsgd was not trained"):
        entered(tmp_path, settings(total_epsilon=once * 1.05))
    assert len(DatasetLedger(tmp_path, "digits").entries()) == 2


def test_splits_that_are_no_function_of_each_record_are_splits_of_their_own(tmp_path: Path) -> None:
    for membership in (HASH, HASH, Membership("strata"), Membership("strata"), None):
        entered(tmp_path, settings(), membership)
    found = DatasetLedger(tmp_path, "digits").entries()
    assert len({one.split for one in found}) == 4


def test_under_a_law_of_trials_training_and_figures_are_entered_as_the_best_of_them(tmp_path: Path) -> None:
    """As events of one trial they would count for less."""
    of = settings(trials_law="geometric", trials_mean=3.0)
    plan = dataclasses.replace(PLAN, trials=Trials(law="geometric", mean=3.0))
    due = planned(of.algorithm("dpsgd"), plan)
    enter(tmp_path, tmp_path / "run", of, {}, HASH, {("training", "train"): due}, algorithm="dpsgd")
    found = DatasetLedger(tmp_path, "digits").entries()
    assert [(one.what, one.law, one.mean) for one in found] == [
        ("training", "geometric", 3.0), ("figures", "geometric", 3.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "data", "held"),
    [("seed=1", {}, False), ("seed=0", {"split_by": "unit"}, False), ("seed=0", {}, True)],
    ids=["another key", "whole units", "a validation part"],
)
def test_splits_of_another_key_of_units_or_with_another_part_are_splits_of_their_own(
    key: str, data: dict[str, Any], held: bool
) -> None:
    def name(key: str, data: dict[str, Any], held: bool) -> str:
        made = dataclasses.replace(settings(), data=settings().data.model_copy(update={"id": "pid"} | data))
        return _split(Membership("hash", key=key), made, "r", "raw", held=held)

    assert name(key, data, held) != name("seed=0", {}, False)


def test_splits_by_other_identities_are_splits_of_their_own() -> None:
    """Under one key the parts of two such splits are independent, so a person may be in any two of them."""
    columns = {name: {"kind": "numeric", "minimum": 0, "maximum": 9} for name in ("age", "income")}
    table = {"path": "t.csv", "label": "y", "classes": ["a", "b"], "features": columns}
    some = {"features": {"age": columns["age"]}}
    swapped = {"features": dict(reversed(columns.items()))}
    given: list[dict[str, Any]] = [{"options": table | more} for more in ({}, some, swapped, {"id": "pid"})]
    given += [{"test_fraction": 0.2000004}, {"test_fraction": 0.2}, {}]
    names = []
    for data in given:
        source = {"source": "table"} if "options" in data else {}
        chosen = {"dataset": "digits", "model": {"name": "logistic"}, "data": data | source}
        made = resolve(chosen | {"privacy": {"noise_multiplier": 1.0}})
        names.append(_split(HASH, made, "r", "raw", held=False))
    assert len(set(names)) == 6
    assert names[-1] == names[-2]


class Crash(BaseException):
    """As if the machine stopped."""


def test_steps_that_a_secure_run_repeats_are_entered_before_it_goes_on(tmp_path: Path) -> None:
    kind = source("digits", {})
    given: dict[str, Any] = {"dataset": "digits", "model": {"name": "logistic"}}
    given |= {"privacy": {"noise_multiplier": 2.0, "delta": 1e-5, "secure": True}}
    given |= {"training": {"epochs": 4, "batch_size": 128, "device": "cpu", "checkpoint_every": 2}}
    first, again = resolve(given), resolve(given | {"resume": True})
    parts = divide(kind.read(kind.locate(tmp_path)), first.data, 0, [])
    plan = plan_training(parts.train, first, algorithm="dpsgd")

    def life(of: Settings, last: int) -> Trained:
        def die(name: str, row: Mapping[str, float]) -> None:
            if row["epoch"] == last:
                raise Crash

        place, ledgers = tmp_path / "run", tmp_path / "ledgers"
        return train_network(*parts_of, plan, place, of, die, ledgers, {}, algorithm="dpsgd")

    def counts() -> list[int]:
        return [entry.events[0].count for entry in DatasetLedger(tmp_path / "ledgers", "digits").entries()]

    parts_of = (parts.train, parts.test, parts.public)
    steps, block = Plan(**plan).steps, block_of(Plan(**plan).steps)
    lost = sum(Plan(**plan).epoch_lengths()[2:])
    owed = lost + -lost % block  # whole blocks
    for of, entered_then in ((first, [steps]), (again, [steps, owed]), (again, [steps, owed, owed])):
        with pytest.raises(Crash):
            life(of, 4)  # there is a checkpoint after two epochs, and none after
        assert counts() == entered_then
    statement = life(again, 0)[2]
    assert counts() == [steps, owed, owed, owed]
    assert sum(event["count"] for event in statement["ledger"]) == sum(counts())


@pytest.mark.parametrize("at", [None, 0])
def test_a_secure_run_that_died_before_its_first_checkpoint_repeats_all_that_it_was_charged(
    at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = resolve({"dataset": "digits", "privacy": {"noise_multiplier": 2.0}}).algorithm("dpsgd")
    charged = algorithm.events_until(PLAN, 3)
    monkeypatch.setattr("equidp.training.charging.charged_until_now", lambda workplace: (at, charged))
    assert repeated(tmp_path, algorithm, PLAN) == charged != ()


def test_beyond_its_plan_a_run_that_may_stop_repeats_all_that_it_was_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"stop_on": "published_epsilon", "published_epsilon": 2.0}
    chosen: dict[str, Any] = {"dataset": "digits", "model": {"name": "logistic"}, "sa_dpsgd": {"options": options}}
    algorithm = resolve(chosen | {"privacy": {"noise_multiplier": 2.0}}).algorithm("sa_dpsgd")
    before = algorithm.events_until(PLAN, 5)  # at the checkpoint
    known: dict[str, Any] = {"now": (5, before)}
    monkeypatch.setattr("equidp.training.charging.charged_until_now", lambda workplace: known["now"])
    assert repeated(tmp_path, algorithm, PLAN) == ()
    after = algorithm.events_until(PLAN, 7)
    known["now"] = (5, after)
    assert repeated(tmp_path, algorithm, PLAN) == after


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": {"name": "bilstm"}}, "choose another model.name"),
        ({"training": {"class_weights": "balanced"}}, "takes declared sizes of classes"),
        ({"training": {"class_weights": [1, 2, 3]}}, "has 3 numbers"),
        ({"training": {"precision": "bf16", "device": "cpu"}}, "half precision"),
        ({"training": {"augmentations": 2, "augmentation_kinds": ["noise"]}}, "views by"),
    ],
)
def test_settings_that_fit_no_record_are_refused_before_anything_is_charged(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    """The ledger counted a run that never was, and the limit of its data set was used up."""
    privacy = {"noise_multiplier": 2.0, "delta": 1e-5, "secure": True}
    of = resolve({"dataset": "digits", "model": {"name": "logistic"}, "privacy": privacy} | given)
    kind = source("digits", {})
    parts = divide(kind.read(kind.locate(tmp_path)), of.data, 0, [])
    plan = plan_training(parts.train, of, algorithm="dpsgd")
    places = (tmp_path / "run", of, lambda name, row: None, tmp_path / "ledgers", {})
    with pytest.raises(EquidpError, match=told):
        train_network(parts.train, parts.test, parts.public, plan, *places, algorithm="dpsgd")
    assert not list(tmp_path.iterdir())


def test_steps_taken_again_have_no_room_beyond_a_limit_that_is_a_guarantee(tmp_path: Path) -> None:
    alone = entered(tmp_path / "alone", settings(evaluation={}))
    once = DatasetLedger(tmp_path / "alone", "digits").entries()
    limit = total_epsilon(once, 1e-5) * 1.2
    enter_more(tmp_path / "alone", settings(), alone, (Event(0.1, 2.0, 20),), ahead=True)  # no guarantee: it may finish
    of = settings(evaluation={}, total_epsilon=limit, total_adaptive=True)
    run = entered(tmp_path, of)
    with pytest.raises(EquidpError, match=r"taken again, and are charged again\. privacy\.total_epsilon=.* would be"):
        enter_more(tmp_path, of, run, (Event(0.1, 2.0, 20),), ahead=True)
    enter_more(tmp_path, of, run, (Event(0.1, 2.0, 1),), ahead=True)
    enter_more(tmp_path, of, run, (Event(0.1, 2.0, 20),))  # has happened
    found = DatasetLedger(tmp_path, "digits").entries()
    assert [one.events[0].count for one in found] == [20, 1, 19]
    assert len({one.limit for one in found}) == 1
