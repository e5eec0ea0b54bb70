"""The ledger of a data set: who pays for what, the limit, and what crashes and neighbours leave of the file."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from equidp.accounting import dataset_ledger
from equidp.accounting.dataset_ledger import DatasetLedger, Entry, spent, spent_by_run, total_epsilon
from equidp.accounting.epsilon import epsilon, epsilon_of
from equidp.accounting.events import Event
from equidp.accounting.trials import Trials
from equidp.errors import EquidpError
from equidp.reporting.ledger_figure import spent_figure

DELTA = 1e-5
FOUR = (Event(1.0, 4.0),)


def entry(part: str = "train", *, split: str = "hash/seed=0", **more: Any) -> Entry:
    facts = {"run": "r", "what": "training", "algorithm": "dpsgd", "unit": "record", "secure": True, "events": FOUR}
    return Entry(split=split, part=part, **(facts | more))


def of_noise(noise: float) -> float:
    return epsilon((Event(1.0, noise),), DELTA).value


def test_nothing_spent_is_zero_and_research_does_not_count() -> None:
    assert total_epsilon([], DELTA) == 0.0
    assert total_epsilon([entry(secure=False)], DELTA) == 0.0


def test_releases_of_one_part_compose_as_one_gaussian_of_less_noise() -> None:
    """By hand: k Gaussians of noise σ are one of noise σ/√k."""
    assert total_epsilon([entry()] * 4, DELTA) == pytest.approx(of_noise(2.0), rel=1e-3)


def test_disjoint_parts_of_one_split_do_not_add_up() -> None:
    assert total_epsilon([entry(), entry("test"), entry("validation")], DELTA) == pytest.approx(of_noise(4.0))
    weaker = entry("test", events=(Event(1.0, 2.0),))
    assert total_epsilon([entry(), weaker], DELTA) == pytest.approx(of_noise(2.0))


def test_parts_of_other_splits_do_because_a_person_may_be_in_any() -> None:
    other = entry("test", split="hash/seed=1")
    assert total_epsilon([entry(), other], DELTA) == pytest.approx(of_noise(4.0 / math.sqrt(2)), rel=1e-3)


def test_laws_and_budgets_enter_by_their_divergences() -> None:
    law = entry(law="geometric", mean=3.0)
    expected = Trials(law="geometric", mean=3.0).epsilon(FOUR, DELTA).value
    assert total_epsilon([law], DELTA) == pytest.approx(expected)
    budget = entry(events=(), order=8.0, total=0.5)
    assert total_epsilon([budget], DELTA) == pytest.approx(epsilon_of(0.5, 8.0, DELTA))
    assert total_epsilon([law, dataclasses.replace(law, part="test")], DELTA) == pytest.approx(expected)  # disjoint
    assert total_epsilon([law, budget], DELTA) > max(expected, epsilon_of(0.5, 8.0, DELTA))
    for alone in (law, budget):  # what is not plain may not be left out beside what is
        assert total_epsilon([entry(), alone], DELTA) > total_epsilon([alone], DELTA)


@pytest.mark.parametrize(
    "number", [{"order": math.nan, "total": 0.5}, {"shape": math.nan}, {"orders": (2.0, math.nan)}]
)
def test_no_number_of_an_entry_is_nan(number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        entry(**number)


@pytest.mark.parametrize("number", [{"order": 8.0, "total": math.nan}, {"law": "geometric", "mean": math.nan}])
def test_an_entry_of_no_number_is_refused_as_damaged_and_does_not_make_the_total_nothing(
    tmp_path: Path, number: dict[str, Any]
) -> None:
    """max(0, NaN) is 0. A line of an older version has no check, and JSON as Python reads it knows NaN."""
    with pytest.raises(ValueError, match="NaN"):
        entry(**number)
    name = max(number)
    line = entry(**{**number, name: 0.25}).to_json().replace(f'"{name}": 0.25', f'"{name}": NaN')
    (tmp_path / "ledger.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(EquidpError, match="line 1"):
        DatasetLedger(tmp_path, "adult").entries()


def test_of_a_choice_that_was_charged_more_the_larger_entry_counts_once() -> None:
    first, more = (entry(law="geometric", mean=3.0, events=(Event(1.0, 4.0, count),)) for count in (1, 2))
    expected = Trials(law="geometric", mean=3.0).epsilon((Event(1.0, 4.0, 2),), DELTA).value
    assert total_epsilon([first, more], DELTA) == pytest.approx(expected)
    assert total_epsilon([first, dataclasses.replace(more, run="other")], DELTA) > expected


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    law = entry("test", law="poisson", mean=2.0, orders=(2.0, 8.0))
    ledger, entries = DatasetLedger(tmp_path / "new", "adult"), (entry(), law)
    ledger.charge(entries[:1], delta=DELTA)
    ledger.charge(entries[1:], delta=DELTA)
    assert ledger.entries() == entries


def test_the_name_of_a_new_file_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("equidp.accounting.dataset_ledger.sync_folder", synced.append)
    for _ in range(2):
        DatasetLedger(tmp_path / "new", "adult").charge([entry()], delta=DELTA)
        assert synced == [tmp_path / "new", tmp_path]


def test_an_entry_is_durable_before_the_training_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting: list[bytes] = []
    ledger = DatasetLedger(tmp_path, "adult")

    def durable(_: int) -> None:
        lasting.append(ledger.path.read_bytes())

    monkeypatch.setattr("equidp.accounting.dataset_ledger.durable", durable)
    for _ in range(2):
        ledger.charge([entry()], delta=DELTA)
        assert lasting[-1] == ledger.path.read_bytes()
    assert len(lasting) == 2


def test_a_run_beyond_the_limit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    limit = of_noise(2.0) * 1.001
    for _ in range(4):
        ledger.charge([entry()], delta=DELTA, limit=limit)
    before = ledger.path.read_bytes()
    with pytest.raises(EquidpError, match="dpsgd was not trained"):
        ledger.charge([entry(secure=False), entry()], delta=DELTA, limit=limit)
    assert ledger.path.read_bytes() == before
    ledger.charge([entry(secure=False)], delta=DELTA, limit=limit)
    assert len(ledger.entries()) == 5


def test_runs_at_once_do_not_pass_the_limit_together(tmp_path: Path) -> None:
    def run(number: int) -> bool:
        try:
            DatasetLedger(tmp_path, "adult").charge([entry(run=str(number))], delta=DELTA, limit=of_noise(2.0) * 1.001)
        except EquidpError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(run, range(8))) == 4
    assert len(DatasetLedger(tmp_path, "adult").entries()) == 4


def test_nothing_is_charged_while_another_process_may_be_between_its_limit_and_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock eight runs at once may keep the limit by luck; this does not depend on when they run."""
    monkeypatch.setattr(dataset_ledger, "SECONDS", 0)
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.charge([entry()], delta=DELTA)
    before = ledger.path.read_bytes()
    with FileLock(f"{ledger.path}.lock"), pytest.raises(EquidpError, match="is held by another run for 0 s: try again"):
        ledger.charge([entry()], delta=DELTA)
    assert ledger.path.read_bytes() == before


def test_every_unit_has_a_total_of_its_own_and_no_limit_holds_over_several(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.charge([entry(run="a")], delta=DELTA)
    ledger.charge([entry(run="b", unit="person")], delta=DELTA)
    ledger.charge([entry(run="c")], delta=DELTA)
    rows = spent_by_run(ledger.entries(), DELTA)
    assert [unit for *_, unit in rows] == ["record", "person", "record"]
    expected = [of_noise(4.0), of_noise(4.0), of_noise(4.0 / math.sqrt(2))]
    assert [total for _, total, *_ in rows] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(EquidpError, match=r"several units \(record, person\)"):
        ledger.charge([entry()], delta=DELTA, limit=100.0)
    ledger.charge([entry(run="d", secure=False), entry("test", run="d", secure=False)], delta=DELTA)
    for unit, counted in (("record", 2), ("person", 1)):  # as the pipeline `ledger` tells it
        found = spent(ledger.entries(), DELTA, unit)
        assert found is not None
        assert (found.secure, found.research, found.others) == (counted, 1, 3 - counted)
        assert found.epsilon == {of: total for _, total, _, of in rows}[unit]
    nobodys = spent(ledger.entries(), DELTA, "row")
    assert nobodys is not None
    assert nobodys.epsilon == 0.0
    chart = spent_figure(rows, "adult", None)
    assert [(trace.name, list(trace.x)) for trace in chart.data] == [("for a record", [1, 3]), ("for a person", [2])]


def test_half_a_line_of_a_crash_goes_and_a_damaged_line_is_refused(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.charge([entry()], delta=DELTA)
    with ledger.path.open("ab") as file:
        file.write(b'{"run": "half')
    assert len(ledger.entries()) == 1
    ledger.charge([entry("test")], delta=DELTA)
    assert [one.part for one in ledger.entries()] == ["train", "test"]
    for damaged in (b"no entry\n", ledger.path.read_bytes().replace(b"train", b"tr\xe4in")):
        ledger.path.write_bytes(damaged)
        with pytest.raises(EquidpError, match="line 1: the entry, or one before it, is damaged"):
            ledger.entries()


def test_a_run_that_the_disk_has_no_room_for_leaves_none_of_its_entries(tmp_path: Path) -> None:
    """Its training has room, and its figures have not: it is refused, and would count."""
    resource = pytest.importorskip("resource", reason="limits are a matter of POSIX")
    ledger, before = DatasetLedger(tmp_path, "adult"), resource.getrlimit(resource.RLIMIT_FSIZE)
    ledger.charge([entry()], delta=DELTA)
    content = ledger.path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * len(content) // 2, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(EquidpError, match=r"Cannot write .* would count from 0"):
                ledger.charge([entry(run="full"), entry("test", run="full")], delta=DELTA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.path.read_bytes() == content
    ledger.charge([entry(run="full"), entry("test", run="full")], delta=DELTA)
    assert [found.run for found in ledger.entries()] == ["r", "full", "full"]


def test_an_entry_whose_end_of_line_an_editor_cut_off_still_counts(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.charge([entry(run="a"), entry(run="b")], delta=DELTA)
    ledger.path.write_bytes(ledger.path.read_bytes().rstrip(b"\n"))
    assert [one.run for one in ledger.entries()] == ["a", "b"]
    with pytest.raises(EquidpError, match=r"privacy\.total_epsilon"):
        ledger.charge([entry(run="c")], delta=DELTA, limit=total_epsilon(ledger.entries(), DELTA))
    ledger.charge([entry(run="c")], delta=DELTA)
    assert [one.run for one in ledger.entries()] == ["a", "b", "c"]


def test_next_to_nothing_is_no_negative_total() -> None:
    almost = dataclasses.replace(entry(), events=(Event(1e-6, 1e3),))
    assert total_epsilon([almost], 1e-2) == 0.0


def test_a_ledger_that_was_edited_or_lost_a_line_is_refused_and_one_without_checks_is_continued(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.path.write_text(f"{dataclasses.replace(entry(run='old'), data=('adult',)).to_json()}\n", encoding="utf-8")
    for run in ("a", "b", "c"):
        ledger.charge([entry(run=run)], delta=DELTA)
    assert [one.run for one in ledger.entries()] == ["old", "a", "b", "c"]
    old, first, second, third = ledger.path.read_bytes().splitlines(keepends=True)
    bare = second[: second.index(b', "check"')] + b"}\n"
    edited = {
        "cheaper": [old, first, second.replace(b'"noise_multiplier": 4.0', b'"noise_multiplier": 9.0'), third],
        "cheaper, before checks": [old.replace(b'"noise_multiplier": 4.0', b'"noise_multiplier": 9.0'), first],
        "one is missing": [old, first, third],
        "other order": [old, second, first, third],
        "without its check": [old, first, bare, third],
        "the last without its check": [old, first, bare],
    }
    for lines in edited.values():
        ledger.path.write_bytes(b"".join(lines))
        with pytest.raises(EquidpError, match="damaged or was changed"):
            ledger.entries()
        with pytest.raises(EquidpError, match="damaged or was changed"):
            ledger.charge([entry(run="d")], delta=DELTA)
    ledger.path.write_bytes(old + first + second)  # the end is gone: nothing tells
    assert len(ledger.entries()) == 3


def test_names_lead_from_entry_to_entry_however_far(tmp_path: Path) -> None:
    """A file that was read by another path each time is one data set: what was spent under each name counts."""
    for names in (("c", "d"), ("b", "c"), ("a", "b"), ("other",)):
        DatasetLedger(tmp_path, *names).charge([entry(run=names[0])], delta=DELTA)
    for name in "abcd":
        assert [one.run for one in DatasetLedger(tmp_path, name).entries()] == ["c", "b", "a"]


def test_two_choices_of_one_run_from_one_part_add_up() -> None:
    """A later entry stands in the place of earlier ones of the same kind alone."""
    law: dict[str, Any] = {"law": "geometric", "mean": 3.0, "part": "validation"}
    both = [entry(what=what, **law) for what in ("scores", "figures")]
    apart = [dataclasses.replace(one, run=str(number)) for number, one in enumerate(both)]
    assert total_epsilon(both, DELTA) == total_epsilon(apart, DELTA) > total_epsilon(both[:1], DELTA)


def test_how_many_trials_under_a_law_there_were_is_not_told() -> None:
    """The folder that may go out told it: each trial's own was of its place in the row, and ε held for no reader."""
    law = {"law": "geometric", "mean": 3.0}
    trials = [entry(run=run, **law) for run in "abc"]
    assert spent(trials, DELTA, "record") is None
    assert spent([*trials, entry(run="d")], DELTA, "record") is None  # whose number the later run's count would tell
    assert spent([], DELTA, "record") is None
    tuned = [entry(run="a", what="tuning", **law), entry("validation", run="a", what="scores", **law)]
    found = spent(tuned, DELTA, "record")
    assert found is not None
    assert found.secure == 1  # however many trials: they have no entries of their own
