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

    Args:
        arguments: of the command line.
        folder: to work in.
        environment: variables to set.
        output: where it prints.
        held: a descriptor that stays open until this process ends.
    """
    attend(output)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["kedro", *arguments]

    (command,) = entry_points(group="console_scripts", name="kedro")
    command.load()()


def attend(output: Descriptor) -> None:
    """Print there from now on, leave Ctrl-C to the process that started this one, and stop when that has ended."""
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
