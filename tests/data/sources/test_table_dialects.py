"""Table: the dialects that people's tables have become Records by configuration alone."""

from __future__ import annotations

import csv
import gzip
import io
import sqlite3
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch
from sqlalchemy import create_engine

from equidp.data.sources import source
from equidp.errors import EquidpError

NUMBER = {"kind": "numeric", "maximum": 100}
OPTIONS: dict[str, Any] = {"label": "y", "classes": ["no", "yes"], "features": {"x": NUMBER}}
FRAME = pd.DataFrame({"x": [25, None], "sex": [1.0, 2.0], "y": [False, True], "id": [2**53 + 1, 3]})
TYPED = {
    **OPTIONS,
    "class_map": {"no": ["false"], "yes": ["true"]},
    "features": {"x": {**NUMBER, "missing": 50}},
    "groups": {"sex": {"map": {"male": ["1"], "female": ["2"]}}},
    "unit": "id",
}


def read(folder: Path, content: bytes | str, name: str = "t.csv", **options: Any):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return records({**OPTIONS, "path": name, **options}, folder)


def records(options: dict, folder: Path):
    table = source("table", options)
    return table.records(table.locate(folder))


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ('"x";"y"\n"25";"no"\n"50";"yes"\n', {"separator": ";"}),
        ("x\ty\n2,5e1\tno\n50,0\tyes\n", {"separator": "\t", "decimal": ","}),
        ("25   no \n50 yes\n", {"separator": " ", "columns": ["x", "y"]}),
        ("25,no\n50,yes\n", {"columns": ["x", "y"]}),
        ("x,y\n25,no\n50,yes\n".encode("utf-16"), {"encoding": "utf-16"}),
        ("x,y\n25,no\n50,yes\n".encode("utf-8-sig"), {"encoding": "UTF-8"}),  # as Excel saves "CSV UTF-8"
        ("x,y,é\n25,no,ü\n50,yes,ß\n".encode("latin-1"), {"encoding": "latin-1"}),
        (gzip.compress(b"x,y\n25,no\n50,yes\n", mtime=0), {"path": "t.csv.gz"}),
        ("x,y\n25,0\n50,1\n", {"class_map": {"no": ["0"], "yes": ["1"]}}),
        ("x,y\n25,9.99\n50,10\n", {"class_edges": [10]}),
        ('x;y\n"25.000,00";no\n50.000;yes\n', {"separator": ";", "decimal": ",", "thousands": "."}),
    ],
)
def test_a_dialect_is_read_by_its_options(tmp_path: Path, content: bytes | str, options: dict) -> None:
    large = {"features": {"x": {"kind": "numeric", "maximum": 100_000}}} if "thousands" in options else {}
    found = read(tmp_path, content, options.get("path", "t.csv"), **{**options, **large})
    assert found.features.flatten().tolist() == [0.25, 0.5]
    assert found.labels.tolist() == [0, 1]
    assert found.schema.groupings["class"] == ("no", "yes")


def test_coded_values_get_names_and_a_sensitive_column_is_a_feature_by_name(tmp_path: Path) -> None:
    sex = {"column": "status", "map": {"male": ["A91", "A93"], "female": ["A92"]}, "unknown": True}
    features = {"sex": {"kind": "group"}, "old": {"kind": "categorical", "column": "x", "edges": [30]}}
    found = read(
        tmp_path, "x,status,y\n25,A91,no\n30,A92,yes\n9,?,no\n1,A93,no\n", features=features, groups={"sex": sex}
    )
    assert found.schema.groupings["sex"] == ("male", "female", "unknown")
    assert found.groups["sex"].tolist() == [0, 1, 2, 0]
    assert found.schema.feature_names == (
        "sex=male", "sex=female", "sex=unknown", "old=under 30", "old=30 and over"
    )  # fmt: skip
    assert found.features.tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [0, 0, 1, 1, 0], [1, 0, 0, 1, 0]]


def test_missing_values_and_numbers_beyond_the_bounds_are_declared(tmp_path: Path) -> None:
    features = {
        "x": {**NUMBER, "clip": True, "missing": 50},
        "ward": {"kind": "categorical", "categories": ["A"], "unknown": True},
    }
    table = "x,ward,y\n-5,A,no\n101,NA,yes\n-9,A,no\n,A,yes\n75,,no\n"
    found = read(tmp_path, table, features=features, na_values=["-9"])
    assert found.schema.feature_names == ("x", "x=missing", "ward=A", "ward=unknown")
    assert found.features.tolist() == [
        [0, 0, 1, 0], [1, 0, 0, 1], [0.5, 1, 1, 0], [0.5, 1, 1, 0], [0.75, 0, 0, 1]
    ]  # fmt: skip
    assert found.remarks == (
        "t.csv, column 'x': 2 of 5 numbers are beyond 0 to 100 and are set to the nearer bound (class: no 1, yes 1).",
    )


@pytest.mark.parametrize("typed", [False, True])
def test_a_code_of_a_missing_value_is_one_of_its_own_column(tmp_path: Path, typed: bool) -> None:
    """Nine hours a week are hours, where a 9 in another column is no answer."""
    features = {"x": {**NUMBER, "missing": 50}, "hours": NUMBER}
    frame = pd.DataFrame({"x": [9, -1, 20], "hours": [9, 9, 9], "health": [1, 2, 9]})
    path = "t.parquet" if typed else "t.csv"
    frame.to_parquet(tmp_path / path) if typed else frame.to_csv(tmp_path / path, index=False)
    options = {"path": path, "features": features, "label": "health", "classes": ["1", "2"], "missing": "drop"}
    found = records({**OPTIONS, **options, "na_values": {"x": ["-1"], "health": ["9"]}}, tmp_path)
    assert found.features.tolist() == torch.tensor([[0.09, 0, 0.09], [0.5, 1, 0.09]]).tolist()
    assert found.labels.tolist() == [0, 1]
    with pytest.raises(EquidpError, match=r"No column 'heath' in .*Did you mean 'health'\?"):
        records({**OPTIONS, **options, "na_values": {"heath": ["9"]}}, tmp_path)
    with pytest.raises(EquidpError, match=r"na_values: '2' is also a declared value of 'health'; where it means"):
        records({**OPTIONS, **options, "na_values": ["9", "2"]}, tmp_path)
    with pytest.raises(EquidpError, match="every row misses a feature or the label"):
        records({**OPTIONS, **options, "na_values": ["9"]}, tmp_path)
    for wrong in ("9", [9], {"x": "9"}, {"x": [9]}):
        with pytest.raises(EquidpError, match=r"'na_values' is not valid: give a list of texts in quotes, such as"):
            records({**OPTIONS, **options, "na_values": wrong}, tmp_path)


@pytest.mark.parametrize("signs", [{}, {"thousands": ","}])
def test_one_row_that_makes_text_of_a_guessed_column_changes_no_code_of_a_missing_value(
    tmp_path: Path, signs: dict
) -> None:
    """Of numbers with a decimal place -1 is written -1.0: the number is missing, and so is the text."""
    features = {"x": {**NUMBER, "clip": True, "missing": 50}}
    table = source("table", {**OPTIONS, "catalog": "t", "features": features, "na_values": ["-1"], **signs})
    found = []
    for more in ("", "?,no\n", "7,no\n"):
        rows = f"x,y\n-1.0,no\n20.5,yes\n-1.0,yes\n{more}"
        table.catalog = lambda name, rows=rows: pd.read_csv(io.StringIO(rows))
        found.append(table.read(table.locate(tmp_path)).features[:3].tolist())
    assert found[0] == found[1] == found[2]
    assert found[0][0] == [0.5, 1]


def test_a_category_and_a_code_that_are_one_number_are_refused_where_types_are_guessed() -> None:
    features = {"ward": {"kind": "categorical", "categories": ["05", "A"]}}
    given = {**OPTIONS, "features": features, "na_values": ["5"]}
    assert source("table", {**given, "path": "t.csv"})
    with pytest.raises(EquidpError, match=r"na_values: '5' and '05', a declared value of 'ward', are one number"):
        source("table", {**given, "catalog": "t"})


def test_an_id_of_a_decimal_type_does_not_follow_the_places_of_others(tmp_path: Path) -> None:
    """A writer of parquet gives the whole column the places that its longest number needs."""
    found = []
    for more in ([], ["100.5"]):
        ids = [Decimal(text) for text in ["17", "20", *more]]
        frame = pd.DataFrame({"x": 1, "y": "no", "id": ids})
        frame.to_parquet(tmp_path / "t.parquet")
        found.append(records({**OPTIONS, "path": "t.parquet", "unit": "id"}, tmp_path).unit_identity[:2])
    assert torch.equal(*found)
    pd.DataFrame({"x": 1, "y": "no", "id": ["17", "20"]}).to_csv(tmp_path / "t.csv", index=False)
    assert torch.equal(found[0], records({**OPTIONS, "path": "t.csv", "unit": "id"}, tmp_path).unit_identity)


def test_a_grouping_and_a_feature_of_one_name_are_each_compared_with_the_codes_of_missing_values() -> None:
    groups = {"area": {"column": "ward", "map": {"north": ["1"], "south": ["9"]}}}
    features = {"area": {"kind": "categorical", "column": "town", "categories": ["a", "b"]}}
    with pytest.raises(EquidpError, match=r"na_values: '9' is also a declared value of 'ward'"):
        source("table", {**OPTIONS, "path": "t.csv", "groups": groups, "features": features, "na_values": ["9"]})


def _parquet(folder: Path) -> dict:
    FRAME.to_parquet(folder / "t.parquet")
    return {"path": "t.parquet"}


def _feather(folder: Path) -> dict:
    FRAME.to_feather(folder / "t.feather")
    return {"path": "t.feather"}


def _sqlite(folder: Path) -> dict:
    engine = create_engine(f"sqlite:///{folder / 'a #1%.db'}")
    FRAME.to_sql("people", engine, index=False)
    engine.dispose()
    return {"path": "a #1%.db", "sql": "SELECT * FROM people", "class_map": {"no": ["0"], "yes": ["1"]}}


def _connection(folder: Path) -> dict:
    path, connection = folder / "a #1%.db", f"sqlite:///{folder / 'b.db'}"
    options = _sqlite(folder)
    path.rename(folder / "b.db")
    return {**options, "path": "", "connection": connection}


@pytest.mark.parametrize("write", [_parquet, _feather, _sqlite, _connection])
def test_a_typed_table_is_read_by_value(tmp_path: Path, write: Callable[[Path], dict]) -> None:
    """Whole numbers with a missing one stay whole, and long ids are not shortened."""
    found = records({**TYPED, **write(tmp_path)}, tmp_path)
    assert found.features.tolist() == [[0.25, 0], [0.5, 1]]
    assert found.labels.tolist() == [0, 1]
    assert found.groups["sex"].tolist() == [0, 1]
    unit = pd.DataFrame({"x": [1], "y": ["no"], "id": [str(2**53 + 1)]})
    unit.to_csv(tmp_path / "one.csv", index=False)
    by_text = records({**OPTIONS, "path": "one.csv", "unit": "id"}, tmp_path)
    assert torch.equal(found.unit_identity[0], by_text.unit_identity[0])


def test_an_entry_of_the_catalog_is_a_table(tmp_path: Path) -> None:
    table = source("table", {**TYPED, "catalog": "people"})
    with pytest.raises(EquidpError, match="only a Kedro run has a catalog"):
        table.locate(tmp_path)
    prints = []
    for change in (0, 0, 1):
        table.catalog = lambda name, change=change: FRAME.assign(x=[25, None if not change else 75])
        files = table.locate(tmp_path)
        prints.append(files.fingerprint)
    assert prints[0] == prints[1] != prints[2], "an entry that changed is encoded again"
    assert table.read(files).features.tolist() == [[0.25, 0], [0.75, 0]]
    table.catalog = lambda name: FRAME.iloc[:0]  # a sheet with a header alone
    with pytest.raises(EquidpError, match="people holds no rows; choose another table, sheet or query"):
        table.locate(tmp_path)
    table.catalog = lambda name: {"a": 1}
    with pytest.raises(EquidpError, match="the entry gives a dict; name one that gives a pandas DataFrame"):
        table.locate(tmp_path)


def test_an_entry_may_have_types_of_arrow_that_pandas_has_not(tmp_path: Path) -> None:
    """With load_args of dtype_backend: pyarrow, dates say; whether these are declared or not."""
    table = source("table", {**OPTIONS, "catalog": "t", "unit": "price"})
    rows = "x,y,seen,price\n25,no,2020-01-01,1.50\n75,yes,2020-01-02,2.25\n"
    read = pd.read_csv(io.StringIO(rows), dtype_backend="pyarrow")
    of_decimals = pd.array([Decimal("1.50"), Decimal("2.25")], dtype=pd.ArrowDtype(pa.decimal128(5, 2)))
    found = []
    for price in (read["price"], of_decimals):
        table.catalog = lambda name, price=price: read.assign(price=price)
        found.append(table.records(table.locate(tmp_path)))
    assert found[0].features.tolist() == [[0.25], [0.75]]
    assert torch.equal(found[0].unit_identity, found[1].unit_identity)


def test_a_text_of_any_length_is_read(tmp_path: Path) -> None:
    """Python's csv refuses fields of more than 128 KiB unless told, which is a setting of the whole process."""
    limit = csv.field_size_limit()
    (tmp_path / "t.csv").write_text(f"body,y\n{'pain ' * 40_000}worse,no\nbetter,yes\n")
    found = records({"label": "y", "classes": ["no", "yes"], "text": "body", "length": 1, "path": "t.csv"}, tmp_path)
    assert len(set(found.features.flatten().tolist())) == 2
    assert csv.field_size_limit() == limit


def test_numbers_are_no_texts(tmp_path: Path) -> None:
    """Whether a catalog has 7 or 7.0, or the text, depends on the other rows."""
    table = source("table", {**TEXTS, "catalog": "t"})
    for rows in ("body,y\n7,no\n1.50,yes\n", "body,y\n007,no\n8,yes\n"):
        table.catalog = lambda name, rows=rows: pd.read_csv(io.StringIO(rows))
        with pytest.raises(
            EquidpError, match=r"row 1 \(the first .*\), column 'body': 7(\.0)? is no text, and may have been written"
        ):
            table.read(table.locate(tmp_path))
    with pytest.raises(EquidpError, match=r"the given table, row 0 \(of .*\), column 'body': 7 is no text"):
        table.encode(pd.DataFrame({"body": [7]}))


def test_texts_in_other_letters_are_told_of(tmp_path: Path) -> None:
    rows = "body,y,sex\n頭が痛い,no,f\nболит,no,m\npain,yes,m\n"
    (tmp_path / "t.csv").write_text(rows, encoding="utf-8")
    groups = {"sex": {"categories": ["f", "m"]}}
    found = records({**TEXTS, "groups": groups, "path": "t.csv"}, tmp_path)
    (said,) = found.remarks
    assert said.startswith("t.csv, column 'body': 2 of 3 texts have no word of letters a to z")
    assert said.endswith("(class: no 2; sex: f 1, m 1).")


TEXTS = {"label": "y", "classes": ["no", "yes"], "text": "body"}


@pytest.mark.parametrize("gone", [None, float("nan"), ""])
def test_a_text_that_is_missing_is_no_text_that_says_none(tmp_path: Path, gone: object) -> None:
    frame = pd.DataFrame({"body": ["none", "-", gone], "y": ["no", "yes", "no"]})
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(EquidpError, match=r"row 3 \(the first .*\), column 'body': a value is missing"):
        records({**TEXTS, "path": "t.parquet"}, tmp_path)
    assert len(records({**TEXTS, "path": "t.parquet", "missing": "drop"}, tmp_path)) == 2
    served = source("table", {**TEXTS, "path": "t.parquet"})
    assert len(served.encode(frame[:2])) == 2
    with pytest.raises(EquidpError, match=r"the given table, row 2 \(of .*\), column 'body': the text is missing"):
        served.encode(frame)


def test_a_catalog_that_took_points_for_decimal_signs_is_refused(tmp_path: Path) -> None:
    """pandas leaves the column as text if one row has two points, and else reads 1.234 as a number below two."""
    given = {"catalog": "t", "decimal": ",", "thousands": ".", "features": {"x": {**NUMBER, "maximum": 1e7}}}
    table = source("table", {**OPTIONS, **given})
    rows = "x,y\n1.234,no\n1.235,yes\n"

    def first(rows: str) -> float:
        table.catalog = lambda name: pd.read_csv(io.StringIO(rows))
        return float(table.read(table.locate(tmp_path)).features[0, 0])

    assert first(rows + "1.234.567,no\n") == pytest.approx(1234 / 1e7)
    with pytest.raises(EquidpError, match=r"column 'x': .* points may have been read as decimal signs.*dtype: str"):
        first(rows)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    options = {**TYPED, **_sqlite(tmp_path), "sql": "SELECT *, x + 1 AS x FROM people"}
    with pytest.raises(EquidpError, match=r"two columns have the same name, 'x'; rename one"):
        records(options, tmp_path)
    table = source("table", {**TYPED, "catalog": "people"})
    table.catalog = lambda name: pd.concat([FRAME, FRAME["x"]], axis=1)
    with pytest.raises(EquidpError, match="two columns have the same name, 'x'; rename one"):
        table.locate(tmp_path)


def test_a_locked_database_is_no_wrong_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*args: object, **named: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    options = {**TYPED, **_sqlite(tmp_path)}
    monkeypatch.setattr("equidp.data.tables.sqlite3.connect", locked)
    with pytest.raises(EquidpError, match=r"\(database is locked\); close the program that writes to it, or copy the"):
        records(options, tmp_path)


def test_nothing_is_written_to_a_database(tmp_path: Path) -> None:
    options = {**TYPED, **_sqlite(tmp_path)}
    before = (tmp_path / options["path"]).read_bytes()
    for query in ("DROP TABLE people", "DELETE FROM people", "PRAGMA user_version = 3"):
        with pytest.raises(EquidpError, match="begins with SELECT or WITH"):
            records({**options, "sql": query}, tmp_path)
    with pytest.raises(EquidpError, match=r"cannot be run \(attempt to write a readonly database\)"):
        records({**options, "sql": "WITH one AS (SELECT 1) DELETE FROM people"}, tmp_path)
    assert (tmp_path / options["path"]).read_bytes() == before


NESTED = "a nested SELECT"


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("SELECT * FROM people", ""),
        ("SELECT * FROM people WHERE sex <> 'limit 3' -- no limit", ""),
        ('SELECT x AS "limit", x, y, sex, id FROM people', ""),
        ("SELECT * FROM (SELECT * FROM people ORDER BY x LIMIT 1)", "LIMIT"),
        ("SELECT x - avg(x) over () + 37 AS x, y, sex, id FROM people", "OVER"),
        ("SELECT * FROM people ORDER BY random()", "RANDOM"),
        ("SELECT x - (SELECT avg(x) FROM people) + 37 AS x, y, sex, id FROM people", NESTED),
        ("WITH m AS (SELECT avg(x) AS m FROM people) SELECT x - m + 37 AS x, y, sex, id FROM people, m", NESTED),
        ("SELECT * FROM people WHERE x = 1 UNION ALL\nSELECT * FROM people WHERE x <> 1", ""),
    ],
)
def test_a_query_by_which_rows_depend_on_each_other_is_told(tmp_path: Path, query: str, word: str) -> None:
    remarks = records({**TYPED, **_sqlite(tmp_path), "sql": query}, tmp_path).remarks
    told = f"by {word} a row that the query gives may depend on other rows"
    assert [told in remark for remark in remarks] == [True] * (word != "")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('"x";"y"\n"25";"no"\n', {}, r"columns are separated by ';' where commas are expected; set data\.options\.sep"),
        ("25,no\n50,yes\n", {}, r"its first row, 25, no, names none of the declared columns; .*data\.options\.columns"),
        ("1,1\n0,1\n", {}, r"two columns have the same name, '1'; rename one \(or name all by data\.options\.columns"),
        ("x,y\n1,no\n".encode("utf-16-le"), {}, r"not UTF-8 text \(it holds NUL bytes\); set .*encoding \(utf-16-le\)"),
        ("x,y\n1,é\n".encode("latin-1"), {}, r"not UTF-8 text \(byte 6\); set data\.options\.encoding \(latin-1 or"),
        ("x;y\n1.5;no\n", {"separator": ";", "decimal": ","}, r"'1\.5' is not written with the decimal sign ','"),
        (
            "x;y\n1.5;no\n",
            {"separator": ";", "decimal": ",", "thousands": "."},
            r"'1\.5' is not written with",
        ),
        (
            'x,y\n"18,5",no\n',
            {},
            r"If its comma is a decimal sign, set data\.options\.decimal to ','\. If it stands for",
        ),
        ("x,y\n,no\n", {}, r"a value is missing; give it, or declare what stands for it \(`unknown: true`, or"),
        ("x,y\n1,no\n", {"path": "mine\\t.csv"}, r"the path 'mine\\\\t\.csv' has backslashes; write / between folders"),
        ("x,y\n1,no\n", {"encoding": "utf-88"}, "Python knows no such encoding"),
        ("x,y\n1,no\n", {"catalog": "t"}, r"give one of path, connection \(with sql\) and catalog"),
        ("x,y\n1,no\n", {"path": "", "connection": "postgresql://me:secret@host/db", "sql": "select"}, "be logged"),
        ("x,y\n1,no\n", {"class_map": {"maybe": ["1"]}}, "map names 'maybe', which is not among the categories"),
        ("x,y\n1,no\n", {"class_edges": [1, 2]}, "edges cut 3 bands, and categories name 2"),
        ("x,y\n1,no\n", {"features": {"sx": {"kind": "group"}}}, "Unknown grouping of the feature 'sx': 'sx'"),
        ("x,y\n1,no\n", {"features": {"x": {**NUMBER, "missing": -1}}}, "missing must lie within minimum and maximum"),
        ("x,y\n1,no\n", {"classes": "no, yes"}, r"'classes' is not valid: .*a list, such as \[.no., .yes.\]"),
        ("x,y\n1,no\n", {"classes": [False, True]}, r"a bare no, off or false is no text in YAML\); put it in quotes"),
    ],
)
def test_another_dialect_is_told_what_to_set(tmp_path: Path, content, options: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        read(tmp_path, content, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.sqlite", b"SQLite format 3\0\xff", r"t\.sqlite is an SQLite database: give data\.options\.sql"),
        (
            "t.xlsx",
            b"PK\3\4\xff",
            r"t\.xlsx is a workbook: give its sheet an entry .* as data\.options\.catalog in place",
        ),
    ],
)
def test_a_file_that_is_no_text_is_told_by_its_kind(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """Another encoding would help neither."""
    with pytest.raises(EquidpError, match=message):
        read(tmp_path, content, name)


@pytest.mark.parametrize("name", ["t.parquet", "t.feather", "t.db"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    sql = {"sql": "SELECT * FROM people"} if name == "t.db" else {}
    with pytest.raises(EquidpError, match=rf"{name}(:| cannot be read)"):
        read(tmp_path, "x,y\n1,no\n", name, **sql)


@pytest.mark.parametrize(
    ("categories", "cells", "found"),
    [
        (["007", "8"], "007\n8\n", [0, 1]),
        (["1", "2"], "1\n\n2\n", [0, 2, 1]),
        (["false", "true"], "true\nfalse\n", [1, 0]),
        (["10", "010", "x"], "010\nx\n", [1, 2]),
        (["0.50", "1"], "0.5\n1\n", [0, 1]),
    ],
)
def test_a_served_column_whose_types_were_guessed_is_the_declared_one(categories, cells: str, found: list) -> None:
    """As `mlflow models predict -t csv` reads it, which guesses types."""
    table = source("table", {**OPTIONS, "path": "t.csv", "features": {"x": _named(categories)}})
    rows = pd.read_csv(io.StringIO("x\n" + cells), skip_blank_lines=False)
    assert table.encode(rows).argmax(1).tolist() == found


def test_a_guessed_number_that_two_categories_may_be_is_refused() -> None:
    table = source("table", {**OPTIONS, "path": "t.csv", "features": {"x": _named(["10", "010", "20"])}})
    with pytest.raises(EquidpError, match=r"the number 10 may be '10' or '010'; give the column as text"):
        table.encode(pd.read_csv(io.StringIO("x\n10\n010\n20\n")))
    assert table.encode(pd.DataFrame({"x": ["10", "010", "20"]})).argmax(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("feature", "cells", "message"),
    [
        (["true", "TRUE"], "true\n", r"the truth value True may be 'true' or 'TRUE'"),
        (["12345678901234567", "12345678901234568"], "12345678901234567\n\n", r"may be '12345678901234567' or '12345"),
        (["12345678901234568"], "12345678901234568\n\n", r"may be '12345678901234568' or another; give the column as"),
        (
            ["NA", "EU"],
            "EU\nNA\n",
            r"row 1 \(.*\), column 'x': nan may be 'NA' or a missing value; give the column as text",
        ),
        (
            None,
            "1.234\n",
            r"row 0 \(.*\), column 'x': 1\.234 may be another number, as data\.options\.thousands is '\.'",
        ),
    ],
)
def test_a_guess_that_may_have_changed_the_text_is_refused(feature, cells: str, message: str) -> None:
    signs = {} if feature else {"decimal": ",", "thousands": "."}
    declared = _named(feature) if feature else {**NUMBER, "maximum": 5000}
    table = source("table", {**OPTIONS, **signs, "path": "t.csv", "features": {"x": declared}})
    with pytest.raises(EquidpError, match=message):
        table.encode(pd.read_csv(io.StringIO("x\n" + cells), skip_blank_lines=False))
    assert len(table.encode(pd.DataFrame({"x": cells.split()}, dtype=object))) == len(cells.split())


def _named(categories: list[str]) -> dict:
    return {"kind": "categorical", "categories": categories, "unknown": True}


@pytest.mark.parametrize(
    ("ids", "decimal", "words"),
    [
        (("p1", "1,85E+04"), ",", "'1,85E\\+04' is what a spreadsheet leaves of a long id"),
        (("p1", "1,85E+04"), ".", "'1,85E\\+04' is what a spreadsheet leaves of a long id"),
        (("17", "17,0"), ",", "'17,0' and '17' .* may be one id in two spellings"),
        (("17", "1,7e1"), ",", "'1,7e1' and '17' .* may be one id in two spellings"),
    ],
)
def test_an_id_with_a_decimal_comma_is_a_number_as_with_a_point(tmp_path: Path, ids, decimal: str, words: str) -> None:
    """As two units, the person would have twice the influence."""
    rows = "".join(f"{25 + at};{(at and 'no') or 'yes'};{name}\n" for at, name in enumerate(ids))
    with pytest.raises(EquidpError, match=f"line 3, column 'id': {words}"):
        read(tmp_path, f"x;y;id\n{rows}", separator=";", decimal=decimal, unit="id")


def test_ids_with_a_decimal_sign_stay_as_they_are_written(tmp_path: Path) -> None:
    content = "x;y;id\n25;no;1,5\n25;no;A,1\n25;yes;A.1\n25;yes;1,5\n"
    found = read(tmp_path, content, separator=";", decimal=",", unit="id")
    with_point = read(tmp_path, content, separator=";", unit="id")
    assert found.unit.tolist() == [0, 1, 2, 0]
    assert found.unit_identity.tolist() == with_point.unit_identity.tolist()
