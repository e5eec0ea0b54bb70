"""Signals: what stops a sweep, and who hears of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equidp.threads import alone


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """SIGTERM stops a sweep as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with _handling(signal.SIGTERM, stop):
        yield


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C, which a terminal sends to all: this one stops them in order.

    Nor does this one while they start: it has to be pressed again.
    """
    with _handling(signal.SIGINT, signal.SIG_IGN):
        yield


@contextmanager
def _handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A handler for a while; only the main thread may set one."""
    if not alone():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
