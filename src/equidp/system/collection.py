"""Collection: Python's garbage collector in the process of a command, which imports much, makes one run and ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import click

_postponed: list[bool] = []
"""Not empty only within `postponed`, before `settle`."""


@contextmanager
def postponed() -> Iterator[None]:
    """Within this context of a command nothing is collected before `settle`.

    Imported objects live until the process ends. The collector would look through all of them again and again, and once
    more at the end, which takes a quarter of the processor time of a short run. In a notebook, whose process goes on,
    nothing changes.
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
    """Call this after the imports: the collector ignores all objects so far, and collects newer ones as usual."""
    if _postponed:
        _postponed.clear()
        gc.freeze()
        gc.enable()
