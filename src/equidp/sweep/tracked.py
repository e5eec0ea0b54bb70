"""The MLflow runs of a sweep: those of its cells, above them one for each row's means, and above all one per data set.

All calls of a sweep to MLflow are here. In MLflow's list, a data set's run contains the runs of its rows, and a row's
run contains the runs of its seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE
from mlflow.utils.time import get_current_time_millis
from mlflow.utils.validation import MAX_PARAMS_TAGS_PER_BATCH
from sqlalchemy.exc import SQLAlchemyError

from equidp.errors import first_line
from equidp.reporting.rendering import whole

SUMMARY = "summary"
"""The tag of runs that trained nothing: `seeds` for a row's means, `dataset` for a data set."""

OF_A_SEED = ("seed", "resume", "resolved.")
"""Beginnings of the parameters in which the seeds of a row may differ."""

PROJECT = "project"
"""The tag of a sweep's runs that names its project's folder."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Means:
    """A row of a sweep's table as MLflow shows it, under a key that stands for its settings, seeds aside.

    Attributes:
        metrics: means by name, and half of their intervals as `plus_minus/…`.
        shown: the same as texts, `0.829 ± 0.012`, by the names of the table's columns.
        note: the same in a sentence.
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


def runs_of(label: str, project: Path, store: str, experiment: str, status: str) -> list[Run]:
    """Return this project's runs with this `run_label` and status, the newest first.

    The tag `project` tells the runs of projects apart, because projects that share an experiment and a grid have cells
    of the same labels. Runs without the tag are taken too.
    """
    wanted = f"tags.run_label = '{label}' and attributes.status = '{status}'"
    return _of(project, MlflowClient(store).search_runs([experiment], wanted))


def _of(project: Path, runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.data.tags.get(PROJECT, str(project)) == str(project)]


def close(label: str, project: Path, store: str, experiment: str) -> None:
    """Set runs that a crash left open to KILLED: otherwise they would seem to be running for ever."""
    for run in runs_of(label, project, store, experiment, "RUNNING"):
        MlflowClient(store).set_terminated(run.info.run_id, "KILLED")


def summarise(
    sweep: str, rows: Sequence[Means], pages: Mapping[str, Path], project: Path, store: str, experiment: str
) -> None:
    """Write the runs of a sweep's rows and data sets, or update those of an earlier call.

    If the store fails meanwhile, nothing is lost: the next call of the sweep writes them. `pages` has the page of each
    data set.
    """
    try:
        _Summary(sweep, project, MlflowClient(store), experiment).write(rows, pages)
    except (MlflowException, SQLAlchemyError, OSError) as error:  # a full disk is an OSError
        said = first_line(error)
        logger.warning("MLflow has no means of this sweep (%s): call it again once the store answers.", said)


@dataclass(frozen=True)
class _Summary:
    """The runs of means of one project's sweep."""

    sweep: str
    project: Path
    mlflow: MlflowClient
    experiment: str

    def write(self, rows: Sequence[Means], pages: Mapping[str, Path]) -> None:
        for dataset, page in pages.items():
            mine = [row for row in rows if row.dataset == dataset]
            note = {MLFLOW_RUN_NOTE: "\n\n".join(f"**{row.label}** {row.note}" for row in mine)}
            above = self._run("dataset", f"{dataset}, {self.sweep}", dataset, {"dataset": dataset, **note})
            self.mlflow.log_text(above, whole(page.read_text(encoding="utf-8")), page.name)
            for row in mine:
                self._write_row(row, above)
            self.mlflow.set_terminated(above)

    def _write_row(self, row: Means, above: str) -> None:
        runs = self._runs(row.cells)
        tags = {"dataset": row.dataset, "algorithm": row.algorithm, "row": row.label, MLFLOW_RUN_NOTE: row.note}
        tags |= {**row.shown, MLFLOW_PARENT_RUN_ID: above}
        settings = runs[0].data.params if runs else {}
        settings = {name: value for name, value in settings.items() if not name.startswith(OF_A_SEED)}
        name = f"{row.label} {row.dataset} mean"
        means = self._run("seeds", name, row.key, tags, metrics=row.metrics, params=settings)
        now, params = get_current_time_millis(), [Param(*of) for of in settings.items()]
        self.mlflow.log_batch(means, metrics=[Metric(name, value, now, 0) for name, value in row.metrics.items()])
        for start in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            self.mlflow.log_batch(means, params=params[start : start + MAX_PARAMS_TAGS_PER_BATCH])
        for run in runs:
            if run.info.lifecycle_stage == LifecycleStage.ACTIVE:  # MLflow refuses a deleted one
                self.mlflow.set_tag(run.info.run_id, MLFLOW_PARENT_RUN_ID, means)
        self.mlflow.set_terminated(means)

    def _run(
        self,
        kind: str,
        name: str,
        key: str,
        tags: Mapping[str, str],
        metrics: Mapping[str, float] = MappingProxyType({}),
        params: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Return the id of the run for these means, with these tags: an earlier call's run, or a new one.

        MLflow cannot remove a metric or change a parameter. So an earlier run that has others than these is deleted.
        For example, means over two seeds have intervals, and means over one seed have none.
        """
        own = {SUMMARY: kind, "sweep": self.sweep, "summary_of": key}
        wanted = " and ".join(f"tags.{tag} = '{value}'" for tag, value in own.items())
        tags = {**own, **tags, PROJECT: str(self.project), MLFLOW_RUN_NAME: name}
        for run in _of(self.project, self.mlflow.search_runs([self.experiment], wanted)):
            known = run.data
            if known.metrics.keys() <= metrics.keys() and known.params.items() <= params.items():
                self.mlflow.log_batch(run.info.run_id, tags=[RunTag(*tag) for tag in tags.items()])
                return run.info.run_id
            self.mlflow.delete_run(run.info.run_id)
        return self.mlflow.create_run(self.experiment, tags=tags, run_name=name).info.run_id

    def _runs(self, ids: Sequence[str]) -> list[Run]:
        """Return the seeds' runs that MLflow still has: `mlflow gc` removes deleted runs for good."""
        found = []
        for run_id in ids:
            try:
                found.append(self.mlflow.get_run(run_id))
            except MlflowException as error:
                if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                    raise
        return found
