"""Comparing runs that MLflow has kept: of any algorithms, settings and seeds, whenever they were made."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from equidp.data.sources import SOURCES
from equidp.errors import EquidpError, unknown_name
from equidp.parameters import ReportSettings, Settings
from equidp.reporting.page import html_report
from equidp.reporting.runs import NOT_SETTINGS
from equidp.reporting.tables import results_table
from equidp.sweep.summary import averaged, of_seeds, row_labels

DONE = "attributes.status = 'FINISHED'"

WITH_NOISE_ONLY = tuple(
    f"privacy.{name}"
    for name in ("epsilon", "noise_multiplier", "delta", "max_trials", "trials_law", "trials_mean", "trials_shape")
)
"""Parameters that every run logs and that nothing depends on where there is no noise."""

logger = logging.getLogger(__name__)


def compare_tracked_runs(settings: Settings) -> tuple[str, pd.DataFrame]:
    """One page and one table for the runs that `report` chooses; runs that differ only in seed are a row of means."""
    report, client = settings.report, MlflowClient()
    found, remarks = _chosen(client, report)
    with tempfile.TemporaryDirectory() as folder:
        results = {run.info.run_id: _artifacts(client, run, Path(folder)) for run in found}
    if lost := [run_id for run_id, documents in results.items() if documents is None]:
        remarks.append(f"Runs whose files are gone or damaged are left out: {', '.join(lost)}.")
        logger.warning(remarks[-1])
        found = [run for run in found if run.info.run_id not in lost]
    if not found:
        raise EquidpError("Of no run are the files still there: train again, or put back the folder they were in.")
    rows = _rows(found)
    documents, privacy = {}, {}
    for label, runs in rows.items():
        kept = [one for run in runs if (one := results[run.info.run_id]) is not None]
        documents[label] = averaged(runs[0].data.tags["algorithm"], {i: metrics for i, (metrics, _) in enumerate(kept)})
        privacy[label] = of_seeds([statement for _, statement in kept])
    if len({run.data.tags["dataset"] for run in found}) > 1:  # a data set's baseline is no baseline for another
        documents = {label: {k: v for k, v in one.items() if k != "baseline"} for label, one in documents.items()}
    page = html_report(
        f"{len(rows)} tracked settings" + (f" on {report.dataset}" if report.dataset else ""),
        documents,
        privacy,
        {},
        {label: dict(runs[0].data.params) for label, runs in rows.items()},
        {label: ", ".join(run.info.run_id for run in runs) for label, runs in rows.items()},
        pd.DataFrame(columns=["grouping", "group"]),
        remarks,
    )
    return page, results_table(documents, privacy).reset_index()


def _chosen(client: MlflowClient, settings: ReportSettings) -> tuple[list[Run], list[str]]:
    """Finished runs of one algorithm each that fit the filter, newest first; and a sentence if some may be missing."""
    assert settings.experiment is not None  # by default the configuration gives that of mlflow.yml
    experiment = client.get_experiment_by_name(settings.experiment)
    if experiment is None:
        raise unknown_name("experiment", settings.experiment, [e.name for e in client.search_experiments()])
    wanted = dict(settings.tags) | ({"dataset": settings.dataset} if settings.dataset else {})
    if wanted.get("dataset") != settings.tags.get("dataset", settings.dataset):
        raise EquidpError(
            f"report.dataset is {settings.dataset!r} and report.tags.dataset {settings.tags['dataset']!r}; "
            "give one of them."
        )
    if any(mark in text for pair in wanted.items() for text in pair for mark in "'\"`"):
        raise EquidpError(f"MLflow's search takes no quotes: there is one in report.dataset or report.tags, {wanted}.")
    query = " and ".join([DONE, *(f"tags.`{k}` = '{v}'" for k, v in wanted.items())])
    found = client.search_runs([experiment.experiment_id], query, max_results=settings.runs)
    runs = [run for run in found if "private" in run.data.tags]
    if not runs:
        finished = client.search_runs([experiment.experiment_id], DONE, max_results=settings.runs)
        known = SOURCES.keys() | {run.data.tags["dataset"] for run in finished if "dataset" in run.data.tags}
        if settings.dataset and settings.dataset not in known:
            raise unknown_name("dataset of tracked runs", settings.dataset, known)
        raise EquidpError(
            f"No finished run fits {wanted or 'the experiment'} in {settings.experiment!r}: train one first, "
            "or loosen report.dataset and report.tags."
        )
    if len(found) < settings.runs:
        return runs, []
    cut = f"Older runs may be missing: the {settings.runs} newest were taken, as report.runs says."
    logger.warning(cut)
    return runs, [cut]


def _rows(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs on the same raw files that differ only in the seed, by a label of the settings that differ.

    Of several runs with the same seed, the newest is taken.
    """
    rows: dict[tuple, dict[str, Run]] = defaultdict(dict)
    for run in runs:
        tags = run.data.tags
        without_effect = NOT_SETTINGS + (WITH_NOISE_ONLY if tags.get("private") == "false" else ())
        params = {k: v for k, v in run.data.params.items() if not k.startswith(without_effect)}
        own = run.info.run_id if tags.get("secure") == "true" else tags.get("seed", "")  # no two secure runs are alike
        rows[tags["algorithm"], tags.get("raw_fingerprint", ""), *sorted(params.items())].setdefault(own, run)
    differing = _differing([(key[0], dict(key[2:])) for key in rows])
    # "None" counts as not given
    shown = {key: {k: _value(v) for k, v in key[2:] if k in differing and v != "None"} for key in sorted(rows)}
    labels = row_labels({key: (key[0], own) for key, own in shown.items()})
    return {label: list(rows[key].values()) for key, label in labels.items()}


def _value(text: str) -> str | float:
    """Return a fraction as a number, because MLflow keeps 1.0 as text and labels are to be those of a sweep."""
    try:
        return text if text.isdigit() else float(text)
    except ValueError:
        return text


def _differing(rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Names of settings that are not the same wherever they are given, or that only some runs of an algorithm have."""
    names = sorted({name for _, settings in rows for name in settings})
    found = []
    for name in names:
        given = {settings[name] for _, settings in rows if name in settings}
        having = {algorithm for algorithm, settings in rows if name in settings}
        if len(given) > 1 or any(algorithm in having and name not in settings for algorithm, settings in rows):
            found.append(name)
    return found


def _artifacts(client: MlflowClient, run: Run, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """metrics.json and privacy.json of a run; None where they are gone or damaged."""
    target = folder / run.info.run_id
    target.mkdir()
    try:
        found = [
            client.download_artifacts(run.info.run_id, f"{name}.json", str(target)) for name in ("metrics", "privacy")
        ]
        metrics, privacy = (json.loads(Path(path).read_text(encoding="utf-8")) for path in found)
    except (MlflowException, OSError, ValueError):
        return None
    return metrics, privacy
