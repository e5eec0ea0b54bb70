"""An HTML page as text: one self-contained file that loads nothing from anywhere.

It holds Plotly's library compressed. If many pages are in one folder, `linked` puts one copy of the library there.

Names from data reach the page in three places, and are escaped in each: HTML text by Jinja's autoescape, Plotly labels
by `style.label`, JSON inside `<script>` by `_json_for_script`. As a second protection, a content security policy allows
only this file's own scripts, by hash, and no request at all.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup, escape

from equidp.options import as_typed, dotted
from equidp.system.files import replacing
from equidp.system.notebooks import without_ipython

with without_ipython():
    from plotly.offline import get_plotlyjs

LIBRARY = "plotly.min.js"
"""Name of the file of Plotly's library that many pages share."""

INSIDE = re.compile(r'<script id="library"[^>]*>[^<]*</script>')
"""Plotly's place on a page."""

WIDE_FROM = 25
"""A chart with more bars than this takes the page's full width."""

SHORT = 10
"""A heading or cell of so many characters is not broken, because it takes no more room than numbers do."""

FOLDED_FROM = 60
"""A table with more rows than this shows its caption until a reader opens it."""

UNSET = "–"
"""The text for a setting without a value."""

NO_VALUES: tuple[object, ...] = (None, "", {}, "None", "[]", "{}")
"""Values that count as none. The texts are here because MLflow keeps settings as text."""


@dataclass(frozen=True)
class TableCell:
    """A table cell: what is shown, and what it is sorted by (None sorts last)."""

    text: str
    key: float | str | None

    @classmethod
    def of(cls, text: object) -> TableCell:
        """A cell of words, sorted by these words."""
        return cls(str(text), str(text))


@dataclass(frozen=True)
class PageTable:
    """A table: caption (empty if none), column headings with whether numbers stand below, rows of cells."""

    caption: str
    header: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[TableCell, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A figure on the page: its id, heading, what it shows in a sentence, and its JSON."""

    id: str
    title: str
    caption: str
    wide: bool
    json: Markup


def render(
    template: str,
    *,
    title: str,
    drawn: Iterator[tuple[go.Figure, str]],
    settings: Mapping[str, Mapping],
    provenance: Mapping,
    warnings: Sequence[str],
    **content: Any,
) -> str:
    """Return a page made from one of the templates in `assets` that extend `base.html.j2`.

    Args:
        title: heading, and the browser's title.
        drawn: figures with their captions; those without data are left out.
        settings: nested or flat, by a caption ("" for none). In the first block, settings without a value are only
            named.
        provenance: commit, data checksums, versions; nested or flat.
        warnings: sentences on top of the page.
        content: further values that the template needs.
    """
    plotly, script = get_plotlyjs(), asset("report.js")
    how: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=jinja2.FunctionLoader(asset), autoescape=True, **how)
    environment.filters["breakable"] = _breakable
    environment.globals["folded_from"] = FOLDED_FROM
    shown = {caption: flat_texts(of) for caption, of in settings.items()}
    first = next(iter(shown.values()), {})
    unset = [name for name, value in first.items() if value == UNSET]
    for name in unset:
        del first[name]
    return environment.get_template(template).render(
        title=title,
        policy=_policy(plotly, script),
        style=Markup(asset("report.css")),
        library=Markup(_packed()),
        script=Markup(script),
        warnings=warnings,
        charts=list(_charts((chart, caption) for chart, caption in drawn if chart.data)),
        settings=shown,
        unset=unset,
        provenance={"": flat_texts(provenance)},
        **content,
    )


def linked(page: str, place: Path, folder: Path) -> str:
    """Return a self-contained page so changed that it takes Plotly from `folder`, above its place.

    Plotly's file is written there if it is missing.
    """
    library, text = folder / LIBRARY, get_plotlyjs().encode()
    if not library.is_file() or library.stat().st_size != len(text):
        with replacing(library) as part:
            part.write_bytes(text)
    address = quote(os.path.relpath(library, place.parent).replace(os.sep, "/"))
    # 'self' is for a page from a server; `file:` is for a page opened as a file, which has no self
    return INSIDE.sub(f'<script id="library" src="{address}"></script>', page).replace(
        "script-src ", "script-src 'self' file: ", 1
    )


def whole(page: str) -> str:
    """Return a linked page as one self-contained file again."""
    return INSIDE.sub(_packed(), page).replace("script-src 'self' file: ", "script-src ", 1)


@cache
def _packed() -> str:
    """Plotly's library, compressed to a third of its size; the page's own script unpacks it."""
    text = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    return f'<script id="library" type="application/gzip">{text}</script>'


def asset(name: str) -> str:
    """The text of a file of `assets`."""
    return resources.files("equidp.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"


def _charts(drawn: Iterator[tuple[go.Figure, str]]) -> Iterator[Chart]:
    """Figures as the page holds them: the title becomes a heading, which wraps on a narrow screen."""
    for number, (chart, caption) in enumerate(drawn, start=1):
        facts = json.loads(chart.to_json())
        title = html.unescape(facts["layout"]["title"].pop("text"))
        facts["layout"]["margin"] = {"t": 40}
        yield Chart(
            id=f"figure-{number}",
            title=title,
            caption=caption,
            wide=sum(len(trace["x"]) for trace in facts["data"] if trace["type"] in ("bar", "heatmap")) > WIDE_FROM,
            json=_json_for_script(facts),
        )


def _breakable(text: str) -> Markup:
    """Return text in which a line may end after the signs that join names, because `race:White` makes a wide column."""
    end = r"\1<wbr>" if len(text) > SHORT else r"\1"
    return Markup(re.sub(r"([*:])", end, str(escape(text))))  # `escape` itself writes neither of these signs


def _json_for_script(facts: Mapping) -> Markup:
    """Return JSON in which no HTML parser can see the end of the `<script>` element."""
    text = json.dumps(facts, ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def flat_texts(values: Mapping) -> dict[str, str]:
    """Return nested settings as texts by dotted names, as a user would type them; `UNSET` for no value."""
    return {name: _typed(value) for name, value in dotted(values, empty=True).items()}


def _typed(value: object) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(as_typed, value))
    return UNSET if value in NO_VALUES else as_typed(value)
