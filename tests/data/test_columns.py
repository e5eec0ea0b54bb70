"""Columns: reading and encoding by a declared schema; the frame's index is the line a user would look at."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equidp.data.cells import SENT, codes, numbers
from equidp.data.columns import Categorical, Numeric, band_ids, bands, encode, feature_names
from equidp.data.tables import read_binary, read_rows
from equidp.errors import EquidpError


def test_rows_are_numbered_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeffname, note\n\nann, "two\nlines"\nbob, x\n')
    frame = read_rows(path, None)
    assert frame.columns.tolist() == ["name", "note"]
    assert frame.index.tolist() == [4, 5]
    assert frame.loc[5, "name"] == "bob"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no rows"),
        (b"a,b\n", "holds no rows"),
        (b"a,b\n1,2\n1,2,3\n", "line 3: 3 fields where 2 are expected"),
        (b"a,a\n1,2\n", "line 1: two columns have the same name"),
        (b"a,b\n\xff\xfe,2\n", r"is not UTF-8 text \(byte 4\)"),
        (b'a,b\n1,x\n2,"six\n3,y\n4,z\n', "the row that begins in line 3: unexpected end of data; write a quote"),
        (b'a,b\n1,"six\n2,"seven\n3,y\n', "the row that begins in line 2: ',' expected after '\"'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text)
    with pytest.raises(EquidpError, match=message):
        read_rows(path, None)


def test_encoding_needs_no_data() -> None:
    columns = {"colour": Categorical(categories=("red", "blue")), "size": Numeric(minimum=10, maximum=20)}
    assert feature_names(columns) == ("colour=red", "colour=blue", "size")
    frame = pd.DataFrame({"size": [10, 15.0], "colour": ["blue", "red"]})
    assert encode(frame, columns, "t").tolist() == [[0, 1, 0], [1, 0, 0.5]]


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "ten", ["1"]])
def test_what_is_no_number_is_refused(value: object) -> None:
    frame = pd.DataFrame({"size": ["12", value]}, dtype=object)
    with pytest.raises(
        EquidpError, match=r"t, row 1 \(of .* index\), column 'size': .* is not a number; give a number from 0 to 20"
    ):
        encode(frame, {"size": Numeric(maximum=20)}, "t")


def test_one_refusal_names_all_that_is_no_number_and_all_unknown_categories() -> None:
    frame = pd.DataFrame({"size": ["12", "k.A.", None, "unb.", "k.A."], "colour": ["red", "rot", None, "blau", "rot"]})
    with pytest.raises(EquidpError, match=r"'k.A.' is not a number; .*\. Other rows hold 'unb.', which are no numbers"):
        encode(frame[["size"]], {"size": Numeric(maximum=20)}, "t")
    with pytest.raises(EquidpError, match=r"'rot'.* Other rows hold 'blau', which are unknown too\."):
        encode(frame[["colour"]], {"colour": Categorical(categories=("red", "blue"))}, "t")
    many = pd.DataFrame({"size": [f"x{k}" for k in range(9)]})
    with pytest.raises(EquidpError, match=r"'x0' is not .* hold 'x1', 'x2', 'x3', 'x4', 'x5' and 3 more, which"):
        encode(many, {"size": Numeric(maximum=20)}, "t")


def test_a_number_is_told_as_it_was_written() -> None:
    with pytest.raises(EquidpError, match=r"column 'size': 21\.0 is out of bounds"):
        encode(pd.DataFrame({"size": [21.0]}), {"size": Numeric(maximum=20)}, "t")


@pytest.mark.parametrize("value", ["", None, math.nan, np.float64("nan"), pd.NA])
def test_what_is_missing_is_called_so(value: object) -> None:
    frame = pd.DataFrame({"cell": [value]}, dtype=object)
    with pytest.raises(
        EquidpError, match=r"t, row 0 \(of .* index\), column 'cell': a number is missing; give a number from 0 to 20"
    ):
        encode(frame, {"cell": Numeric(maximum=20)}, "t")
    with pytest.raises(
        EquidpError, match=r"t, row 0 \(of .* index\), column 'cell': a category is missing; give one of red, blue\."
    ):
        encode(frame, {"cell": Categorical(categories=("red", "blue"))}, "t")


@given(st.floats(-50, 200, allow_nan=False))
def test_a_value_lies_in_the_band_its_name_says(value: float) -> None:
    edges = (30, 40, 60)
    name = bands(edges)[int(band_ids(torch.tensor([value], dtype=torch.float64), edges))]
    expected = "under 30" if value < 30 else "30-39" if value < 40 else "40-59" if value < 60 else "60 and over"
    assert name == expected


@pytest.mark.parametrize(
    ("edges", "names"),
    [
        ((0.25, 0.5, 0.75), ("under 0.25", "0.25 to under 0.5", "0.5 to under 0.75", "0.75 and over")),
        ((39.5, 65), ("under 39.5", "39.5 to under 65", "65 and over")),
        ((1_200_000, 1_500_000, 1_500_001), ("under 1200000", "1200000-1499999", "1500000", "1500001 and over")),
    ],
)
def test_bands_are_named_by_what_is_in_them(edges: tuple[float, ...], names: tuple[str, ...]) -> None:
    assert bands(edges) == names


@pytest.mark.parametrize("sign", [";", "\t"])
def test_a_table_that_other_signs_separate_is_refused(tmp_path: Path, sign: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"age{sign}weight\n1{sign}2,5\n")
    with pytest.raises(EquidpError, match=r"columns are separated by .* where commas are expected"):
        read_rows(table, None)


@pytest.mark.parametrize("number", [10**600, -(10**600)], ids=["above", "below"])
def test_a_whole_number_beyond_every_float_is_refused_in_a_sentence(number: int) -> None:
    with pytest.raises(
        EquidpError,
        match=r"^there, row 1 \(of the table's index\), column 'age': -?10+… \(\d+ signs\) is not a number; give a",
    ):
        numbers(pd.Series([3, number], name="age", dtype=object), 0, 90, "there")


def test_a_number_with_an_imaginary_part_is_refused_and_not_cut() -> None:
    with pytest.raises(EquidpError, match=r"^there, row 1 .*'age': .*1j.* is not a number; give a number from 0 to 90"):
        numbers(pd.Series([3, 45 + 1j], name="age", dtype=object), 0, 90, "there")


def test_of_a_value_of_a_million_signs_the_beginning_is_told() -> None:
    column = pd.Series(["a", "x" * 1_000_000], name="work")
    with pytest.raises(EquidpError, match=r"… \(1,000,000 signs\)'\. Valid: a, b\.$") as refused:
        codes(column, ("a", "b"), "there")
    assert len(refused.value.message) < 1000


def test_a_message_says_how_rows_are_counted(tmp_path: Path) -> None:
    """In a file, in what a workbook or a database gives, and in what is sent to a served model: from 2, 1 and 0 on."""
    (tmp_path / "t.csv").write_text("size\n1\n21\n")
    (tmp_path / "t.parquet").write_bytes(pd.DataFrame({"size": [1, 21]}).to_parquet())
    own = pd.DataFrame({"size": [1, 21]}, index=pd.Index(["a", "b"], name="person"))
    for frame, counted in (
        (read_rows(tmp_path / "t.csv", None), "line 3"),
        (read_binary(tmp_path / "t.parquet"), "row 2 (the first below the header is 1)"),
        (own.set_axis(pd.RangeIndex(2, name=SENT)), "row 1 of those sent (the first is 0)"),
        (own, "row b (of the table's index)"),
    ):
        with pytest.raises(EquidpError) as raised:
            encode(frame, {"size": Numeric(maximum=20)}, "t")
        assert raised.value.message.startswith(f"t, {counted}, column 'size': ")
