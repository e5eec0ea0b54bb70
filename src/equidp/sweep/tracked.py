"""The MLflow runs of cells. All that a sweep asks of MLflow stands here."""

from __future__ import annotations

from typing import Any

from mlflow import MlflowClient


def client(store: str) -> MlflowClient:
    """MLflow's client of the store at an address."""
    return MlflowClient(store)


def runs_of(label: str, store: str, experiment: str, status: str) -> list[Any]:
    """Runs with this `run_label` and status, the newest first."""
    wanted = f"tags.run_label = '{label}' and attributes.status = '{status}'"
    return list(client(store).search_runs([experiment], wanted))


def close(label: str, store: str, experiment: str) -> None:
    """End as killed what a crash left open: it would look as if it were still running, forever."""
    for run in runs_of(label, store, experiment, "RUNNING"):
        client(store).set_terminated(run.info.run_id, "KILLED")
