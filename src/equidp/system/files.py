"""Files: complete or not there at all for readers; locks; messages for a disk that refuses to write; sockets."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from equidp.errors import EquidpError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # everywhere but on Windows
    msvcrt = None  # type: ignore[assignment]

FAR = 2**31 - 2
"""A byte beyond the end of any locked file: Windows locks bytes, and prevents others from reading them."""

SOCKET_ROOM = 70
"""Longest path of a folder, in bytes, in which multiprocessing's sockets have room for their names (macOS: 103 bytes
in all)."""

REFUSALS: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the quota is used up; free some space",
    errno.EFBIG: "File too large; raise the limit on the size of files (ulimit -f), or choose another file system",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "writing there is not allowed; change its permissions or choose another folder",
    errno.EPERM: "writing there is not allowed; change its permissions or choose another folder",
    errno.ENOTDIR: "a file stands where a folder should be; move it",
    errno.EEXIST: "a file stands where a folder should be; move it",
}
"""Why a disk refuses to write, and what to do, by the system's number."""


def sockets_fit() -> bool:
    """Whether sockets can be made in the folder for temporary files."""
    return len(os.fsencode(tempfile.gettempdir())) <= SOCKET_ROOM


def private(path: str, flags: int) -> int:
    """An opener of files that only their owner may read: they are as sensitive as the data."""
    return os.open(path, flags, 0o600)


def durable(descriptor: int) -> None:
    """Write an open file or folder to the disk itself. Raises OSError if that fails.

    Apple's `fsync` leaves the data in the disk's own memory, where a power cut would lose them.
    """
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with suppress(OSError):  # for example a network file system, which knows only `fsync`
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a new or replaced name in a folder durable. Only POSIX systems need this."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        durable(descriptor)
    finally:
        os.close(descriptor)


def settle(path: Path) -> None:
    """Make a completely written file durable, and its name. Raises EquidpError if the disk refuses."""
    try:
        with open(path, "rb+") as file:  # open for writing, because Windows makes only such files durable
            durable(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def locked(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed, or this process ends; False if another process holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_byte(file)
    except OSError:
        return False
    return True


def _lock_byte(file: IO[bytes]) -> None:
    """Lock a byte, Windows' counterpart of `flock`. Raises OSError if another process holds the lock."""
    place = file.tell()
    file.seek(FAR)  # Windows locks from the file's position on
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    finally:
        file.seek(place)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to. It replaces `path` if the block succeeds, and is removed otherwise.

    Raises:
        EquidpError: the disk refuses.
    """
    part = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise storage_error(path, error) from error
    finally:
        with suppress(OSError):  # there is no folder, or it is not writable: the first error is reported
            part.unlink(missing_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Write a file completely, durably, and for its owner alone. Raises EquidpError if the disk refuses."""
    with replacing(path) as part, open(part, "xb", opener=private) as file:
        file.write(content)
        file.flush()
        durable(file.fileno())
    try:
        sync_folder(path.parent)  # otherwise a power cut could lose the file's name, and with it what was charged
    except OSError as error:
        raise storage_error(path, error) from error


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give a folder beside `path` to write into. It replaces `path` if the block succeeds, and is removed otherwise.

    `path` is never incomplete: if the process ends during the replacement, there is no such folder.

    Raises:
        EquidpError: the disk refuses.
    """
    part, earlier = unfinished(path), unfinished(path)
    try:
        part.mkdir(parents=True)
        yield part
        if path.exists():
            os.replace(path, earlier)
        os.replace(part, path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        for folder in (part, earlier):
            shutil.rmtree(folder, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists. No reader sees an incomplete folder.

    Raises:
        EquidpError: the disk refuses.
    """
    try:
        if path.is_dir():
            gone = unfinished(path)
            os.replace(path, gone)
            shutil.rmtree(gone)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(path, error) from error


def remove_kept(path: Path) -> None:
    """Remove a file that may not exist, and unfinished new versions that killed processes left beside it."""
    path.unlink(missing_ok=True)
    for left in path.parent.glob(unfinished_of(path)):
        left.unlink(missing_ok=True)


def unfinished(path: Path) -> Path:
    """Return a path beside `path` to write its new content to, with a name that no other process uses.

    The name is random, because containers that share a folder can have equal process ids.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def unfinished_of(path: Path) -> str:
    """Return a pattern for the names beside `path` of unfinished new versions that killed processes left."""
    return f".{escape(path.name)}.*.part"


def refused(folder: Path) -> OSError | None:
    """Return why the disk would refuse a file in a folder, which may have to be made; None if it would not refuse."""
    there, number = next(one for one in (folder, *folder.parents) if one.exists()), 0
    if not there.is_dir():
        number = errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK):
        number = errno.EACCES
    return OSError(number, os.strerror(number)) if number else None


def storage_error(path: Path, error: OSError | SafetensorError) -> EquidpError:
    """Return the error for a disk that refuses to write."""
    if isinstance(error, OSError):
        number, said = error.errno, error.strerror
    else:  # safetensors reports the system's errors in its own words
        code = re.search(r"os error (\d+)", str(error))
        number, said = int(code[1]) if code else None, None
    reason = REFUSALS.get(number or 0, said or str(error))
    if number == errno.EACCES and sys.platform == "win32":  # Windows gives this error if Excel has the table open, too
        reason = "another program has it open, or writing there is not allowed; close it, or choose another folder"
    return EquidpError(f"Cannot write {path}: {reason}. What was saved before is intact.")
