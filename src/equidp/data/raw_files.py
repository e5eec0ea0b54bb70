"""Raw files: where a provider's file is, whether its content is the provider's, and how to open it plain or gzipped.

Checksums are taken over the unpacked content, so that one checksum covers a file and its gzipped copy.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from equidp.errors import EquidpError

BLOCK = 1 << 20


@dataclass(frozen=True)
class PublishedFile:
    """A file as its provider publishes it.

    Attributes:
        path: place below the raw folder, without the `.gz` of a packed copy.
        page: address where a person downloads it; empty for a file of the user's own.
        sha256: checksum of the unpacked content; empty where none is known.
        md5: likewise, for providers that publish only an MD5.
        contains: what a folder must hold, as a phrase; empty for a file.
    """

    path: str
    page: str
    sha256: str = ""
    md5: str = ""
    contains: str = ""


@dataclass(frozen=True)
class RawFiles:
    """Files found for one dataset.

    Attributes:
        paths: files by the names that the source gives them; empty for an embedded dataset.
        fingerprint: sha256 over all contents (names, sizes and times for big folders), or `embedded`.
        records: the same over the files of the records alone; empty if there are no others.
    """

    paths: Mapping[str, Path]
    fingerprint: str
    records: str = ""


def find(raw_dir: Path, published: PublishedFile) -> Path | None:
    """The file itself, or its gzipped copy, or None."""
    candidates = (raw_dir / f"{published.path}{suffix}" for suffix in ("", ".gz"))
    return next((path for path in candidates if _is_there(path)), None)


def find_own(raw_dir: Path, path: str) -> Path | None:
    """A file of the user's own: the named one, else its plain or gzipped copy, or None."""
    named = raw_dir / path
    return named if _is_there(named) else find(raw_dir, PublishedFile(path.removesuffix(".gz"), ""))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's content as a binary stream, unpacked when its name ends in `.gz`.

    Raises:
        EquidpError: the file is truncated, corrupt or unreadable, which may show while it is read.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EquidpError(f"{path} is truncated or corrupt ({error}); download it again.") from error
    except OSError as error:
        raise EquidpError(f"{path} cannot be read ({error.strerror or error}).") from error


def content(path: Path) -> bytes:
    """The whole unpacked content. Raises EquidpError where the file is truncated, corrupt or unreadable."""
    return b"".join(_blocks(path))


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Checksum of the unpacked content, as hexadecimal digits."""
    checksum = hashlib.new(algorithm, usedforsecurity=False)
    for block in _blocks(path):
        checksum.update(block)
    return checksum.hexdigest()


def verified(path: Path, published: PublishedFile, *, verify: bool) -> str:
    """Return the file's sha256, after comparison with the published checksums unless `verify` is off.

    Raises:
        EquidpError: the checksums differ.
    """
    for algorithm, expected in (("sha256", published.sha256), ("md5", published.md5)):
        found = digest(path, algorithm) if verify and expected else expected
        if found != expected:
            raise EquidpError(
                f"{path} is not the provider's file: the {algorithm} of its content is {found}, expected {expected}; "
                f"download it again from {published.page}, or accept it as it is with data.options.verify=false."
            )
    return published.sha256 if verify and published.sha256 else digest(path)


def missing(raw_dir: Path, published: PublishedFile, *, download: str) -> EquidpError:
    """Build the error for a missing file; `download` says as a phrase why it was not downloaded."""
    check = f" with sha256 {published.sha256} (unpacked)" if published.sha256 else ""
    check = check or (f" with md5 {published.md5}" if published.md5 else "")
    form = f", a folder with {published.contains}," if published.contains else ", plain or as .gz,"
    put = f"download it from {published.page} and put it there{check}" if published.page else "put it there"
    reason = f" ({download})" if published.page else ""
    return EquidpError(
        f"{raw_dir / published.path}{form} is missing: {put}, or point raw_dir (EQUIDP_RAW_DIR) at the folder that "
        f"holds it{reason}."
    )


def inside(raw_dir: Path, path: str) -> Path:
    """A path of the user's own, relative to the raw folder. Raises EquidpError if it leads out of this folder."""
    if "\\" in path and not (raw_dir / path).exists():
        raise EquidpError(f"data.options: the path {path!r} has backslashes; write / between folders.")
    whole = (raw_dir / path).resolve()
    if not path or not whole.is_relative_to(raw_dir.resolve()):
        raise EquidpError(f"data.options: the path {path!r} must lead to a file below raw_dir ({raw_dir}).")
    return whole


def fingerprint(parts: Iterable[str]) -> str:
    """One sha256 over several digests or facts, in the order given."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder and its linked folders, in a fixed order.

    Raises:
        EquidpError: a folder cannot be read, or a link leads to a folder that contains it.
    """

    def refuse(error: OSError) -> None:
        raise EquidpError(f"{error.filename} cannot be read ({error.strerror or error}).") from error

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(place)
        for link in (here / name for name in folders if (here / name).is_symlink()):
            if any(above.resolve().is_relative_to(link.resolve()) for above in (here, *here.parents)):
                raise EquidpError(f"{link} is a link to a folder that contains it; remove it.")
        found += [here / name for name in names]
    return sorted(found)


def folder_fingerprint(folder: Path, paths: Iterable[Path]) -> str:
    """sha256 over relative paths, sizes and modification times: cheap enough for ten thousand images.

    The whole relative path counts, because a file in another class's folder is another record.
    """
    stats = ((path.relative_to(folder).as_posix(), path.stat()) for path in sorted(paths))
    return fingerprint(f"{place} {stat.st_size} {stat.st_mtime_ns}" for place, stat in stats)


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError as error:  # a folder above the file may not be read
        raise EquidpError(f"{path} cannot be read ({error.strerror}).") from error


def _blocks(path: Path) -> Iterable[bytes]:
    with opened(path) as stream:
        while block := stream.read(BLOCK):
            yield block
