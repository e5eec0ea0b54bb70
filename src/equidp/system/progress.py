"""Progress bars: drawn often in a terminal, and seldom in a file, where every frame stays."""

from __future__ import annotations

import sys
from typing import Any

SECONDS_IN_A_FILE = 10.0
"""Seconds between two frames in a file, where every frame stays."""


def frames(*, first: bool = False) -> dict[str, Any]:
    """Return `tqdm`'s settings for how often a bar is drawn. With `first`, even short work shows a frame in a file."""
    if sys.stderr.isatty():
        return {}
    return {"mininterval": SECONDS_IN_A_FILE, "delay": 0.0 if first else SECONDS_IN_A_FILE}
