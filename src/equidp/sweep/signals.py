"""Signals: what stops a sweep, and which processes receive them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equidp.system.interrupts import handling


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """SIGTERM stops a sweep as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with handling(stop, signal.SIGTERM):
        yield


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started in the block ignore Ctrl-C, which a terminal sends to all: this process stops them in
    order.

    This process ignores it too while they start: it has to be pressed again.
    """
    with handling(signal.SIG_IGN, signal.SIGINT):
        yield
