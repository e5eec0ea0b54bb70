"""Running the project in this process, as `kedro run` would, and reading what it left."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kedro.framework.project
import mlflow
import pytest
from kedro.framework.project import settings
from kedro.framework.session import KedroSession
from kedro.framework.startup import ProjectMetadata, bootstrap_project
from mlflow import MlflowClient
from mlflow.entities import Run
from omegaconf import OmegaConf

FIRST: list[ProjectMetadata] = []
"""What Kedro has found of the first project."""

QUICK = {"training.epochs": 2, "training.batch_size": 128, "training.device": "cpu"}


def kedro_run(project: Path, *pipelines: str, options: Mapping[str, Any] | None = None, **params: Any) -> None:
    """`kedro run --pipelines=… --params=…`; dots in names are written as they are, through a dict.

    `options` are those of Kedro's own, such as `to_nodes`.
    """
    bootstrapped(project)
    with KedroSession.create(project_path=project, runtime_params=nested(params)) as session:
        session.run(pipeline_names=list(pipelines), **(options or {}))


def bootstrapped(project: Path) -> ProjectMetadata:
    """As Kedro's own, once a process: all projects here are of one package, and Kedro looks at every frame for it."""
    if kedro.framework.project.PACKAGE_NAME != "equidp" or not FIRST:
        FIRST[:] = [bootstrap_project(project)]
    places = {"project_path": project, "source_dir": project / "src", "config_file": project / "pyproject.toml"}
    return FIRST[0]._replace(**places)


@contextlib.contextmanager
def own_project(template: Path, folder: Path) -> Iterator[Path]:
    """As the fixture `project`, for what several tests read: a copy of the template, entered."""
    shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patched, contextlib.chdir(folder):
        patched.delenv("EQUIDP_RAW_DIR", raising=False)
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield folder


def nested(params: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as nested dicts, as Kedro's command line makes them."""
    tree = OmegaConf.create({})
    for name, value in params.items():
        OmegaConf.update(tree, name, value, force_add=True)
    return OmegaConf.to_container(tree)  # type: ignore[return-value]


def resolved(project: Path, **params: Any) -> dict[str, Any]:
    """All settings of a run by their names, dots included, validated as they are before anything is trained."""
    bootstrapped(project)
    given = {"runtime_params": nested(params), **settings.CONFIG_LOADER_ARGS}
    return settings.CONFIG_LOADER_CLASS(project / "conf", **given)["parameters"]


def mlflow_runs(project: Path) -> list[Run]:
    """All runs of the project's store, oldest first."""
    mlflow.set_tracking_uri(f"sqlite:///{project / 'mlflow.db'}")
    client = MlflowClient()
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return sorted(found, key=lambda run: run.info.start_time)


def report_folder(project: Path, algorithm: str, dataset: str = "digits", seed: int = 0) -> Path:
    """Where a run's results lie."""
    return project / "data" / "08_reporting" / dataset / algorithm / f"seed={seed}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's content."""
    return json.loads(path.read_text())
