"""What all runs on a data set have spent, as a figure."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from equidp.reporting.style import figure, looks


def spent_figure(rows: Sequence[tuple[str, float, bool, str]], dataset: str, limit: float | None) -> go.Figure:
    """Each unit's total after each run; runs in research mode, which do not count, have open marks.

    Args:
        rows: as of `spent_by_run`.
        limit: `privacy.total_epsilon`, drawn as a line.
    """
    chart = figure(f"Spent on {dataset}", "run", "total ε")
    units = tuple(dict.fromkeys(unit for *_, unit in rows))
    for unit in units:
        look, of = looks(units)[unit], [(run, *row) for run, row in enumerate(rows, start=1) if row[-1] == unit]
        chart.add_trace(
            go.Scatter(
                x=[run for run, *_ in of],
                y=[total for _, _, total, *_ in of],
                text=[what if counts else f"{what}, research mode: not counted" for _, what, _, counts, _ in of],
                hoverinfo="text+y",
                mode="lines+markers",
                line={"shape": "hv", "color": look.colour, "dash": look.dash},
                marker={"symbol": ["circle" if counts else "circle-open" for *_, counts, _ in of], "size": 9},
                name=f"for a {look.name}",
                showlegend=len(units) > 1,
            )
        )
    if limit is not None:
        chart.add_hline(y=limit, line_dash="dash", annotation_text="privacy.total_epsilon")
    return chart
