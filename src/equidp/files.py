"""Writing files so that a reader never sees half of one, and where sockets may be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from equidp.errors import EquidpError

SOCKET_ROOM = 70
"""Bytes of a folder under which every system (macOS: 103 in all) has room for multiprocessing's names of sockets."""


def sockets_fit() -> bool:
    """Whether sockets can be made in the folder for temporary files."""
    return len(os.fsencode(tempfile.gettempdir())) <= SOCKET_ROOM


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` once the block has succeeded, and goes if not.

    Raises:
        EquidpError: where the folder cannot be written or the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors in its own
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise EquidpError(f"{path} cannot be written ({reason}): free some space or choose another place.") from error
    finally:
        part.unlink(missing_ok=True)
