"""Figures of exact training quantities. *Outside the guarantee*: each says "not private" in its title."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from equidp.reporting.figures.drawing import capital, draw_lines, in_words
from equidp.reporting.style import bars, categories, figure, label, looks

DIAGNOSTICS = {
    "cosine": "cosine similarity of noisy and clean gradient",
    "mean_weight": "mean scaling weight",
    "gradient_norm": "gradient norm",
    "batch_size": "records in a batch",
    "nonfinite": "records with a non-finite gradient",
}
"""Exact training figures, outside the guarantee: columns `nonprivate/<name>` of a history. Algorithms add others."""

GROUP_DIAGNOSTICS = {
    "gradient_norm": "mean gradient norm",
    "mean_gradient": "norm of the mean gradient",
    "above": "share of gradients above C",
    "excess": "mean excess over C",
    "noise": "noise in a group's mean gradient",
}
"""Such figures by group: columns `nonprivate/<name>/<group>`. The last two are the terms of DPSGD-F's Eq. 1."""


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
    name, column = DIAGNOSTICS.get(quantity, in_words(quantity)), f"nonprivate/{quantity}"
    chart = figure(f"{capital(name)} (not private)", "epoch", name)
    tails = {a: h.tail(last or len(h)) for a, h in histories.items() if column in h}
    return draw_lines(chart, {a: (h["epoch"], h[column]) for a, h in tails.items()}, known=histories)


def group_diagnostic(history: pd.DataFrame, algorithm: str, quantity: str = "gradient_norm") -> go.Figure:
    """An exact training figure of every group over the epochs. *Outside the guarantee.*

    Args:
        history: with `nonprivate/<quantity>/<group>`.
        algorithm: its name.
        quantity: one of `GROUP_DIAGNOSTICS`.
    """
    name, prefix = GROUP_DIAGNOSTICS[quantity], f"nonprivate/{quantity}/"
    columns = [c for c in history.columns if c.startswith(prefix)]
    chart = figure(f"{capital(name)}: {label(algorithm)} (not private)", "epoch", name)
    return draw_lines(chart, {c.removeprefix(prefix): (history["epoch"], history[c]) for c in columns})


def diagnostic_distribution(
    histories: Mapping[str, pd.DataFrame], quantity: str = "gradient_norm", last: int = 10
) -> go.Figure:
    """The distribution of a per-record or per-step quantity over the last epochs, as shares. *Outside the guarantee.*

    Args:
        histories: history frames with counts in columns `nonprivate/<quantity>_histogram/<lower edge of the bin>`;
            the last bin is open. Only counts are kept, never the records' own values.
        quantity: one of `DIAGNOSTICS`.
        last: the number of epochs at the end that are added up.
    """
    name, prefix = DIAGNOSTICS[quantity], f"nonprivate/{quantity}_histogram/"
    chart = figure(f"{capital(name)}, last {last} epochs (not private)", f"{name}, from", "share")
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
