"""The figures: each a function from result tables to a Plotly figure, all in the style of `style.py`.

What they read:

- documents: `metrics.json` by algorithm;
- histories: `history.parquet` by algorithm, one row per epoch;
- privacy: `privacy.json` by algorithm;
- runs: one row per run (or per algorithm and setting, averaged over seeds).

docs/figures.md lists which figure of which paper each one redraws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from equidp.reporting.style import bars, figure, label, line, looks
from equidp.reporting.tables import BASELINE, group_figures

METRIC_NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "mcc": "Matthews correlation",
    "auroc": "AUROC",
    "loss": "cross-entropy (nats)",
    "excess_loss": "excess loss (nats)",
    "calibration_error": "expected calibration error",
}


def metric_per_group(documents: Mapping[str, Mapping], grouping: str, metric: str = "accuracy") -> go.Figure:
    """A metric in every group, one bar per algorithm, the baseline's in grey."""
    chart = figure(f"{METRIC_NAMES[metric].capitalize()} by {label(grouping)}", label(grouping), METRIC_NAMES[metric])
    frame = group_figures(documents, [metric])
    return _grouped_bars(chart, frame[frame["grouping"] == grouping], metric)


def cost_per_group(documents: Mapping[str, Mapping], grouping: str, metric: str = "accuracy") -> go.Figure:
    """What privacy cost each group: private minus baseline, one bar per algorithm. Below zero is a loss of accuracy."""
    chart = figure(f"Cost of privacy by {label(grouping)}", label(grouping), f"Δ {METRIC_NAMES[metric]}")
    frame = group_figures(documents, ["loss" if metric == "excess_loss" else metric])
    frame = frame[(frame["grouping"] == grouping) & (frame["algorithm"] != BASELINE)]
    return _grouped_bars(chart, frame, f"cost/{metric}")


def group_counts(groups: pd.DataFrame, grouping: str) -> go.Figure:
    """How many records each group has in every part of the split.

    Args:
        groups: columns `grouping`, `group`, and one of counts per part (`train`, `test`, `public`).
        grouping: which one to draw.
    """
    frame = groups[groups["grouping"] == grouping]
    parts = [c for c in frame.columns if c not in ("grouping", "group") and frame[c].notna().any()]
    chart = figure(f"Records by {label(grouping)}", label(grouping), "records", barmode="group")
    for part, look in looks(parts).items():
        if part in parts:
            chart.add_trace(bars(part, look, frame["group"], frame[part]))
    chart.update_xaxes(type="category")
    return chart


def clip_norms(history: pd.DataFrame, algorithm: str) -> go.Figure:
    """The clip norm of every group over the epochs (one line if the algorithm has one for all)."""
    prefix = "clip_norm/"
    columns = [c for c in history.columns if c.startswith(prefix)] or [c for c in ("clip_norm",) if c in history]
    chart = figure(f"Clip norm over training: {label(algorithm)}", "epoch", "clip norm")
    names = {c: c.removeprefix(prefix) if c.startswith(prefix) else "all records" for c in columns}
    return _lines(chart, {names[c]: (history["epoch"], history[c]) for c in columns})


def test_curve(histories: Mapping[str, pd.DataFrame], metric: str = "accuracy", over: str = "epoch") -> go.Figure:
    """A test metric over the epochs, or over the ε spent so far (the privacy-utility curve of one run per algorithm).

    Args:
        histories: history frames by algorithm.
        metric: any `test/<metric>` column, `accuracy/<grouping>:<group>` included.
        over: `epoch` or `epsilon`; algorithms without ε are left out there.
    """
    named = {"epoch": "epoch", "epsilon": "ε spent"}[over]
    name, column = METRIC_NAMES.get(metric, metric), f"test/{metric}"
    chart = figure(f"Test {label(name)} over {'training' if over == 'epoch' else 'ε'}", named, f"test {label(name)}")
    known = {a: h.dropna(subset=[over]) for a, h in histories.items() if column in h and over in h}
    return _lines(chart, {a: (h[over], h[column]) for a, h in known.items() if len(h)})


def epsilon_over_epochs(history: pd.DataFrame, privacy: Mapping) -> go.Figure:
    """ε spent so far by each accountant, with the paper's own figure for the whole run as a level."""
    names = {
        "epsilon": "ε we stand by",
        "epsilon_rdp": "RDP",
        "epsilon_pld": "PLD",
        "epsilon_published": "as published",
    }
    chart = figure(f"ε over training at δ = {privacy.get('delta')}", "epoch", "ε")
    drawn = {names[c]: (history["epoch"], history[c]) for c in names if c in history and history[c].notna().any()}
    _lines(chart, drawn)
    published = (privacy.get("epsilon_published") or {}).get("value")
    if published is not None and "as published" not in drawn:
        chart.add_hline(
            y=published,
            line={"dash": "dot", "color": "#1f2328"},
            annotation={"text": "as published", "xanchor": "right"},
        )
    return chart


def _grouped_bars(chart: go.Figure, frame: pd.DataFrame, column: str) -> go.Figure:
    for algorithm, look in looks(frame["algorithm"]).items():
        rows = frame[frame["algorithm"] == algorithm]
        if len(rows) and rows[column].notna().any():
            hover = [f"{count} test records" for count in rows["count"]]
            chart.add_trace(bars(algorithm, look, rows["group"], _gaps(rows[column]), hovertext=hover))
    chart.update_layout(barmode="group")
    chart.update_xaxes(type="category")
    return chart


def _lines(chart: go.Figure, series: Mapping[str, tuple[Iterable, Sequence | pd.Series]]) -> go.Figure:
    for name, look in looks(series).items():
        if name in series:
            x, y = series[name]
            chart.add_trace(line(name, look, x, _gaps(y)))
    return chart


def _gaps(values: Sequence | pd.Series) -> list[float | None]:
    """Plotly draws None as a gap; NaN would not survive JSON."""
    return [None if pd.isna(v) else float(v) for v in values]
