"""What all runs on a data set have spent, as a figure."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from equidp.reporting.style import INK, figure


def spent_figure(rows: Sequence[tuple[str, float, bool]], dataset: str, limit: float | None) -> go.Figure:
    """The total after each run; runs in research mode, which do not count, have open marks.

    Args:
        rows: of each run, what it was, the total ε after it, and whether it counts.
        dataset: its name.
        limit: `privacy.total_epsilon`, drawn as a line.
    """
    chart = figure(f"Spent on {dataset}", "run", "total ε")
    chart.add_trace(
        go.Scatter(
            x=list(range(1, len(rows) + 1)),
            y=[total for _, total, _ in rows],
            text=[what if counts else f"{what}, research mode: not counted" for what, _, counts in rows],
            hoverinfo="text+y",
            mode="lines+markers",
            line={"shape": "hv", "color": INK},
            marker={"symbol": ["circle" if counts else "circle-open" for *_, counts in rows], "size": 9},
            showlegend=False,
        )
    )
    if limit is not None:
        chart.add_hline(y=limit, line_dash="dash", annotation_text="privacy.total_epsilon")
    return chart
