"""Which runs are of one data set, and of one unit: presets, copies, changed files, columns of ids."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from equidp.accounting.dataset_ledger import FILE, Entry, spent_by_run, total_epsilon
from equidp.accounting.events import Event
from equidp.data.records import Membership
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.parameters import Settings, resolve
from equidp.pipelines.reporting.nodes import draw_ledger
from equidp.training import charging
from equidp.training.charging import enter, ledger_of

COLUMNS = {"age": {"kind": "numeric", "minimum": 0, "maximum": 99}}
RAW, OTHER = "a" * 64, "b" * 64
DUE = {("training", "train"): {"events": (Event(1.0, 4.0),)}}


def table(dataset: str = "clinic", path: str = "2024.csv", unit: str = "", **more: Any) -> Settings:
    options = {"path": path, "label": "y", "classes": ["a", "b"], "features": COLUMNS} | (
        {"unit": unit} if unit else {}
    )
    privacy = {"noise_multiplier": 4.0, "secure": True} | more.pop("privacy", {})
    data = {"source": "table", "options": options} | ({"split_by": "unit"} if unit else {}) | more.pop("data", {})
    privacy |= {"unit": more.pop("word", "unit")} if unit else {}
    given = {"dataset": dataset, "model": {"name": "logistic"}, "data": data, "privacy": privacy, **more}
    return resolve(given)


def entered(
    folder: Path, of: Settings, raw: str = RAW, *, given: bool = False, encoding: str = "1-a"
) -> tuple[Entry, ...]:
    """The data set's entries after a run."""
    told, place = {"raw_fingerprint": raw, "encoding": encoding}, folder / "run"
    place.mkdir(exist_ok=True)
    enter(folder, place, of, told, Membership("hash", key="seed=0", given=given), DUE, algorithm="dpsgd")
    return ledger_of(folder, of, told).entries()


@pytest.mark.parametrize(
    ("second", "raw"),
    [
        (table("clinic_by_age"), RAW),  # a second preset over the file
        (table("clinic_by_age"), OTHER),  # and after the file was changed
        (table("elsewhere", path="copies/of/2024.csv"), RAW),  # a copy
        (table(path="2025.csv"), OTHER),  # the preset, with another file
    ],
    ids=["preset", "changed", "copy", "path"],
)
def test_runs_that_share_a_preset_a_place_or_the_content_are_of_one_data_set(
    tmp_path: Path, second: Settings, raw: str
) -> None:
    first = entered(tmp_path, table())
    assert len(entered(tmp_path, second, raw)) == 2
    assert ledger_of(tmp_path, table()).entries() == ledger_of(tmp_path, second).entries()
    assert len(first) == 1
    assert [path.name for path in tmp_path.glob("*.jsonl")] == [FILE]


def test_a_copy_that_is_read_with_a_tokenizer_is_known_by_its_own_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equidp.data.sources.table.tokenizer_digest", lambda _: "t")
    (tmp_path / "notes.csv").write_text("note,y\nwell,a\n")
    options = {"path": "notes.csv", "label": "y", "classes": ["a", "b"], "text": "note"}
    plain, tokens = (source("table", options | more).search(tmp_path) for more in ({}, {"tokenizer": "words"}))
    assert plain.fingerprint != tokens.fingerprint
    assert plain.fingerprint == tokens.records
    entered(tmp_path, table(), tokens.records)
    told = {"raw_fingerprint": tokens.fingerprint, "records_fingerprint": tokens.records}
    assert len(ledger_of(tmp_path, table("elsewhere", path="copy.csv"), told).entries()) == 1


def test_a_third_run_connects_two_data_sets_and_a_limit_counts_both(tmp_path: Path) -> None:
    one, two = table("one", path="one.csv"), table("two", path="two.csv")
    assert len(entered(tmp_path, one, RAW)) == len(entered(tmp_path, two, OTHER)) == 1
    spent = total_epsilon(ledger_of(tmp_path, one).entries(), 1e-5)
    moved = table("one", path="two.csv", privacy={"total_epsilon": 1.5 * spent})
    with pytest.raises(EquidpError, match="dpsgd was not trained"):
        entered(tmp_path, moved, OTHER)
    assert len(entered(tmp_path, table("one", path="two.csv"), OTHER)) == 3


def test_other_data_sets_stay_apart_unless_the_user_gives_them_a_name_in_common(tmp_path: Path) -> None:
    entered(tmp_path, table())
    assert len(entered(tmp_path, table("other", path="other.csv"), OTHER)) == 1
    named = {"privacy": {"ledger": "patients"}}
    assert len(entered(tmp_path, table(**named))) == 2
    assert len(entered(tmp_path, table("other", path="other.csv", **named), OTHER)) == 4


def test_a_name_that_data_get_while_a_run_goes_on_connects_it_with_later_runs(tmp_path: Path) -> None:
    entered(tmp_path, table())
    named = {"privacy": {"ledger": "patients"}}
    again = table(resume=True, raw_dir="moved", **named)
    assert [one.what for one in entered(tmp_path, again)] == ["training", "names"]
    assert len(entered(tmp_path, again)) == 2  # they are known by now
    found = entered(tmp_path, table("other", path="other.csv", **named), OTHER)
    assert len(found) == 3
    assert len(spent_by_run(found, 1e-5)) == 2


def test_presets_of_one_public_source_are_one_data_set(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": {"name": "logistic"}, "privacy": {"noise_multiplier": 4.0, "secure": True}}
    first = resolve(given | {"dataset": "digits"})
    second = resolve(given | {"dataset": "rare_eights", "data": {"source": "digits", "keep": {"8": 0.5}}})
    entered(tmp_path, first, "embedded")
    assert len(entered(tmp_path, second, "embedded")) == 2
    faces = resolve(given | {"dataset": "adult"})
    assert len(entered(tmp_path, faces, "embedded")) == 1  # that word says nothing about what is embedded


def test_a_table_that_changed_is_split_anew_unless_ids_say_who_is_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By content, a person whose row was changed may have gone from the training to the test part."""
    names = [entered(tmp_path, table(), raw)[-1].split for raw in (RAW, RAW, OTHER)]
    assert names[0] == names[1] != names[2]
    assert entered(tmp_path, table(), encoding="2-a")[-1].split not in names  # an upgrade may read a row otherwise
    by_id = [entered(tmp_path, table(data={"id": "pid"}), raw)[-1].split for raw in (RAW, OTHER)]
    assert by_id[0] == by_id[1] not in names
    by_provider = [entered(tmp_path, table(data={"id": "pid"}), raw, given=True)[-1].split for raw in (RAW, OTHER)]
    assert by_provider[0] != by_provider[1]  # a column of the table says who is in the test part
    monkeypatch.setattr(charging, "SPELLING", 0)  # an upgrade may read an id otherwise, too
    assert entered(tmp_path, table(data={"id": "pid"}))[-1].split not in by_id


def test_units_of_other_columns_have_totals_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for unit, word in (("person", "unit"), ("person", "person"), ("family", "unit")):
        found = entered(tmp_path, table(unit=unit, word=word))
    assert [one.unit for one in found] == ["person", "person", "family"]
    with pytest.raises(EquidpError, match=r"several units \(person, family\)"):
        entered(tmp_path, table(unit="family", privacy={"total_epsilon": 100.0}))
    # medical records, of many rows each: runs by row have another total
    assert entered(tmp_path, table(unit="record"))[-1].unit != entered(tmp_path, table())[-1].unit == "record"
    with caplog.at_level(logging.INFO):
        draw_ledger(tmp_path, table())
    assert "a person pays for the others too" in caplog.text
    assert "for a family of clinic, of 1 secure run(s)" in caplog.text
