"""Figures over many runs: a metric or a cost of privacy against ε or any setting, with intervals over seeds."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.algorithms import BASELINE
from equidp.errors import EquidpError, unknown_name
from equidp.evaluation.seeds import mean_interval
from equidp.reporting.figures.drawing import METRIC_NAMES, capital, in_words
from equidp.reporting.runs import NOT_SETTINGS
from equidp.reporting.style import figure, label, line, looks
from equidp.reporting.titles import cost_title

MOST_ABOVE = 8
"""The most names that fit between title and plot; with more, the legend is beside the plot."""


def privacy_utility(runs: pd.DataFrame, metric: str = "accuracy") -> go.Figure:
    """A metric against ε, one line per algorithm: the privacy-utility curve of a sweep.

    Args:
        runs: columns `algorithm`, `seed`, `epsilon` and the metric. The baseline, which has no ε, is a level line.
        metric: the column to draw.

    Raises:
        EquidpError: a column is not there, or rows of one point differ in more than their seed.
    """
    _check_columns(runs, "epsilon", metric)
    name = METRIC_NAMES.get(metric, metric)
    chart = _sweep(runs.dropna(subset=["epsilon"]), "epsilon", metric, f"{capital(name)} against ε", "ε", name)
    spent = runs["epsilon"].dropna()
    if len(spent) and spent.max() < 1.05 * spent.min():  # one target, which runs meet except for last digits
        chart.update_xaxes(range=[0.9 * spent.min(), 1.1 * spent.max()])
    levels = runs[runs["epsilon"].isna() & (runs["algorithm"] == BASELINE) & runs[metric].notna()]
    if len(levels) and len(chart.data):
        _check_seeds(levels, "The baseline's runs")
        look = looks([])[BASELINE]
        style = {"color": look.colour, "dash": look.dash}
        chart.add_hline(y=levels[metric].mean(), line=style)
        chart.add_trace(go.Scatter(name=BASELINE, x=[None], y=[None], mode="lines", line=style))
    return chart


def cost_against(runs: pd.DataFrame, setting: str, metric: str = "accuracy") -> go.Figure:
    """The cost of privacy of each group against a setting such as the number of epochs or the noise multiplier.

    Args:
        runs: columns `algorithm`, `seed`, `group`, `cost` and the setting.
        setting: the column on the x axis.
        metric: the metric whose cost it is, for the y axis.

    Raises:
        EquidpError: as `privacy_utility`.
    """
    _check_columns(runs, setting)
    named = runs.assign(algorithm=[f"{a}, {g}" for a, g in zip(runs["algorithm"], runs["group"], strict=True)])
    words = in_words(setting)
    return _sweep(named, setting, "cost", f"Cost of privacy against {words}", words, cost_title(metric))


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
    words, name = in_words(setting), METRIC_NAMES.get(metric, metric)
    return _sweep(runs, setting, metric, f"{capital(name)} against {words}", words, name)


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
    if len(chart.data) > MOST_ABOVE:
        chart.update_layout(legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"})
    return chart


def _check_columns(runs: pd.DataFrame, *columns: str) -> None:
    """Refuse a misspelt setting, and a search that found nothing."""
    for column in columns:
        if column not in runs:
            if runs.empty:
                raise EquidpError("No run is among those given: make them first, or look at what the search asked for.")
            raise unknown_name("column of the runs", column, runs.columns)


def _check_seeds(runs: pd.DataFrame, whose: str) -> None:
    """Refuse runs that differ in more than their seed, because their interval would not be over seeds."""
    names = [c for c in runs.columns if "." in c and not c.startswith(NOT_SETTINGS)]
    names += [c for c in ("dataset", "raw_fingerprint") if c in runs]
    if (runs["algorithm"] == BASELINE).all():  # the baseline is the same for every ε
        names = [name for name in names if name == "privacy.unit" or not name.startswith("privacy.")]
    if mixed := [name for name in names if runs[name].map(_as_text).nunique() > 1]:
        raise EquidpError(
            f"{whose} are no seeds of each other, for they differ in {', '.join(mixed)}: draw those of one setting at "
            f"a time, such as runs[runs[{mixed[0]!r}] == …]."
        )


def _as_text(value: Any) -> str:
    """Return a setting as text; a setting that was not logged counts as one that was not given."""
    return "None" if pd.isna(value) else str(value)
