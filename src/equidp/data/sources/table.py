"""Table: one of the user's own, from a file, a database or the catalog, with a schema declared in conf."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from equidp.data.cells import cells, codes, refuse_alike, require, with_points
from equidp.data.columns import Column, Named, Numeric, OfGroup, beyond, encode, feature_names
from equidp.data.groupings import Grouping, check_shown, group_ids, group_names, owners
from equidp.data.raw_files import PublishedFile, RawFiles, digest, find_own, fingerprint, inside
from equidp.data.records import PRODUCT, Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.tables import (
    FEATHER,
    PARQUET,
    Dialect,
    frame_digest,
    numbered_from_1,
    read_binary,
    read_query,
    read_rows,
)
from equidp.data.tokens import Tokenizer, tokenizer_digest
from equidp.data.words import token_ids, words
from equidp.errors import EquidpError, listed_names, unknown_name
from equidp.options import HUGE, Number

PARTS = ("train", "test")


def _distinct(classes: tuple[str, ...]) -> tuple[str, ...]:
    refuse_alike(classes, "classes")
    check_shown(classes)
    return classes


def _known_encoding(name: str) -> str:
    try:
        return codecs.lookup(name).name if name != "utf-8-sig" else name
    except LookupError:
        raise ValueError("Python knows no such encoding; common ones are utf-8, utf-16, latin-1 and cp1252") from None


Sign = Annotated[str, Field(min_length=1, max_length=1)]

Sizes = tuple[Annotated[int, Field(ge=1)], ...]
"""Public numbers of records, or units, of each class."""

Classes = Annotated[tuple[str, ...], Field(min_length=2), AfterValidator(_distinct)]
"""Names of classes, in label order."""


class TableOptions(SourceOptions):
    """Options of `table`, and of `csv`, which is the same under its older name.

    Attributes:
        path: a file of separated values (plain or .gz), parquet (.parquet, .pq), feather (.feather, .arrow), or with
            `sql` an SQLite database; relative to the raw folder.
        sql: a query that begins with SELECT or WITH. It is run for reading only.
        connection: SQLAlchemy's URL of another database, in place of `path`. It holds no password: parameters are
            logged. A catalog entry `pandas.SQLQueryDataset` takes one from conf/local/credentials.yml.
        catalog: an entry of the Kedro catalog that gives a DataFrame, in place of `path`.
        separator, decimal, thousands, encoding: as for `pandas.read_csv`.
        columns: names of a file without a header row.
        na_values: further texts, or numbers, that mean a missing value.
        label: column of the label.
        classes: its values, in label order; or names of those of `class_map` or of the bands of `class_edges`.
        class_map: for each class the values of the label that it stands for.
        class_edges: for a label that is a number: where one class ends and the next begins.
        features: columns that are features, each with categories, a map, edges or bounds, or a grouping by name; none
            where there is `text`.
        text: column of texts, the only feature: as words hashed into `vocabulary` ids, or as tokens of `tokenizer`.
        tokenizer: folder of a pretrained network's tokenizer.
        length: words or tokens kept of each text: its first tokens, or its last words.
        vocabulary: number of ids that words are hashed into, the padding included.
        groups: groupings to report by, each over a column that need not be a feature.
        unit: column whose value is shared by the records of one person; empty where each row is a unit.
        id: column with an id for each row, which then decides on its part, in place of its content (`data.id`).
        part: column that says `train` or `test`; empty to split at random.
        sizes: public numbers of rows of each class, in label order, known from elsewhere and not counted in the table.
            Counts in `data.keep`, the sampling rate and the noise then follow from these.
        unit_sizes: likewise of units.
        missing: `drop` leaves out rows with a missing feature or label; `error` refuses them.
    """

    path: str = ""
    sql: str = ""
    connection: str = ""
    catalog: str = ""
    separator: Sign = ","
    decimal: Sign = "."
    thousands: Literal[""] | Sign = ""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "utf-8-sig"
    columns: tuple[str, ...] = ()
    na_values: tuple[str, ...] = ()
    label: str
    classes: Classes
    class_map: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    class_edges: tuple[Number, ...] = ()
    features: dict[str, Column] = Field(default_factory=dict)
    text: str = ""
    tokenizer: str = ""
    length: Annotated[int, Field(ge=1, le=10_000)] = 128
    vocabulary: Annotated[int, Field(ge=2, le=2**24)] = 20_000
    groups: dict[str, Grouping] = Field(default_factory=dict)
    unit: str = ""
    id: str = ""
    part: str = ""
    sizes: Sizes = ()
    unit_sizes: Sizes = ()
    missing: Literal["error", "drop"] = "error"
    paths: ClassVar[tuple[str, ...]] = ("tokenizer",)

    @model_validator(mode="before")
    @classmethod
    def _classes_by_their_map(cls, given: Any) -> Any:
        if isinstance(given, dict) and "classes" not in given and isinstance(named := given.get("class_map"), dict):
            return {**given, "classes": tuple(named)}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> TableOptions:
        check_group_names(self.groups)
        if sum(map(bool, (self.path, self.connection, self.catalog))) != 1:
            raise ValueError("give one of path, connection (with sql) and catalog")
        if bool(self.sql) < bool(self.connection) or (self.sql and self.catalog):
            raise ValueError("sql goes with path (of an SQLite file) or with connection")
        if self.connection:
            _refuse_password(self.connection)
        if self.decimal == self.thousands:
            raise ValueError("decimal and thousands are the same sign")
        if self.label in (self.text, *(declared.column or name for name, declared in self.declared.items())):
            raise ValueError(f"the label {self.label!r} is also a feature")
        if bool(self.features) == bool(self.text):
            raise ValueError("declare the columns of features, or one column of text")
        if self.tokenizer and not self.text:
            raise ValueError("tokenizer needs text, the column to read")
        check_sizes(self.classes, self.sizes, self.unit_sizes)
        _ = self.classified  # refuses a map or edges that do not fit the classes
        return self

    @property
    def declared(self) -> dict[str, Named | Numeric]:
        """The features, each with its column; one that is a grouping is that grouping."""
        found: dict[str, Named | Numeric] = {}
        for name, column in self.features.items():
            if isinstance(column, OfGroup):
                group = column.group or name
                if group not in self.groups:
                    raise ValueError(unknown_name(f"grouping of the feature {name!r}", group, self.groups).message)
                own = self.groups[group]
                found[name] = own.model_copy(update={"column": own.column or group})
            else:
                found[name] = column
        return found

    @property
    def classified(self) -> Named:
        """The label's declaration."""
        bounds = {"minimum": -HUGE, "maximum": HUGE} if self.class_edges else {}
        return Named.model_validate(
            {"categories": self.classes, "map": self.class_map, "edges": self.class_edges, **bounds}
        )


class Table(Source):
    """A table described by its options; groupings are the class and the declared ones."""

    name = "table"
    Options = TableOptions
    _tokenizer: Tokenizer | None = None

    def words(self) -> tuple[str, ...]:
        """Units have the name of their column."""
        return (*self.unit_names, self.options.unit) if self.options.unit else self.unit_names

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The file the options name, plain or gzipped; what a database or the catalog gives is read at once."""
        read = [tokenizer_digest(Path(self.options.tokenizer))] if self.options.tokenizer else []
        if not self.options.path:
            self._given = self._fetched()
            return RawFiles({}, fingerprint([frame_digest(self._given), *read]) if read else frame_digest(self._given))
        named = inside(raw_dir, self.options.path)
        path = find_own(raw_dir, self.options.path)
        if path is None and named.is_dir():
            raise EquidpError(f"data.options.path: {named} is a folder; name the file in it.")
        return None if path is None else RawFiles({"table": path}, fingerprint([digest(path), *read]))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The file the options name."""
        return PublishedFile(self.options.path.removesuffix(".gz"), "")

    @property
    def schema(self) -> Schema:
        """The schema that the options declare; nothing comes from the table."""
        kind: dict[str, Any]
        if self.options.text:
            kind = {"kind": "text", "shape": (self.options.length,), "vocabulary": self.options.vocabulary}
            if self.options.tokenizer:
                kind |= {"vocabulary": self._tokens().vocabulary, "tokenizer": self._tokens().digest}
        else:
            names = feature_names(self.options.declared)
            kind = {"kind": "tabular", "shape": (len(names),), "feature_names": names}
        return Schema(
            name=self.name,
            classes=self.options.classes,
            groupings={"class": self.options.classes, **group_names(self.options.groups)},
            sizes=self.options.sizes,
            unit_sizes=self.options.unit_sizes,
            **kind,
        )

    def read(self, files: RawFiles) -> Records:
        """The rows of the table, float32 `[N, d]`, or int64 `[N, length]` of its texts."""
        path = files.paths.get("table")
        where = str(path or self.options.catalog or "the query of data.options.sql")
        rows = self._cells(self._rows(path), where)
        _refuse_headless(rows, self._columns(), self.options, where)
        require(rows, self._columns(), where)
        frame = self._without_missing(rows, where)
        labels = self.options.classified.ids(frame[self.options.label], where)
        part = codes(frame[self.options.part], PARTS, where).to(torch.uint8) if self.options.part else None
        records = Records(
            features=self._features(frame, where),
            labels=labels,
            groups={"class": labels, **group_ids(frame, self.options.groups, where)},
            schema=self.schema,
            part=part,
            **owners(frame, self.options.unit, self.options.id, where),
        )
        return replace(records, remarks=tuple(self._remarks(rows, frame)))

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """Features float32 `[N, d]` (of texts int64 `[N, length]`) of rows with the declared column names."""
        where = "the given table"
        text = [self.options.text] if self.options.text else []
        require(frame, [*text, *(declared.column or name for name, declared in self.options.declared.items())], where)
        return self._features(self._cells(frame, where), where)

    def _features(self, frame: pd.DataFrame, where: str) -> Tensor:
        if not self.options.text:
            return encode(frame, self.options.declared, where)
        texts = [str(text) for text in frame[self.options.text]]
        if self.options.tokenizer:
            return self._tokens().ids(texts)
        ids = [token_ids(words(text), self.options.vocabulary, self.options.length) for text in texts]
        return torch.tensor(ids, dtype=torch.int64).reshape(-1, self.options.length)

    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(Path(self.options.tokenizer), self.options.length, "first")
        return self._tokenizer

    def _fetched(self) -> pd.DataFrame:
        if self.options.connection:
            return read_query(self.options.sql, self.options.connection)
        if self.catalog is None:
            raise EquidpError(
                f"data.options.catalog={self.options.catalog}: only a Kedro run has a catalog; give a path here."
            )
        found = self.catalog(self.options.catalog)
        if not isinstance(found, pd.DataFrame):
            raise EquidpError(
                f"data.options.catalog={self.options.catalog}: the entry gives a {type(found).__name__}; name one that "
                "gives a pandas DataFrame."
            )
        return numbered_from_1(found.convert_dtypes(dtype_backend="numpy_nullable"))

    def _rows(self, path: Path | None) -> pd.DataFrame:
        if path is None:
            return self._given
        if self.options.sql:
            return read_query(self.options.sql, path)
        if path.suffix.lower() in PARQUET + FEATHER:
            return read_binary(path)
        dialect = Dialect(self.options.separator, self.options.encoding, adjustable=True)
        return read_rows(path, self.options.columns or None, dialect=dialect)

    def _cells(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        """Cells as `cells` gives them, numbers in the declared columns with Python's signs."""
        frame, signs = cells(frame, self.options.na_values), (self.options.decimal, self.options.thousands)
        if signs == (".", ""):
            return frame
        every = [
            *self.options.declared.items(),
            *self.options.groups.items(),
            (self.options.label, self.options.classified),
        ]
        numeric = {declared.column or name for name, declared in every if declared.numeric}
        changed = {name: with_points(frame[name], *signs, where) for name in frame.columns if name in numeric}
        return frame.assign(**changed)

    def _columns(self) -> list[str]:
        """All columns that are read."""
        options = self.options
        named = [declared.column or name for name, declared in [*options.declared.items(), *options.groups.items()]]
        return [options.label, *named, *filter(None, (options.text, options.unit, options.id, options.part))]

    def _without_missing(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        needed = [(self.options.label, self.options.classified), *self.options.declared.items()]
        gone = np.zeros(len(frame), dtype=bool)
        columns = [(name, frame[declared.column or name], declared.missed) for name, declared in needed]
        if self.options.text:  # `none` and `-` are texts
            columns.append((self.options.text, frame[self.options.text], lambda column: (column == "").to_numpy()))
        for name, column, missing_in in columns:
            missed = missing_in(column)
            if missed.any() and self.options.missing == "error":
                own = ", or declare what stands for it (`unknown: true`, or `missing: …` of a number)"
                own = own if name != self.options.label else ""
                raise EquidpError(
                    f"{where}, row {frame.index[int(missed.argmax())]}, column {column.name!r}: a value is missing; "
                    f"give it{own}, or leave all such rows out by `missing: drop` among the dataset's options."
                )
            gone |= missed
        if gone.all():
            raise EquidpError(f"{where}: every row misses a feature or the label; declare fewer columns.")
        return frame[~gone]

    def _remarks(self, rows: pd.DataFrame, frame: pd.DataFrame) -> Iterator[str]:
        """What was left out and clipped, by class and group: it may be one group more than another."""
        table = self.options.path or self.options.catalog or "The query"
        if lost := len(rows) - len(frame):
            by = self._counted(rows.drop(index=frame.index))
            yield f"{table}: {lost:,} of {len(rows):,} rows miss a feature or the label and are left out ({by})."
        for name, declared in {**self.options.groups, **self.options.declared}.items():
            column = declared.column or name
            if (clipped := beyond(frame[column], declared)).any():
                yield (
                    f"{table}, column {column!r}: {clipped.sum():,} of {len(frame):,} numbers are beyond "
                    f"{declared.minimum:g} to {declared.maximum:g} and are set to the nearer bound "
                    f"({self._counted(frame[clipped])})."
                )

    def _counted(self, rows: pd.DataFrame) -> str:
        """How many of some rows are of each class and group; these rows need not be as declared."""
        label = self.options.classified.model_copy(update={"column": self.options.label})
        told = []
        for name, declared in {"class": label, **self.options.groups}.items():
            lenient = declared.model_copy(update={"unknown": True})
            with suppress(EquidpError):
                counts = torch.bincount(lenient.ids(rows[declared.column or name], ""), minlength=len(lenient.names))
                numbers = zip(lenient.names, counts.tolist(), strict=True)
                told.append(f"{name}: {', '.join(f'{group} {count:,}' for group, count in numbers if count)}")
        return "; ".join(told)


class Csv(Table):
    """`table` under its older name."""

    name = "csv"


def _refuse_headless(rows: pd.DataFrame, wanted: list[str], options: TableOptions, where: str) -> None:
    """Refuse a file of which no declared column is there: its first row may be no header."""
    if options.path and not options.sql and not options.columns and not set(wanted) & set(rows.columns):
        raise EquidpError(
            f"{where}: its first row, {listed_names(rows.columns[:6])}, names none of the declared columns; correct "
            "these, or name all columns by data.options.columns if the file has no header row."
        )


def _refuse_password(url: str) -> None:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        password = make_url(url).password or "password" in make_url(url).query
    except ArgumentError:
        raise ValueError("connection is not a URL such as postgresql+psycopg://host/database") from None
    if password:
        raise ValueError(
            "a password here would be logged with the run's parameters; put the URL into conf/local/credentials.yml, "
            "and name a catalog entry of type pandas.SQLQueryDataset by `catalog`"
        )


def check_sizes(classes: tuple[str, ...], *given: tuple[int, ...]) -> None:
    """Refuse sizes that are not one for each class.

    Raises:
        ValueError: for such sizes, to be reported by the settings class.
    """
    for sizes in given:
        if sizes and len(sizes) != len(classes):
            raise ValueError(f"there are {len(sizes)} sizes for {len(classes)} classes; give one for each, in order")


def check_group_names(groups: Mapping[str, Grouping]) -> None:
    """Refuse names with another meaning: `class`, and names with the sign that joins groupings.

    Raises:
        ValueError: for such a name, to be reported by the settings class.
    """
    for name in groups:
        if name == "class" or PRODUCT in name or not name.strip():
            raise ValueError(f"a grouping cannot be called {name!r}")
    check_shown(groups)
