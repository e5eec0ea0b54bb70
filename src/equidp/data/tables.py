"""Tables: reading a file, a database or an entry of a catalog, without guessing a type.

Text stays text until the declared schema says what it is. A table's index is the line in the file, or counts from 1.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from equidp.data.cells import LINE, ROW
from equidp.data.raw_files import content
from equidp.errors import EquidpError

SEPARATORS = ";\t|,"
READING = re.compile(r"\s*\(*\s*(select|with)\b", re.IGNORECASE)
QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
"""Texts, quoted names and comments in a query."""
OTHER_ROWS = re.compile(
    r"\b(limit|offset|fetch|top(?=\s+\d)|tablesample|over(?=\s*\()|random(?=\s*\())\b", re.IGNORECASE
)
"""Words of SQL that make a row of the result depend on other rows."""
NESTED = re.compile(r"(?<!\bunion )(?<!\bunion all )(?<!\bunion distinct )\bselect\b", re.IGNORECASE)
"""The query's own SELECT, and those nested in it. Any number of a nested SELECT's rows may decide on a result's row."""
PARQUET, FEATHER = (".parquet", ".pq"), (".feather", ".arrow")
EXCEL, SQLITE = (".xlsx", ".xlsm", ".xls", ".ods"), b"SQLite format 3\0"
"""Names of workbooks end so; files of SQLite begin so."""


@dataclass(frozen=True)
class Dialect:
    """How a file of separated values is written; the names are those of `pandas.read_csv`.

    Attributes:
        separator: sign between two columns; a blank stands for any number of blanks.
        encoding: encoding of the text.
        adjustable: whether a message may point to `data.options`.
    """

    separator: str = ","
    encoding: str = "utf-8-sig"
    adjustable: bool = False


def read_rows(
    path: Path, names: Sequence[str] | None, *, skip: str = "", dialect: Dialect | None = None
) -> pd.DataFrame:
    """Read a file of separated values as stripped strings; the frame's index is the line number in the file.

    Args:
        names: column names of a file without header; None where the first line holds them.
        skip: lines that start with this are left out.
        dialect: commas and UTF-8 unless given.

    Raises:
        EquidpError: the file is empty or not such text, a line has too many or too few fields, or a quote stays open.
    """
    dialect = dialect or Dialect()
    found = _numbered_rows(path, dialect)
    numbered = [(line, row) for line, row in found if not (skip and row[0].startswith(skip))]
    if names is None and numbered:
        names = numbered.pop(0)[1]
    if not numbered or names is None:
        raise EquidpError(f"{path} holds no rows; download or export it again.")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        headless = " (or name all by data.options.columns, if this is no header)" if dialect.adjustable else ""
        raise EquidpError(f"{path}, line 1: two columns have the same name, {twice[0]!r}; rename one{headless}.")
    if len(names) == 1 and (sign := next((sign for sign in SEPARATORS if sign in names[0]), None)):
        raise _separated_otherwise(path, sign, dialect)
    for line, row in numbered:
        if len(row) != len(names):
            raise EquidpError(f"{path}, line {line}: {len(row)} fields where {len(names)} are expected; repair it.")
    cells, lines = [row for _, row in numbered], [line for line, _ in numbered]
    return pd.DataFrame(cells, columns=list(names), index=pd.Index(lines, name=LINE), dtype=object)


def read_binary(path: Path) -> pd.DataFrame:
    """A parquet or feather file; whole numbers with a missing one stay whole.

    Raises:
        EquidpError: the file is damaged or of another kind.
    """
    read = pd.read_parquet if path.suffix.lower() in PARQUET else pd.read_feather
    try:
        return numbered_from_1(read(path, dtype_backend="numpy_nullable"), str(path))
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise EquidpError(f"{path} cannot be read ({_one_line(error)}); write or download it again.") from error


def read_query(query: str, database: Path | str) -> pd.DataFrame:
    """Return the result of a query, typed as the database has it. Nothing is written: the transaction is rolled back.

    Args:
        database: a file of SQLite, which is opened for reading only, or SQLAlchemy's URL of another database.

    Raises:
        EquidpError: the query does not begin as one that only reads, or the database refuses it.
    """
    import sqlalchemy as sql

    if not READING.match(query):
        raise EquidpError("data.options.sql: give a query that begins with SELECT or WITH; nothing else is run.")
    where = str(database) if isinstance(database, Path) else "data.options.connection"
    try:
        if isinstance(database, Path):  # by a URI, because SQLAlchemy's URLs allow no `#` or `%` in a name
            uri = f"{database.absolute().as_uri()}?mode=ro"
            engine = sql.create_engine(
                "sqlite://", poolclass=sql.NullPool, creator=lambda: sqlite3.connect(uri, uri=True)
            )
        else:
            engine = sql.create_engine(database, poolclass=sql.NullPool)
        with engine.connect().execution_options(postgresql_readonly=True) as connection:
            found = connection.execute(sql.text(query))
            names, rows = list(found.keys()), [tuple(row) for row in found]
            connection.rollback()
    except (sql.exc.SQLAlchemyError, ImportError) as error:
        reason = _one_line(getattr(error, "orig", None) or error)
        do = "close the program that writes to it, or copy the file" if "is locked" in reason else "correct it"
        raise EquidpError(f"{where}: the query of data.options.sql cannot be run ({reason}); {do}.") from error
    return numbered_from_1(pd.DataFrame(rows, columns=names, dtype=object), where)


def read_entry(load: Callable[[str], object], entry: str) -> pd.DataFrame:
    """Return the table of a catalog entry. Raises EquidpError if it is not a DataFrame."""
    found = load(entry)
    if not isinstance(found, pd.DataFrame):
        raise EquidpError(
            f"data.options.catalog={entry}: the entry gives a {type(found).__name__}; name one that gives a pandas "
            "DataFrame."
        )
    return numbered_from_1(found, f"data.options.catalog={entry}")


def looks_at_other_rows(query: str) -> str:
    """Return what in a query may make a row of its result depend on other rows; empty if nothing does."""
    plain = " ".join(QUOTED.sub(" ", query).split())
    if found := OTHER_ROWS.search(plain):
        return found[1].upper()
    return "a nested SELECT" if len(NESTED.findall(plain)) > 1 else ""


def numbered_from_1(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return the table with names as text and rows counted from 1.

    Raises:
        EquidpError: there are no rows, or two columns have one name.
    """
    if len(frame.columns) and not len(frame):
        raise EquidpError(f"{where} holds no rows; choose another table, sheet or query, or export it again.")
    found = frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name=ROW)).rename(columns=str)
    if found.columns.has_duplicates:
        twice = found.columns[found.columns.duplicated()][0]
        raise EquidpError(f"{where}: two columns have the same name, {twice!r}; rename one (in SQL by AS).")
    return found


def frame_digest(frame: pd.DataFrame) -> str:
    """sha256 of a table's names, types and cells."""
    sha = hashlib.sha256(repr([(str(name), str(kind)) for name, kind in frame.dtypes.items()]).encode())
    sha.update(frame.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").encode())
    return sha.hexdigest()


def _numbered_rows(path: Path, dialect: Dialect) -> list[tuple[int, list[str]]]:
    text = _text(path, dialect)
    # strict, because else a quote that is never closed takes the rows after it into its cell, and they are lost
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=dialect.separator, skipinitialspace=True, strict=True)
    numbered, begun = [], 1
    limit = csv.field_size_limit(len(text) + 1)  # a long text is allowed
    try:
        for row in reader:
            if row and dialect.separator.isspace() and not row[-1]:  # blanks at the end of a line
                row.pop()
            if row:
                numbered.append((reader.line_num, [field.strip() for field in row]))
            begun = reader.line_num + 1
    except csv.Error as error:
        first = text.partition("\n")[0]
        sign = max(SEPARATORS, key=first.count)
        if begun == 1 and first.count(sign) > first.count(dialect.separator):
            raise _separated_otherwise(path, sign, dialect) from error
        raise EquidpError(
            f"{path}, the row that begins in line {begun}: {error}; write a quote within quotes twice, or export the "
            "table again."
        ) from error
    finally:
        csv.field_size_limit(limit)
    return numbered


def _separated_otherwise(path: Path, sign: str, dialect: Dialect) -> EquidpError:
    remedy = f"set data.options.separator to {sign!r}" if dialect.adjustable else "export it with commas"
    expected = "commas" if dialect.separator == "," else repr(dialect.separator)
    return EquidpError(f"{path}: columns are separated by {sign!r} where {expected} are expected; {remedy}.")


def _text(path: Path, dialect: Dialect) -> str:
    raw = content(path)
    option = f"set data.options.encoding ({_likely(raw)})" if dialect.adjustable else "save it{} in UTF-8"
    export = "" if path.suffix in (".csv", ".data", ".txt", ".tsv", ".gz") else " as csv"
    kind = "UTF-8" if dialect.encoding.startswith("utf-8") else dialect.encoding
    try:
        text = raw.decode(dialect.encoding)
    except UnicodeError as error:
        if dialect.adjustable:
            _refuse_other_kind(path, raw)
        place = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise EquidpError(f"{path} is not {kind} text{place}; {option.format(export)}.") from error
    if "\0" in text:
        raise EquidpError(f"{path} is not {kind} text (it holds NUL bytes); {option.format(export)}.")
    return text


def _refuse_other_kind(path: Path, raw: bytes) -> None:
    """Refuse a database and a workbook, to which no encoding helps. Only what is no text is looked at."""
    if raw.startswith(SQLITE):
        raise EquidpError(f"{path} is an SQLite database: give data.options.sql, such as 'SELECT * FROM visits'.")
    if path.suffix.lower() in EXCEL:
        raise EquidpError(workbook(path, "name that as data.options.catalog in place of path"))


def workbook(path: Path, then: str) -> str:
    """Say how a sheet is read, and what to do `then`."""
    return (
        f"{path} is a workbook: give its sheet an entry in conf/base/catalog.yml, such as `sheet: {{type: "
        f"pandas.ExcelDataset, filepath: {path}}}`, and then {then}."
    )


def _likely(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if b"\0" in raw[:4]:
        return "utf-16-le" if raw[1:2] == b"\0" else "utf-16-be"
    return "latin-1 or cp1252, say"


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
