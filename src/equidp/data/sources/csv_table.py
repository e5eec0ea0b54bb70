"""Csv: a table of the user's own, with a schema declared in conf (`data.options`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pandas as pd
import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from equidp.data.columns import Column, codes, encode, feature_names, read_rows, require
from equidp.data.groupings import MISSING, Grouping, check_shown, group_ids, group_names, owners
from equidp.data.raw_files import PublishedFile, RawFiles, digest, find_own, fingerprint, inside
from equidp.data.records import PRODUCT, Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.tokens import Tokenizer, tokenizer_digest
from equidp.data.words import token_ids, words
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
        features: columns that are features, each with categories or bounds; none where there is `text`.
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

    path: str
    label: str
    classes: Classes
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

    @model_validator(mode="after")
    def _names_are_free(self) -> CsvOptions:
        check_group_names(self.groups)
        if self.label in self.features or self.label == self.text:
            raise ValueError(f"the label {self.label!r} is also a feature")
        if bool(self.features) == bool(self.text):
            raise ValueError("declare the columns of features, or one column of text")
        if self.tokenizer and not self.text:
            raise ValueError("tokenizer needs text, the column to read")
        check_sizes(self.classes, self.sizes, self.unit_sizes)
        return self


class Csv(Source):
    """A table described by its options; groupings are the class and the declared ones."""

    name = "csv"
    Options = CsvOptions
    _tokenizer: Tokenizer | None = None

    def words(self) -> tuple[str, ...]:
        """Units have the name of their column."""
        return (*self.unit_names, self.options.unit) if self.options.unit else self.unit_names

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The file the options name, plain or gzipped."""
        named = inside(raw_dir, self.options.path)
        path = find_own(raw_dir, self.options.path)
        if path is None and named.is_dir():
            raise EquidpError(f"data.options.path: {named} is a folder; name the file in it.")
        if path is None:
            return None
        read = [tokenizer_digest(Path(self.options.tokenizer))] if self.options.tokenizer else []
        return RawFiles({"table": path}, fingerprint([digest(path), *read]))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The file the options name."""
        return PublishedFile(self.options.path.removesuffix(".gz"), "")

    @property
    def schema(self) -> Schema:
        """The schema that the options declare; nothing comes from the table."""
        names = feature_names(self.options.features)
        tokens = self._tokens() if self.options.tokenizer else None
        text = {"kind": "text", "shape": (self.options.length,), "vocabulary": self.options.vocabulary}
        if tokens:
            text |= {"vocabulary": tokens.vocabulary, "tokenizer": tokens.digest}
        kind = text if self.options.text else {"kind": "tabular", "shape": (len(names),), "feature_names": names}
        return Schema(
            name=self.name,
            classes=self.options.classes,
            groupings={"class": self.options.classes, **group_names(self.options.groups)},
            **kind,
            sizes=self.options.sizes,
            unit_sizes=self.options.unit_sizes,
        )

    def read(self, files: RawFiles) -> Records:
        """The rows of the table, float32 `[N, d]`, or int64 `[N, length]` of its texts."""
        where = str(files.paths["table"])
        rows = read_rows(files.paths["table"], None)
        frame = self._without_missing(rows, where)
        require(frame, [name for name in (self.options.unit, self.options.id, self.options.part) if name], where)
        labels = codes(frame[self.options.label], self.options.classes, where)
        part = codes(frame[self.options.part], PARTS, where).to(torch.uint8) if self.options.part else None
        records = Records(
            features=self._features(frame, where),
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
        """Features float32 `[N, d]` (of texts int64 `[N, length]`) of rows with the declared column names."""
        if self.options.text:
            require(frame, [self.options.text], "the given table")
        return self._features(frame, "the given table")

    def _features(self, frame: pd.DataFrame, where: str) -> Tensor:
        if not self.options.text:
            return encode(frame, self.options.features, where)
        texts = [str(text) for text in frame[self.options.text]]
        if self.options.tokenizer:
            return self._tokens().ids(texts)
        ids = [token_ids(words(text), self.options.vocabulary, self.options.length) for text in texts]
        return torch.tensor(ids, dtype=torch.int64).reshape(-1, self.options.length)

    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(Path(self.options.tokenizer), self.options.length, "first")
        return self._tokenizer

    def _without_missing(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        text = [self.options.text] if self.options.text else []
        needed = [self.options.label, *self.options.features, *text]
        require(frame, needed, where)

        def absent_in(column: pd.Series) -> pd.Series:
            """Mask of missing values; a declared category, such as `none`, is never missing."""
            if column.name == self.options.text:  # `none` and `-` are texts
                return column == ""
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
