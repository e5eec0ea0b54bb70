"""Csv: a table of the user's own, with a schema declared in conf (`data.options`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from equidp.data.columns import Column, codes, encode, feature_names, read_rows, require
from equidp.data.groupings import MISSING, Grouping, check_shown, group_ids, group_names, owners
from equidp.data.raw_files import PublishedFile, RawFiles, digest, find_own, fingerprint, inside
from equidp.data.records import PRODUCT, Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.errors import EquidpError

logger = logging.getLogger(__name__)

PARTS = ("train", "test")


def _distinct(classes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(classes)) < len(classes):
        raise ValueError("two classes have the same name")
    check_shown(classes)
    return classes


Sizes = tuple[Annotated[int, Field(ge=1)], ...]
"""Public numbers of records, or units, of each class."""

Classes = Annotated[tuple[str, ...], Field(min_length=2), AfterValidator(_distinct)]
"""Names of classes, in label order."""


class CsvOptions(SourceOptions):
    """Options of `csv`.

    Attributes:
        path: the file, relative to the raw folder; plain or gzipped, with a header row, in UTF-8.
        label: column of the label.
        classes: its values, in label order.
        features: columns that are features, each with categories or bounds.
        groups: groupings to report by, each over a column that need not be a feature.
        unit: column whose value is shared by the records of one person; empty where each row is a unit.
        id: column with an id for each row, which then decides on its part, in place of its content (`data.id`).
        part: column that says `train` or `test`; empty to split at random.
        sizes: public numbers of rows of each class, in label order, known from elsewhere and not counted in the table.
            Counts in `data.keep`, the sampling rate and the noise then follow from these.
        unit_sizes: likewise of units.
        missing: `drop` leaves out rows with a missing feature or label; `error` refuses them.
    """

    path: str
    label: str
    classes: Classes
    features: dict[str, Column] = Field(min_length=1)
    groups: dict[str, Grouping] = Field(default_factory=dict)
    unit: str = ""
    id: str = ""
    part: str = ""
    sizes: Sizes = ()
    unit_sizes: Sizes = ()
    missing: Literal["error", "drop"] = "error"

    @model_validator(mode="after")
    def _names_are_free(self) -> CsvOptions:
        check_group_names(self.groups)
        if self.label in self.features:
            raise ValueError(f"the label {self.label!r} is also a feature")
        check_sizes(self.classes, self.sizes, self.unit_sizes)
        return self


class Csv(Source):
    """A table described by its options; groupings are the class and the declared ones."""

    name = "csv"
    Options = CsvOptions

    def words(self) -> tuple[str, ...]:
        """Units have the name of their column."""
        return (*self.unit_names, self.options.unit) if self.options.unit else self.unit_names

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The file the options name, plain or gzipped."""
        named = inside(raw_dir, self.options.path)
        path = find_own(raw_dir, self.options.path)
        if path is None and named.is_dir():
            raise EquidpError(f"data.options.path: {named} is a folder; name the file in it.")
        return None if path is None else RawFiles({"table": path}, fingerprint([digest(path)]))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The file the options name."""
        return PublishedFile(self.options.path.removesuffix(".gz"), "")

    @property
    def schema(self) -> Schema:
        """The schema that the options declare; nothing comes from the table."""
        names = feature_names(self.options.features)
        return Schema(
            name=self.name,
            kind="tabular",
            shape=(len(names),),
            classes=self.options.classes,
            groupings={"class": self.options.classes, **group_names(self.options.groups)},
            feature_names=names,
            sizes=self.options.sizes,
            unit_sizes=self.options.unit_sizes,
        )

    def read(self, files: RawFiles) -> Records:
        """The rows of the table, float32 `[N, d]`."""
        where = str(files.paths["table"])
        rows = read_rows(files.paths["table"], None)
        frame = self._without_missing(rows, where)
        require(frame, [name for name in (self.options.unit, self.options.id, self.options.part) if name], where)
        labels = codes(frame[self.options.label], self.options.classes, where)
        part = codes(frame[self.options.part], PARTS, where).to(torch.uint8) if self.options.part else None
        records = Records(
            features=encode(frame, self.options.features, where),
            labels=labels,
            groups={"class": labels, **group_ids(frame, self.options.groups, where)},
            schema=self.schema,
            part=part,
            **owners(frame, self.options.unit, self.options.id, where),
        )
        if lost := len(rows) - len(frame):  # said of a table that was read, not beside the error of one that was not
            logger.warning("%s: %d of %d rows miss a feature or the label and are left out.", where, lost, len(rows))
        return records

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """Features float32 `[N, d]` of rows with the declared column names."""
        return encode(frame, self.options.features, "the given table")

    def _without_missing(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        needed = [self.options.label, *self.options.features]
        require(frame, needed, where)

        def absent_in(column: pd.Series) -> pd.Series:
            """Mask of missing values; a declared category, such as `none`, is never missing."""
            label = column.name == self.options.label
            named = self.options.classes if label else getattr(self.options.features[column.name], "categories", ())
            return column.str.lower().isin(MISSING - {name.lower() for name in named})

        absent = frame[needed].apply(absent_in)
        if self.options.missing == "error":
            for name in absent.columns[absent.any()]:
                raise EquidpError(
                    f"{where}, row {absent[name].idxmax()}, column {name!r}: a value is missing; give it, or leave all "
                    "such rows out by `missing: drop` among the dataset's options."
                )
            return frame
        complete = frame[~absent.any(axis=1)]
        if complete.empty:
            raise EquidpError(f"{where}: every row misses a feature or the label; declare fewer columns.")
        return complete


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
