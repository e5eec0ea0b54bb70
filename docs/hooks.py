"""What MkDocs does besides: two pages of the repository's root join the site, and formulas get their raised letters."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FORMULAS = ("algorithms", "privacy", "tuning", "extending", "parts", "sharp-edges")
"""How the pages' names begin that have any."""

INDEX = re.compile(
    r"((?<![\w&#])(?:max|min|sup|log|slot|group|[^\W\d_][\u0300-\u036f]*)|[)’])([_^])(\{[^}]*\}|[A-Za-z0-9Α-ω′*]+[\u0300-\u036f]*)"
)
"""A letter or a bracket with an index: C_0, ρ^k, (…)^{1/2}."""


def on_files(files: Files, config: Any) -> Files:
    """Add the two pages, with links that hold from `docs/`."""
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Indices as indices; in the files they are plain text, which every viewer shows."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if not page.file.src_uri.startswith(FORMULAS):
        return markdown
    markdown = re.sub(r"^```text\n(.*?)\n```$", _equations, markdown, flags=re.M | re.S)
    parts = re.split(r"(^```.*?^```$|`[^`]*`|<p class.*?</p>)", markdown, flags=re.M | re.S)
    return "".join(part if number % 2 else _indices(part) for number, part in enumerate(parts))


def _equations(block: re.Match[str]) -> str:
    lines = (_indices(html.escape(line, quote=False)) for line in block[1].splitlines())
    return f'<p class="equation">{"<br>".join(lines)}</p>'


def _indices(text: str) -> str:
    tags = {"_": "sub", "^": "sup"}
    for _ in range(2):  # a letter may have both
        text = INDEX.sub(lambda m: f"{m[1]}<{tags[m[2]]}>{m[3].strip('{}')}</{tags[m[2]]}>", text)
    return re.sub(
        r"(</su[bp]>)([_^])(\{[^}]*\}|[A-Za-z0-9Α-ω]+)",
        lambda m: f"{m[1]}<{tags[m[2]]}>{m[3].strip('{}')}</{tags[m[2]]}>",
        text,
    )
