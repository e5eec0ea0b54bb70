"""Columns: the declared schema of a table, and the encoding that follows from it without looking at the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from equidp.data.cells import (
    MISSING,
    UNKNOWN,
    RefusedCellsError,
    absent,
    as_numbers,
    codes,
    numbers,
    place,
    refuse_alike,
    require,
)
from equidp.options import Number


class Plain(BaseModel):
    """The base of blocks that pydantic chooses by their `kind`; `Declared` cannot be one."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Named(Plain):
    """A column whose values have names: categories as they are, names for values, or bands of a number.

    Attributes:
        column: the column to read; the declaration's own name where empty.
        categories: names in order: the column's own values, or names of `map`, or names for the bands of `edges`.
        map: for each name the values of the column that it stands for, such as `male: [A91, A93]`.
        edges: for numbers: where one band ends and the next begins.
        minimum, maximum: bounds of these numbers.
        clip: a number beyond the bounds counts as the bound, instead of being an error.
        unknown: missing values are a category of their own, `unknown`, instead of being an error.
    """

    column: str = ""
    categories: tuple[str, ...] = ()
    map: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    edges: tuple[Number, ...] = ()
    minimum: Number = 0.0
    maximum: Number = 1e9
    clip: bool = False
    unknown: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if not (self.categories or self.map or self.edges):
            raise ValueError("give either categories or edges, or a map")
        if self.map and self.edges:
            raise ValueError("give either map or edges")
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError("edges must rise")
        if self.edges and self.categories and len(self.categories) != len(self.edges) + 1:
            raise ValueError(f"edges cut {len(self.edges) + 1} bands, and categories name {len(self.categories)}")
        if not self.minimum < self.maximum:
            raise ValueError("minimum must be less than maximum")
        if unnamed := [name for name in self.map if self.categories and name not in self.categories]:
            raise ValueError(f"map names {unnamed[0]!r}, which is not among the categories; leave categories out")
        refuse_alike(self.names, self._kind)
        refuse_alike(self.values, "values")
        if spaced := [text for text in self.values if text != text.strip()]:
            raise ValueError(f"no cell is {spaced[0]!r}, as cells lose spaces at their ends: leave them out")
        return self

    @property
    def _kind(self) -> str:
        return "categories"

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of their ids; `unknown` comes last."""
        named = self.categories or tuple(self.map) or bands(self.edges)
        return (*named, UNKNOWN) if self.unknown and UNKNOWN not in named else named

    @property
    def values(self) -> tuple[str, ...]:
        """Declared texts, which therefore never mean a missing value."""
        written = () if self.edges else self.categories or tuple(self.map)
        return tuple(text for name in written for text in self.map.get(name, (name,)))

    def ids(self, column: pd.Series, where: str) -> Tensor:
        """Position in `names` of each value, int64 `[N]`. Raises EquidpError for a value outside the declaration."""
        if not self.unknown:
            return self._known_ids(column, where)
        missing = torch.from_numpy(absent(column, self.values))
        ids = torch.full((len(column),), self.names.index(UNKNOWN), dtype=torch.int64)
        ids[~missing] = self._known_ids(column[~missing.numpy()], where)
        return ids

    def missed(self, column: pd.Series) -> np.ndarray:
        """Boolean `[N]`: missing values for which nothing is declared."""
        return np.zeros(len(column), dtype=bool) if self.unknown else absent(column, self.values)

    def encoded(self, column: pd.Series, where: str) -> Tensor:
        """One-hot, float32 `[N, len(names)]`."""
        return torch.nn.functional.one_hot(self.ids(column, where), len(self.names)).float()

    def feature_names(self, name: str) -> tuple[str, ...]:
        """Names of the encoded columns, such as `ward=A`."""
        return tuple(f"{name}={category}" for category in self.names)

    def example(self) -> str | float:
        """A value of the first category or band."""
        return self.minimum if self.edges else self.values[0]

    @property
    def numeric(self) -> bool:
        """Whether the column holds numbers."""
        return bool(self.edges)

    def _known_ids(self, column: pd.Series, where: str) -> Tensor:
        otherwise = "" if self.unknown else self._otherwise
        if not self.edges:
            names = self.categories or tuple(self.map)
            return codes(column, names, where, values=self.map, otherwise=otherwise)
        found = numbers(column, self.minimum, self.maximum, where, clip=self.clip, otherwise=otherwise)
        return band_ids(found, self.edges)

    @property
    def _otherwise(self) -> str:
        """What else can be done about an invalid value. For features it is empty, and said where the table is read."""
        return ""


class Categorical(Named):
    """A feature with declared categories, encoded one-hot."""

    kind: Literal["categorical"] = "categorical"


class Bounded(Plain):
    """A column of numbers with declared bounds.

    Attributes:
        minimum, maximum: public bounds, known from elsewhere and not taken from the table.
        clip: a number beyond the bounds becomes the bound, instead of being an error.
    """

    minimum: Number = 0.0
    maximum: Number
    clip: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.minimum < self.maximum:
            raise ValueError("minimum must be less than maximum")
        if not math.isfinite(self.maximum - self.minimum):  # every value would be scaled to 0
            raise ValueError("minimum and maximum are too far apart")
        return self

    @property
    def numeric(self) -> bool:
        """Whether the column holds numbers."""
        return True

    def missed(self, column: pd.Series) -> np.ndarray:
        """Boolean `[N]`: the missing values."""
        return absent(column)

    def values(self, column: pd.Series, where: str) -> Tensor:
        """The numbers within their bounds, float64 `[N]`.

        Raises:
            EquidpError: a cell is no number, or is beyond the bounds without `clip`.
        """
        return numbers(column, self.minimum, self.maximum, where, clip=self.clip)


class Numeric(Bounded):
    """A feature with declared bounds, scaled to 0..1 by them.

    Attributes:
        column: the column to read; the feature's own name where empty.
        missing: the number that stands for a missing one; a second feature then tells which were missing.
    """

    kind: Literal["numeric"] = "numeric"
    column: str = ""
    missing: Number | None = None

    @model_validator(mode="after")
    def _missing_within(self) -> Self:
        if self.missing is not None and not self.minimum <= self.missing <= self.maximum:
            raise ValueError("missing must lie within minimum and maximum")
        return self

    def missed(self, column: pd.Series) -> np.ndarray:
        """Boolean `[N]`: the missing values for which nothing is declared."""
        return absent(column) if self.missing is None else np.zeros(len(column), dtype=bool)

    def encoded(self, column: pd.Series, where: str) -> Tensor:
        """Scaled to 0..1, float32 `[N, 1]`; `[N, 2]` with the indicator of a missing number."""
        gone = absent(column) if self.missing is not None else np.zeros(len(column), dtype=bool)
        values = self.values(column.mask(gone, self.missing), where)
        scaled = (values - self.minimum) / (self.maximum - self.minimum)
        indicator = [torch.from_numpy(gone)] if self.missing is not None else []
        return torch.stack([scaled, *indicator], dim=1).float()

    def example(self) -> float:
        """The number in the middle."""
        return (self.minimum + self.maximum) / 2

    def feature_names(self, name: str) -> tuple[str, ...]:
        """Names of the encoded columns: `weight`, and `weight=missing`."""
        return (name,) if self.missing is None else (name, f"{name}=missing")


class OfGroup(Plain):
    """A feature that is one of the declared groupings, one-hot: a sensitive column that is asked for by name.

    Attributes:
        group: the grouping; the feature's own name where empty.
    """

    kind: Literal["group"] = "group"
    group: str = ""


Column = Annotated[Categorical | Numeric | OfGroup, Field(discriminator="kind")]


def beyond(column: pd.Series, declared: Named | Bounded) -> np.ndarray:
    """Boolean `[N]`: the numbers that are set to a bound."""
    if not (declared.clip and declared.numeric):
        return np.zeros(len(column), dtype=bool)
    values = as_numbers(column)
    return np.isfinite(values) & ((values < declared.minimum) | (values > declared.maximum))


def refuse_guessed(column: pd.Series, declared: Named | Numeric, thousands: str, where: str) -> None:
    """Refuse cells that guessing the types of a csv file may have changed: `NA` to a missing value, `1.234` to 1.234.

    Raises:
        EquidpError: there is such a cell in a column where this text is declared as something else.
    """
    cells = column.to_numpy(dtype=object)
    floats = np.array([isinstance(cell, float) for cell in cells], dtype=bool)
    missing = np.array([cell != cell for cell in cells[floats]], dtype=bool)
    if declared.numeric and thousands == ".":
        changed, may_be = ~missing, "may be another number, as data.options.thousands is '.'"
    elif isinstance(declared, Named) and declared.unknown and (own := _read_as_missing(declared)):
        changed, may_be = missing, f"may be {' or '.join(map(repr, own))} or a missing value"
    else:
        return
    if changed.any():
        bad = np.zeros(len(column), dtype=bool)
        bad[np.flatnonzero(floats)[changed]] = True
        raise RefusedCellsError(
            column,
            lambda at: (
                f"{place(where, column, column.index[at])}: {cells[at]} {may_be}; give the column as text, "
                "as the file has it (pandas.read_csv with dtype=str, keep_default_na=False)."
            ),
            bad,
        )


def _read_as_missing(declared: Named) -> list[str]:
    return [text for text in declared.values if text.lower() in MISSING - {UNKNOWN}]


def encode(frame: pd.DataFrame, columns: Mapping[str, Named | Numeric], where: str) -> Tensor:
    """Features of a table, float32 `[N, len(feature_names(columns))]` in 0..1: one-hot categories and scaled numbers.

    Raises:
        EquidpError: a column is missing or a value breaks its declaration.
    """
    require(frame, (declared.column or name for name, declared in columns.items()), where)
    encoded = [declared.encoded(frame[declared.column or name], where) for name, declared in columns.items()]
    return torch.cat(encoded, dim=1)


def refused_in(checks: Iterable[tuple[pd.Series, Callable[[pd.Series], object]]]) -> dict[Any, str]:
    """Return, by its label, each refused row, with the sentence of the first column that is refused for it."""
    found: dict[Any, str] = {}
    for column, check in checks:
        try:
            check(column)
        except RefusedCellsError as error:
            found = error.each() | found
    return found


def feature_names(columns: Mapping[str, Named | Numeric]) -> tuple[str, ...]:
    """Names of `encode`'s columns, such as `age` and `workclass=Private`."""
    return tuple(one for name, declared in columns.items() for one in declared.feature_names(name))


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
