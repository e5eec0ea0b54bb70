"""Progress bars: often where a terminal moves them, seldom where every frame stays."""

from __future__ import annotations

import sys
from typing import Any

SECONDS_IN_A_FILE = 10.0
"""Between two frames where nobody watches the bar move, as every one of them stays."""


def frames(*, first: bool = False) -> dict[str, Any]:
    """`tqdm`'s settings of how often a bar is drawn; `first`: at once in a file, too, however short the work is."""
    if sys.stderr.isatty():
        return {}
    return {"mininterval": SECONDS_IN_A_FILE, "delay": 0.0 if first else SECONDS_IN_A_FILE}
