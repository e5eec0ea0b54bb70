"""`kedro …` in a process of its own, which stops when the process that started it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from equidp.system.files import sockets_fit

SECONDS_TO_STOP = 10
"""Time for a run that was asked to stop to write a checkpoint."""


@dataclass(frozen=True)
class Descriptor:
    """A file descriptor that a starting process receives as one of its own."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # not on Windows

        return _received, (DupFd(self.number),)


def _received(sent: Any) -> Descriptor:
    return Descriptor(sent.detach())


def kedro(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: Descriptor, held: Descriptor
) -> None:
    """Run `kedro <arguments>`, as the whole work of a process of `multiprocessing`.

    It works in `folder` with these environment variables, prints to `output`, and keeps `held` open until it ends.
    """
    attend(output)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["kedro", *arguments]

    (command,) = entry_points(group="console_scripts", name="kedro")
    command.load()()


def attend(output: Descriptor) -> None:
    """Print to `output`, leave Ctrl-C to the process that started this one, and stop when that process has ended."""
    os.setsid()
    threading.Thread(target=_stop_without_starter, daemon=True).start()
    os.dup2(output.number, 1)
    os.dup2(output.number, 2)


def _stop_without_starter() -> None:
    """Wait until the starter has ended, then ask this process to stop; training then writes a checkpoint."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def forks() -> bool:
    """Whether this system can fork runs: Apple's frameworks fail after a fork, and forking needs a socket."""
    return sys.platform == "linux" and sockets_fit()


def reason_of(log: Path, code: int) -> str:
    """Return why a process failed: the last line that it has printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    return last if code > 0 else f"killed by signal {-code}; last line: {last}"
