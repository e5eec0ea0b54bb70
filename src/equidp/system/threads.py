"""Threads: things of which a process has only one, even with several trainings (ThreadRunner).

These are torch's generators, the environment and the main thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

GLOBAL_RANDOM = threading.RLock()
"""Hold this lock while seeding torch's own generators: a process has them only once, and another seed in between would
give a model other initial weights. Hold it, too, while recording a CUDA graph, which uses the same generators."""


def alone() -> bool:
    """Whether this is the process's main thread; ThreadRunner's trainings run in other threads."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Within this context the process's environment has these variables. Afterwards they are as before."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
