"""Markdown made of text that comes from data or settings: its markup characters lose their meaning."""

from __future__ import annotations

import re
from collections.abc import Sequence

from equidp.errors import UNSHOWN


def markdown_text(text: str) -> str:
    """Text from data within Markdown: markup characters lose their meaning, and no line ends."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", UNSHOWN.sub(" ", str(text)))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its header."""
    shown = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]
    return "\n".join([shown[0], "|" + "---|" * len(rows[0]), *shown[1:]])
