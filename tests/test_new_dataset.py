"""`kedro new-dataset`: a draft holds names and types of a table, and no value of it."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from tests.end_to_end.kedro_project import bootstrapped

from equidp.cli import cli
from equidp.data.sources import source
from equidp.drafting import MARK, draft, draft_entry, marked
from equidp.errors import EquidpError
from equidp.parameters import resolve
from equidp.settings import Session
from equidp.starting_rate import made_up, starting_rate

TABLE = "age;sex;ward;weight;smoker;patient_id;no\n" + "33;f;surgery;61,5;true;7;well\n" * 3


def drafted(folder: Path, content: str | bytes, name: str = "t.csv", label: tuple[str, ...] = ()) -> dict:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return yaml.safe_load(draft(folder / name, folder, "mine", label))["presets"]["mine"]["data"]


def test_a_draft_has_columns_and_types_and_no_value(tmp_path: Path) -> None:
    data = drafted(tmp_path, TABLE)
    options = data["options"]
    assert (options["separator"], options["decimal"], options["label"]) == (";", ",", "no")
    assert options["features"] == {
        "ward": {"kind": "categorical", "categories": [MARK]},
        "weight": {"kind": "numeric", "minimum": MARK, "maximum": MARK},
        "smoker": {
            "kind": "categorical",
            "map": {"false": ["false", "False", "FALSE"], "true": ["true", "True", "TRUE"]},
        },
    }
    assert options["groups"] == {
        "age": {"edges": [MARK], "minimum": MARK, "maximum": MARK},
        "sex": {"categories": [MARK], "unknown": True},
    }
    assert data["groups"] == ["age", "sex"]
    text = draft(tmp_path / "t.csv", tmp_path, "mine", ())
    assert "# unit: patient_id " in text
    assert "# not taken, as it is called like an identifier: patient_id" in text
    assert "surgery" not in str(data)
    assert "61" not in str(data)


def test_a_draft_says_that_one_row_may_change_the_kind_of_a_column(tmp_path: Path) -> None:
    """It went out as declared before the records were looked at, and nothing told that these had decided."""
    kinds = [
        drafted(tmp_path, "dose;y\n" + "1;a\n" * 5 + last)["options"]["features"]["dose"]["kind"]
        for last in ("2;b\n", "half;b\n")
    ]
    assert kinds == ["numeric", "categorical"]
    said = " ".join(draft(tmp_path / "t.csv", tmp_path, "mine", ()).replace("\n#", "").split())
    assert "types, and which columns are left out, follow from cells: one row may change them" in said


def test_a_table_of_images_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image;Dateiname;file_name;imagery;y\na.png;b;c.png;1;0\n")
    text = draft(tmp_path / "t.csv", tmp_path, "mine", ())
    assert list(yaml.safe_load(text)["presets"]["mine"]["data"]["options"]["features"]) == ["Dateiname", "imagery"]
    assert "called like a file: image, file_name. Where a table is of images, data.source is image_folder" in text


def test_an_index_of_bodies_is_a_feature_and_one_of_rows_is_none(tmp_path: Path) -> None:
    columns = "Barthel-Index;Körpergewichtsindex;row_index;PatientIndex;Index;y"
    features = drafted(tmp_path, f"{columns}\n1;2;3;4;5;no\n")["options"]["features"]
    assert list(features) == ["Barthel-Index", "Körpergewichtsindex"]


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_truth_values_are_read_as_they_are_drafted(tmp_path: Path, name: str) -> None:
    """Whichever way they are written: pandas, R and spreadsheets each have one of their own."""
    table = pd.DataFrame({"smoker": [True, False, True, False], "y": ["no", "yes", "yes", "no"]})
    if name == "t.csv":
        (tmp_path / name).write_text("smoker,y\nTrue,no\nfalse,yes\nTRUE,yes\nFalse,no\n")
    else:
        table.to_parquet(tmp_path / name)
    options = drafted(tmp_path, (tmp_path / name).read_bytes(), name, ("y",))["options"]
    declared = source("table", {**options, "classes": ["no", "yes"]})
    assert declared.records(declared.locate(tmp_path)).features.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("content", "name", "found"),
    [
        ("1,A11,no\n2,A12,yes\n", "t.csv", {"columns": ["column_1", "column_2", "column_3"], "label": "column_3"}),
        ("Ann,f,no\nBob,m,yes\nCem,f,no\n", "t.csv", {"columns": ["column_1", "column_2", "column_3"]}),
        ("A11 6 A34\nA12 48 A32\n".replace("A11", "11"), "t.data", {"separator": " "}),
        ("é,y\n1,no\n".encode("cp1252"), "t.csv", {"encoding": "cp1252", "label": "y"}),
        ("x,y\n1,no\n".encode("utf-16"), "t.csv", {"encoding": "utf-16", "label": "y"}),
        ("x;y\n1,5;no\n", "t.csv", {"separator": ";", "decimal": ","}),
        ("x;z;y\n1,5;1.736;no\n2;12;no\n", "t.csv", {"separator": ";", "decimal": ",", "thousands": "."}),
    ],
)
def test_a_dialect_is_seen_and_what_is_guessed_is_marked(tmp_path: Path, content, name: str, found: dict) -> None:
    options = drafted(tmp_path, content, name)["options"]
    assert {key: options[key] for key in found} == found
    text = draft(tmp_path / name, tmp_path, "mine", ())
    for key in ("columns", "encoding"):
        assert (key in found) <= any(line.strip().startswith(key) and MARK in line for line in text.splitlines())
    assert ("encoding" in found) == ("if right, take this remark out" in text)  # a right guess has nothing to replace


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("x;y\n1 736,5;no\n-12;no\n", {"decimal": ",", "thousands": " "}),
        ("x;y\n1\u202f736,5;no\n-12;no\n", {"decimal": ",", "thousands": "\u202f"}),
        ('x,y\n"1,736.5",no\n-12,no\n', {"thousands": ","}),
        ("x;y\n1'736.5;no\n-12;no\n", {"thousands": "'"}),
    ],
)
def test_numbers_are_read_as_they_are_written_where_the_draft_was_made(
    tmp_path: Path, content: str, found: dict[str, str]
) -> None:
    """Spaces before each three digits made a column of amounts a text that is left out."""
    options = drafted(tmp_path, content.encode(), "t.csv")["options"]
    assert {key: options[key] for key in ("decimal", "thousands") if key in options} == found
    options["features"]["x"] |= {"minimum": -3000, "maximum": 3000}
    declared = source("table", {**options, "classes": ["no", "yes"]})
    found_x = declared.records(declared.locate(tmp_path)).features.flatten().tolist()
    assert found_x == pytest.approx([4736.5 / 6000, 2988 / 6000])


def test_a_name_that_can_be_no_folders_is_made_one_or_refused_before_a_draft(project: Path) -> None:
    """It was drafted, and its check then refused it."""
    raw = project / "data" / "01_raw"
    for name in ("Hôpital-2", "病院"):
        (raw / f"{name}.csv").write_text("x;y\n1;no\n", encoding="utf-8")
    assert "conf/local/parameters/hopital_2.yml is drafted" in called(project, "data/01_raw/Hôpital-2.csv")
    assert "The dataset's name '病院' becomes a folder's: by --name give" in called(project, "data/01_raw/病院.csv")
    assert "The dataset's name 'größe' becomes" in called(project, "data/01_raw/病院.csv", "--name", "größe")
    (project / "conf" / "local" / "parameters" / "hopital_2.yml").unlink()


def test_codes_and_dates_are_no_numbers(tmp_path: Path) -> None:
    rows = "Fall-Nr;Alter;code;day;cost;x;y\n1;40;01;01.02.2020;1.200;0,5;no\n2;50;12;03.02.2020;3;1,5;yes\n"
    data = drafted(tmp_path, rows, "t.csv")
    kinds = {name: one["kind"] for name, one in data["options"]["features"].items()}
    assert kinds == {"code": "categorical", "cost": "numeric", "x": "numeric"}
    assert data["groups"] == ["Alter"]
    assert "# not taken, as it is a date: day. Write a column of your own from it" in draft(
        tmp_path / "t.csv", tmp_path, "m", ""
    )


def test_numbers_of_persons_and_dates_are_no_features(tmp_path: Path) -> None:
    """Whatever they are called, and of typed tables, too: a date there is a type of its own."""
    rows = pd.DataFrame({"laufend": range(1000, 1200), "Person number": 7, "age": 40, "x": [1, 2] * 100, "w": 0.5})
    rows["w"] += rows.index / 1000  # a measure has a value of its own in every row, too
    rows["Interview date"] = pd.Timestamp("2023-06-17")
    rows["y"] = "no"
    for name in ("t.csv", "t.parquet"):
        rows.to_csv(tmp_path / name, index=False) if name == "t.csv" else rows.to_parquet(tmp_path / name)
        text = draft(tmp_path / name, tmp_path, "mine", ("y",))
        data = yaml.safe_load(text)["presets"]["mine"]["data"]
        assert list(data["options"]["features"]) == ["x", "w"]
        assert "nearly every row has a value of its own, as of an identifier or a text: laufend" in text
        assert "it is called like an identifier: Person number" in text
        assert "it is a date: Interview date" in text
        told = yaml.safe_load(draft(tmp_path / name, tmp_path, "mine", ("y",), unit="x"))["presets"]["mine"]
        assert (told["data"]["split_by"], told["data"]["options"]["unit"], told["privacy"]["unit"]) == ("x", "x", "x")
        assert list(told["data"]["options"]["features"]) == ["w"]
    with pytest.raises(EquidpError, match=r"No column 'persons' in "):
        draft(tmp_path / "t.csv", tmp_path, "mine", ("y",), unit="persons")


def test_a_table_of_nothing_but_groups_waits_for_features(tmp_path: Path) -> None:
    """Nothing stood below `features:`, no line was marked there, and the draft was refused once others were done."""
    (tmp_path / "t.csv").write_text("sex,age,ill\n" + "f,30,yes\nm,40,no\n" * 3)
    text = draft(tmp_path / "t.csv", tmp_path, "mine", ())
    assert yaml.safe_load(text)["presets"]["mine"]["data"]["options"]["features"] == {}
    lines = text.splitlines()
    assert lines.index("        features:") + 2 in marked(text)  # counted from 1


@pytest.mark.parametrize("label", [(), ("person",)])
def test_a_table_of_nothing_but_the_unit_is_refused(tmp_path: Path, label: tuple[str, ...]) -> None:
    (tmp_path / "t.csv").write_text("person\n1\n2\n")
    with pytest.raises(EquidpError, match=r"t\.csv has no column but the unit 'person', so there is nothing"):
        draft(tmp_path / "t.csv", tmp_path, "mine", label, unit="person")
    with pytest.raises(EquidpError, match="visits has no column, so there is nothing to predict"):
        draft_entry("visits", lambda _: pd.DataFrame(), "mine", label=(), unit="")


def test_a_query_of_a_database_is_drafted(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as database:
        pd.DataFrame({"x": [1, None], "ward": ["A", None], "y": ["no", "yes"]}).to_sql("t", database, index=False)
    with pytest.raises(EquidpError, match=r"is an SQLite database: add a query, such as --sql"):
        draft(tmp_path / "t.sqlite", tmp_path, "mine", ())
    text = draft(tmp_path / "t.sqlite", tmp_path, "mine", ("y",), sql='SELECT x, ward, "y" FROM t')
    options = yaml.safe_load(text)["presets"]["mine"]["data"]["options"]
    assert (options["path"], options["sql"]) == ("t.sqlite", 'SELECT x, ward, "y" FROM t')
    assert {name: one["kind"] for name, one in options["features"].items()} == {"x": "numeric", "ward": "categorical"}


def test_a_parquet_file_is_drafted_too(tmp_path: Path) -> None:
    pd.DataFrame({"x": [1.5], "y": ["a"]}).to_parquet(tmp_path / "t.parquet")
    options = yaml.safe_load(draft(tmp_path / "t.parquet", tmp_path, "mine", ("y",)))["presets"]["mine"]["data"][
        "options"
    ]
    assert options["features"] == {"x": {"kind": "numeric", "minimum": MARK, "maximum": MARK}}


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "t.csv").write_text(TABLE)
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "u.csv", "is missing"), (tmp_path / "t.csv", "below")):
        with pytest.raises(EquidpError, match=message):
            draft(path, tmp_path / "raw", "mine", ())
    with pytest.raises(EquidpError, match=r"No column 'wards' in .*Did you mean 'ward'\?"):
        draft(tmp_path / "t.csv", tmp_path, "mine", ("wards",))


def test_the_command_drafts_and_then_checks(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equidp.starting_rate.starting_rate", lambda *facts: (3.0, 0.3))
    monkeypatch.chdir(project)
    raw = project / "data" / "01_raw"
    raw.mkdir(parents=True, exist_ok=True)
    (raw / "clinic.csv").write_text(TABLE)
    monkeypatch.setenv("EQUIDP_RAW_DIR", str(raw))

    metadata = bootstrapped(project)

    def call() -> str:
        return CliRunner().invoke(cli, ["new-dataset", str(raw / "clinic.csv"), "--label", "no"], obj=metadata).output

    said = call()
    assert f"conf/local/parameters/clinic.yml is drafted. 5 lines have {MARK}" in said
    assert said.endswith(f"Then, to check it: kedro new-dataset {raw / 'clinic.csv'} --label no\n")
    assert f"5 lines still with {MARK}, the first is line 14 (classes: [{MARK}]" in call()
    preset = project / "conf" / "local" / "parameters" / "clinic.yml"
    text = preset.read_text()
    for said in ("classes: [well, ill]", "edges: [40]", "minimum: 0", "maximum: 150"):
        text = text.replace(f"{said.split(': ')[0]}: {'[' * ('[' in said)}{MARK}{']' * ('[' in said)}", said)
    text = text.replace(f"categorical, categories: [{MARK}]", "categorical, categories: [surgery]")
    preset.write_text(text)
    assert f"1 line still with {MARK}, the first is line" in call()
    preset.write_text(text.replace(f"categories: [{MARK}]", "categories: [f, m]"))
    start = "training.learning_rate=3,dpsgd.options.clip_norm=0.3"
    assert call().splitlines() == [
        "Reads the table and tries it against the preset.",
        "It is as declared. Now six short trainings on made-up rows, for a rate to start from.",
        "3 rows, 4 features",
        "class: well 3, ill 0",
        "age: under 40 3, 40 and over 0",
        "sex: f 3, m 0, unknown 0",
        f"To start from (found on made-up rows of this shape, not on the table; write it into the preset): {start}",
        f"The preset is valid. Now: kedro run --pipeline=dpsgd --params=dataset=clinic,{start}",
    ]
    preset.unlink()


def test_a_preset_of_another_label_or_unit_than_the_one_that_is_named_is_not_called_valid(project: Path) -> None:
    """It was, and protected rows where the command had asked for persons."""
    (project / "data" / "01_raw" / "homes.csv").write_text("person;smokes;works;x\n33;0;1;2\n44;1;0;3\n")
    called(project, "data/01_raw/homes.csv", "--label", "smokes", "--label", "works")
    preset = project / "conf" / "local" / "parameters" / "homes.yml"
    preset.write_text(told(preset.read_text()))
    for one, option in (("person", "--unit"), ("x", "--label")):
        said = called(project, "data/01_raw/homes.csv", "--label", "works", option, one)
        assert f"'homes' has a preset already, and it does not read '{one}' as label or unit: give another" in said
    preset.unlink()


def test_several_labels_are_drafted_and_checked(project: Path) -> None:
    """The check of these took a mask of two columns for one of rows."""
    (project / "data" / "01_raw" / "survey.csv").write_text("Alter (Jahre);smokes;works;x\n33;0;1;2\n44;1;0;3\n")
    given = ("data/01_raw/survey.csv", "--label", "smokes", "--label", "works")
    said = called(project, *given)
    assert said.endswith(f"kedro new-dataset {' '.join(given)}\n")
    preset = project / "conf" / "local" / "parameters" / "survey.yml"
    text = preset.read_text()
    data = yaml.safe_load(text)["presets"]["survey"]["data"]
    assert data["options"]["labels"] == ["smokes", "works"]
    assert not {"label", "classes"} & set(data["options"])
    assert (data["groups"], list(data["options"]["features"])) == (["Alter (Jahre)"], ["x"])
    preset.write_text(told(text))
    assert called(project, *given).splitlines()[1:] == [
        "2 rows, 1 features",
        "Alter (Jahre): under 40 1, 40 and over 1",
        "The preset is valid. Now: kedro run --pipeline=dpsgd --params=dataset=survey",
    ]
    preset.unlink()


@pytest.mark.parametrize(
    ("protected", "declared", "count"),
    [
        ("", "", 4),
        (", unit: home", "", 2),
        ("", ", sizes: [30, 50]", 80),
        (", unit: home", ", sizes: [30, 50], unit_sizes: [20, 40]", 60),
        (", unit: home", ", sizes: [30, 50]", 2),
    ],
)
def test_a_rate_to_start_from_is_for_as_many_units_as_the_run_has(
    project: Path, monkeypatch: pytest.MonkeyPatch, protected: str, declared: str, count: int
) -> None:
    """By declared sizes where there are some: how many there are is protected then, and the rate is a setting."""
    asked = []
    monkeypatch.setattr("equidp.starting_rate.starting_rate", lambda *facts: asked.append(facts[-1]) or (3.0, 0.3))
    (project / "data" / "01_raw" / "homes.csv").write_text("home,x,y\n1,2,a\n1,3,b\n2,4,a\n2,5,b\n")
    preset = project / "conf" / "local" / "parameters" / "homes.yml"
    preset.parent.mkdir(exist_ok=True, parents=True)
    preset.write_text(f"""
presets:
  homes:
    data:
      source: table
      split_by: home
      options:
        {{path: homes.csv, label: y, classes: [a, b], unit: home{declared},
          features: {{x: {{kind: numeric, maximum: 9}}}}}}
    model: {{name: logistic}}
    privacy: {{epsilon: 1.0, delta: 1.0e-5{protected}}}
""")
    assert "The preset is valid" in called(project, "--name", "homes")
    preset.unlink()
    assert asked == [count]


@pytest.mark.slow
def test_a_rate_to_start_from_leaves_the_majority_and_comes_from_the_declaration_alone() -> None:
    """At a rate of 0.1 thirty steps at this noise hardly move a model."""
    options = {
        "path": "nowhere.csv",
        "label": "y",
        "classes": ["no", "yes"],
        "features": {
            "ward": {"kind": "categorical", "categories": ["A", "B", "C"]},
            "weight": {"kind": "numeric", "minimum": 0, "maximum": 150, "missing": 75},
        },
    }
    table = source("table", options)
    told = {"dataset": "mine", "data": {"source": "table", "options": options}, "model": {"name": "logistic"}}
    training = {"epochs": 3, "batch_size": 400, "device": "cpu"}
    settings = resolve({**told, "training": training, "privacy": {"epsilon": 3.0, "delta": 1e-5}})
    rate, bound = starting_rate(settings, table.schema, table.columns, 5000)
    assert (rate, bound) == starting_rate(settings, table.schema, table.columns, 5000)
    assert 1 <= rate <= 40
    rows = made_up(table.columns, 300, seed=0)
    assert rows.shape[1:] == table.schema.shape
    assert torch.equal(rows[:, :3].sum(1), torch.ones(300))
    assert 0 <= float(rows.min()) <= float(rows.max()) <= 1


def test_a_run_of_a_draft_says_what_is_still_to_be_declared(tmp_path: Path) -> None:
    options = drafted(tmp_path, TABLE)["options"]
    with pytest.raises(EquidpError, match=rf"classes, features, groups still have {MARK}: put in what the codebook"):
        source("table", options)


def called(project: Path, *options: str) -> str:
    return CliRunner().invoke(cli, ["new-dataset", *options], obj=bootstrapped(project)).output


def told(text: str) -> str:
    """A draft of `TABLE` with all that the codebook says."""
    text = text.replace(f"classes: [{MARK}]", "classes: [well]").replace(f"edges: [{MARK}]", "edges: [40]")
    text = text.replace(f"minimum: {MARK}", "minimum: 0").replace(f"maximum: {MARK}", "maximum: 150")
    return text.replace(f"categories: [{MARK}]", "categories: [f, m]").replace("[f, m]}\n", "[surgery]}\n")


def test_a_preset_in_any_layer_and_file_is_checked_and_not_drafted_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = project / "data" / "01_raw"
    (raw / "a table.csv").write_text(TABLE)
    file, conf = "data/01_raw/a table.csv", project / "conf"
    said = called(project, file, "--name", "wave", "--label", "no", "--env", "base")
    drafted_in = conf / "base" / "parameters" / "wave.yml"
    assert "conf/base/parameters/wave.yml is drafted" in said
    assert said.endswith(f"kedro new-dataset '{file}' --name wave --label no --env base\n")
    mine = conf / "base" / "parameters" / "mine.yml"
    mine.write_text(f"# {MARK} of another\ndata: {{keep: {{}}}}\n" + drafted_in.read_text())
    drafted_in.unlink()
    for env in ((), ("--env", "base"), ("--env", "local")):
        said = called(project, file, "--name", "wave", *env)
        line = next(n for n, text in enumerate(mine.read_text().splitlines(), 1) if f"classes: [{MARK}]" in text)
        assert f"mine.yml: 5 lines still with {MARK}, the first is line {line} (classes: [{MARK}]" in said, env
    assert "'wave' has a preset already, and it does not read u.csv: give another" in called(
        project, "u.csv", "--name", "wave"
    )
    assert "'adult' has a preset already, and it does not read adult.csv" in called(project, "adult.csv")
    assert not (conf / "local" / "parameters" / "wave.yml").exists()
    (drafted_in).write_text("training: {epochs: 3}\n")
    assert "wave.yml is there, and has no preset 'other'" not in called(project, "--name", "other")
    mine.unlink()
    assert "wave.yml is there, and has no preset 'wave': rename it" in called(
        project, file, "--name", "wave", "--env", "base"
    )


@pytest.mark.slow
def test_a_sheet_of_excel_is_drafted_and_checked_by_its_entry_of_the_catalog(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openpyxl", reason="needs equidp[excel]")
    monkeypatch.setattr("equidp.starting_rate.starting_rate", lambda *facts: (3.0, 0.3))
    frame = pd.DataFrame({"age": [33] * 3, "sex": "f", "ward": "surgery", "id": 7, "no": "well"})
    book, file = project / "data" / "01_raw" / "clinic.xlsx", "data/01_raw/clinic.xlsx"
    with pd.ExcelWriter(book) as writer:
        pd.DataFrame({"notes": [1]}).to_excel(writer, sheet_name="Notes", index=False)
        frame.to_excel(writer, sheet_name="Visits", index=False)
    entry = f"type: pandas.ExcelDataset, filepath: {file}, load_args: {{sheet_name: Visits}}"
    other = entry.replace("Visits", "Visit")
    (project / "conf" / "base" / "catalog_mine.yml").write_text(f"visits: {{{entry}}}\nvisit: {{{other}}}\n")
    assert "is a workbook: give its sheet an entry in conf/base/catalog.yml" in called(project, file)
    assert "Unknown entry of the catalog in data.options.catalog 'visis'. Did you mean 'visits'?" in called(
        project, "--catalog", "visis"
    )
    assert called(project, "--catalog", "visit") == (
        "Error: data.options.catalog=visit cannot be read (ValueError: Worksheet named 'Visit' not found); correct the "
        "entry.\n"
    )
    said = called(project, "--catalog", "visits", "--unit", "id", "--label", "no")
    assert said.endswith("kedro new-dataset --catalog visits --label no --unit id\n")
    preset = project / "conf" / "local" / "parameters" / "visits.yml"
    assert yaml.safe_load(preset.read_text())["presets"]["visits"]["data"]["options"]["catalog"] == "visits"
    preset.write_text(told(preset.read_text()).replace("classes: [well]", "classes: [well, ill]"))
    for again in (("--catalog", "visits"), ("--name", "visits")):
        found = called(project, *again)
        assert "3 rows, 1 features" in found
        assert "kedro run --pipeline=dpsgd --params=dataset=visits,training" in found
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert called(project, "--name", "visits").splitlines()[-1] == (
        "Error: data.options.catalog=visits needs openpyxl, which is not installed: pip install 'equidp[excel]'."
    )


def test_an_entry_whose_credentials_or_driver_are_missing_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials are not committed, so whoever clones a project lacks them."""
    entry = "type: pandas.SQLQueryDataset, sql: SELECT 1, credentials: clinic_db"
    (project / "conf" / "base" / "catalog_mine.yml").write_text(f"visits: {{{entry}}}\n")
    told = "Error: An entry of the catalog names the credentials 'clinic_db', which no file of settings has: write them"
    assert called(project, "--catalog", "visits").startswith(told)
    bootstrapped(project)
    with Session.create(project_path=project) as session, pytest.raises(EquidpError, match=told[7:]):
        session.run(pipeline_names=["ingestion"])
    (project / "conf" / "local" / "credentials.yml").write_text(
        "clinic_db: {con: 'postgresql+psycopg2://me@host/db'}\n"
    )
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    assert called(project, "--catalog", "visits").endswith(
        "psycopg2 halted; None in sys.modules); install what is missing.\n"
    )
