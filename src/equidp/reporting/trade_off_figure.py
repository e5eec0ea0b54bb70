"""The trade-off curve as a figure: the most an attacker can recognise, and the results of an audit's attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from equidp.reporting.style import INK, figure, line, looks
from equidp.reporting.tables import BASELINE


def trade_off_figure(
    curves: Mapping[str, Mapping], attacks: Mapping[str, Sequence[Sequence[float]]] | None = None
) -> go.Figure:
    """Records recognised at most, over records accused wrongly; both axes logarithmic.

    Args:
        curves: `trade_off` of privacy.json by algorithm.
        attacks: what attacks achieved, by their name: (accused wrongly, recognised) pairs. A point above its curve
            refutes the guarantee, up to chance.
    """
    chart = figure("What an attacker can recognise at most", "accused wrongly", "recognised")
    table = looks(curves)
    ends = [min(curve["false_alarms"][0] for curve in curves.values()), 1.0]
    chart.add_trace(line(table[BASELINE], ends, ends).update(name="blind guessing", mode="lines"))
    for name, curve in curves.items():
        shown = [(alarms, 1 - missed) for alarms, missed in zip(curve["false_alarms"], curve["misses"], strict=True)]
        chart.add_trace(line(table[name], *zip(*shown, strict=True)))
    for number, (name, points) in enumerate((attacks or {}).items()):
        chart.add_trace(
            go.Scatter(
                name=name,
                x=[accused for accused, _ in points],
                y=[caught for _, caught in points],
                mode="markers",
                marker={"symbol": ("x", "cross", "star", "asterisk")[number % 4], "size": 9, "color": INK},
            )
        )
    chart.update_xaxes(type="log", dtick=1, exponentformat="none")
    chart.update_yaxes(type="log", dtick=1, exponentformat="none")
    return chart
