"""The one look of all figures: colours that colour-blind readers tell apart, dashes and patterns that survive print."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

import plotly.graph_objects as go

from equidp.reporting.tables import BASELINE

# Okabe and Ito's palette ("Color Universal Design", 2008) without its yellow, which vanishes on white paper.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
_PATTERNS = ("", "/", ".", "\\", "x", "-", "|", "+")
_GREY = "#767676"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Look:
    """How one algorithm or group is drawn, everywhere the same."""

    colour: str
    dash: str
    symbol: str
    pattern: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """One look per name, distinct in colour and again in dash, marker and pattern. The baseline is always plain grey."""
    others = [name for name in dict.fromkeys(names) if name != BASELINE]
    table = {BASELINE: Look(_GREY, "dot", "circle-open", "")}
    for i, name in enumerate(others):
        # the lists have lengths 7, 6, 8 and 8, so the combination repeats only after 168 names
        table[name] = Look(
            _COLOURS[i % len(_COLOURS)],
            _DASHES[i % len(_DASHES)],
            _SYMBOLS[i % len(_SYMBOLS)],
            _PATTERNS[i % len(_PATTERNS)],
        )
    return table


def label(text: object) -> str:
    """Text from data, made inert: Plotly reads some HTML in labels, and a group may be named `<a href=…>`."""
    return html.escape(str(text), quote=False)


def figure(title: str, x: str, y: str, **layout: object) -> go.Figure:
    """An empty figure in the project's style.

    Args:
        title: what is shown, as a sentence fragment.
        x, y: axis titles with units.
        layout: further Plotly layout settings.
    """
    blank = go.Figure()
    blank.update_layout(
        template="simple_white",
        title={"text": title, "x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 15}},
        font={"family": FONT, "size": 12, "color": "#1f2328"},
        margin={"l": 64, "r": 16, "t": 56, "b": 64},
        legend={"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0, "title": None},
        paper_bgcolor="white",
        plot_bgcolor="white",
        bargap=0.2,
        height=380,
        **layout,
    )
    blank.update_xaxes(title=x, automargin=True, showgrid=False)
    blank.update_yaxes(
        title=y, automargin=True, showgrid=True, gridcolor="#e4e7eb", zeroline=True, zerolinecolor="#9aa1a9"
    )
    return blank


def line(name: str, look: Look, x: Iterable, y: Iterable, **more: object) -> go.Scatter:
    """A line with its dash and marker; missing values are gaps, not zeros."""
    return go.Scatter(
        name=label(name),
        x=list(x),
        y=list(y),
        mode="lines+markers",
        line={"color": look.colour, "dash": look.dash, "width": 2},
        marker={"symbol": look.symbol, "size": 6, "color": look.colour},
        **more,
    )


def bars(name: str, look: Look, x: Iterable, y: Iterable, **more: object) -> go.Bar:
    """Bars with their fill pattern."""
    return go.Bar(
        name=label(name),
        x=[label(v) for v in x],
        y=list(y),
        marker={
            "color": look.colour,
            "line": {"color": "#1f2328", "width": 0.5},
            "pattern": {"shape": look.pattern, "fgcolor": "white", "size": 6, "solidity": 0.25},
        },
        **more,
    )
