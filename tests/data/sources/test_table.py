"""Table: one of the user's own becomes Records by declaration alone."""

from __future__ import annotations

import inspect
import unicodedata
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from tests.data.sources.tiny import CSV_OPTIONS, write_tiny

from equidp.data.encoding import encode
from equidp.data.sources import source
from equidp.data.sources.table import Table
from equidp.data.splitting import split
from equidp.errors import EquidpError

HEADER = "person,outcome,ward,weight,sex,age"


def encoded(folder: Path, options: dict):
    return encode("mine", "csv", options, raw_folder=folder, cache=folder / "kept")


def read(raw_dir: Path, *rows: str, **options):
    table = raw_dir / "mine" / "people.csv"
    table.parent.mkdir(exist_ok=True)
    table.write_text("\n".join([HEADER, *rows, ""]), encoding="utf-8")
    csv = source("csv", {**CSV_OPTIONS, **options})
    return csv.read(csv.locate(raw_dir))


def test_a_declared_table_becomes_records(tmp_path: Path) -> None:
    records = read(tmp_path, "p1,ill,A,50,f,30", "p1,well,B,100,,60", "p2,well,B,200,M,0".replace("M", "m"))
    assert records.features.tolist() == [[1, 0, 0.25], [0, 1, 0.5], [0, 1, 1]]
    assert records.schema.feature_names == ("ward=A", "ward=B", "weight")
    assert records.labels.tolist() == [0, 1, 1]
    assert records.schema.groupings["sex"] == ("f", "m", "unknown")
    assert records.groups["sex"].tolist() == [0, 2, 1]
    assert records.schema.groupings["age_band"] == ("under 40", "40-59", "60 and over")
    assert records.groups["age_band"].tolist() == [0, 2, 0]
    assert records.unit.tolist() == [0, 0, 1]


def test_a_declared_part_is_the_split(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("x,y,where\n0,a,train\n1,b,train\n1,a,test\n")
    options = {
        "path": "t.csv",
        "label": "y",
        "classes": ["a", "b"],
        "features": {"x": {"kind": "numeric", "maximum": 1}},
    }
    csv = source("csv", {**options, "part": "where"})
    parts = split(csv.read(csv.locate(tmp_path)), seed=0)
    assert (len(parts.train), len(parts.test)) == (2, 1)


def test_persons_stay_on_one_side(tmp_path: Path) -> None:
    csv = source("csv", write_tiny("csv", tmp_path))
    parts = split(csv.read(csv.locate(tmp_path)), seed=0, split_by="unit")
    assert not set(parts.train.unit.tolist()) & set(parts.test.unit.tolist())


def test_what_is_declared_is_not_missing(tmp_path: Path) -> None:
    """A group or category may be called `none`, in its own column."""
    options = {
        "features": {
            "ward": {"kind": "categorical", "categories": ["A", "none"]},
            "weight": {"kind": "numeric", "maximum": 200},
        },
        "groups": {"sex": {"categories": ["f", "none"], "unknown": True}},
        "missing": "drop",
    }
    rows = ("p1,ill,none,50,none,30", "p2,ill,A,none,f,30", "p3,well,A,50,NA,30")
    records = read(tmp_path, *rows, **options)
    assert records.features.tolist() == [[0, 1, 0.25], [1, 0, 0.25]]
    assert records.groups["sex"].tolist() == [1, 2]


def test_another_order_of_features_is_another_encoding(tmp_path: Path) -> None:
    """Kept records of the first order would be read as those of the second."""
    options = write_tiny("csv", tmp_path)
    turned = {**options, "features": dict(reversed(options["features"].items()))}
    keys = {encoded(tmp_path, one)[1]["fingerprint"] for one in (options, turned)}
    assert len(keys) == 2


def test_records_are_called_as_the_user_called_them(tmp_path: Path) -> None:
    """A sentence about the dataset `csv` would not say which table it means."""
    records, _ = encoded(tmp_path, write_tiny("csv", tmp_path))
    with pytest.raises(EquidpError, match="Unknown grouping of dataset 'mine': 'sexx'"):
        records.grouping("sexx")


def test_an_edited_source_encodes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train on what it made before the edit."""
    options = write_tiny("csv", tmp_path)
    before = encoded(tmp_path, options)[1]["fingerprint"]
    copy = tmp_path / "table.py"
    copy.write_text(Path(inspect.getfile(Table)).read_text() + "\n# edited\n")
    where = inspect.getfile
    monkeypatch.setattr(inspect, "getfile", lambda kind: str(copy) if kind is Table else where(kind))
    assert encoded(tmp_path, options)[1]["fingerprint"] != before
    copy.unlink()
    keys = {encoded(tmp_path, options)[1]["fingerprint"] for _ in range(2)}
    assert len(keys) == 2, "whose code cannot be read is encoded every time"


def test_a_name_written_with_other_signs_for_its_accents_is_the_same_person(tmp_path: Path) -> None:
    """As two units, the person would have twice the influence, and could be trained on and tested too."""
    one, two = (unicodedata.normalize(form, "Zoë") for form in ("NFC", "NFD"))
    assert one != two
    rows = (f"{one},ill,A,50,f,30", f"{two},well,A,60,f,30", "p2,well,A,60,f,30")
    assert read(tmp_path, *rows).unit.tolist() == [0, 0, 1]


def test_a_category_is_known_however_its_accents_are_written(tmp_path: Path) -> None:
    one, two = (unicodedata.normalize(form, "Pädiatrie") for form in ("NFC", "NFD"))
    features = {"ward": {"kind": "categorical", "categories": ["A", one]}}
    records = read(tmp_path, f"p1,ill,{two},50,f,30", f"p2,well,{one},60,f,30", features=features)
    assert records.features.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("other", ["17.0", "017", "17.00"])
def test_one_number_in_two_spellings_is_refused_as_a_person(tmp_path: Path, other: str) -> None:
    """As two units, the person would have twice the influence."""
    rows = ("170,ill,A,50,f,30", "17,well,A,60,f,30", f"{other},well,A,60,f,30")
    with pytest.raises(EquidpError, match=rf"line 4, column 'person': '{other}' and '17' \(line 3\) may be one id"):
        read(tmp_path, *rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [("P17", "P17\u200b"), ("P17", "Ｐ17"), ("a b", "a\u00a0 b"), ("100000", "1e5"), ("0.5", ".50"), ("7", "+7")],
)
def test_two_ids_that_a_person_cannot_tell_apart_are_refused(tmp_path: Path, one: str, other: str) -> None:
    """As two persons they would have twice the influence, and stand on both sides of a split."""
    rows = (f"{one},ill,A,50,f,30", "p2,well,A,60,f,30", f"{other},well,A,60,f,30")
    with pytest.raises(EquidpError, match=r"line 4, column 'person': .* \(line 2\) may be one id in two spellings"):
        read(tmp_path, *rows)
    with pytest.raises(EquidpError, match=r"line 4, column 'person': .* \(line 2\) may be one id in two spellings"):
        read(tmp_path, *rows, unit="", id="person")


@pytest.mark.parametrize("other", ["P-17", "p\u201017", "p\u201217"])
def test_ids_that_differ_in_capital_letters_or_dashes_alone_are_told(tmp_path: Path, other: str) -> None:
    """Random ids may, so they are no error; a person who has both is two units."""
    (said,) = read(tmp_path, "p-17,ill,A,50,f,30", f"{other},well,B,100,m,60", "p-18,ill,A,50,f,30").remarks
    assert said.startswith("mine/people.csv, column 'person': 1 ids differ from another one in capital letters or dash")
    assert not read(tmp_path, "p-17,ill,A,50,f,30", "p-17,well,B,100,m,60", "p-18,ill,A,50,f,30").remarks


def test_ids_that_are_whole_numbers_written_one_way_are_taken(tmp_path: Path) -> None:
    rows = [f"{person},ill,A,50,f,30" for person in ("017", "17a", "1.0", "10.0", "1.5", "-1", "017", "0", "1e5")]
    assert read(tmp_path, *rows).unit.tolist() == [0, 1, 2, 3, 4, 5, 0, 6, 7]


@pytest.mark.parametrize("person", ["1.23457E+11", "1.2345678901234568e+17"])
def test_what_a_spreadsheet_left_of_ids_is_refused(tmp_path: Path, person: str) -> None:
    """Ids of several persons may have become this one."""
    with pytest.raises(EquidpError, match=r"line 3, column 'person': '1\.23.* leaves of a long id, .* as text\."):
        read(tmp_path, "p1,ill,A,50,f,30", f"{person},well,A,60,f,30")


@pytest.mark.parametrize("person", ["", " ", "NA", "?", "#N/A", "<NA>", "-", r"\N"])
def test_a_row_without_a_person_is_refused(tmp_path: Path, person: str) -> None:
    """Many such rows would be protected as one person."""
    with pytest.raises(EquidpError, match=r"people\.csv, line 3, column 'person': the unit is missing"):
        read(tmp_path, "p1,ill,A,50,f,30", f"{person},well,A,60,f,30", "p2,well,A,60,f,30")


def test_missing_values_are_refused_or_dropped(tmp_path: Path) -> None:
    rows = ("p1,ill,A,50,f,30", "p2,well,?,60,f,30", "p3,well,B,NA,f,30")
    with pytest.raises(EquidpError, match=r"people\.csv, line 3, column 'ward': a value is missing; .*`missing: drop`"):
        read(tmp_path, *rows)
    found = read(tmp_path, *rows, missing="drop")
    assert len(found) == 1
    assert found.remarks == (
        "mine/people.csv: 2 of 3 rows miss a feature or the label and are left out "
        "(class: well 2; sex: f 2; age_band: under 40 2).",
    )
    with pytest.raises(EquidpError, match=r"people\.csv: every row misses a feature or the label"):
        read(tmp_path, *rows[1:], missing="drop")
    with pytest.raises(EquidpError, match="column 'weight': '999' is out of bounds"):
        read(tmp_path, *rows, "p4,well,B,999,f,30", missing="drop")


def test_what_is_left_out_is_told_by_group_at_every_ingestion(tmp_path: Path, caplog) -> None:
    """Of kept records too; what is missing may be missing for one group more than for another."""
    options = {**write_tiny("csv", tmp_path), "missing": "drop"}
    with (tmp_path / "mine" / "people.csv").open("a") as table:
        table.write("p,,A,50,,200\n")  # 200 is out of bounds, and the row is left out before that matters
    for _ in range(2):
        caplog.clear()
        _, provenance = encoded(tmp_path, options)
        told = "1 of 161 rows miss a feature or the label and are left out (class: unknown 1; sex: unknown 1)."
        assert told in caplog.text
        assert [told in remark for remark in provenance["remarks"]] == [True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("p,ill,C,50,f,30", r"line 2, column 'ward': 'C'\. Valid: A, B"),
        (
            "p,ill,A,fat,f,30",
            r"line 2, column 'weight': 'fat' is not a number; give a number from 0 to 200\. If it stands for a missing "
            r"value, name it in data\.options\.na_values\.$",
        ),
        ("p,ill,A,201,f,30", r"line 2, column 'weight': '201' is out of bounds"),
        ("p,sick,A,50,f,30", r"line 2, column 'outcome': 'sick'\."),
        ("p,ill,A,50,x,30", r"line 2, column 'sex': 'x'\."),
        (
            "p,ill,A,50,f,",
            r"line 2, column 'age': a number is missing; give .*, or declare the grouping with `unknown: true`",
        ),
        ("p,ill,A,50,f", r"line 2: 5 fields where 6 are expected"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        read(tmp_path, row)


def test_a_missing_group_is_told_how_to_become_one(tmp_path: Path) -> None:
    groups = {"sex": {"categories": ["f", "m"]}}
    with pytest.raises(EquidpError, match=r"give one of f, m, or declare the grouping with `unknown: true`\.$"):
        read(tmp_path, "p,ill,A,50,,30", groups=groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "../people.csv"}, r"the path '\.\./people\.csv' must lead to a file below raw_dir"),
        ({"label": "outcom"}, r"No column 'outcom' in .*people\.csv\. Did you mean 'outcome'"),
        ({"unit": "persn"}, r"No column 'persn' in .*people\.csv\. Did you mean 'person'"),
        ({"classes": ["ill"]}, r"data option of dataset 'csv' 'classes' is not valid: .*at least 2"),
        ({"classes": ["a", "a"]}, r"'classes' is not valid: .*two classes have the same name"),
        ({"features": {"w": {"kind": "numerc"}}}, r"'features\.w' is not valid: Unknown kind .* mean 'numeric'\?"),
        ({"features": {"w": {"kind": "numeric", "minimum": 3, "maximum": 2}}}, "minimum must be less than maximum"),
        ({"features": {"w": {"kind": "numeric", "minimum": -1e308, "maximum": 1e308}}}, "too far apart"),
        ({"features": {"w": {"kind": "categorical", "categories": ["a", "a"]}}}, "two categories have the same name"),
        ({"features": {"w": {"kind": "numeric", "maximum": True}}}, "true and false are not numbers"),
        ({"groups": {"b": {"edges": [1], "minimum": 9, "maximum": 3}}}, "minimum must be less than maximum"),
        (
            {"classes": ["Zoë", unicodedata.normalize("NFD", "Zoë")]},
            r"two classes look alike: 'Zo\\xeb' and 'Zoe\\u0308'",
        ),
        ({"groups": {"sex": {"map": {"f": ["F", "f "]}}}}, r"no cell is 'f '"),
        ({"groups": {"sex": {"categories": ["f", "f\u200b"]}}}, r"two groups look alike: 'f' and 'f\\u200b'"),
        (
            {"features": {"w": {"kind": "categorical", "map": {"a": ["1"], "b": ["1"]}}}},
            "two values have the same name: '1'",
        ),
        ({"classes": [0, 1]}, r"'classes\.0' is not valid: .*valid string; put it in quotes \(given: 0\)\."),
        ({"classes": [False, True]}, r"put it in quotes \(given: False\)\."),
        ({"features": {"outcome": {"kind": "numeric", "maximum": 2}}}, "the label 'outcome' is also a feature"),
        (
            {"features": {"number": {"kind": "numeric", "column": "person", "maximum": 9}}},
            "the unit 'person' is also a",
        ),
        ({"groups": {"class": {"edges": [1]}}}, "a grouping cannot be called 'class'"),
        ({"groups": {"a*b": {"edges": [1]}}}, r"a grouping cannot be called 'a\*b'"),
        ({"classes": ["a", "b\r"]}, r"the name 'b\\r' holds the control character '\\r'; write it without"),
        ({"groups": {"a\x1b[31m": {"edges": [1]}}}, r"holds the control character '\\x1b'"),
        ({"groups": {"sex": {"categories": ["\u202efm", "m"]}}}, r"holds the control character '\\u202e'"),
        ({"groups": {"sex": {}}}, "give either categories or edges"),
        ({"groups": {"sex": {"edges": [2, 1]}}}, "edges must rise"),
        ({"groups": {"sex": {"edges": [True, 2]}}}, "true and false are not numbers"),
        ({"lable": "x"}, r"Unknown data option of dataset 'csv': 'lable'\. Did you mean 'label'"),
    ],
)
def test_a_wrong_declaration_is_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        read(tmp_path, "p,ill,A,50,f,30", **options)


def test_a_column_that_cannot_be_shown_is_quoted(tmp_path: Path) -> None:
    ward = {"kind": "categorical", "categories": ["B", "\x1b]0;title\x07"]}
    with pytest.raises(EquidpError, match=r"Valid: '\\x1b\]0;title\\x07', B\. If"):
        read(tmp_path, "p,ill,A,50,f,30", features={"ward": ward})


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    message = r"mine/people\.csv, plain or as \.gz, is missing: put it there, or point raw_dir .* holds it\.$"
    with pytest.raises(EquidpError, match=message):
        source("csv", CSV_OPTIONS).locate(tmp_path)


def test_a_folder_is_not_called_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(EquidpError, match=r"data\.options\.path: .*mine is a folder; name the file in it\."):
        source("csv", {**CSV_OPTIONS, "path": "mine"}).locate(tmp_path)


def test_encode_takes_rows_with_the_declared_names(tmp_path: Path) -> None:
    records = read(tmp_path, "p1,ill,A,50,f,30")
    frame = pd.DataFrame({"weight": [50], "ward": ["A"]})
    assert torch.equal(source("csv", CSV_OPTIONS).encode(frame), records.features)


def test_the_example_in_the_docs_is_a_valid_declaration() -> None:
    page = (Path(__file__).parents[3] / "docs" / "declare.md").read_text()
    preset = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["presets"]["clinic"]
    data = preset["data"]
    schema = source(data["source"], data["options"]).schema
    assert preset["privacy"]["unit"] == data["options"]["unit"]
    assert schema.unit_sizes  # N of patients follows from these: from `sizes`, of rows, it would not
    assert schema.classes == ("no", "yes")
    assert set(schema.groupings) == {"class", "sex", "age_band"}
    assert schema.shape == (3,)
