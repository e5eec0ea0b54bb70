"""What a process has once, for several trainings in it (ThreadRunner): generators, environment, a main thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

GLOBAL_RANDOM = threading.RLock()
"""Held by whoever seeds torch's own generators: a process has them once, and another's seed in between would give a
model other initial weights than its seed says. And by whoever records a CUDA graph, which lays hold of them too."""


def alone() -> bool:
    """Whether this is the process's main thread, beside which nothing else trains."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables of the process's environment for a block, which are as they were after it."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
