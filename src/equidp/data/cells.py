"""Cells of a table: whether a cell is missing, which category or number it is, and whether two texts look alike."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from numbers import Number as AnyNumber
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from equidp.errors import EquidpError, listed_names, missing_column, shortened, unknown_name

UNKNOWN = "unknown"
MISSING = frozenset({"", "?", "-", ".", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "\\n", "none", UNKNOWN})
"""Texts that tables write for a missing value, compared in lower case."""

NUMERAL = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,9}))?")

NUMBER = re.compile(r"0|(-?\d+)e(?:(\d{1,3})|-?\d+)")
"""The form in which `looks_as_id` writes a number."""

SHOWN = 5
"""Number of further invalid values that a message names."""

SEVERAL = -2
"""Position of a cell that may be one of several declared categories."""

LINE, ROW, SENT = "line {}", "row {} (the first below the header is 1)", "row {} of those sent (the first is 0)"
"""Names of a table's index, which say how its rows are counted."""

WHOLE = 2.0**53
"""From here on, neighbouring whole numbers can be the same float."""


class RefusedCellsError(EquidpError):
    """Cells that break their column's declaration. The message is about the first one, and names values of others.

    Args:
        column: the column.
        said: returns the sentence on one cell alone, by its position.
        bad: boolean `[N]`, which cells are refused.
        more: text after the sentence on the first cell.
    """

    def __init__(self, column: pd.Series, said: Callable[[int], str], bad: np.ndarray, more: str = "") -> None:
        self._labels, self._said, self._bad = column.index, said, np.flatnonzero(bad).tolist()
        self.first = column.iloc[self._bad[0]]
        """The first refused cell."""
        self.missing = _is_absent(self.first, {""})
        """Whether it is empty."""
        super().__init__(said(self._bad[0]) + more)

    def each(self) -> dict[Any, str]:
        """Every refused cell's own sentence, by its row's label."""
        return {self._labels[at]: self._said(at) for at in self._bad}


def require(frame: pd.DataFrame, names: Iterable[str], where: str) -> None:
    """Raise EquidpError where columns do not exist; the message names them, the file and the nearest existing name."""
    missing = [name for name in dict.fromkeys(names) if name not in frame.columns]
    if missing:
        raise missing_column(where, missing[0], map(str, frame.columns), missing[1:])


def cells(
    frame: pd.DataFrame,
    missing: Collection[str] | Mapping[str, Collection[str]] = (),
    numeric: Collection[str] = (),
) -> pd.DataFrame:
    """Return the table with stripped text; numbers and truth values keep their type, so `010` is not 10.

    Args:
        frame: the table.
        missing: further texts, or numbers as text, that mean a missing value: in every column, or by the column's name.
        numeric: columns of numbers, in which the text `-1.0` counts as -1 too. Where types are guessed, one row can
            turn a whole column into text, and this must not decide which other cells are missing.
    """

    def column(one: pd.Series) -> pd.Series:
        texts = missing.get(str(one.name), ()) if isinstance(missing, Mapping) else missing
        sought = {*texts, *(number for text in texts if (number := number_in(text)) is not None)}
        by_value = one.name in numeric

        def cell(value: Any) -> Any:
            value = value.strip() if isinstance(value, str) else value
            known = sought and isinstance(value, str | AnyNumber) and _key(value, by_value=by_value) in sought
            return None if known else value

        return one if isinstance(one.dtype, np.dtype) and one.dtype.kind in "iufb" and not sought else _each(one, cell)

    return frame.apply(column) if len(frame.columns) else frame


def absent(column: pd.Series, names: Iterable[str] = ()) -> np.ndarray:
    """Boolean `[N]`: which cells are missing. A declared name, one of `names`, is never missing."""
    missing = MISSING - {name.lower() for name in names}
    return np.array([_is_absent(value, missing) for value in column.to_numpy(dtype=object)], dtype=bool)


def row_of(index: pd.Index, label: object) -> str:
    """A row for a message, counted as the name of the table's index says."""
    counted = index.name if index.name in (LINE, ROW, SENT) else "row {} (of the table's index)"
    return str(counted).format(label)


def place(where: str, column: pd.Series, label: object) -> str:
    """A cell for a message: its table, row and column; `label` is the row's in the column's index."""
    return f"{where}, {row_of(column.index, label)}, column {column.name!r}"


def composed(name: object) -> str:
    """The text with each accented letter as one character; a Mac may write it as two."""
    return unicodedata.normalize("NFC", str(name))


def looks(name: str) -> str:
    """Return what a person sees of a text: compatible signs as one (NFKC), blanks as one, no signs without a width."""
    shown = (sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) != "Cf")
    return " ".join("".join(shown).split())


def looks_as_id(name: str, decimal: str = ".") -> str:
    """As `looks`, with one text for all ways to write a number: `017`, `17.0` and `1.7e1` are 17."""
    shown = looks(name)
    found = NUMERAL.fullmatch(shown.replace(decimal, "."))
    if found is None or not (found[2] or found[3]):
        return shown
    sign, whole, part, power = found[1].strip("+"), found[2], found[3] or "", int(found[4] or 0)
    digits = (whole + part).lstrip("0")
    kept = digits.rstrip("0")
    return f"{sign}{kept}e{power - len(part) + len(digits) - len(kept)}" if kept else "0"


def as_number(name: str) -> str:
    """Write a number in one way, a whole number by its digits: `007` and `7.0` are `7`. Other text stays as it is."""
    shown = looks_as_id(name)
    found = NUMBER.fullmatch(shown)
    if found is None:
        return name
    return f"{found[1]}{'0' * int(found[2])}" if found[2] else shown


def refuse_alike(names: Iterable[str], kind: str) -> None:
    """Refuse two names that are the same, or that a person cannot tell apart.

    Raises:
        ValueError: for such names, to be reported by the settings class; `kind` is the word for them.
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.get(looks(name))
        if other is not None:
            same = f"two {kind} have the same name: {name!r}"
            raise ValueError(same if other == name else f"two {kind} look alike: {other!a} and {name!a}")
        seen[looks(name)] = name


def codes(
    column: pd.Series,
    categories: Sequence[str],
    where: str,
    *,
    values: Mapping[str, Sequence[str]] | None = None,
    otherwise: str = "",
) -> Tensor:
    """Return the position of each cell in the declared categories, int64 `[N]`.

    Text is compared as written. A number or a truth value, as a typed table has them, is compared by value. A float of
    2⁵³ or more stands for several whole numbers, so it is taken for none of them.

    Args:
        column: the cells.
        categories: declared names, in order.
        where: the table, for messages.
        values: the texts that the table holds for each category. A category that is not named here is its own text.
        otherwise: what else can be done about an undeclared value, for messages.

    Raises:
        EquidpError: an undeclared value, or a number that can be two of the texts, as 10 can be `10` and `010`; the
            message names file, row and column.
    """
    declared = _Texts([(text, i) for i, name in enumerate(categories) for text in (values or {}).get(name, (name,))])
    found = np.array([declared.position(value) for value in column.to_numpy(dtype=object)], dtype=np.int64)

    def said(bad: int) -> str:
        given, at = column.iloc[bad], f"{place(where, column, column.index[bad])}:"
        if _is_absent(given, {""}):
            return f"{at} a category is missing; give one of {listed_names(categories)}{otherwise}."
        if found[bad] == SEVERAL:
            texts = list(map(repr, declared.alike(given)))
            texts += ["another"] if len(texts) == 1 else []
            sort = "truth value" if isinstance(given, bool | np.bool_) else "number"
            return (
                f"{at} the {sort} {as_written(given)} may be {' or '.join(texts)}; give the column as text (pandas: "
                "dtype=str)."
            )
        return str(unknown_name(f"category in {at}", given, declared.texts))

    if (bad := found < 0).any():
        named = column.iloc[first := int(np.argmax(bad))]
        unknown = found[first] != SEVERAL and not _is_absent(named, {""})
        more = _others(column[found == -1], named, "which are unknown too") if unknown else ""
        raise RefusedCellsError(column, said, bad, more)
    return torch.from_numpy(found)


class _Texts:
    """The texts that a table may hold for the declared categories, each with its category's position."""

    def __init__(self, written: Sequence[tuple[str, int]]) -> None:
        self.texts = [text for text, _ in written]
        self._by_text = {composed(text): i for text, i in written}
        self._by_truth: dict[bool, int] = {}
        self._by_number: dict[Decimal, int] = {}
        for text, i in written:
            if (truth := {"true": True, "false": False}.get(text.lower())) is not None:
                self._by_truth[truth] = i if self._by_truth.get(truth, i) == i else SEVERAL
            if (number := number_in(text)) is not None:
                self._by_number[number] = i if self._by_number.get(number, i) == i else SEVERAL

    def position(self, value: Any) -> int:
        """Return the position of a cell's category; `SEVERAL` if it may be more than one, -1 if it is none."""
        if isinstance(value, str):
            return self._by_text.get(composed(value), -1)
        if isinstance(value, bool | np.bool_):
            return self._by_truth.get(bool(value), -1)
        if isinstance(value, float | np.floating) and abs(float(value)) >= WHOLE:
            return SEVERAL if self.alike(value) else -1
        if isinstance(value, AnyNumber):
            number = number_in(str(value))
            return -1 if number is None else self._by_number.get(number, -1)
        return -1 if _is_absent(value, MISSING) else self._by_text.get(composed(value), -1)

    def alike(self, value: Any) -> list[str]:
        """Return the texts that a number, in floating point, or a truth value may stand for."""
        if isinstance(value, bool | np.bool_):
            return [text for text in self.texts if text.lower() == str(value).lower()]
        numbered = ((text, number_in(text)) for text in self.texts)
        return [text for text, number in numbered if number is not None and float(number) == float(value)]


def numbers(
    column: pd.Series, minimum: float, maximum: float, where: str, *, clip: bool = False, otherwise: str = ""
) -> Tensor:
    """Return the column as float64 `[N]`.

    Args:
        column: the cells.
        minimum: lower bound.
        maximum: upper bound.
        where: the table, for messages.
        clip: whether a number beyond a bound becomes the bound.
        otherwise: what else can be done about an invalid value, for messages.

    Raises:
        EquidpError: a cell is no finite number, or is outside the declared bounds.
    """
    values = as_numbers(column)
    good = np.isfinite(values) & (clip | ((values >= minimum) & (values <= maximum)))

    def said(bad: int) -> str:
        given = column.iloc[bad]
        what = "is not a number" if not np.isfinite(values[bad]) else "is out of bounds"
        what = "a number is missing" if _is_absent(given, {""}) else f"{as_written(given)} {what}"
        return (
            f"{place(where, column, column.index[bad])}: {what}; give a number from {minimum:g} to {maximum:g}"
            f"{otherwise}."
        )

    if not good.all():
        others = _others(column[~np.isfinite(values)], column.iloc[int(np.argmin(good))], "which are no numbers")
        raise RefusedCellsError(column, said, ~good, others)
    return torch.tensor(values.clip(minimum, maximum))


def as_numbers(column: pd.Series) -> np.ndarray:
    """Return the column as float64 `[N]`, NaN where a cell is no number."""
    read = None
    with contextlib.suppress(OverflowError):  # raised for a whole number beyond every float
        read = pd.to_numeric(column, errors="coerce")
    if read is None or read.dtype.kind == "c":
        read = pd.to_numeric(_each(column, lambda value: None if _beyond(value) else value), errors="coerce")
    return read.to_numpy(dtype=np.float64, na_value=np.nan)


def _beyond(value: object) -> bool:
    """Whether a float cannot hold a value: it is too large, or has an imaginary part, which would be lost silently."""
    return isinstance(value, complex | np.complexfloating) or (
        isinstance(value, int) and value.bit_length() > sys.float_info.max_exp
    )


def with_points(column: pd.Series, decimal: str, thousands: str, where: str) -> pd.Series:
    """Return the column with numbers in text, written with these signs, as Python writes them.

    Raises:
        EquidpError: a number is written in another way. If it were accepted, it could be read as another number.
    """
    group = rf"\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+|" if thousands else ""
    wanted = re.compile(rf"[+-]?(?:{group}\d+)?(?:{re.escape(decimal)}\d*)?(?:[eE][+-]?\d+)?")

    def cell(value: Any) -> Any:
        if not isinstance(value, str) or not wanted.fullmatch(value):
            return value
        return (value.replace(thousands, "") if thousands else value).replace(decimal, ".")

    def said(bad: int) -> str:
        signs = f"{decimal!r}" + (f" and thousands {thousands!r}" if thousands else "")
        return (
            f"{place(where, column, column.index[bad])}: {column.iloc[bad]!r} is not written with the decimal sign "
            f"{signs}; correct it, or data.options.decimal and data.options.thousands."
        )

    given = column.to_numpy(dtype=object)
    otherwise = [isinstance(of, str) and not wanted.fullmatch(of) and number_in(of) is not None for of in given]
    if any(otherwise):
        raise RefusedCellsError(column, said, np.array(otherwise))
    return _each(column, cell)


def number_in(text: str) -> Decimal | None:
    """Return the exact finite number that a text is; None if it is none."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _others(invalid: pd.Series, named: object, what: str) -> str:
    """Return a sentence that names the other invalid values, so that one run finds all; empty if there are none."""
    texts = list(dict.fromkeys(as_written(value) for value in invalid if not _is_absent(value, {""})))
    others = [text for text in texts if text != as_written(named)]
    more = f" and {len(others) - SHOWN:,} more" if len(others) > SHOWN else ""
    return f" Other rows hold {', '.join(others[:SHOWN])}{more}, {what}." if others else ""


def as_written(value: object) -> str:
    """A cell for a message."""
    return shortened(repr(value.item() if isinstance(value, np.generic) else value))


def _each(column: pd.Series, change: Any) -> pd.Series:
    changed = [change(value) for value in column.to_numpy(dtype=object)]
    return pd.Series(changed, index=column.index, name=column.name, dtype=object)


def _key(value: Any, *, by_value: bool) -> Any:
    """Return a cell in a form that compares by value. Text does so only with `by_value`, and if it is a number."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, str) and not by_value):
        return value
    number = number_in(str(value))
    return value if number is None and isinstance(value, str) else number


def _is_absent(value: object, missing: Collection[str]) -> bool:
    """Whether a cell is empty: a text among `missing`, or a value that tables and databases use for nothing."""
    if isinstance(value, str):
        return value.lower() in missing
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))
