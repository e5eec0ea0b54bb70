"""Interrupts: Ctrl-C and SIGTERM arrive as exceptions, and Python loses an exception that is raised in a finaliser."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from equidp.system.threads import alone

SIGTERM_STATUS = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ends."""

SECONDS_LATER = 0.1


def keep() -> None:
    """Make sure that an interrupt that arrives in a finaliser is delivered again.

    Python only prints it ("Exception ignored in …") and continues, for hours if a training follows. Database clients
    run finalisers often.
    """
    if not isinstance(sys.unraisablehook, _Again):
        sys.unraisablehook = _Again(sys.unraisablehook)


def end_quietly() -> None:
    """Let an interrupt that nothing catches end the process with "Aborted!", as click does.

    Kedro imports a project before click runs, which takes seconds. During this time Ctrl-C would print fifty lines.
    """
    earlier = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("\nAborted!", file=sys.stderr)
        else:
            earlier(kind, value, trace)

    sys.excepthook = hook


@contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Within this context signals have this handler. Only the main thread may set one; in others nothing changes."""
    before = {number: signal.signal(number, handler) for number in numbers} if alone() else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def waiting() -> Iterator[None]:
    """Within this context an interrupt waits until the end; a second interrupt is delivered at once.

    This is for work that must not be interrupted. For example, if a store has made a run but not yet answered, nobody
    would know of this run.
    """
    before = {n: h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            before[signal.Signals(number)](number, frame)

    try:
        with handling(note, *before):
            yield
    finally:
        if len(arrived) == 1:
            signal.raise_signal(arrived[0])


def raise_hidden(error: BaseException) -> None:
    """Raise the interrupt during whose handling `error` arose, if there is one.

    An interrupted database session is closed and raises an error of its own. That ordinary error would hide the
    interrupt, and the run would continue.
    """
    seen: set[int] = set()
    ahead = [error]
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        if isinstance(one, KeyboardInterrupt | SystemExit):
            raise one
        seen.add(id(one))
        ahead += [other for other in (one.__cause__, one.__context__) if other is not None]


@dataclass(frozen=True)
class _Again:
    """Sends an interrupt again, and passes everything else to the previous hook, which may be another `_Again`."""

    earlier: Callable[[Any], Any]

    def __call__(self, lost: Any) -> None:
        number = _signal_behind(lost.exc_type, lost.exc_value)
        if number is None:
            self.earlier(lost)
            return
        # on Windows `os.kill` would end the process at once
        send = signal.raise_signal if sys.platform == "win32" else partial(os.kill, os.getpid())
        # later, because an exception that is raised in this function is lost, too
        with suppress(RuntimeError):  # no thread can be started any more, because the process is ending already
            threading.Timer(SECONDS_LATER, send, (number,)).start()


def _signal_behind(kind: type[BaseException], value: BaseException | None) -> signal.Signals | None:
    if issubclass(kind, KeyboardInterrupt):
        return signal.SIGINT
    return signal.SIGTERM if isinstance(value, SystemExit) and value.code == SIGTERM_STATUS else None
