"""Nodes of reporting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.accounting.dataset_ledger import DatasetLedger, spent_by_run
from equidp.errors import EquidpError
from equidp.parameters import Settings
from equidp.pipelines.provenance import provenance_facts
from equidp.reporting.figures import clip_norms, cost_per_group, metric_per_group
from equidp.reporting.ledger_figure import spent_figure
from equidp.reporting.page import html_report
from equidp.reporting.privacy_report import epsilon_text
from equidp.reporting.tables import BASELINE, results_table

logger = logging.getLogger(__name__)

MOST_NAMES = 6
"""So many algorithms are named in a page's title; more are counted."""


def cost_figure(metrics: dict[str, Any], data: dict[str, Any], *, algorithm: str) -> go.Figure:
    """What privacy cost each group."""
    return cost_per_group({algorithm: metrics}, data["groups"][0])


def accuracy_figure(metrics: dict[str, Any], data: dict[str, Any], *, algorithm: str) -> go.Figure:
    """Accuracy of each group."""
    return metric_per_group({algorithm: metrics}, data["groups"][0])


def clip_norm_figure(history: pd.DataFrame, *, algorithm: str) -> go.Figure:
    """Clip norms over the epochs: noised releases, so they may be shown."""
    return clip_norms(history, algorithm)


def shown_settings(
    dataset: str,
    seed: int,
    data: dict[str, Any],
    model: dict[str, Any],
    privacy: dict[str, Any],
    training: dict[str, Any],
) -> dict[str, Any]:
    """The settings that all algorithms of a page share."""
    return {"dataset": dataset, "seed": seed, "data": data, "model": model, "privacy": privacy, "training": training}


def options_of(algorithms: Sequence[str]) -> list[str]:
    """Names of the settings that a page's algorithms have of their own, the baseline's first: costs depend on them."""
    return [f"{name}.options" for name in dict.fromkeys((BASELINE, *algorithms))]


def draw_ledger(folder: Path, settings: Settings) -> go.Figure:
    """What all runs on the data set have spent, run by run; the last total is told in the terminal.

    Raises:
        EquidpError: no run on it is entered yet, or an entry is damaged.
    """
    ledger = DatasetLedger(folder, settings.dataset)
    entries, delta = ledger.entries(), settings.privacy.delta
    if not entries:
        raise EquidpError(f"{ledger.path} has no entry: train on {settings.dataset} first.")
    rows = spent_by_run(entries, delta)
    logger.info(
        "%s: ε = %s at δ = %g, of %d secure runs.",
        ledger.path,
        epsilon_text(rows[-1][1]),
        delta,
        len({entry.run for entry in entries if entry.secure}),
    )
    return spent_figure(rows, settings.dataset, settings.privacy.total_epsilon)


def run_report(
    metrics: dict[str, Any],
    privacy: dict[str, Any],
    history: pd.DataFrame,
    groups: pd.DataFrame,
    provenance: dict[str, Any],
    dataset: str,
    seed: int,
    data: dict[str, Any],
    model: dict[str, Any],
    asked: dict[str, Any],
    training: dict[str, Any],
    released: dict[str, Any],
    *options: dict[str, Any],
    algorithm: str,
) -> str:
    """The HTML page of one run, one self-contained file."""
    own = dict(zip(options_of([algorithm]), options, strict=True))
    settings = shown_settings(dataset, seed, data, model, asked, training) | own
    return html_report(
        f"{algorithm} on {dataset}",
        {algorithm: metrics},
        {algorithm: privacy},
        {algorithm: history},
        settings,
        provenance_facts(provenance),
        groups,
        _remarks(data),
        {algorithm: released},
    )


def comparison_of(algorithms: Sequence[str]) -> Callable[..., tuple[str, pd.DataFrame]]:
    """The node function that compares these algorithms.

    Its last inputs are their metrics, statements and histories, and the options of them and the baseline.
    """

    def compare_algorithms(
        groups: pd.DataFrame,
        provenance: dict[str, Any],
        dataset: str,
        seed: int,
        data: dict[str, Any],
        model: dict[str, Any],
        asked: dict[str, Any],
        training: dict[str, Any],
        *results: Any,
    ) -> tuple[str, pd.DataFrame]:
        """One page and one table for all algorithms of the run."""
        count = len(algorithms)
        metrics, privacy, histories = (
            dict(zip(algorithms, results[i * count : (i + 1) * count], strict=True)) for i in range(3)
        )
        own = dict(zip(options_of(algorithms), results[3 * count :], strict=True))
        settings = shown_settings(dataset, seed, data, model, asked, training) | own
        page = html_report(
            f"{', '.join(algorithms) if count <= MOST_NAMES else f'{count} algorithms'} on {dataset}",
            metrics,
            privacy,
            histories,
            settings,
            provenance_facts(provenance),
            groups,
            _remarks(data),
        )
        return page, results_table(metrics, privacy).reset_index()

    return compare_algorithms


def _remarks(data: dict[str, Any]) -> list[str]:
    """What a reader of figures must know about the records; not how many are left out: that is no noised count."""
    if data["options"].get("missing") != "drop":
        return []
    return [
        "Rows that miss a feature or the label, if there were any, are left out (data.options.missing=drop): all "
        "figures are of complete rows."
    ]
