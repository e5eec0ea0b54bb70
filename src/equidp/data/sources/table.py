"""Table: the user's own table, from a file, a database or the catalog, with a schema declared in conf."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from equidp.data.cells import (
    MISSING,
    RefusedCellsError,
    absent,
    as_written,
    cells,
    codes,
    place,
    require,
    with_points,
)
from equidp.data.columns import (
    Bounded,
    Named,
    Numeric,
    beyond,
    encode,
    feature_names,
    refuse_guessed,
    refused_in,
)
from equidp.data.groupings import group_ids, group_names, nearly_alike, owners
from equidp.data.raw_files import PublishedFile, RawFiles, digest, find_own, fingerprint, inside
from equidp.data.records import Records, Schema
from equidp.data.sources.base import GIVEN, Source
from equidp.data.sources.table_options import ZERO_OR_ONE, TableOptions
from equidp.data.tables import (
    FEATHER,
    PARQUET,
    Dialect,
    frame_digest,
    looks_at_other_rows,
    read_binary,
    read_entry,
    read_query,
    read_rows,
)
from equidp.data.tokens import Tokenizer, tokenizer_digest
from equidp.data.words import PADDING, token_ids, words
from equidp.errors import EquidpError, listed_names

PARTS = ("train", "test")

COMMA = re.compile(r"[+-]?\d[\d. ]*,\d+")
"""A number that may have a decimal comma."""

PYTHONS = (".", "")
"""Signs of decimals and of thousands, as Python writes numbers."""


class Table(Source):
    """A table described by its options; groupings are the class and the declared ones."""

    name = "table"
    Options = TableOptions
    tasks = ("classification", "regression", "counts", "multilabel", "ordinal")

    @property
    def task(self) -> str:
        """The task that the label's declaration says."""
        return self.options.task

    def words(self) -> tuple[str, ...]:
        """Units have the name of their column."""
        return (*self.unit_names, self.options.unit) if self.options.unit else self.unit_names

    @property
    def reader(self) -> str:
        """Versions of the tokenizer's libraries, if texts become tokens and rows have no ids; else empty."""
        return self._tokens.version if self.options.tokenizer and not self.options.id else ""

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The file the options name, plain or gzipped. A table from a database or the catalog is read at once."""
        read = [tokenizer_digest(Path(self.options.tokenizer))] if self.options.tokenizer else []
        if not self.options.path:
            self._given = self._fetched()
            own = frame_digest(self._given)
            return RawFiles({}, fingerprint([own, *read]) if read else own, own)
        named = inside(raw_dir, self.options.path)
        path = find_own(raw_dir, self.options.path)
        if path is None and named.is_dir():
            raise EquidpError(f"data.options.path: {named} is a folder; name the file in it.")
        if path is None:
            return None
        own = digest(path)
        return RawFiles({"table": path}, fingerprint([own, *read]), fingerprint([own]))

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
                kind |= {"vocabulary": self._tokens.vocabulary, "tokenizer": self._tokens.digest}
        else:
            names = feature_names(self.options.declared)
            kind = {"kind": "tabular", "shape": (len(names),), "feature_names": names}
        options, groups = self.options, group_names(self.options.groups)
        if not options.classes:
            kind["targets"] = tuple(options.outcomes)
        if options.number:
            kind["bounds"] = (float(options.number.minimum), float(options.number.maximum))
        return Schema(
            name=self.name,
            task=self.task,
            classes=options.classes,
            groupings=({"class": options.classes} if options.classes else {}) | groups,
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
        try:
            records = self._records(frame, where)
        except RefusedCellsError as error:
            if error.missing:
                raise
            sign = ""
            if self.options.decimal == "." and COMMA.fullmatch(str(error.first)):
                sign = " If its comma is a decimal sign, set data.options.decimal to ','."
            raise EquidpError(
                f"{error.message}{sign} If it stands for a missing value, name it in data.options.na_values."
            ) from error
        return replace(records, remarks=(*self._remarks(rows, frame), *self._wordless(frame, records.features)))

    def _records(self, frame: pd.DataFrame, where: str) -> Records:
        labels = self._labels(frame, where)
        spelt = {"guessed": bool(self.options.catalog), "decimal": self.options.decimal}
        part = codes(frame[self.options.part], PARTS, where).to(torch.uint8) if self.options.part else None
        return Records(
            features=self._features(frame, where),
            labels=labels,
            groups=({"class": labels} if self.options.classes else {}) | group_ids(frame, self.options.groups, where),
            schema=self.schema,
            part=part,
            **owners(frame, self.options.unit, self.options.id, where, **spelt),
        )

    @property
    def columns(self) -> Mapping[str, Named | Numeric]:
        """The declared features."""
        declared: Mapping[str, Named | Numeric] = self.options.declared
        return declared

    def example(self) -> pd.DataFrame | None:
        """A row, or a text."""
        return pd.DataFrame({self.options.text: ["a text"]}) if self.options.text else super().example()

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """Features float32 `[N, d]` (of texts int64 `[N, length]`) of rows with the declared column names."""
        text, where = [self.options.text] if self.options.text else [], GIVEN
        require(frame, [*text, *(declared.column or name for name, declared in self.options.declared.items())], where)
        for name, declared in self.options.declared.items():
            refuse_guessed(frame[declared.column or name], declared, self.options.thousands, where)
        found = self._cells(frame, where)
        if text and (gone := _no_text(found[text[0]])).any():
            row = frame.index[int(gone.argmax())]
            raise EquidpError(f"{place(where, frame[text[0]], row)}: the text is missing; leave the row out.")
        return self._features(found, where)

    def unfit(self, frame: pd.DataFrame) -> dict[Any, str]:
        """As `Source.unfit`; a row has the first sentence that `encode` would have for it."""
        options, signs = self.options, (self.options.decimal, self.options.thousands)
        if options.text or type(self).encode is not Table.encode:
            return super().unfit(frame)
        columns = [(declared.column or name, declared) for name, declared in options.declared.items()]
        guessed = (
            (frame[name], partial(refuse_guessed, declared=declared, thousands=options.thousands, where=GIVEN))
            for name, declared in columns
        )
        read, point = cells(frame, options.na_values), partial(with_points, decimal=signs[0], thousands=signs[1])
        signed = ((read[name], partial(point, where=GIVEN)) for name in frame.columns if name in self._numeric)
        found = refused_in([*guessed, *(signed if signs != PYTHONS else ())])
        read = self._cells(frame.drop(index=list(found)), GIVEN)
        return found | refused_in((read[name], partial(declared.encoded, where=GIVEN)) for name, declared in columns)

    def _labels(self, frame: pd.DataFrame, where: str) -> Tensor:
        if self.options.number:
            return self._numbers(frame[self.options.label], self.options.number, where)
        if self.options.labels:
            return torch.stack([ZERO_OR_ONE.ids(frame[name], where) for name in self.options.labels], dim=1).float()
        return self.options.classified.ids(frame[self.options.label], where)

    def _numbers(self, column: pd.Series, declared: Bounded, where: str) -> Tensor:
        found = declared.values(column, where)
        if self.options.counts and (parts := (found != found.round()).numpy()).any():
            at = int(parts.argmax())
            raise EquidpError(
                f"{place(where, column, column.index[at])}: {as_written(column.iloc[at])} is no whole "
                "number; correct it, or declare target in place of counts."
            )
        return found.float()

    def _features(self, frame: pd.DataFrame, where: str) -> Tensor:
        if not self.options.text:
            return encode(frame, self.options.declared, where)
        texts = frame[self.options.text].tolist()
        if others := [at for at, text in enumerate(texts) if not isinstance(text, str)]:
            raise EquidpError(
                f"{place(where, frame[self.options.text], frame.index[others[0]])}: {as_written(texts[others[0]])} "
                "is no text, and may have been written otherwise; give the column as text (pandas: dtype=str)."
            )
        if self.options.tokenizer:
            return self._tokens.ids(texts)
        ids = [token_ids(words(text), self.options.vocabulary, self.options.length) for text in texts]
        return torch.tensor(ids, dtype=torch.int64).reshape(-1, self.options.length)

    @cached_property
    def _tokens(self) -> Tokenizer:
        return Tokenizer(Path(self.options.tokenizer), self.options.length, "first")

    def _fetched(self) -> pd.DataFrame:
        if self.options.connection:
            return read_query(self.options.sql, self.options.connection)
        if self.catalog is None:
            raise EquidpError(
                f"data.options.catalog={self.options.catalog}: only a Kedro run has a catalog; give a path here."
            )
        found = read_entry(self.catalog, self.options.catalog)
        floats = {str(name) for name in found if pd.api.types.is_float_dtype(found[name])}
        for name in floats & self._numeric:
            if self.options.thousands == ".":
                raise EquidpError(
                    f"data.options.catalog={self.options.catalog}, column {name!r}: its points may have been read as "
                    "decimal signs, where data.options.thousands is '.'; give the entry load_args of dtype: str."
                )
        # Ids that are floats may have lost digits. Turned into whole numbers again, they would not show it
        kept = {name: found[name] for name in floats & {self.options.unit, self.options.id}}
        arrow = [str(name) for name in found if isinstance(found[name].dtype, pd.ArrowDtype) and name not in kept]
        # pandas has no type of its own for Arrow's dates, decimals and lists, and fails even if none is declared
        others = {name: found[name].astype(object) for name in arrow if found[name].dtype.kind not in "iufbU"}
        return found.assign(**others).convert_dtypes(dtype_backend="numpy_nullable").assign(**kept)

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
        missing, numeric = self.options.na_values, self._numeric
        signs = (self.options.decimal, self.options.thousands)
        frame = cells(frame, missing, numeric if signs == PYTHONS else ())
        if signs == PYTHONS:
            return frame
        changed = {name: with_points(frame[name], *signs, where) for name in frame.columns if name in numeric}
        return frame.assign(**cells(pd.DataFrame(changed), missing, numeric))

    @property
    def _numeric(self) -> set[str]:
        """The columns that are declared as numbers."""
        every = [*self.options.declared.items(), *self.options.groups.items(), *self.options.outcomes.items()]
        return {getattr(declared, "column", "") or name for name, declared in every if declared.numeric}

    def _columns(self) -> list[str]:
        """All columns that are read."""
        options = self.options
        named = [declared.column or name for name, declared in [*options.declared.items(), *options.groups.items()]]
        others = filter(None, (options.text, options.unit, options.id, options.part))
        return [*options.outcomes, *named, *others, *(options.na_values if isinstance(options.na_values, dict) else ())]

    def _without_missing(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        needed = [*self.options.outcomes.items(), *self.options.declared.items()]
        gone = np.zeros(len(frame), dtype=bool)
        columns = [(name, frame[getattr(declared, "column", "") or name], declared.missed) for name, declared in needed]
        if self.options.text:
            columns.append((self.options.text, frame[self.options.text], _no_text))
        for name, column, missing_in in columns:
            missed = missing_in(column)
            if missed.any() and self.options.missing == "error":
                own = ", or declare what stands for it (`unknown: true`, or `missing: …` of a number)"
                own = own if name not in self.options.outcomes else ""
                raise EquidpError(
                    f"{place(where, column, frame.index[int(missed.argmax())])}: a value is missing; "
                    f"give it{own}, or leave all such rows out by `missing: drop` among the dataset's options."
                )
            gone |= missed
        if gone.all():
            raise EquidpError(f"{where}: every row misses a feature or the label; declare fewer columns.")
        return frame[~gone]

    def _remarks(self, rows: pd.DataFrame, frame: pd.DataFrame) -> Iterator[str]:
        """Say what was left out and clipped, by class and group, because it may concern one group more than another."""
        table = self.options.path or self.options.catalog or "The query"
        if word := looks_at_other_rows(self.options.sql):
            yield (
                f"data.options.sql: by {word} a row that the query gives may depend on other rows. ε is for rows as "
                "the query gives them, and one row more in the database may change many of these: take them row by row."
            )
        if lost := len(rows) - len(frame):
            by = self._counted(rows.drop(index=frame.index))
            yield f"{table}: {lost:,} of {len(rows):,} rows miss a feature or the label and are left out ({by})."
        for whose in filter(None, (self.options.unit, self.options.id)):
            if alike := nearly_alike(frame[whose]):
                yield (
                    f"{table}, column {whose!r}: {alike:,} ids differ from another one in capital letters or dashes "
                    "alone, and count as others. If a person has both, no ε is for all of this person's rows: write "
                    "each id in one way."
                )
        every = {**self.options.groups, **self.options.declared, **self.options.outcomes}
        for name, declared in every.items():
            column = getattr(declared, "column", "") or name
            if (clipped := beyond(frame[column], declared)).any():
                yield (
                    f"{table}, column {column!r}: {clipped.sum():,} of {len(frame):,} numbers are beyond "
                    f"{declared.minimum:g} to {declared.maximum:g} and are set to the nearer bound "
                    f"({self._counted(frame[clipped])})."
                )

    def _wordless(self, frame: pd.DataFrame, features: Tensor) -> Iterator[str]:
        """Say how many texts are lost because they are in other letters."""
        if self.options.text and not self.options.tokenizer and (empty := (features == PADDING).all(1).numpy()).any():
            yield (
                f"{self.options.path or self.options.catalog or 'The query'}, column {self.options.text!r}: "
                f"{empty.sum():,} of {len(frame):,} texts have no word of letters a to z or digits, and are all one "
                f"text to the model ({self._counted(frame[empty])})."
            )

    def _counted(self, rows: pd.DataFrame) -> str:
        """Return how many of these rows are in each class and group; the rows need not be as declared."""
        of_class = {}
        if self.options.classes:
            of_class = {"class": self.options.classified.model_copy(update={"column": self.options.label})}
        counted = []
        for name, declared in {**of_class, **self.options.groups}.items():
            lenient = declared.model_copy(update={"unknown": True})
            with suppress(EquidpError):
                counts = torch.bincount(lenient.ids(rows[declared.column or name], ""), minlength=len(lenient.names))
                numbers = zip(lenient.names, counts.tolist(), strict=True)
                counted.append(f"{name}: {', '.join(f'{group} {count:,}' for group, count in numbers if count)}")
        return "; ".join(counted)


class Csv(Table):
    """`table` under its older name."""

    name = "csv"


def _no_text(column: pd.Series) -> np.ndarray:
    """Boolean `[N]`: the missing texts; `none` and `-` are texts."""
    return absent(column, MISSING - {""})


def _refuse_headless(rows: pd.DataFrame, wanted: list[str], options: TableOptions, where: str) -> None:
    """Refuse a file of which no declared column is there: its first row may be no header."""
    if options.path and not options.sql and not options.columns and not set(wanted) & set(rows.columns):
        raise EquidpError(
            f"{where}: its first row, {listed_names(rows.columns[:6])}, names none of the declared columns; correct "
            "these, or name all columns by data.options.columns if the file has no header row."
        )
