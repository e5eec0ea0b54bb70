"""Network: a provider's own download, with a time limit, and the reason if it fails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds a server may stay silent before its download counts as failed."""

REMARK = "(raised as a result of Query-invoked autoflush"


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


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with its type; SQLAlchemy puts a remark in front of some reasons."""
    text = [line for line in str(error).strip().splitlines() if not line.startswith(REMARK)]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextmanager
def timeout(seconds: float = TIMEOUT) -> Iterator[None]:
    """Give sockets opened in the block a time limit: the providers' clients set none, and could wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
