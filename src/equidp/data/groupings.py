"""Groupings: groups of records declared over the columns of a table, by category or by numeric band."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from pydantic import model_validator
from torch import Tensor

from equidp.data.columns import band_ids, bands, codes, composed, numbers, require
from equidp.data.membership import identities
from equidp.errors import UNSHOWN, EquidpError
from equidp.options import Declared, Number

UNKNOWN = "unknown"
MISSING = frozenset({"", "?", "-", ".", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "\\n", "none", UNKNOWN})
"""What tables write for a missing value, compared in lower case."""

WHOLE = re.compile(r"^(-?)0*(\d+)(?:\.0+)?$")
"""A whole number as an id, however it is written."""

CUT_OFF = re.compile(r"-?\d(\.\d+)?[eE]\+\d+")
"""A long number as spreadsheets write it, with its last digits gone."""


def check_shown(names: Iterable[str]) -> None:
    """Refuse names with control characters: a table, a page or a terminal would show something else.

    Raises:
        ValueError: for such a name, to be reported by the settings class.
    """
    for name in names:
        if found := UNSHOWN.search(name):
            raise ValueError(f"the name {name!r} holds the control character {found[0]!r}; write it without")


class Grouping(Declared):
    """One declared grouping.

    Attributes:
        column: the column it reads; the grouping's own name where empty.
        categories: group names, as the column holds them.
        edges: for numbers instead: where one band ends and the next begins.
        minimum, maximum: bounds of the numbers.
        unknown: missing values form a group of their own, `unknown`, instead of being an error.
    """

    column: str = ""
    categories: tuple[str, ...] = ()
    edges: tuple[Number, ...] = ()
    minimum: float = 0.0
    maximum: float = 1e9
    unknown: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> Grouping:
        if bool(self.categories) == bool(self.edges):
            raise ValueError("give either categories or edges")
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError("edges must rise")
        if not self.minimum < self.maximum:
            raise ValueError("minimum must be less than maximum")
        if len(set(self.names)) < len(self.names):
            raise ValueError("two groups have the same name")
        check_shown(self.categories)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Group names, in id order; `unknown` comes last."""
        named = self.categories or bands(self.edges)
        return (*named, UNKNOWN) if self.unknown and UNKNOWN not in named else named

    def ids(self, column: pd.Series, where: str) -> Tensor:
        """Group of each value, int64 `[N]`.

        Raises:
            EquidpError: a value outside the declaration.
        """
        if not self.unknown:
            return self._known_ids(column, where)
        missing = MISSING - {name.lower() for name in self.categories}  # what is declared is never missing
        absent = torch.tensor([str(value).strip().lower() in missing for value in column], dtype=torch.bool)
        ids = torch.full((len(column),), self.names.index(UNKNOWN), dtype=torch.int64)
        ids[~absent] = self._known_ids(column[~absent.numpy()], where)
        return ids

    def _known_ids(self, column: pd.Series, where: str) -> Tensor:
        otherwise = "" if self.unknown else ", or declare the grouping with `unknown: true`"
        if self.categories:
            return codes(column, self.categories, where, otherwise=otherwise)
        return band_ids(numbers(column, self.minimum, self.maximum, where, otherwise=otherwise), self.edges)


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


def unit_ids(column: pd.Series, where: str) -> Tensor:
    """One number per distinct id, int64 `[N]`, in order of first appearance.

    Raises:
        EquidpError: as `id_names`.
    """
    return torch.tensor(pd.factorize(id_names(column, where))[0], dtype=torch.int64)


def owners(frame: pd.DataFrame, unit: str, own: str, where: str) -> dict[str, Any]:
    """`unit`, `unit_identity` and `identity` of Records by two columns of a table; an empty name is no column."""
    found: dict[str, Any] = {}
    if unit:
        found = {"unit": unit_ids(frame[unit], where), "unit_identity": identities(id_names(frame[unit], where))}
    if own:
        found["identity"] = identities(id_names(frame[own], where, "id"))
    return found


def id_names(column: pd.Series, where: str, of: str = "unit") -> pd.Series:
    """A column's ids, each in one spelling, `of` says whose ids they are, for messages.

    Accents are written in one way; otherwise one person could be two units, and have twice the influence.

    Raises:
        EquidpError: a row has no id, or a long id that a spreadsheet shortened: rows of many persons would then be
            protected as one person. Or two ids are the same number, such as `17` and `17.0`: one person may have both.
    """
    names = column.astype(str).str.strip().map(composed)
    absent = column.isna() | names.str.lower().isin(MISSING)
    if absent.any():
        row = column.index[int(absent.to_numpy().argmax())]
        raise EquidpError(
            f"{where}, row {row}, column {column.name!r}: the {of} is missing. Give every row one, or an id of its own."
        )
    ids = names.drop_duplicates()
    if (cut := ids.str.fullmatch(CUT_OFF)).any():
        raise EquidpError(
            f"{where}, row {ids.index[int(cut.to_numpy().argmax())]}, column {column.name!r}: {ids[cut].iloc[0]!r} is "
            "what a spreadsheet leaves of a long id, and several may look alike; export the ids as text."
        )
    numbers_in = ids.str.replace(WHOLE, r"\1\2", regex=True)
    if (again := numbers_in.duplicated()).any():
        second = int(again.to_numpy().argmax())
        first = int((numbers_in == numbers_in.iloc[second]).to_numpy().argmax())
        raise EquidpError(
            f"{where}, row {ids.index[second]}, column {column.name!r}: {ids.iloc[second]!r} and {ids.iloc[first]!r} "
            f"(row {ids.index[first]}) may be one id in two spellings; write each id in one way."
        )
    return names
