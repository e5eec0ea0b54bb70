"""The forest plot of a comparison: how much better each run is than the run it is compared with."""

from __future__ import annotations

import html
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.reporting.figures.drawing import METRIC_NAMES
from equidp.reporting.style import HEIGHT, INK, LONGEST_TICK, ROW_HEIGHT, Look, blank, label, looks
from equidp.reporting.tables import shortened
from equidp.tasks.base import Task

APART = 0.14
"""Distance of a row's two points from its middle, above and below, in rows."""

SIZE = 9
"""Size of a point in pixels."""

NAMES = {"gain": "overall", "worst_gain": "worst group"}


def gains(compared: pd.DataFrame, task: type[Task]) -> go.Figure:
    """One row per run, overall and of the worst group: its gain over its reference, and the 95 % interval over seeds.

    Args:
        compared: columns `run`, `reference`, and of `gain` and `worst_gain` the mean, half of the interval (`…±`) and
            the number of seeds (`…_seeds`), as the table of a sweep has them. A gain without an interval is an open
            point.
        task: the task whose main metric is compared. If this metric has a highest value, intervals are cut at the
            largest possible difference.
    """
    chart = blank(f"Gain in {METRIC_NAMES[task.main]} over the reference", HEIGHT // 2 + 2 * ROW_HEIGHT * len(compared))
    table = looks(NAMES.values())
    for shift, (column, words) in zip((-APART, APART), NAMES.items(), strict=True):
        rows = compared.reset_index(drop=True).dropna(subset=[column])
        if len(rows):
            chart.add_trace(_points(rows, column, table[words], shift, task.most))
            look = table[words]  # for the legend, which would show the first point's symbol, and that may be open
            marker = {"color": look.colour, "symbol": look.symbol, "size": SIZE}
            chart.add_trace(go.Scatter(name=look.name, x=[None], y=[None], mode="markers", marker=marker))
    names = [html.escape(short, quote=False) for short in shortened(map(str, compared["run"]), LONGEST_TICK).values()]
    chart.update_xaxes(
        title_text="\N{LEFTWARDS ARROW} worse    gain    better \N{RIGHTWARDS ARROW}",
        rangemode="tozero",
        showgrid=True,
        gridcolor="#e4e7eb",
        zeroline=True,
        zerolinecolor=INK,
        zerolinewidth=1.5,
    )
    chart.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=names,
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )
    return chart


def _points(rows: pd.DataFrame, column: str, look: Look, shift: float, most: float) -> go.Scatter:
    """One column's gains, each a little above or below the middle of its row."""
    gains = rows[column].astype(float)
    half = rows[f"{column}±"].astype(float)
    above = [_reach(gain, gain + reach, most) for gain, reach in zip(gains, half, strict=True)]
    below = [_reach(gain, gain - reach, most) for gain, reach in zip(gains, half, strict=True)]
    symbols = [look.symbol if pd.notna(reach) else f"{look.symbol}-open" for reach in half]
    ends = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return go.Scatter(
        name=look.name,
        x=gains.tolist(),
        y=[place + shift for place in rows.index],
        mode="markers",
        showlegend=False,
        marker={"color": look.colour, "size": SIZE, "symbol": symbols},
        error_x={**ends, "thickness": 1.5, "width": 4},
        hovertext=[_hover(row, column) for row in rows.to_dict("records")],
        hoverinfo="text",
    )


def _reach(gain: float, end: float, most: float) -> float | None:
    """Return how far an interval is drawn from its middle, at most to the largest possible difference."""
    return None if pd.isna(end) else abs(min(max(end, -most), most) - gain)


def _hover(row: Mapping[Hashable, Any], column: str) -> str:
    half = row[f"{column}±"]
    reach = "no interval" if pd.isna(half) else f"95 % interval {row[column] - half:+.3g} to {row[column] + half:+.3g}"
    seeds = f"{row[f'{column}_seeds']} seed{'s' * (row[f'{column}_seeds'] != 1)}"
    return f"{label(row['run'])} over {label(row['reference'])}, {NAMES[column]}: {row[column]:+.3g}, {reach}, {seeds}"
