"""Parts that several kinds of figures share: named lines, metrics in words, gaps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from equidp.reporting.style import HEIGHT, ROW_HEIGHT, line, looks
from equidp.reporting.titles import METRIC_TITLES

METRIC_NAMES = METRIC_TITLES | {"loss": "loss (nats)", "excess_loss": "excess loss (nats)"}

FEW_EPOCHS = 10
"""Over fewer epochs every epoch has its tick, because Plotly by itself would mark epoch 1.2."""


def draw_lines(
    chart: go.Figure,
    series: Mapping[str, tuple[Iterable, Sequence | pd.Series]],
    *,
    row: int | None = None,
    known: Iterable[str] = (),
    legend: bool = True,
) -> go.Figure:
    """Draw named (x, y) series. `known` names all algorithms, so that looks stay the same if only some are drawn."""
    table = looks([*known, *series])
    for name, (x, y) in series.items():
        values = gaps(y)
        if any(v is not None for v in values):
            trace = line(table[name], x, values, showlegend=legend, legendgroup=table[name].name)
            chart.add_trace(trace, row=row, col=None if row is None else 1)
    epochs = [x for x, _ in series.values() if isinstance(x, pd.Series) and x.name == "epoch" and len(x)]
    if epochs and max(x.max() for x in epochs) - min(x.min() for x in epochs) < FEW_EPOCHS:
        chart.update_xaxes(dtick=1)
    return chart


def in_rows(chart: go.Figure, number: int) -> None:
    """Give a map room for `number` rows of colours, with names from above."""
    chart.update_yaxes(title_text="", autorange="reversed", showgrid=False, zeroline=False, type="category")
    chart.update_layout(height=HEIGHT // 2 + ROW_HEIGHT * number)


def in_words(setting: Hashable) -> str:
    """A setting's name as words: `training.epochs` → `epochs`, `noise_multiplier` → `noise multiplier`."""
    return str(setting).rsplit(".", 1)[-1].replace("_", " ")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def gaps(values: Sequence | pd.Series) -> list[float | None]:
    """Return values with None for NaN: Plotly draws None as a gap, and JSON has no NaN."""
    return [None if pd.isna(v) else float(v) for v in values]
