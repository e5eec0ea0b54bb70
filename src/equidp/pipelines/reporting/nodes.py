"""Nodes of reporting."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.accounting.dataset_ledger import kept_limit, spent_by_run
from equidp.errors import EquidpError
from equidp.parameters import Settings, concerning
from equidp.pipelines.provenance import provenance_facts
from equidp.reporting.figures import cost_per_group, metric_per_group
from equidp.reporting.ledger_figure import spent_figure
from equidp.reporting.page import html_report
from equidp.reporting.privacy_report import privacy_report
from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.style import noted
from equidp.reporting.tables import results_table
from equidp.training.charging import ledger_of

logger = logging.getLogger(__name__)

MOST_NAMES = 6
"""The most algorithms that a page's title names; of more it gives the number."""


def cost_figure(metrics: dict[str, Any], settings: Settings, *, algorithm: str) -> go.Figure:
    """What privacy cost each group."""
    exact = f"Exact figures of {settings.data.evaluate_on} records and of the baseline: outside the guarantee"
    return noted(cost_per_group({algorithm: metrics}, settings.data.groups[0]), exact)


def accuracy_figure(metrics: dict[str, Any], settings: Settings, *, algorithm: str) -> go.Figure:
    """Accuracy, or the task's main metric, of each group."""
    exact = f"Exact figures of {settings.data.evaluate_on} records: outside the guarantee"
    return noted(metric_per_group({algorithm: metrics}, settings.data.groups[0]), exact)


def statement(privacy: dict[str, Any], settings: Settings) -> str:
    """The privacy statement in words."""
    return privacy_report(privacy, settings.dataset)


def draw_ledger(folder: Path, settings: Settings) -> go.Figure:
    """Draw what all runs on the data set have spent, run by run; the log gives the last total of each unit.

    Raises:
        EquidpError: the ledger has no run on this data set, or an entry is damaged.
    """
    ledger = ledger_of(folder, settings)
    entries, delta = ledger.entries(), settings.privacy.delta
    if not entries:
        raise EquidpError(f"{ledger.path} has no entry of {settings.dataset}: train on it first.")
    rows = spent_by_run(entries, delta)
    totals = {unit: total for _, total, _, unit in rows}
    if len({unit for *_, counts, unit in rows if counts}) > 1:
        logger.warning(
            "Secure runs protect several units (%s). Each total holds the runs of its own unit alone: a person pays "
            "for the others too, and no figure holds for all together.",
            ", ".join(totals),
        )
    for unit, total in totals.items():
        logger.info(
            "%s: ε = %s at δ = %g for a %s of %s, of %d secure run(s).",
            ledger.path,
            epsilon_text(total),
            delta,
            unit,
            ", ".join(dict.fromkeys(entry.data[0] for entry in entries)),
            len({entry.run for entry in entries if entry.secure and entry.unit == unit}),
        )
    if (limit := kept_limit(entries)) is not None:
        logger.info(
            "No run is begun with which they would cost more than %s, reckoned at the Rényi order %g. That limit, and "
            "not what is spent, is the guarantee where models and noised figures of earlier runs decide on later ones; "
            "none covers decisions by exact figures, baselines or audits.",
            limit,
            limit.order,
        )
    return spent_figure(rows, settings.dataset, limit.epsilon if limit else settings.privacy.total_epsilon)


def run_report(
    groups: pd.DataFrame,
    provenance: dict[str, Any],
    settings: Settings,
    released: dict[str, Any],
    *results: Any,
    algorithm: str,
) -> str:
    """The HTML page of one run, one self-contained file.

    `released` is metrics_release.json; `results` are as of `compare_algorithms`.
    """
    return compare_algorithms(
        groups, provenance, settings, *results, algorithms=[algorithm], released={algorithm: released}
    )[0]


def compare_algorithms(
    groups: pd.DataFrame,
    provenance: dict[str, Any],
    settings: Settings,
    *results: Any,
    algorithms: Sequence[str],
    released: Mapping[str, Mapping] | None = None,
) -> tuple[str, pd.DataFrame]:
    """One page and one table for all algorithms of the run.

    `results` are all metrics, then all statements, then all histories, each in the order of `algorithms`.
    """
    count = len(algorithms)
    metrics, privacy, histories = (
        dict(zip(algorithms, results[i * count : (i + 1) * count], strict=True)) for i in range(3)
    )
    page = html_report(
        f"{', '.join(algorithms) if count <= MOST_NAMES else f'{count} algorithms'} on {settings.dataset}",
        metrics,
        privacy,
        histories,
        concerning(settings.to_dict(), algorithms),
        provenance_facts(provenance),
        groups,
        _remarks(provenance),
        released,
    )
    return page, results_table(metrics, privacy).reset_index()


def _remarks(provenance: dict[str, Any]) -> list[str]:
    """Sentences that a reader of figures must know: how many records of which groups are left out or clipped.

    Their counts are exact, like the counts of groups on the page.
    """
    return [f"Of the table, before it was split: {remark}" for remark in provenance.get("remarks", ())]
