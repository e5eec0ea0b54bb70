"""The figures: each a function from result tables to a Plotly figure, all in the style of `style.py`.

What they read:

- documents: `metrics.json` by algorithm;
- histories: `history.parquet` by algorithm, one row per epoch;
- privacy: `privacy.json` of an algorithm;
- runs: one row per run, with its settings and results as columns and the column `seed`. Rows that differ in the seed
  only are averaged, with 95 % intervals; rows that differ in another setting too (a column with a dot in its name) than
  the one drawn are refused.

docs/figures.md lists which figure of which paper each one redraws.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from equidp.errors import EquidpError, unknown_name
from equidp.evaluation.metrics import unique_slugs
from equidp.evaluation.seeds import mean_interval
from equidp.reporting.runs import NOT_SETTINGS
from equidp.reporting.style import (
    HEIGHT,
    ROW_HEIGHT,
    Look,
    bars,
    blank,
    categories,
    colours,
    figure,
    label,
    line,
    looks,
)
from equidp.reporting.tables import (
    BASELINE,
    METRIC_TITLES,
    PARTS,
    group_figures,
    group_intervals,
    marked,
    with_baseline,
)

METRIC_NAMES = METRIC_TITLES | {"loss": "loss (nats)", "excess_loss": "excess loss (nats)"}

ACCOUNTANTS = {"epsilon": "ε we stand by", "epsilon_rdp": "RDP", "epsilon_pld": "PLD", "epsilon_prv": "PRV"}

DIAGNOSTICS = {
    "cosine": "cosine similarity of noisy and clean gradient",
    "mean_weight": "mean scaling weight",
    "gradient_norm": "gradient norm",
    "batch_size": "records in a batch",
    "nonfinite": "records with a non-finite gradient",
}
"""Exact training figures, outside the guarantee: columns `nonprivate/<name>` of a history. Algorithms add others."""

SMOOTHED_FROM = 30
"""Clip norms of runs with at least so many epochs are drawn as running means."""

MOST_BARS = 100
"""So many bars in one figure are told apart; of more a map is made."""

FEW_EPOCHS = 10
"""Over fewer epochs every one has its tick: left to itself Plotly would mark epoch 1.2."""

SCHEDULE_FIGURES = {
    "mean": "mean σ",
    "variance": "variance of σ",
    "first_noise_multiplier": "first σ",
    "first_steps": "steps of the first phase",
}
"""Columns of a schedule report and what they are."""


def metric_per_group(documents: Mapping[str, Mapping], grouping: str, metric: str = "accuracy") -> go.Figure:
    """A metric in every group, one bar per algorithm, the baseline's in grey."""
    name = METRIC_NAMES[metric]
    chart = figure(f"{_capital(name)} by {label(grouping)}", label(grouping), name)
    frame = group_figures(documents, [metric])
    intervals = group_intervals(with_baseline(documents), grouping) if metric == "accuracy" else {}
    return _grouped_bars(chart, frame[frame["grouping"] == grouping], metric, intervals, documents)


def cost_per_group(documents: Mapping[str, Mapping], grouping: str, metric: str = "accuracy") -> go.Figure:
    """What privacy cost each group: private minus baseline, one bar per algorithm. Below zero is a loss of accuracy."""
    chart = figure(f"Cost of privacy by {label(grouping)}", label(grouping), f"Δ {METRIC_NAMES[metric]}")
    frame = group_figures(documents, ["loss" if metric == "excess_loss" else metric])
    frame = frame[(frame["grouping"] == grouping) & (frame["algorithm"] != BASELINE)]
    costs = {name: document.get("cost_of_privacy", {}) for name, document in documents.items()}
    intervals = group_intervals(costs, grouping) if metric == "accuracy" else {}
    return _grouped_bars(chart, frame, f"cost/{metric}", intervals, documents)


def group_counts(groups: pd.DataFrame, grouping: str) -> go.Figure:
    """How many records each group has in every part of the split.

    Args:
        groups: columns `grouping`, `group`, and counts in those of `train`, `test`, `public` that there are. Where
            test records are counted, groups with few of them are marked.
        grouping: which one to draw.
    """
    frame = groups[groups["grouping"] == grouping]
    if "test" in frame:
        names = marked(dict(zip(frame["group"], frame["test"], strict=True)))
        frame = frame.assign(group=frame["group"].map(names))
    parts = [part for part in PARTS if part in frame and frame[part].any()]
    chart = figure(f"Records by {label(grouping)}", label(grouping), "records")
    for part in parts:
        chart.add_trace(bars(looks(parts)[part], frame["group"], frame[part]))
    chart.update_layout(barmode="group")
    categories(chart, frame["group"])
    return chart


def clip_norms(history: pd.DataFrame, algorithm: str) -> go.Figure:
    """The clip norm of every group over the epochs (one line if the algorithm has one for all).

    Group clip norms rest on noisy counts. With many epochs their running mean is drawn; the axis says so.
    """
    prefix = "clip_norm/"
    columns = {c: c.removeprefix(prefix) for c in history.columns if c.startswith(prefix)}
    columns = columns or {c: "all records" for c in ("clip_norm",) if c in history}
    window = 1 + len(history) // SMOOTHED_FROM
    named = "clip norm" if window == 1 else f"clip norm, mean of {window} epochs"
    chart = figure(f"Clip norm over training: {label(algorithm)}", "epoch", named)
    smooth = history[list(columns)].rolling(window, center=True, min_periods=1).mean()
    return _lines(chart, {name: (history["epoch"], smooth[c]) for c, name in columns.items()})


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
        _lines(chart, drawn, row=row, known=histories, legend=row == 1)
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
    return _lines(chart, {a: (h[over], h[column]) for a, h in known.items()}, known=histories)


def group_curves(
    histories: Mapping[str, pd.DataFrame], documents: Mapping[str, Mapping], grouping: str, groups: Sequence[str]
) -> go.Figure:
    """Test accuracy of a few groups over the epochs, by algorithm: the rare group's and the common one's, say.

    The documents have every group's name: a column's name depends on them all, as two may share a slug.
    """
    chart = figure(f"Test accuracy by {label(grouping)} over training", "epoch", "test accuracy")
    series = {}
    for algorithm, history in histories.items():
        every = documents[algorithm]["groups"]
        prefix, slugs = f"test/accuracy/{unique_slugs(list(every))[grouping]}", unique_slugs(list(every[grouping]))
        for group in groups:
            if group in slugs and (column := f"{prefix}:{slugs[group]}") in history:
                series[f"{algorithm}, {group}"] = (history["epoch"], history[column])
    return _lines(chart, series)


def epsilon_over_epochs(history: pd.DataFrame, privacy: Mapping) -> go.Figure:
    """ε spent so far by each accountant, with the paper's own figure for the whole run as a level."""
    chart = figure(f"ε over training at δ = {privacy.get('delta')}", "epoch", "ε")
    series: dict[str, tuple[Iterable, Sequence | pd.Series]] = {
        name: (history["epoch"], history[c]) for c, name in ACCOUNTANTS.items() if c in history
    }
    published = (privacy.get("epsilon_published") or {}).get("value")
    if published is not None:
        series["as published, whole run"] = (history["epoch"], [published] * len(history))
    return _lines(chart, series)


def epsilon_by_algorithm(histories: Mapping[str, pd.DataFrame]) -> go.Figure:
    """ε spent so far, by algorithm."""
    chart = figure("ε over training", "epoch", "ε")
    known = {a: h for a, h in histories.items() if "epsilon" in h}
    return _lines(chart, {a: (h["epoch"], h["epsilon"]) for a, h in known.items()}, known=histories)


def privacy_utility(runs: pd.DataFrame, metric: str = "accuracy") -> go.Figure:
    """A metric against ε, one line per algorithm: the privacy-utility curve of a sweep.

    Args:
        runs: columns `algorithm`, `seed`, `epsilon` and the metric. The baseline, which has no ε, is a level.
        metric: the column to draw.

    Raises:
        EquidpError: a column is not there, or rows of one point differ in more than their seed.
    """
    _check_columns(runs, "epsilon", metric)
    name = METRIC_NAMES.get(metric, metric)
    chart = _sweep(runs.dropna(subset=["epsilon"]), "epsilon", metric, f"{_capital(name)} against ε", "ε", name)
    levels = runs[runs["epsilon"].isna() & (runs["algorithm"] == BASELINE) & runs[metric].notna()]
    if len(levels) and len(chart.data):
        _check_seeds(levels, "The baseline's runs")
        look = looks([])[BASELINE]
        style = {"color": look.colour, "dash": look.dash}
        chart.add_hline(y=levels[metric].mean(), line=style)
        chart.add_trace(go.Scatter(name=BASELINE, x=[None], y=[None], mode="lines", line=style))
    return chart


def cost_against(runs: pd.DataFrame, setting: str) -> go.Figure:
    """The cost of privacy of each group against a setting such as the number of epochs or the noise multiplier.

    Args:
        runs: columns `algorithm`, `seed`, `group`, `cost` and the setting.
        setting: the column on the x axis.

    Raises:
        EquidpError: as `privacy_utility`.
    """
    _check_columns(runs, setting)
    named = runs.assign(algorithm=[f"{a}, {g}" for a, g in zip(runs["algorithm"], runs["group"], strict=True)])
    words = _words(setting)
    return _sweep(named, setting, "cost", f"Cost of privacy against {words}", words, "Δ accuracy")


def metric_against(runs: pd.DataFrame, setting: str, metric: str = "accuracy") -> go.Figure:
    """A metric against any setting, one line per algorithm: the effect of one hyper-parameter.

    Args:
        runs: columns `algorithm`, `seed`, the setting and the metric.
        setting: the column on the x axis.
        metric: the column on the y axis.

    Raises:
        EquidpError: as `privacy_utility`.
    """
    _check_columns(runs, setting, metric)
    words, name = _words(setting), METRIC_NAMES.get(metric, metric)
    return _sweep(runs, setting, metric, f"{_capital(name)} against {words}", words, name)


def diagnostics_in(histories: Mapping[str, pd.DataFrame]) -> list[str]:
    """Names of the exact training figures with one value per epoch, in the order of first appearance."""
    columns = dict.fromkeys(str(c) for history in histories.values() for c in history.columns)
    names = (c.removeprefix("nonprivate/") for c in columns if c.startswith("nonprivate/"))
    return [name for name in names if "/" not in name]


def diagnostic_curve(histories: Mapping[str, pd.DataFrame], quantity: str, last: int | None = None) -> go.Figure:
    """An exact training figure over the (last) epochs, by algorithm. *Outside the guarantee.*

    Args:
        histories: history frames by algorithm, with `nonprivate/<quantity>`.
        quantity: one of `DIAGNOSTICS`, or another figure that an algorithm adds.
        last: only so many epochs at the end.
    """
    name, column = DIAGNOSTICS.get(quantity, _words(quantity)), f"nonprivate/{quantity}"
    chart = figure(f"{_capital(name)} (not private)", "epoch", name)
    tails = {a: h.tail(last or len(h)) for a, h in histories.items() if column in h}
    return _lines(chart, {a: (h["epoch"], h[column]) for a, h in tails.items()}, known=histories)


def group_gradient_norms(history: pd.DataFrame, algorithm: str) -> go.Figure:
    """Mean gradient norm of every group over the epochs. *Outside the guarantee.*"""
    prefix = "nonprivate/gradient_norm/"
    columns = [c for c in history.columns if c.startswith(prefix)]
    chart = figure(f"Mean gradient norm: {label(algorithm)} (not private)", "epoch", "gradient norm")
    return _lines(chart, {c.removeprefix(prefix): (history["epoch"], history[c]) for c in columns})


def diagnostic_distribution(
    histories: Mapping[str, pd.DataFrame], quantity: str = "gradient_norm", last: int = 10
) -> go.Figure:
    """The distribution of a per-record or per-step quantity over the last epochs, as shares. *Outside the guarantee.*

    Args:
        histories: history frames with counts in columns `nonprivate/<quantity>_histogram/<lower edge of the bin>`;
            the last bin is open. Counts, never the records' own values, are kept.
        quantity: one of `DIAGNOSTICS`.
        last: so many epochs at the end are added up.
    """
    name, prefix = DIAGNOSTICS[quantity], f"nonprivate/{quantity}_histogram/"
    chart = figure(f"Distribution of the {name}, last {last} epochs (not private)", f"{name}, from", "share")
    shares = {algorithm: _binned_shares(history, prefix, last) for algorithm, history in histories.items()}
    table = looks(histories)
    edges = sorted({edge for of in shares.values() for edge, share in of.items() if share > 0})
    shown = [e for e in sorted({e for of in shares.values() for e in of}) if edges and edges[0] <= e <= edges[-1]]
    for algorithm, of in shares.items():
        if of:
            chart.add_trace(bars(table[algorithm], [f"{e:g}" for e in shown], [of.get(e) for e in shown]))
    categories(chart, [f"{e:g}" for e in shown])
    return chart.update_layout(barmode="group")


def _binned_shares(history: pd.DataFrame, prefix: str, last: int) -> dict[float, float]:
    """Share of each bin over the last epochs, by the bin's lower edge; empty without a count."""
    columns = [str(c) for c in history.columns if str(c).startswith(prefix)]
    counts = {float(c.removeprefix(prefix)): float(history[c].tail(last).sum()) for c in columns}
    total = sum(counts.values())
    return {edge: count / total for edge, count in counts.items()} if total else {}


def schedule_figure(report: pd.DataFrame, parameter: str) -> go.Figure:
    """How a schedule's noise depends on one of its parameters: mean, variance and first σ, length of the first phase.

    Args:
        report: one row per value: a column with the parameter's name, and those of `SCHEDULE_FIGURES` that are known.
        parameter: the column on the x axis, such as `noise_decay` (β), `phase_decay` (γ) or `phases` (n).
    """
    shown = [c for c in SCHEDULE_FIGURES if c in report]
    words = _words(parameter)
    rows = (len(shown) + 1) // 2
    empty = blank(f"Noise schedule against {words}", 240 * rows + 60)
    chart = make_subplots(rows=rows, cols=2, horizontal_spacing=0.16, vertical_spacing=0.18, figure=empty)
    ordered = report.sort_values(parameter)
    for index, column in enumerate(shown):
        row, col = index // 2 + 1, index % 2 + 1
        look = looks(SCHEDULE_FIGURES[c] for c in shown)[SCHEDULE_FIGURES[column]]
        trace = line(look, ordered[parameter], _gaps(ordered[column]), showlegend=False)
        chart.add_trace(trace, row=row, col=col)
        chart.update_yaxes(title_text=SCHEDULE_FIGURES[column], row=row, col=col)
        chart.update_xaxes(title_text=words, row=row, col=col)
    return chart


def trajectories(paths: pd.DataFrame, optimum: tuple[float, float]) -> go.Figure:
    """The way of a model with two parameters, by algorithm.

    Args:
        paths: columns `algorithm`, `step`, `first`, `second` (the two parameters).
        optimum: the parameters of least loss, marked with a cross.
    """
    chart = figure("Trajectories of two parameters", "first parameter", "second parameter")
    ordered = {a: p.sort_values("step") for a, p in paths.groupby("algorithm", sort=False)}
    _lines(chart, {str(a): (p["first"], p["second"]) for a, p in ordered.items()})
    mark = {"symbol": "cross-thin", "size": 14, "line": {"width": 3}}
    chart.add_trace(go.Scatter(name="optimum", x=[optimum[0]], y=[optimum[1]], mode="markers", marker=mark))
    return chart


def _grouped_bars(
    chart: go.Figure,
    frame: pd.DataFrame,
    column: str,
    intervals: Mapping[str, Mapping[str, Sequence[float] | None]],
    known: Iterable[str],
) -> go.Figure:
    """One bar per algorithm in every group, small ones marked, those without a value included as gaps.

    Where there would be too many bars, a map: a row per algorithm, values in colour and in words.

    `known` fixes the looks where only some of the algorithms have the grouping.

    `intervals` has the ends of a bar's interval by algorithm and group, where there is one. It is drawn as far as an
    accuracy, or a difference of two, can be: a t-interval over few seeds goes far beyond, and would squeeze the bars.
    """
    least = -1 if column.startswith("cost/") else 0
    tested = {str(group): count for group, count in frame.groupby("group")["count"].max().items()}
    frame = frame.assign(name=frame["group"], group=frame["group"].map(marked(tested)))
    rows = {}
    for algorithm, look in looks(known).items():
        of = frame[frame["algorithm"] == algorithm]
        if of[column].notna().any():
            pairs = [intervals.get(algorithm, {}).get(group) for group in of["name"]]
            ends = [pair and (max(pair[0], least), min(pair[1], 1)) for pair in pairs]
            rows[look] = of.assign(ends=pd.Series(ends, index=of.index, dtype=object))
    if len(rows) * len(tested) > MOST_BARS:
        _colour_map(chart, rows, column)
    else:
        for look, of in rows.items():
            hover, values = [f"{count} test records" for count in of["count"]], _gaps(of[column])
            chart.add_trace(bars(look, of["group"], values, _reach(values, list(of["ends"])), hovertext=hover))
        chart.update_layout(barmode="group")
    categories(chart, frame["group"])
    return chart


def _colour_map(chart: go.Figure, rows: Mapping[Look, pd.DataFrame], column: str) -> None:
    """A row of coloured values per algorithm, in order from above; a difference is white at 0."""
    groups = list(dict.fromkeys(group for of in rows.values() for group in of["group"]))
    table = [of.set_index("group").reindex(groups) for of in rows.values()]
    hover = [
        [
            f"{count:.0f} test records"
            + (f", 95 % interval {pair[0]:.3f} to {pair[1]:.3f}" if isinstance(pair, tuple) else "")
            for count, pair in zip(of["count"], of["ends"], strict=True)
        ]
        for of in table
    ]
    values, names = [_gaps(of[column]) for of in table], [look.name for look in rows]
    chart.add_trace(colours(groups, names, values, hover, around_zero=column.startswith("cost/")))
    chart.update_yaxes(title_text="", autorange="reversed", showgrid=False, zeroline=False, type="category")
    chart.update_layout(height=HEIGHT // 2 + ROW_HEIGHT * len(rows))


def _reach(values: Sequence[float | None], ends: Sequence[Sequence[float] | None]) -> list[tuple[float, float]] | None:
    """How far each value's interval reaches below and above it; None where no value has one."""
    if not any(ends):
        return None
    known = [(y, pair) if y is not None and pair else None for y, pair in zip(values, ends, strict=True)]
    return [(at[0] - at[1][0], at[1][1] - at[0]) if at else (0.0, 0.0) for at in known]


def _lines(
    chart: go.Figure,
    series: Mapping[str, tuple[Iterable, Sequence | pd.Series]],
    *,
    row: int | None = None,
    known: Iterable[str] = (),
    legend: bool = True,
) -> go.Figure:
    """Draw named (x, y) series. `known` fixes the looks where only some of the algorithms have the quantity."""
    table = looks([*known, *series])
    for name, (x, y) in series.items():
        values = _gaps(y)
        if any(v is not None for v in values):
            trace = line(table[name], x, values, showlegend=legend, legendgroup=table[name].name)
            chart.add_trace(trace, row=row, col=None if row is None else 1)
    epochs = [x for x, _ in series.values() if isinstance(x, pd.Series) and x.name == "epoch" and len(x)]
    if epochs and max(x.max() for x in epochs) - min(x.min() for x in epochs) < FEW_EPOCHS:
        chart.update_xaxes(dtick=1)
    return chart


def _sweep(runs: pd.DataFrame, x: str, y: str, title: str, x_name: str, y_name: str) -> go.Figure:
    """Mean over seeds with 95 % intervals, one line per algorithm."""
    chart = figure(title, label(x_name), label(y_name))
    known = runs.dropna(subset=[x, y])
    for algorithm, look in looks(known["algorithm"]).items():
        of = known[known["algorithm"] == algorithm]
        points = {}
        for at, rows in of.groupby(x):
            _check_seeds(rows, f"{algorithm}'s runs at {x} = {at}")
            points[at] = mean_interval(rows[y].tolist())
        if points:
            spread = [p.half_width or 0.0 for p in points.values()]
            chart.add_trace(line(look, points, [p.mean for p in points.values()], spread if any(spread) else None))
    return chart


def _check_columns(runs: pd.DataFrame, *columns: str) -> None:
    """Refuse a misspelt setting, and a search that found nothing."""
    for column in columns:
        if column not in runs:
            if runs.empty:
                raise EquidpError("No run is among those given: make them first, or look at what the search asked for.")
            raise unknown_name("column of the runs", column, runs.columns)


def _check_seeds(runs: pd.DataFrame, whose: str) -> None:
    """Refuse runs that differ in more than their seed: an interval over them would be none over seeds."""
    names = [c for c in runs.columns if "." in c and not c.startswith(NOT_SETTINGS)]
    names += [c for c in ("dataset", "raw_fingerprint") if c in runs]
    if (runs["algorithm"] == BASELINE).all():  # the same for every ε
        names = [name for name in names if name == "privacy.unit" or not name.startswith("privacy.")]
    if mixed := [name for name in names if runs[name].map(_told).nunique() > 1]:
        raise EquidpError(
            f"{whose} are no seeds of each other, for they differ in {', '.join(mixed)}: draw those of one setting at "
            f"a time, such as runs[runs[{mixed[0]!r}] == …]."
        )


def _told(value: Any) -> str:
    """A setting that was not logged is as good as one that was not given."""
    return "None" if pd.isna(value) else str(value)


def _words(setting: Hashable) -> str:
    """A setting's name as words: `training.epochs` → `epochs`, `noise_multiplier` → `noise multiplier`."""
    return str(setting).rsplit(".", 1)[-1].replace("_", " ")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _gaps(values: Sequence | pd.Series) -> list[float | None]:
    """Plotly draws None as a gap; NaN would not survive JSON."""
    return [None if pd.isna(v) else float(v) for v in values]
