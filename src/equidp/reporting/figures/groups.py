"""Figures of groups: a metric, its cost of privacy, and the number of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from equidp.algorithms import BASELINE
from equidp.data.records import MIN_TEST_RECORDS
from equidp.reporting.figures.drawing import METRIC_NAMES, capital, gaps, in_rows
from equidp.reporting.style import Look, bars, categories, colours, figure, label, looks
from equidp.reporting.tables import PARTS, group_figures, group_intervals, marked, with_baseline
from equidp.reporting.titles import cost_title, task_in

MOST_BARS = 100
"""A figure with more bars than this becomes a colour map, because too many bars look alike."""


def metric_per_group(documents: Mapping[str, Mapping], grouping: str, metric: str | None = None) -> go.Figure:
    """A metric in every group, by default the task's main one: a bar per algorithm, the baseline's in grey."""
    task = task_in(documents)
    metric = metric or task.main
    name = METRIC_NAMES[metric]
    chart = figure(f"{capital(name)} by {label(grouping)}", label(grouping), name)
    frame = group_figures(documents, [metric])
    intervals = group_intervals(with_baseline(documents), grouping) if metric == task.main else {}
    return _grouped_bars(chart, frame[frame["grouping"] == grouping], metric, intervals, documents, (0.0, task.most))


def cost_per_group(documents: Mapping[str, Mapping], grouping: str, metric: str | None = None) -> go.Figure:
    """What privacy cost each group, one bar per algorithm, above 0 where something is lost."""
    task = task_in(documents)
    metric = metric or task.main
    chart = figure(f"Cost of privacy by {label(grouping)}", label(grouping), cost_title(metric))
    frame = group_figures(documents, ["loss" if metric == "excess_loss" else metric])
    frame = frame[(frame["grouping"] == grouping) & (frame["algorithm"] != BASELINE)]
    costs = {name: document.get("cost_of_privacy", {}) for name, document in documents.items()}
    intervals = group_intervals(costs, grouping) if metric == task.main else {}
    return _grouped_bars(chart, frame, f"cost/{metric}", intervals, documents, (-task.most, task.most))


def group_counts(groups: pd.DataFrame, grouping: str) -> go.Figure:
    """How many records each group has in every part of the split.

    Args:
        groups: columns `grouping`, `group`, and counts in some of `train`, `test` and `public`. If test records are
            counted, groups with few of them are marked.
        grouping: the grouping to draw.
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


def _grouped_bars(
    chart: go.Figure,
    frame: pd.DataFrame,
    column: str,
    intervals: Mapping[str, Mapping[str, Sequence[float] | None]],
    known: Iterable[str],
    possible: tuple[float, float],
) -> go.Figure:
    """Draw one bar per algorithm in every group. Small groups are marked, and groups without a value are gaps.

    If there were too many bars, a colour map is drawn: a row per algorithm, values in colour and as text.

    `known` names all algorithms, so that looks stay the same if only some have the grouping.

    `intervals` has the ends of bars' intervals by algorithm and group. They are cut at the `possible` values: a
    t-interval over few seeds goes far beyond an accuracy of 1, and would squeeze the bars.
    """
    tested = {str(group): count for group, count in frame.groupby("group")["count"].max().items()}
    frame = frame.assign(name=frame["group"], group=frame["group"].map(marked(tested)))
    rows = {}
    for algorithm, look in looks(known).items():
        of = frame[frame["algorithm"] == algorithm]
        if of[column].notna().any():
            pairs = [intervals.get(algorithm, {}).get(group) for group in of["name"]]
            ends = [pair and (max(pair[0], possible[0]), min(pair[1], possible[1])) for pair in pairs]
            rows[look] = of.assign(ends=pd.Series(ends, index=of.index, dtype=object))
    if len(rows) * len(tested) > MOST_BARS:
        _colour_map(chart, rows, column)
    else:
        for look, of in rows.items():
            hover, values = [f"{count:,.0f} test records" for count in of["count"]], gaps(of[column])
            chart.add_trace(bars(look, of["group"], values, _reach(values, list(of["ends"])), hovertext=hover))
        chart.update_layout(barmode="group")
        _room_for_sure(chart, rows.values(), column)
    categories(chart, frame["group"])
    return chart


def _room_for_sure(chart: go.Figure, rows: Iterable[pd.DataFrame], column: str) -> None:
    """Let intervals of groups with few test records leave the figure, because they would squeeze all bars."""
    every = [of for row in rows for of in zip(row[column], row["ends"], row["count"], strict=True)]
    sure = [end for _, pair, count in every if pair and count >= MIN_TEST_RECORDS for end in pair]
    seen = [0.0, *(value for value, _, _ in every if pd.notna(value)), *sure]
    room = 0.05 * (max(seen) - min(seen))
    if room and any(pair[0] < min(seen) or pair[1] > max(seen) for _, pair, _ in every if pair):
        chart.update_yaxes(range=[min(seen) - room * (min(seen) < 0), max(seen) + room])


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
    values, names = [gaps(of[column]) for of in table], [look.name for look in rows]
    chart.add_trace(colours(groups, names, values, hover, around_zero=column.startswith("cost/")))
    in_rows(chart, len(rows))


def _reach(values: Sequence[float | None], ends: Sequence[Sequence[float] | None]) -> list[tuple[float, float]] | None:
    """Return how far each value's interval reaches below and above it; None if no value has an interval."""
    if not any(ends):
        return None
    known = [(y, pair) if y is not None and pair else None for y, pair in zip(values, ends, strict=True)]
    return [(at[0] - at[1][0], at[1][1] - at[0]) if at else (0.0, 0.0) for at in known]
