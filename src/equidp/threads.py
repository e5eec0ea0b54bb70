"""Threads: what several trainings in one process (Kedro's ThreadRunner) must not do at the same time."""

from __future__ import annotations

import threading

GLOBAL_RANDOM = threading.RLock()
"""Held by whoever seeds torch's own generators: a process has them once, and another's seed in between would give a
model other initial weights than its seed says. And by whoever records a CUDA graph, which lays hold of them too."""


def alone() -> bool:
    """Whether this is the process's main thread, beside which nothing else trains."""
    return threading.current_thread() is threading.main_thread()
