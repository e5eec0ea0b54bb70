"""A preset for a table, drafted from its columns' names and types alone.

No category and no bound is taken from the table, because each would be a release. Places that only the codebook can
fill are marked.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from equidp.data.cells import with_points
from equidp.data.raw_files import content
from equidp.data.tables import (
    EXCEL,
    FEATHER,
    PARQUET,
    SEPARATORS,
    SQLITE,
    read_binary,
    read_entry,
    read_query,
    workbook,
)
from equidp.errors import EquidpError, missing_column
from equidp.options import MARK

SENSITIVE = re.compile(
    r"sex|gender|geschlecht|race|ethnic|religion|national|disab|marital|(^|_)age(_|$|group)|^(alter|âge|edad|età)\b"
    r"|familienstand",
    re.IGNORECASE,
)
IDENTIFYING = re.compile(
    r"(^|[_.\s-])(id|nr|no|key|uuid)$|^(id|name|patient|person|subject|index)$"
    r"|^(row|record|case|patient|person|subject)[_.\s-]?(index|number)$",
    re.IGNORECASE,
)
"""Names of identifiers. `index` counts alone or after a word such as `patient`: a body mass index is a feature."""
IMAGE = re.compile(
    r"(^|[_.\s-])(image|img|photo|picture|bild|foto)s?([_.\s-]?(name|file|path))?$|^file[_.\s-]?(name|path)$",
    re.IGNORECASE,
)
"""Columns of image file names. An index of images, for example, is an id."""
DATE = r"\d{1,2}\.\d{1,2}\.\d+"
"""A date whose numbers are separated by points."""
DATES = re.compile(rf"({DATE}|\d{{1,2}}[/-]\d{{1,2}}[/-]\d{{2,4}}|\d{{4}}([-/.])\d{{1,2}}\2\d{{1,2}})([T ].*)?")

DISTINCT, FEW = 0.99, 100
"""A column in which at least the share DISTINCT of the values are different is like an identifier. With fewer than FEW
rows this is not judged."""

PLAIN = (".", "")
SIGNS = (PLAIN, (",", ""), (",", "."), (".", ","), *((decimal, one) for decimal in ",." for one in " \u00a0\u202f'’"))
"""Signs of decimals and of thousands, Python's first. France writes spaces that do not break, and thin ones;
Switzerland writes apostrophes."""

ROWS = 5000
"""Number of rows from which types are read."""

DRAFT = """\
# Drafted by `kedro new-dataset` from names and types of columns; no value of the table is in it. But types, and which
# columns are left out, follow from cells: one row may change them, and they go out with a model. Go by the codebook.
# Replace every {mark} by what it says: bounds or categories read from data are a release. The same command checks.
presets:
  {name}:
    data:
      source: table
      groups: {reported}          # what is reported by; a product too: "sex*age_band"
{split}      options:
{table}{label}\
        missing: error          # `drop` leaves out rows with a missing feature or label; or keep them: `unknown: true`
                                # of categories, `missing: 75` of a number
{unit}        features:
{features}{remarks}        groups:
{groups}    model: {{name: logistic}}
    privacy: {{epsilon: 3.0, delta: 1.0e-5{protected}}}          # δ below 1 / the number of rows
    training: {{epochs: 20, batch_size: 256, learning_rate: 0.1}}          # the check proposes a rate
"""


ONE_LABEL = """\
        label: {label}
        classes: [{mark}]          # values of the label, in label order, each in quotes
        # ordered: true          where this order counts, as of grades; of three classes or more
        # target: {{minimum: 0, maximum: 100}}          in place of classes, if the label is a number to be predicted
        # class_map: {{bad: ["1"], good: ["2"]}}        names for coded values; class_edges: [50] cuts a number
"""

UNTOLD = """\
        # unit: {id}          the column whose rows are one person's; name it as `split_by` beside
                                # `groups`, too, and as `unit` in `privacy`: without, ε is of one row
"""


def draft(path: Path, raw_dir: Path, name: str, label: tuple[str, ...], *, unit: str = "", sql: str = "") -> str:
    """Return the preset's text for a table below `raw_dir`; the label is the last column unless columns are named.

    Raises:
        EquidpError: the file is missing, is not below `raw_dir`, is no table to draft from, or has no such column.
    """
    if path.is_dir():
        raise EquidpError(f"{path} is a folder: name a table. For images write a preset of data.source: image_folder.")
    if not path.is_file():
        raise EquidpError(f"{path} is missing: name a csv, parquet or feather file.")
    if path.suffix.lower() in EXCEL:
        raise EquidpError(workbook(path, "name that: kedro new-dataset --catalog sheet"))
    if not path.resolve().is_relative_to(raw_dir.resolve()):
        raise EquidpError(
            f"{path} is not below raw_dir ({raw_dir}): move it there, or set EQUIDP_RAW_DIR to the folder it is in."
        )
    if not sql and _begins(path, SQLITE):
        raise EquidpError(f'{path} is an SQLite database: add a query, such as --sql "SELECT * FROM visits".')
    lines = [f"path: {_text(path.resolve().relative_to(raw_dir.resolve()).as_posix())}"]
    if sql:
        more, columns = [f"sql: {json.dumps(sql, ensure_ascii=False)}"], _kinds(read_query(sql, path))
    else:
        more, columns = _columns(path)
    return _drafted(str(path), [*lines, *more], columns, name, label, unit)


def draft_entry(entry: str, load: Callable[[str], object], name: str, label: tuple[str, ...], unit: str) -> str:
    """Return the preset's text for the table of an entry of the Kedro catalog, which `load` loads.

    Raises:
        EquidpError: there is no such entry, or it gives no table, or a table without such a column.
    """
    columns = _kinds(read_entry(load, entry))
    return _drafted(entry, [f"catalog: {_text(entry)}"], columns, name, label, unit)


def _drafted(
    where: str, table: list[str], columns: dict[str, str], name: str, label: tuple[str, ...], unit: str
) -> str:
    for column in filter(None, (*label, unit)):
        if column not in columns:
            raise missing_column(where, column, columns)
    possible = [column for column in columns if column != unit]
    if not possible:
        lack = f"no column but the unit {unit!r}" if unit else "no column"
        raise EquidpError(f"{where} has {lack}, so there is nothing to predict: name a table with more columns.")
    guess = "" if label else f"          # {MARK}: the last column; or name another"
    label = tuple(dict.fromkeys(label)) or (possible[-1],)
    others = [column for column in columns if column not in (*label, unit)]
    groups, ids, images = (list(filter(of.search, others)) for of in (SENSITIVE, IDENTIFYING, IMAGE))
    left = [column for column in others if column not in (*groups, *ids, *images)]
    distinct, dates = ([column for column in left if columns[column] == kind] for kind in ("distinct", "date"))
    remarks = (
        (ids, "it is called like an identifier", ""),
        (distinct, "nearly every row has a value of its own, as of an identifier or a text", ""),
        (dates, "it is a date", ". Write a column of your own from it, such as the age then, or the quarter"),
        (images, "it is called like a file", ". Where a table is of images, data.source is image_folder"),
    )  # fmt: skip
    not_taken = [f"as {why}: {', '.join(map(_text, names))}{more}" for names, why, more in remarks if names]
    features = [f"{_text(of)}: {_feature(columns[of])}" for of in left if of not in (*distinct, *dates)]
    no_group = "{}          # sex: {categories: [f, m], unknown: true}, over any column"
    return DRAFT.format(
        mark=MARK,
        name=name,
        reported=f"[{', '.join(map(_text, groups)) or ('class' if len(label) == 1 else MARK)}]",
        split=_lines([f"split_by: {_text(unit)}"] if unit else [], 6),
        table=_lines(table, 8),
        label=_lines([f"labels: [{', '.join(map(_text, label))}]          # columns of 0 and 1"], 8)
        if len(label) > 1
        else ONE_LABEL.format(label=f"{_text(label[0])}{guess}", mark=MARK),
        unit=f"        unit: {_text(unit)}\n" if unit else UNTOLD.format(id=_text(next(iter(ids), "…"))),
        features=_lines(features or [f"{{}}          # {MARK}: name columns; a group's may be a feature too"], 10),
        remarks=_lines((f"# not taken, {remark}" for remark in not_taken), 10),
        groups=_lines([f"{_text(column)}: {_group(columns[column])}" for column in groups] or [no_group], 10),
        protected=f", unit: {_text(unit)}" if unit else "",
    )


def _lines(lines: Iterable[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def marked(text: str) -> list[int]:
    """Return the numbers of the lines that still have the mark."""
    return [number for number, line in enumerate(text.splitlines(), 1) if MARK in line and not line.startswith("#")]


def _begins(path: Path, sign: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(sign)) == sign


def _columns(path: Path) -> tuple[list[str], dict[str, str]]:
    """Lines of the dialect, and the kind of each column."""
    if path.suffix.lower() in PARQUET + FEATHER:
        return [], _kinds(read_binary(path))
    text, encoding = _decoded(path)
    first_line = text.partition("\n")[0].strip()
    guessed = f"encoding: {encoding}          # {MARK}: a guess, it is not UTF-8; if right, take this remark out"
    lines = [] if encoding == "utf-8-sig" else [guessed]
    sign = max(",;\t|", key=first_line.count)
    if not any(one in first_line for one in SEPARATORS) and len(first_line.split()) > 1:
        sign = " "
    if sign != ",":
        lines.append(f"separator: {json.dumps(sign)}")
    given: dict[str, Any] = {"sep": r"\s+" if sign == " " else sign, "encoding": encoding, "nrows": ROWS}
    names = [name.strip().strip('"') for name in (first_line.split() if sign == " " else first_line.split(sign))]
    headless = any(not name or _is_number(name) for name in names) or len(set(names)) < len(names)
    try:
        first = pd.read_csv(path, skipinitialspace=True, dtype=str, **given)
        # a first row whose values occur in other rows is no header: else a person's cells would be drafted as names
        if headless := headless or any((first[name] == name).any() for name in first):
            given |= {"header": None, "names": [f"column_{i}" for i in range(1, len(names) + 1)]}
        frame, texts = (pd.read_csv(path, skipinitialspace=True, dtype=kind, **given) for kind in (None, str))
    except (ValueError, OSError) as error:  # pandas' errors of parsing are ValueErrors
        raise EquidpError(f"{path} cannot be read ({' '.join(str(error).split())}); is it a table?") from error
    if headless:
        listed = f"columns: [{', '.join(map(str, frame.columns))}]"
        lines.append(f"{listed}          # {MARK}: the file has no header row; name them, here and below")
    signs = _signs(texts, sign)
    if signs != PLAIN:
        keys = zip(("decimal", "thousands"), signs, PLAIN, strict=True)
        lines += [f"{key}: {json.dumps(used)}" for key, used, plain in keys if used != plain]
        written = [name for name in texts if _are_numbers(texts[name], *signs)]
        numbers = {name: pd.to_numeric(with_points(texts[name], *signs, str(path))) for name in written}
        frame = frame.assign(**numbers)
    codes = [str(name) for name in texts if texts[name].str.fullmatch(rf"0\d+|{DATE}").any()]  # 01 is no number
    return lines, _kinds(frame) | _kinds(texts[codes])


def _signs(texts: pd.DataFrame, separator: str) -> tuple[str, str]:
    """Return the signs of decimals and thousands by which most columns are numbers; at a tie, the first of `SIGNS`."""
    possible = [(decimal, one) for decimal, one in SIGNS if decimal != separator and (one != separator or one == ",")]
    return max(possible, key=lambda signs: sum(_are_numbers(texts[name], *signs) for name in texts))


def _are_numbers(column: pd.Series, decimal: str, thousands: str) -> bool:
    """Whether all cells that are given are numbers, written with these signs."""
    whole = rf"\d{{1,3}}({re.escape(thousands)}\d{{3}})+|\d*"
    given = column.dropna()
    number = rf"[+-]?({whole})({re.escape(decimal)}\d+)?([eE][+-]?\d+)?"
    return len(given) > 0 and bool(given.str.fullmatch(number).all())


def _decoded(path: Path) -> tuple[str, str]:
    raw = content(path)
    marked_16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    for encoding in ("utf-16" if marked_16 else "utf-8-sig", "cp1252"):
        with suppress(UnicodeError):
            return raw.decode(encoding), encoding
    raise EquidpError(f"{path} is neither text nor parquet or feather by its name; name a table.")


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _kinds(frame: pd.DataFrame) -> dict[str, str]:
    """Return each column's kind: `number`, `truth`, `text`, `date`, or `distinct` if nearly every row differs."""

    def kind(column: pd.Series) -> str:
        given = column.dropna()
        if pd.api.types.is_bool_dtype(column):
            return "truth"
        dated = (isinstance(cell, datetime.date) or (isinstance(cell, str) and DATES.fullmatch(cell)) for cell in given)
        if len(given) and all(dated):
            return "date"
        if len(given) >= FEW and not pd.api.types.is_float_dtype(column) and given.nunique() >= DISTINCT * len(given):
            return "distinct"
        return "number" if pd.api.types.is_numeric_dtype(column) else "text"

    return {str(name): kind(column) for name, column in frame.convert_dtypes().items()}


def _feature(kind: str) -> str:
    if kind == "number":
        return f"{{kind: numeric, minimum: {MARK}, maximum: {MARK}}}"
    if kind == "truth":  # in all spellings that pandas reads as a truth value
        spelt = {word: [word, word.capitalize(), word.upper()] for word in ("false", "true")}
        return f"{{kind: categorical, map: {json.dumps(spelt)}}}"
    return f"{{kind: categorical, categories: [{MARK}]}}"


def _group(kind: str) -> str:
    if kind == "number":
        return f"{{edges: [{MARK}], minimum: {MARK}, maximum: {MARK}}}          # or categories, if numbers are codes"
    return f"{{categories: [{MARK}], unknown: true}}"


def _text(name: str) -> str:
    """A name as YAML reads it back as text."""
    plain = re.fullmatch(r"[A-Za-z][\w./ -]*", name) and name.strip() == name
    word = name.lower() in ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
    return name if plain and not word else json.dumps(name, ensure_ascii=False)
