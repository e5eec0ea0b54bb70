"""Figures of a training: clip norms, noise, test metrics and ε over the epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from equidp.algorithms import BASELINE
from equidp.evaluation.metrics import unique_slugs
from equidp.reporting.figures.drawing import METRIC_NAMES, draw_lines, gaps, in_rows, in_words
from equidp.reporting.privacy_report import published_words
from equidp.reporting.style import HEIGHT, INK, SEQUENTIAL, blank, figure, label, line, looks
from equidp.reporting.titles import task_in

ACCOUNTANTS = {"epsilon": "guaranteed ε", "epsilon_rdp": "RDP", "epsilon_pld": "PLD", "epsilon_prv": "PRV"}

SMOOTHED_FROM = 30
"""Clip norms of runs with at least so many epochs are drawn as running means."""

MOST_LINES = 6
"""The most groups whose clip norms are drawn as lines. More lines hide one another, so rows of colours are drawn."""

SCHEDULE_FIGURES = {
    "mean": "mean σ",
    "variance": "variance of σ",
    "first_noise_multiplier": "first σ",
    "first_steps": "steps of the first phase",
}
"""Columns of a schedule report, with their names in words."""


def clip_norms(history: pd.DataFrame, algorithm: str) -> go.Figure:
    """The clip norm of every group over the epochs, as lines or rows of colours; one line if all groups have the same.

    Group clip norms follow from noisy counts. With many epochs their running mean is drawn, and the axis says so.
    """
    prefix = "clip_norm/"
    columns = {c: c.removeprefix(prefix) for c in history.columns if c.startswith(prefix)}
    columns = columns or {c: "all records" for c in ("clip_norm",) if c in history}
    window = 1 + len(history) // SMOOTHED_FROM
    named = "clip norm" if window == 1 else f"clip norm, mean of {window} epochs"
    chart = figure(f"Clip norm over training: {label(algorithm)}", "epoch", named)
    smooth = history[list(columns)].rolling(window, center=True, min_periods=1).mean()
    series = {name: (history["epoch"], smooth[c]) for c, name in columns.items()}
    return draw_lines(chart, series) if len(series) <= MOST_LINES else _in_colour(chart, series, named)


def _in_colour(chart: go.Figure, series: Mapping[str, tuple[pd.Series, pd.Series]], named: str) -> go.Figure:
    """A row of coloured values for each series, in order from above; all have the same epochs."""
    table, values = looks(series), [gaps(y) for _, y in series.values()]
    epochs = next(x for x, _ in series.values())
    chart.add_trace(
        go.Heatmap(
            x=epochs.tolist(),
            y=[table[name].name for name in series],
            z=values,
            colorscale=SEQUENTIAL,
            colorbar={"thickness": 12, "outlinewidth": 0, "title": {"text": named, "side": "right"}},
            ygap=1,
            hovertemplate="%{y}, epoch %{x}: %{z:.3f}<extra></extra>",
        )
    )
    in_rows(chart, len(series))
    return chart


def schedules(histories: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Noise multiplier σ and clip norm C over the epochs, by algorithm. Per-group clip norms: see `clip_norms`."""
    quantities = {"noise_multiplier": "σ", "clip_norm": "C"}
    present = [q for q in quantities if any(q in h and h[q].notna().any() for h in histories.values())]
    if not present:
        return figure("Schedules", "epoch", "")
    empty = blank(f"Schedules of {' and '.join(quantities[q] for q in present)}", HEIGHT + 160 * (len(present) - 1))
    chart = make_subplots(rows=len(present), cols=1, shared_xaxes=True, vertical_spacing=0.08, figure=empty)
    for row, quantity in enumerate(present, start=1):
        drawn = {a: (h["epoch"], h[quantity]) for a, h in histories.items() if quantity in h}
        draw_lines(chart, drawn, row=row, known=histories, legend=row == 1)
        chart.update_yaxes(title_text=quantities[quantity], rangemode="tozero", row=row, col=1)
    chart.update_xaxes(title_text="epoch", row=len(present), col=1)
    return chart


def learning_curve(histories: Mapping[str, pd.DataFrame], metric: str = "accuracy", over: str = "epoch") -> go.Figure:
    """A test metric over the epochs, or over the ε spent so far (the privacy-utility curve within one run).

    Args:
        histories: history frames by algorithm.
        metric: any `test/<metric>` column.
        over: `epoch` or `epsilon`; algorithms without ε are left out there.
    """
    axis = {"epoch": "epoch", "epsilon": "ε spent"}[over]
    name, column = METRIC_NAMES.get(metric, metric), f"test/{metric}"
    chart = figure(f"Test {label(name)} over {'training' if over == 'epoch' else 'ε'}", axis, f"test {label(name)}")
    known = {a: h.dropna(subset=[over, column]) for a, h in histories.items() if column in h and over in h}
    return draw_lines(chart, {a: (h[over], h[column]) for a, h in known.items()}, known=histories)


def group_curves(
    histories: Mapping[str, pd.DataFrame], documents: Mapping[str, Mapping], grouping: str, groups: Sequence[str]
) -> go.Figure:
    """The main test metric of a few groups over the epochs, by algorithm; for example, of a rare and a common group.

    `documents` give the names of all groups. A column's name depends on all of them, because two may share a slug.
    """
    main = task_in(documents).main
    name = METRIC_NAMES[main]
    chart = figure(f"Test {name} by {label(grouping)} over training", "epoch", f"test {name}")
    series = {}
    for algorithm, history in histories.items():
        every = documents[algorithm]["groups"]
        prefix, slugs = f"test/{main}/{unique_slugs(list(every))[grouping]}", unique_slugs(list(every[grouping]))
        for group in groups:
            if group in slugs and (column := f"{prefix}:{slugs[group]}") in history:
                series[f"{algorithm}, {group}"] = (history["epoch"], history[column])
    return draw_lines(chart, series)


def epsilon_over_epochs(history: pd.DataFrame, privacy: Mapping) -> go.Figure:
    """ε spent so far by each accountant, and a level line for the papers' figure of the whole run."""
    chart = figure(f"ε over training at δ = {privacy.get('delta')}", "epoch", "ε")
    series: dict[str, tuple[Iterable, Sequence | pd.Series]] = {
        name: (history["epoch"], history[c]) for c, name in ACCOUNTANTS.items() if c in history
    }
    published = (privacy.get("epsilon_published") or {}).get("value")
    if published is not None:
        title = published_words(privacy).title.removeprefix("ε ")
        series[f"{title}, whole run"] = (history["epoch"], [published] * len(history))
    return draw_lines(chart, series)


def epsilon_by_algorithm(histories: Mapping[str, pd.DataFrame]) -> go.Figure:
    """ε spent so far, by algorithm."""
    chart = figure("ε over training", "epoch", "ε")
    known = {a: h for a, h in histories.items() if "epsilon" in h}
    return draw_lines(chart, {a: (h["epoch"], h["epsilon"]) for a, h in known.items()}, known=histories)


def schedule_figure(report: pd.DataFrame, parameter: str) -> go.Figure:
    """How a schedule's noise depends on one of its parameters: mean, variance and first σ, length of the first phase.

    Args:
        report: one row per value, with a column of the parameter's name and any columns of `SCHEDULE_FIGURES`.
        parameter: the column on the x axis, such as `noise_decay` (β), `phase_decay` (γ) or `phases` (n).
    """
    shown = [c for c in SCHEDULE_FIGURES if c in report]
    words = in_words(parameter)
    rows = (len(shown) + 1) // 2
    empty = blank(f"Noise schedule against {words}", 240 * rows + 60)
    chart = make_subplots(rows=rows, cols=2, horizontal_spacing=0.16, vertical_spacing=0.18, figure=empty)
    ordered = report.sort_values(parameter)
    for index, column in enumerate(shown):
        row, col = index // 2 + 1, index % 2 + 1
        look = looks(SCHEDULE_FIGURES[c] for c in shown)[SCHEDULE_FIGURES[column]]
        trace = line(look, ordered[parameter], gaps(ordered[column]), showlegend=False)
        chart.add_trace(trace, row=row, col=col)
        chart.update_yaxes(title_text=SCHEDULE_FIGURES[column], row=row, col=col)
        chart.update_xaxes(title_text=words, row=row, col=col)
    return chart


def trajectories(paths: pd.DataFrame, optimum: tuple[float, float]) -> go.Figure:
    """The path of a model with two parameters during training, by algorithm.

    Args:
        paths: columns `algorithm`, `step`, `first`, `second` (the two parameters).
        optimum: the parameters of least loss, marked with a cross.
    """
    chart = figure("Trajectories of two parameters", "first parameter", "second parameter")
    ordered = {a: p.sort_values("step") for a, p in paths.groupby("algorithm", sort=False)}
    draw_lines(chart, {str(a): (p["first"], p["second"]) for a, p in ordered.items()})
    mark = {"symbol": "cross-thin", "size": 14, "line": {"width": 3}}
    chart.add_trace(go.Scatter(name="optimum", x=[optimum[0]], y=[optimum[1]], mode="markers", marker=mark))
    return chart


def trade_off_figure(
    curves: Mapping[str, Mapping], attacks: Mapping[str, Sequence[Sequence[float]]] | None = None
) -> go.Figure:
    """The largest rate of recognised records over the rate of wrong accusations; both axes are logarithmic.

    Args:
        curves: `trade_off` of privacy.json by algorithm.
        attacks: results of attacks by name: (accused wrongly, recognised) pairs. A point above its curve refutes the
            guarantee, up to chance.
    """
    chart = figure("What an attacker can recognise at most", "accused wrongly", "recognised")
    table = looks(curves)
    ends = [min(curve["false_alarms"][0] for curve in curves.values()), 1.0]
    chart.add_trace(line(table[BASELINE], ends, ends).update(name="blind guessing", mode="lines"))
    for name, curve in curves.items():
        shown = [(alarms, 1 - missed) for alarms, missed in zip(curve["false_alarms"], curve["misses"], strict=True)]
        chart.add_trace(line(table[name], *zip(*shown, strict=True)))
    for number, (name, points) in enumerate((attacks or {}).items()):
        # filled symbols, because Plotly draws no asterisk without a line width
        marker = {"symbol": ("x", "cross", "star", "diamond")[number % 4], "size": 9, "color": INK}
        accused, caught = zip(*points, strict=True)
        chart.add_trace(go.Scatter(name=name, x=accused, y=caught, mode="markers", marker=marker))
    chart.update_xaxes(type="log", dtick=1, exponentformat="none")
    chart.update_yaxes(type="log", dtick=1, exponentformat="none")
    return chart
