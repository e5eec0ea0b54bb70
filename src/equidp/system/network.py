"""Network: runs a provider's own download with a time limit, and gives the reason if it fails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from equidp.errors import first_line

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds a server may stay silent before its download counts as failed."""


def attempt(download: Callable[[], T]) -> tuple[T | None, str]:
    """Run a download.

    Returns:
        Its result and "", or None and the reason for the failure, as a phrase.
    """
    try:
        with timeout():
            return download(), ""
    except NotImplementedError:
        return None, "this provider allows no automatic download"
    except Exception as error:  # any failure of a provider's client ends in the same advice
        return None, f"the automatic download failed: {first_line(error)}"


@contextmanager
def timeout(seconds: float = TIMEOUT) -> Iterator[None]:
    """Give sockets opened in the block a time limit: the providers' clients set none, and could wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
