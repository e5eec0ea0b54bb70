"""The style of all figures: colours that colour-blind readers can tell apart, dashes and patterns that print well."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from equidp.algorithms import BASELINE
from equidp.reporting.tables import shortened

# Okabe and Ito's palette ("Color Universal Design", 2008) without its yellow, which vanishes on white paper.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
_PATTERNS = ("", "/", ".", "\\", "x", "-", "|", "+")
_GREY = "#767676"
SEQUENTIAL = ((0.0, "#f2f7fb"), (1.0, "#0072B2"))
_DIVERGING = ((0.0, "#D55E00"), (0.5, "#ffffff"), (1.0, "#0072B2"))
INK = "#1f2328"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 380
ROW_HEIGHT = 26
NOTED_TOP = 26
"""Pixels above a title with a note, because Plotly moves the first of two lines up, beyond the edge."""

LONGEST_TICK = 24
LONGEST_NAME = 48
MOST_MARKERS = 15
"""A line of many points shows this many markers, enough to distinguish it from the others."""


@dataclass(frozen=True)
class Look:
    """How one algorithm or group is drawn and named, the same everywhere."""

    name: str
    colour: str
    dash: str
    symbol: str
    pattern: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """One look per name, distinguished by colour, and also by dash, marker or pattern. The baseline is plain grey.

    The lists have different lengths, so that a look repeats only after 168 names.
    """
    table = {}
    shown = shortened((str(name) for name in names if name != BASELINE), LONGEST_NAME)
    for i, (name, short) in enumerate(shown.items()):
        table[name] = Look(
            html.escape(short, quote=False),
            *(choices[i % len(choices)] for choices in (_COLOURS, _DASHES, _SYMBOLS, _PATTERNS)),
        )
    return {BASELINE: Look(BASELINE, _GREY, "dot", "circle-open", ""), **table}


def label(text: object) -> str:
    """Text from data, escaped and short: Plotly reads some HTML in labels, and a group may be named `<a href=…>`."""
    (short,) = shortened([str(text)], LONGEST_NAME).values()
    return html.escape(short, quote=False)


_AXIS = {"automargin": True, "title": {"standoff": 12}, "ticks": "outside", "showline": True, "linecolor": INK}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 12, "color": INK},
        "title": {"x": 0.01, "y": 0.97, "yanchor": "top", "font": {"size": 15}},
        "margin": {"l": 60, "r": 16, "t": 84, "b": 56},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "bargap": 0.2,
        "xaxis": {**_AXIS, "showgrid": False, "zeroline": False},
        "yaxis": {**_AXIS, "showgrid": True, "gridcolor": "#e4e7eb", "zeroline": True, "zerolinecolor": "#9aa1a9"},
    }
)


def figure(title: str, x: str, y: str) -> go.Figure:
    """An empty figure in the project's style: title, then legend, then the plot; axis titles have units."""
    return blank(title).update_layout(xaxis_title_text=x, yaxis_title_text=y)


def noted(chart: go.Figure, note: str) -> go.Figure:
    """Return the figure with a note below its title, for places without the page's caption."""
    text, height = f"{chart.layout.title.text}<br><sup>{note}</sup>", chart.layout.height or HEIGHT
    return chart.update_layout(title={"text": text, "y": 1 - NOTED_TOP / height}, margin_t=100)


def blank(title: str, height: int = HEIGHT) -> go.Figure:
    """A figure without axes. Plotly's own default template is never loaded, because it is large and slow to copy."""
    return go.Figure(layout={"template": _TEMPLATE, "title": {"text": title}, "height": height})


_PROTOTYPE = frozenset({"__proto__", "constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable"}) | {
    *("toLocaleString", "toString", "valueOf"),
    *(f"__{verb}{kind}__" for verb in ("define", "lookup") for kind in ("Getter", "Setter")),
}
"""Properties of every JavaScript object: Plotly drops a category of such a name, because it seems to exist already."""


def category(name: object) -> str:
    """A group as a position on the x axis, escaped. Ticks are numbers, so a missing group does not shift the names."""
    return f"\N{ZERO WIDTH SPACE}{name}" if name in _PROTOTYPE else html.escape(str(name), quote=False)


BESIDE = 1e-9
"""Added to a tick's position, because Plotly would take the whole number 1 for the position of a group named 1."""


def categories(chart: go.Figure, names: Iterable[str]) -> None:
    """Name the groups on the x axis, shortened there; the full name shows on hovering."""
    shown = shortened(names, LONGEST_TICK)
    chart.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=[category(name) for name in shown],
        tickmode="array",
        tickvals=[place + BESIDE for place in range(len(shown))],
        ticktext=[html.escape(short, quote=False) for short in shown.values()],
    )


def line(look: Look, x: Iterable, y: Iterable, spread: Sequence | None = None, **more: object) -> go.Scatter:
    """A line with its dash and marker; None in y is a gap, not a zero.

    `spread` has half widths of the intervals around y, or is None for no error bars. `more` goes to `go.Scatter`.
    """
    return go.Scatter(
        name=look.name,
        x=list(x),
        y=list(y),
        mode="lines+markers",
        line={"color": look.colour, "dash": look.dash, "width": 2},
        marker={"symbol": look.symbol, "size": 6, "color": look.colour, "maxdisplayed": MOST_MARKERS},
        error_y=None if spread is None else {"type": "data", "array": list(spread), "thickness": 1, "width": 3},
        **more,
    )


def bars(
    look: Look, x: Iterable, y: Iterable, reach: Sequence[tuple[float, float]] | None = None, **more: object
) -> go.Bar:
    """Bars with their fill pattern, over categories; None in y is a gap.

    `reach` says how far each bar's interval reaches below and above its height, or is None for no error bars. `more`
    goes to `go.Bar`.
    """
    below, above = zip(*reach, strict=True) if reach else ((), ())
    ends = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    fill = {"shape": look.pattern, "fillmode": "overlay", "fgcolor": "white", "size": 6, "solidity": 0.25}
    return go.Bar(
        name=look.name,
        x=[category(name) for name in x],
        y=list(y),
        error_y={**ends, "thickness": 1, "width": 3, "color": INK} if reach else None,
        marker={"color": look.colour, "line": {"color": INK, "width": 0.5}, "pattern": fill},
        **more,
    )


def colours(
    x: Iterable, y: Iterable[str], values: Sequence[Sequence[float | None]], hover: Sequence, *, around_zero: bool
) -> go.Heatmap:
    """Values in colour and as text, with a row for each name in `y`, from above; None is left white.

    With `around_zero` values above 0 are blue and below 0 orange, on a scale up to the largest absolute value. Without
    it a darker colour is a larger value.
    """
    known = [abs(value) for row in values for value in row if value is not None]
    reach = max(known, default=0.0) or 1.0
    scale = {"zmin": -reach, "zmax": reach, "colorscale": _DIVERGING} if around_zero else {"colorscale": SEQUENTIAL}
    return go.Heatmap(
        x=[category(name) for name in x],
        y=list(y),
        z=values,
        hovertext=hover,
        texttemplate="%{z:.2f}",
        hovertemplate="%{y}, %{x}: %{z:.3f}<br>%{hovertext}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        colorbar={"thickness": 12, "outlinewidth": 0},
        **scale,
    )
