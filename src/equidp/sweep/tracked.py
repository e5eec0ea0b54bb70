"""The MLflow runs of a sweep: those of its cells, and above them one of each row's means and one of each data set.

All calls of a sweep to MLflow are here. In MLflow's list a data set's run holds those of its rows, and a row's those of
its seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from mlflow.utils.time import get_current_time_millis
from mlflow.utils.validation import MAX_PARAMS_TAGS_PER_BATCH
from sqlalchemy.exc import SQLAlchemyError

from equidp.errors import first_line
from equidp.reporting.rendering import whole

SUMMARY = "summary"
"""The tag of runs that trained nothing: `seeds` of a row's means, `dataset` of a data set's."""

OF_A_SEED = ("seed", "resume", "resolved.")
"""How parameters begin in which the seeds of a row may differ."""

PROJECT = "project"
"""The tag of a cell's run that names its project's folder."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Means:
    """A row of a sweep's table as MLflow shows it, under a key that stands for its settings, seeds aside.

    Attributes:
        metrics: means by name, and half of their intervals as `plus_minus/…`.
        shown: the same as texts, `0.829 ± 0.012`, by the names of the table's columns; `note`: in a sentence.
        cells: MLflow's ids of the seeds' runs.
    """

    key: str
    dataset: str
    algorithm: str
    label: str
    metrics: Mapping[str, float]
    shown: Mapping[str, str]
    note: str
    cells: Sequence[str]


def runs_of(label: str, project: Path, store: str, experiment: str, status: str) -> list[Any]:
    """This project's runs with this `run_label` and status, the newest first; one without the tag `project` is its own.

    Projects that share an experiment and a grid have cells of the same labels.
    """
    wanted = f"tags.run_label = '{label}' and attributes.status = '{status}'"
    found = MlflowClient(store).search_runs([experiment], wanted)
    return [run for run in found if run.data.tags.get(PROJECT, str(project)) == str(project)]


def close(label: str, project: Path, store: str, experiment: str) -> None:
    """Set runs that a crash left open to KILLED: otherwise they would seem to be running for ever."""
    for run in runs_of(label, project, store, experiment, "RUNNING"):
        MlflowClient(store).set_terminated(run.info.run_id, "KILLED")


def summarise(sweep: str, rows: Sequence[Means], pages: Mapping[str, Path], store: str, experiment: str) -> None:
    """Write the runs of a sweep's rows and data sets; called again, they are brought up to date.

    A store that fails meanwhile loses nothing: the next call of the sweep writes them. `pages`: of each data set.
    """
    try:
        _summarise(sweep, rows, pages, MlflowClient(store), experiment)
    except (MlflowException, SQLAlchemyError, OSError) as error:  # a full disk is an OSError
        said = first_line(error)
        logger.warning("MLflow has no means of this sweep (%s): call it again once the store answers.", said)


def _summarise(
    sweep: str, rows: Sequence[Means], pages: Mapping[str, Path], mlflow: MlflowClient, experiment: str
) -> None:
    def run(kind: str, name: str, key: str, tags: Mapping[str, str]) -> str:
        own = {SUMMARY: kind, "sweep": sweep, "summary_of": key}
        wanted = " and ".join(f"tags.{tag} = '{value}'" for tag, value in own.items())
        found = mlflow.search_runs([experiment], wanted, max_results=1)
        if not found:
            return mlflow.create_run(experiment, tags={**own, **tags}, run_name=name).info.run_id
        mlflow.log_batch(found[0].info.run_id, tags=[RunTag(*tag) for tag in tags.items()])
        return found[0].info.run_id

    for dataset, page in pages.items():
        mine = [row for row in rows if row.dataset == dataset]
        note = {MLFLOW_RUN_NOTE: "\n\n".join(f"**{row.label}** {row.note}" for row in mine)}
        above = run("dataset", f"{dataset}, {sweep}", dataset, {"dataset": dataset, **note})
        mlflow.log_text(above, whole(page.read_text(encoding="utf-8")), page.name)
        for row in mine:
            own = {"dataset": dataset, "algorithm": row.algorithm, "row": row.label, MLFLOW_RUN_NOTE: row.note}
            tags = {**own, **row.shown}
            means = run("seeds", f"{row.label} {dataset} mean", row.key, tags | {MLFLOW_PARENT_RUN_ID: above})
            now = get_current_time_millis()
            mlflow.log_batch(means, metrics=[Metric(name, value, now, 0) for name, value in row.metrics.items()])
            settings = mlflow.get_run(row.cells[0]).data.params
            shared = [Param(*of) for of in settings.items() if not of[0].startswith(OF_A_SEED)]
            for start in range(0, len(shared), MAX_PARAMS_TAGS_PER_BATCH):
                mlflow.log_batch(means, params=shared[start : start + MAX_PARAMS_TAGS_PER_BATCH])
            for cell in row.cells:
                if mlflow.get_run(cell).info.lifecycle_stage == LifecycleStage.ACTIVE:  # MLflow refuses a deleted one
                    mlflow.set_tag(cell, MLFLOW_PARENT_RUN_ID, means)
            mlflow.set_terminated(means)
        mlflow.set_terminated(above)
