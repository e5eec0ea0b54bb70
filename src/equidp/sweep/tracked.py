"""The MLflow runs of cells. All calls of a sweep to MLflow are here."""

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
    """Set runs that a crash left open to KILLED: otherwise they would seem to be running for ever."""
    for run in runs_of(label, store, experiment, "RUNNING"):
        client(store).set_terminated(run.info.run_id, "KILLED")
