"""Logs and terminals: suppressing another library's messages, and where results are printed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of what is printed where there is no terminal."""


@contextmanager
def held_back(name: str, *, below: int) -> Iterator[None]:
    """During the block the logger `name` prints only messages of the level `below` and above.

    So do those beneath it that are there: torch gives each of its own a level of its own.
    """
    known = list(logging.root.manager.loggerDict.items())
    beneath = [one for its, one in known if its.startswith(f"{name}.") and isinstance(one, logging.Logger)]
    before = [(one, one.level) for one in (logging.getLogger(name), *beneath)]
    for logger, level in before:
        logger.setLevel(max(level, below))
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def terminal() -> Console:
    """Where results are printed: as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)
