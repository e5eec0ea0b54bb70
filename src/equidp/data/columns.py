"""Columns: the declared schema of a table, and the encoding that follows from it without looking at the data."""

from __future__ import annotations

import csv
import io
import itertools
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from equidp.data.raw_files import content
from equidp.errors import EquidpError, listed_names, missing_column, unknown_name
from equidp.options import Number


class Categorical(BaseModel):
    """A column with declared categories, encoded one-hot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["categorical"] = "categorical"
    categories: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Categorical:
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("two categories have the same name")
        return self


class Numeric(BaseModel):
    """A column with declared bounds, scaled to 0..1 by them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["numeric"] = "numeric"
    minimum: Number = 0.0
    maximum: Number

    @model_validator(mode="after")
    def _ordered(self) -> Numeric:
        if not self.minimum < self.maximum:
            raise ValueError("minimum must be less than maximum")
        if not math.isfinite(self.maximum - self.minimum):  # every value would be scaled to 0
            raise ValueError("minimum and maximum are too far apart")
        return self


Column = Annotated[Categorical | Numeric, Field(discriminator="kind")]


def read_rows(path: Path, names: Sequence[str] | None, *, skip: str = "") -> pd.DataFrame:
    """Read a comma-separated file as stripped strings; the frame's index is the line number in the file.

    Args:
        path: the file, plain or gzipped.
        names: column names of a file without header; None where the first line holds them.
        skip: lines that start with this are left out.

    Raises:
        EquidpError: the file is empty, not UTF-8 text, a line has too many or too few fields, or a quote stays open.
    """
    numbered = [(line, row) for line, row in _numbered_rows(path) if not (skip and row[0].startswith(skip))]
    if names is None and numbered:
        names = numbered.pop(0)[1]
    if not numbered or names is None:
        raise EquidpError(f"{path} holds no rows; download or export it again.")
    if len(set(names)) < len(names):
        raise EquidpError(f"{path}, row 1: two columns have the same name; rename one.")
    if len(names) == 1 and (found := next((sign for sign in ";\t|" if sign in names[0]), None)):
        raise EquidpError(
            f"{path}: columns are separated by {found!r} where commas are expected; export it with commas."
        )
    for line, row in numbered:
        if len(row) != len(names):
            raise EquidpError(f"{path}, row {line}: {len(row)} fields where {len(names)} are expected; repair it.")
    cells, lines = [row for _, row in numbered], [line for line, _ in numbered]
    return pd.DataFrame(cells, columns=list(names), index=lines, dtype=object)


def require(frame: pd.DataFrame, names: Iterable[str], where: str) -> None:
    """Check that columns exist.

    Raises:
        EquidpError: one does not; the message names the file and the nearest column.
    """
    for name in names:
        if name not in frame.columns:
            raise missing_column(where, name, frame.columns)


def composed(name: object) -> str:
    """The text with each accented letter as one character; a Mac may write it as two."""
    return unicodedata.normalize("NFC", str(name))


def codes(column: pd.Series, categories: Sequence[str], where: str, *, otherwise: str = "") -> Tensor:
    """Position of each value in the declared categories, int64 `[N]`; `otherwise`: as for `numbers`.

    Raises:
        EquidpError: an undeclared value; the message names file, row and column.
    """
    position = {composed(category): i for i, category in enumerate(categories)}
    found = np.array([position.get(composed(value), -1) for value in column], dtype=np.int64)
    found[column.isna().to_numpy()] = -1  # a cell that is missing in a served table is no category called `nan`
    if (found < 0).any():
        bad = int(np.argmax(found < 0))
        place = f"{where}, row {column.index[bad]}, column {column.name!r}:"
        if _is_absent(column.iloc[bad]):
            raise EquidpError(f"{place} a category is missing; give one of {listed_names(categories)}{otherwise}.")
        raise unknown_name(f"category in {place}", column.iloc[bad], categories)
    return torch.from_numpy(found)


def numbers(column: pd.Series, minimum: float, maximum: float, where: str, *, otherwise: str = "") -> Tensor:
    """The column as float64 `[N]`; `otherwise` says what else can be done about an invalid value.

    Raises:
        EquidpError: a value that is no number or lies outside the declared bounds.
    """
    values = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64)
    good = np.isfinite(values) & (values >= minimum) & (values <= maximum)
    if not good.all():
        position = int(np.argmin(good))
        given = column.iloc[position]
        what = "is not a number" if not np.isfinite(values[position]) else "is out of bounds"
        what = "a number is missing" if _is_absent(given) else f"{_as_written(given)} {what}"
        raise EquidpError(
            f"{where}, row {column.index[position]}, column {column.name!r}: {what}; "
            f"give a number from {minimum:g} to {maximum:g}{otherwise}."
        )
    return torch.tensor(values)


def _is_absent(value: object) -> bool:
    """Whether a cell is empty: an empty string in a file, NaN or None in a table given to a served model."""
    return value is None or value is pd.NA or value == "" or (isinstance(value, float) and math.isnan(value))


def _as_written(value: object) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)


def encode(frame: pd.DataFrame, columns: Mapping[str, Categorical | Numeric], where: str) -> Tensor:
    """Features of a table, float32 `[N, width(columns)]` in 0..1: one-hot categories and scaled numbers.

    Raises:
        EquidpError: a column is missing or a value breaks its declaration.
    """
    require(frame, columns, where)
    return torch.cat([_encode_column(frame[name], column, where) for name, column in columns.items()], dim=1)


def feature_names(columns: Mapping[str, Categorical | Numeric]) -> tuple[str, ...]:
    """Names of `encode`'s columns, such as `age` and `workclass=Private`."""
    return tuple(
        f"{name}={category}" if category else name
        for name, column in columns.items()
        for category in (column.categories if isinstance(column, Categorical) else ("",))
    )


def bands(edges: Sequence[float]) -> tuple[str, ...]:
    """Names of the bands that `edges` cut a number into: `under 30`, `30-39`, …, `60 and over`."""
    return (
        f"under {_plain(edges[0])}",
        *(_between(low, high) for low, high in itertools.pairwise(edges)),
        f"{_plain(edges[-1])} and over",
    )


def _between(low: float, high: float) -> str:
    if not (float(low).is_integer() and float(high).is_integer()):
        return f"{_plain(low)} to under {_plain(high)}"
    return _plain(low) if high == low + 1 else f"{_plain(low)}-{_plain(high - 1)}"


def _plain(edge: float) -> str:
    return f"{edge:.15g}"


def band_ids(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Band of each value, int64 `[N]`; a value equal to an edge belongs to the band above it."""
    return torch.bucketize(values, torch.tensor(edges, dtype=values.dtype), right=True)


def _encode_column(column: pd.Series, declared: Categorical | Numeric, where: str) -> Tensor:
    if isinstance(declared, Categorical):
        ids = codes(column, declared.categories, where)
        return torch.nn.functional.one_hot(ids, len(declared.categories)).float()
    values = numbers(column, declared.minimum, declared.maximum, where)
    return ((values - declared.minimum) / (declared.maximum - declared.minimum)).float().unsqueeze(1)


def _numbered_rows(path: Path) -> list[tuple[int, list[str]]]:
    # strict, as else a quote that is never closed takes the rows after it into its own cell, and they are lost
    reader = csv.reader(io.StringIO(_text(path), newline=""), skipinitialspace=True, strict=True)
    numbered, begun = [], 1
    try:
        for row in reader:
            if row:
                numbered.append((reader.line_num, [field.strip() for field in row]))
            begun = reader.line_num + 1
    except csv.Error as error:
        raise EquidpError(
            f"{path}, the row that begins in line {begun}: {error}; write a quote within quotes twice, or export the "
            "table again."
        ) from error
    return numbered


def _text(path: Path) -> str:
    try:
        return content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        export = "" if path.suffix in (".csv", ".data", ".txt", ".gz") else " as csv"
        raise EquidpError(f"{path} is not UTF-8 text (byte {error.start}); save it{export} in UTF-8.") from error
