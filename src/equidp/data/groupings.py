"""Groupings: groups of records declared over the columns of a table, by category or by numeric band."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import model_validator
from torch import Tensor

from equidp.data.cells import (
    WHOLE,
    absent,
    as_number,
    as_numbers,
    as_written,
    composed,
    looks,
    looks_as_id,
    place,
    require,
    row_of,
)
from equidp.data.columns import Named
from equidp.data.membership import identities
from equidp.errors import UNSHOWN, EquidpError
from equidp.options import Declared

CUT_OFF = re.compile(r"-?\d([.,]\d+)?[eE]\+\d+")
"""A long number as spreadsheets write it, without its last digits."""

DASH = re.compile("[\u2010-\u2015\u2212]")

SPELLING = 3
"""Increase it with every change of how `id_names` spells ids, because a person may then be in another part."""


def check_shown(names: Iterable[str]) -> None:
    """Refuse names with control characters, because a table, a page or a terminal would show something else.

    Raises:
        ValueError: for such a name, to be reported by the settings class.
    """
    for name in names:
        if found := UNSHOWN.search(name):
            raise ValueError(f"the name {name!r} holds the control character {found[0]!r}; write it without")


class Grouping(Named, Declared):
    """One declared grouping, declared as a `Named` column."""

    @model_validator(mode="after")
    def _shown(self) -> Grouping:
        check_shown(self.names)
        return self

    @property
    def _kind(self) -> str:
        return "groups"

    @property
    def _otherwise(self) -> str:
        return ", or declare the grouping with `unknown: true`"


def group_ids(frame: pd.DataFrame, groupings: Mapping[str, Grouping], where: str) -> dict[str, Tensor]:
    """Group ids of every declared grouping.

    Raises:
        EquidpError: a column is missing or a value lies outside its declaration.
    """
    columns = {name: grouping.column or name for name, grouping in groupings.items()}
    require(frame, columns.values(), where)
    return {name: grouping.ids(frame[columns[name]], where) for name, grouping in groupings.items()}


def group_names(groupings: Mapping[str, Grouping]) -> dict[str, tuple[str, ...]]:
    """Group names of every declared grouping."""
    return {name: grouping.names for name, grouping in groupings.items()}


def unit_ids(names: pd.Series) -> Tensor:
    """One number per distinct id of `id_names`, int64 `[N]`, in order of first appearance."""
    return torch.tensor(pd.factorize(names)[0], dtype=torch.int64)


def owners(
    frame: pd.DataFrame, unit: str, own: str, where: str, *, guessed: bool = False, decimal: str = "."
) -> dict[str, Any]:
    """Return `unit`, `unit_identity` and `identity` of Records from two columns of a table.

    Args:
        frame: the table.
        unit: column of the units' ids; empty for none.
        own: column of the rows' own ids; empty for none.
        where: the table, for messages.
        guessed: as of `id_names`.
        decimal: as of `id_names`.

    Raises:
        EquidpError: as `id_names`.
    """
    found: dict[str, Any] = {}
    if unit:
        names = id_names(frame[unit], where, guessed=guessed, decimal=decimal)
        found = {"unit": unit_ids(names), "unit_identity": identities(names)}
    if own:
        found["identity"] = identities(id_names(frame[own], where, "id", guessed=guessed, decimal=decimal))
    return found


def nearly_alike(column: pd.Series) -> int:
    """Count the ids that differ from an earlier one only in capital letters or dashes.

    They are not refused, because ids of random letters may differ so.
    """
    ids = column.drop_duplicates().map(lambda name: looks(str(name))).drop_duplicates()
    return int(ids.map(lambda name: DASH.sub("-", name.casefold())).duplicated().sum())


def id_names(
    column: pd.Series, where: str, of: str = "unit", *, guessed: bool = False, decimal: str = "."
) -> pd.Series:
    """Return a column's ids, each in one spelling.

    Accents are written in one way; otherwise one person could be two units, and have twice the influence. Whole numbers
    of a typed table are written in one way too, because otherwise one row could rename everybody: pandas turns them
    into floats if one is missing, and a writer of parquet gives all decimals the places that the longest one needs.

    Args:
        column: the ids.
        where: the table, for messages.
        of: whose ids they are, for messages.
        guessed: whether types were guessed column by column. Then numbers in text are written in one way too, because
            the other rows decide whether `007` is text or 7.
        decimal: the table's decimal sign, for comparing ids as numbers. Names keep this sign.

    Raises:
        EquidpError: a row has no id, or a long id that a spreadsheet or a float shortened: rows of many persons would
            then be protected as one person. Or two ids look alike, or are the same number, such as `17` and `17.0`:
            one person may have both.
    """
    if (gone := absent(column)).any():
        raise EquidpError(
            f"{place(where, column, column.index[int(gone.argmax())])}: the {of} is missing. Give every "
            "row one, or an id of its own."
        )
    floats = np.array([isinstance(cell, float | np.floating) for cell in column.to_numpy(dtype=object)], dtype=bool)
    if floats.any() and (long := floats & (np.abs(as_numbers(column)) >= WHOLE)).any():
        at = int(long.argmax())
        raise EquidpError(
            f"{place(where, column, column.index[at])}: the number {as_written(column.iloc[at])} may be "
            "several ids, as a float has no more digits; give the ids as text."
        )
    names = column.astype(str).str.strip().map(composed)
    numbers = floats | np.array([isinstance(cell, Decimal) for cell in column.to_numpy(dtype=object)], dtype=bool)
    if numbers.any():
        names = names.mask(numbers, names.map(as_number))
    ids = names.drop_duplicates()
    if (cut := ids.str.fullmatch(CUT_OFF)).any():
        raise EquidpError(
            f"{place(where, ids, ids.index[int(cut.to_numpy().argmax())])}: {ids[cut].iloc[0]!r} is "
            "what a spreadsheet leaves of a long id, and several may look alike; export the ids as text."
        )
    shown = ids.map(lambda name: looks_as_id(name, decimal))
    if (again := shown.duplicated()).any():
        second = int(again.to_numpy().argmax())
        first = int((shown == shown.iloc[second]).to_numpy().argmax())
        raise EquidpError(
            f"{place(where, ids, ids.index[second])}: {ids.iloc[second]!r} and {ids.iloc[first]!r} "
            f"({row_of(ids.index, ids.index[first])}) may be one id in two spellings; write each id in one way."
        )
    return names.map(as_number) if guessed else names
