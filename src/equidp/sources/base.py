"""Source: what every dataset promises — to find its raw files, and to turn them into Records by a declared schema."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from equidp.errors import EquidpError, unknown_name
from equidp.records import Records
from equidp.sources.files import Published, RawFiles, find, fingerprint, missing, verified

NETWORK_TIMEOUT = 30.0
"""Seconds a provider's server may stay silent before its download counts as failed."""


class SourceOptions(BaseModel):
    """Options every source has (`data.options.*`).

    Attributes:
        verify: compare files with the checksums the provider's files have.
        download: fetch missing files with the provider's own client.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verify: bool = True
    download: bool = True


class Source(ABC):
    """A dataset: `read(locate(raw_dir))` gives its Records.

    Attributes:
        name: registry name.
        Options: settings class of `data.options`.
        layouts: alternative sets of files, the provider's own first; the first complete one is read.
        unit_names: what one record is called, and what the records of one unit share, where they share something.
    """

    name: ClassVar[str]
    Options: ClassVar[type[SourceOptions]] = SourceOptions
    layouts: ClassVar[Sequence[Sequence[Published]]] = ()
    unit_names: ClassVar[tuple[str, ...]] = ("record",)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = checked_options(self.Options, options or {}, f"data option of dataset {self.name!r}")

    def locate(self, raw_dir: Path) -> RawFiles:
        """Find the files below `raw_dir`, downloading them where the provider allows it.

        Raises:
            EquidpError: a file is missing, corrupt or not the provider's; the message says where to get it.
        """
        raw_dir, outcome = Path(raw_dir), ""
        found = self.search(raw_dir)
        if found is None:
            outcome = self._try_download(raw_dir)
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

    def wanted(self, raw_dir: Path) -> Published:
        """The file to ask for: the first missing one of a layout that was begun, else of the provider's own."""
        begun = [layout for layout in self.layouts if any(find(raw_dir, file) for file in layout)]
        layout = (begun or self.layouts)[0]
        return next(file for file in layout if find(raw_dir, file) is None)

    @abstractmethod
    def read(self, files: RawFiles) -> Records:
        """Decode and encode the files by the declared schema. Nothing is learnt from the data.

        Raises:
            EquidpError: the data break the schema; the message names file, row and column.
        """

    def download(self, raw_dir: Path) -> None:
        """Fetch the files with the provider's own client. Sources without one leave this as it is."""
        raise NotImplementedError

    def split_level(self, word: str) -> Literal["record", "unit"]:
        """Translate `data.split_by` (`record`, `unit`, or this dataset's own words, such as `lesion`).

        Raises:
            EquidpError: for a word this dataset does not know.
        """
        levels: dict[str, Literal["record", "unit"]] = {"record": "record", self.unit_names[0]: "record"}
        if len(self.unit_names) > 1:
            levels |= {"unit": "unit", self.unit_names[1]: "unit"}
        if word not in levels:
            raise unknown_name(f"value of data.split_by for dataset {self.name!r}", word, levels)
        return levels[word]

    def _try_download(self, raw_dir: Path) -> str:
        if not self.options.download:
            return "data.options.download is off"
        try:
            with network_timeout():
                self.download(raw_dir)
        except NotImplementedError:
            return "this provider allows no automatic download"
        except Exception as error:  # any failure of a provider's client ends in the same advice
            return f"the automatic download failed: {first_line(error)}"
        return "the automatic download did not bring it"


def checked_options(options: type[BaseModel], given: Mapping[str, Any], kind: str) -> Any:
    """Build settings from a mapping.

    Args:
        options: the settings class.
        given: names and values as they stand in conf.
        kind: what one of them is called in an error, such as `data option of dataset 'adult'`.

    Raises:
        EquidpError: an unknown name or a value that is not allowed.
    """
    for name in given:
        if name not in options.model_fields:
            raise unknown_name(kind, name, options.model_fields)
    try:
        return options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise EquidpError(f"The {kind} {place!r} is not valid: {first['msg']} (given: {first['input']!r}).") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with its type."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextmanager
def network_timeout(seconds: float = NETWORK_TIMEOUT) -> Iterator[None]:
    """Give sockets opened inside a timeout: the providers' clients set none, and would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
