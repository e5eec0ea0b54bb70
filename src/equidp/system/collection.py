"""Python's garbage collector in the process of a command, which imports much, makes one run and ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import click

_postponed: list[bool] = []
"""Empty but during `postponed`, before `settle`."""


@contextmanager
def postponed() -> Iterator[None]:
    """During a block that a command runs nothing is collected before `settle`.

    What is imported stays until the process ends. The collector would look through all of it again and again, and once
    more at the end: a quarter of the processor time of a short run. In a notebook, whose process goes on, nothing
    changes.
    """
    if click.get_current_context(silent=True) is None or not gc.isenabled():
        yield
        return
    gc.disable()
    _postponed.append(True)
    try:
        yield
    finally:
        _postponed.clear()
        gc.enable()


def settle() -> None:
    """The imports are done: they are passed over from here on, and all that is newer is collected as usual."""
    if _postponed:
        _postponed.clear()
        gc.freeze()
        gc.enable()
