"""Logs and terminals: holds back messages of other libraries, and says where results are printed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
"""Columns of printed text if there is no terminal."""


@contextmanager
def held_back(name: str, *, below: int) -> Iterator[None]:
    """Within this context the logger `name` prints only messages of the level `below` and above.

    The same holds for existing loggers beneath it, because some libraries, such as torch, give each of these a level.
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
    """Return the console on which results are printed, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)
