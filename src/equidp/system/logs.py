"""Logs: holding back what another library's logger would say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back(name: str, *, below: int) -> Iterator[None]:
    """Let the logger `name` speak only from the level `below` upwards, for a while."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(below)
    try:
        yield
    finally:
        logger.setLevel(level)
