"""Source: the interface of every dataset: find its raw files, and turn them into Records by a declared schema."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pandas as pd
import torch
from torch import Tensor

from equidp.data.columns import Named, Numeric, encode, refused_in
from equidp.data.membership import identified
from equidp.data.raw_files import PublishedFile, RawFiles, find, fingerprint, missing, verified
from equidp.data.records import TEST_PART, Records, Schema
from equidp.errors import EquidpError, unknown_name
from equidp.options import Declared, checked_options
from equidp.system.network import attempt

GIVEN = "the given table"
"""The word of messages for rows that are sent to a served model."""

UNIT_COLUMN = " For units of several records, name the column of their ids: data.options.unit."


class SourceOptions(Declared):
    """Options every source has (`data.options.*`).

    Attributes:
        verify: compare files with the checksums the provider's files have.
        download: fetch missing files with the provider's own client.
        paths: names of the options whose value is the path of a folder.
    """

    paths: ClassVar[tuple[str, ...]] = ()

    verify: bool = True
    download: bool = True


class Source(ABC):
    """A dataset: `read(locate(raw_dir))` gives its Records.

    Attributes:
        name: registry name.
        Options: settings class of `data.options`.
        layouts: alternative sets of files, the provider's own first; the first complete one is read.
        unit_names: the word for one record, and the word for a unit of several records, where there are such units.
        tasks: names of the tasks that the source can give records for.
        sizes: the published number of records of each class, or of all where there are no classes: of the provider's
            training part where there is one, else of the whole; empty where none is published. Files that are not
            verified have none.
        unit_sizes: likewise of units.
        test_size: the published number of test records, where the provider splits; 0 where none is published.
        catalog: loads an entry of the Kedro catalog, in a Kedro run.
    """

    name: ClassVar[str]
    Options: ClassVar[type[SourceOptions]] = SourceOptions
    layouts: ClassVar[Sequence[Sequence[PublishedFile]]] = ()
    unit_names: ClassVar[tuple[str, ...]] = ("record",)
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    sizes: ClassVar[tuple[int, ...]] = ()
    unit_sizes: ClassVar[tuple[int, ...]] = ()
    test_size: ClassVar[int] = 0
    catalog: Callable[[str], Any] | None = None

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = checked_options(self.Options, options or {}, f"data option of dataset {self.name!r}")

    def locate(self, raw_dir: Path) -> RawFiles:
        """Find the files below `raw_dir`, downloading them where the provider allows it.

        Raises:
            EquidpError: a file is missing, corrupt or not the provider's; the message says where to get it.
        """
        raw_dir, outcome = Path(raw_dir), "data.options.download is off"
        found = self.search(raw_dir)
        if found is None:
            if self.options.download:
                _, reason = attempt(lambda: self.download(raw_dir))
                outcome = reason or "the automatic download did not bring it"
            found = self.search(raw_dir)
        if found is None:
            raise missing(raw_dir, self.wanted(raw_dir), download=outcome)
        return found

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The first layout whose files are all there, verified; None where there is none."""
        for layout in self.layouts:
            found = {file: path for file in layout if (path := find(raw_dir, file))}
            if len(found) == len(layout):
                digests = [verified(path, file, verify=self.options.verify) for file, path in found.items()]
                return RawFiles({file.path: path for file, path in found.items()}, fingerprint(digests))
        return None

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The file that a message names: the first missing one of a partly present layout, else the provider's."""
        if not self.layouts:
            raise EquidpError(
                f"Source {self.name!r} names no files: give its class `layouts`, or a `search` that finds them; for "
                'data that are made in `read` it returns RawFiles({}, "made").'
            )
        begun = [layout for layout in self.layouts if any(find(raw_dir, file) for file in layout)]
        layout = (begun or self.layouts)[0]
        return next(file for file in layout if find(raw_dir, file) is None)

    @property
    def task(self) -> str:
        """The task that the options declare."""
        return self.tasks[0]

    @abstractmethod
    def read(self, files: RawFiles) -> Records:
        """Decode and encode the files by the declared schema. Nothing is learnt from the data.

        Raises:
            EquidpError: the data break the schema; the message names file, row and column.
        """

    def as_in(self, schema: Schema) -> Self:
        """This source with the public facts of a schema; for a source whose `read` takes such facts from a file."""
        return self

    def records(self, files: RawFiles) -> Records:
        """The result of `read`, with the declared sizes and each record's identity."""
        found = self.read(files)
        if self.sizes and self.options.verify:
            self._refuse_incomplete(found)
            schema = replace(found.schema, sizes=self.sizes, unit_sizes=self.unit_sizes)
            found = replace(found, schema=schema)
        return identified(found)

    def _refuse_incomplete(self, found: Records) -> None:
        """Refuse other numbers of records than are published, because a folder of files has no known checksum."""
        test = torch.zeros(len(found), dtype=torch.bool) if found.part is None else found.part == TEST_PART
        there = torch.bincount(found.class_ids[~test], minlength=len(self.sizes)).tolist()
        kinds = [f"records of class {name!r}" for name in found.schema.classes] or ["training records"]
        numbers = zip(kinds, there, self.sizes, strict=True)
        for kind, has, published in [*numbers, ("test records", int(test.sum()), self.test_size or int(test.sum()))]:
            if has != published:
                raise EquidpError(
                    f"The files of dataset {self.name!r} hold {has:,} {kind} where {published:,} are published: some "
                    "are missing, or do not belong there. Unpack the archive again, or accept them as they are with "
                    "data.options.verify=false."
                )

    @property
    def reader(self) -> str:
        """Versions of the libraries that records' identities depend on, if these are made from decoded content.

        With another version a person may come into another part, so it is another split.
        """
        return ""

    @property
    def columns(self) -> Mapping[str, Named | Numeric]:
        """The raw columns that are features, with their declarations; empty if the source is no table."""
        return {}

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """Features of rows with the provider's column names, for a model that is served; tables only.

        Raises:
            EquidpError: the dataset is not a table, or a value does not fit the schema.
        """
        if self.columns:
            return encode(frame, self.columns, GIVEN)
        raise EquidpError(f"Dataset {self.name!r} is not a table: give its features as an array instead.")

    def unfit(self, frame: pd.DataFrame) -> dict[Any, str]:
        """Return, by its label, each row that `encode` refuses, with the sentence on that row alone.

        Whole columns are checked if this gives the same result, because thousands of rows, one after another, take a
        minute.
        """
        if type(self).encode is not Source.encode:
            return _refused_by(self.encode, frame)
        return refused_in(
            (frame[declared.column or name], partial(declared.encoded, where=GIVEN))
            for name, declared in self.columns.items()
        )

    def example(self) -> pd.DataFrame | None:
        """A row that `encode` takes, made from the declaration alone; None if the source is no table."""
        row = {declared.column or name: [declared.example()] for name, declared in self.columns.items()}
        return pd.DataFrame(row) if row else None

    def download(self, raw_dir: Path) -> None:
        """Fetch the files with the provider's own client. Sources without a client do not override this."""
        raise NotImplementedError

    def words(self) -> tuple[str, ...]:
        """`unit_names`, or the words that the options give."""
        return self.unit_names

    def split_level(self, setting: str, word: str) -> Literal["record", "unit"]:
        """Return what a setting's word means for this dataset: `record`, `unit` or the dataset's own words (`lesion`).

        Raises:
            EquidpError: for a word this dataset does not know.
        """
        record, *units = self.words()
        levels: dict[str, Literal["record", "unit"]] = {"record": "record", record: "record"}
        if units:
            levels |= {"unit": "unit", units[0]: "unit"}
        if word not in levels:
            refused = unknown_name(f"value of {setting} for source {self.name!r}", word, levels)
            more = "" if units or "unit" not in self.Options.model_fields else UNIT_COLUMN
            raise EquidpError(f"{refused}{more}")
        return levels[word]


def part_column(*sizes: int) -> Tensor:
    """`Records.part` of so many training records, followed by so many test records: uint8 `[N]`."""
    return torch.cat([torch.full((size,), part, dtype=torch.uint8) for part, size in enumerate(sizes)])


def classified(schema: Schema, parts: Sequence[tuple[Tensor, Tensor]]) -> Records:
    """Return Records of features `[n, *schema.shape]` and labels `[n]` of each part, training first.

    The class is the only grouping.
    """
    features, labels = map(torch.cat, zip(*parts, strict=True))
    part = part_column(*(len(own) for _, own in parts))
    return Records(features=features, labels=labels, groups={"class": labels}, schema=schema, part=part)


def _refused_by(check: Callable[[pd.DataFrame], object], rows: pd.DataFrame) -> dict[Any, str]:
    """Return, by its label, each row that is refused on its own; the rows are found by halving the table."""
    try:
        check(rows)
    except EquidpError as error:
        if len(rows) == 1:
            return {rows.index[0]: error.message}
        middle = len(rows) // 2
        return _refused_by(check, rows.iloc[:middle]) | _refused_by(check, rows.iloc[middle:])
    return {}
