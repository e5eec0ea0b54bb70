"""Logs: suppressing another library's messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back(name: str, *, below: int) -> Iterator[None]:
    """During the block the logger `name` prints only messages of the level `below` and above."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(below)
    try:
        yield
    finally:
        logger.setLevel(level)
