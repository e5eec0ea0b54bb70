"""The project's MLflow database while it is being made: complete under its name, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from equidp.errors import EquidpError
from equidp.hooks import store

EXPERIMENT = {"name": "equidp", "create_experiment_kwargs": {"artifact_location": "file:///there", "tags": {"a": "b"}}}


def made(folder: Path) -> str:
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    store.make_store(uri, EXPERIMENT)
    return uri


def test_a_new_store_has_the_experiment_as_configured(tmp_path):
    client = MlflowClient(made(tmp_path))

    experiment = client.get_experiment_by_name("equidp")
    assert experiment.artifact_location == "file:///there"
    assert experiment.tags["a"] == "b"
    client.create_run(experiment.experiment_id)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
def test_a_new_store_below_any_letters_leaves_no_folder_elsewhere(tmp_path):
    (tmp_path / "Ünï cödé").mkdir()
    made(tmp_path / "Ünï cödé")
    assert [path.name for path in tmp_path.iterdir()] == ["Ünï cödé"]
    assert (tmp_path / "Ünï cödé" / "mlflow.db").is_file()


def test_an_existing_store_is_not_changed(tmp_path):
    (tmp_path / "mlflow.db").write_bytes(b"anything")
    made(tmp_path)
    assert (tmp_path / "mlflow.db").read_bytes() == b"anything"


@pytest.mark.slow
def test_a_store_that_is_stopped_while_it_is_made_leaves_nothing(tmp_path, monkeypatch):
    def stopped(*_):
        assert not (tmp_path / "mlflow.db").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(store.SqlAlchemyStore, "create_experiment", stopped)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_store_that_another_run_has_made_meanwhile_is_kept(tmp_path, monkeypatch):
    create = store.SqlAlchemyStore.create_experiment

    def overtaken(*given):
        (tmp_path / "mlflow.db").write_bytes(b"the other run's")
        return create(*given)

    monkeypatch.setattr(store.SqlAlchemyStore, "create_experiment", overtaken)
    made(tmp_path)
    assert (tmp_path / "mlflow.db").read_bytes() == b"the other run's"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "postgresql://host/name", "sqlite://", "file:///runs"])
def test_stores_that_are_no_sqlite_file_are_not_made(tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    store.make_store(uri, EXPERIMENT)
    assert list(tmp_path.iterdir()) == []


def test_a_project_that_was_moved_does_not_write_into_its_old_place(tmp_path, monkeypatch):
    client = MlflowClient(made(tmp_path))
    monkeypatch.setattr(store, "MlflowClient", lambda: client)
    moved = EXPERIMENT | {"create_experiment_kwargs": {"artifact_location": "file:///a%20b/mlartifacts"}}
    with pytest.raises(
        EquidpError,
        match=r"keeps its artifacts in /there, and not in /a b/mlartifacts.*another project's.*name another",
    ):
        store._chosen(moved)


def test_a_folder_of_artifacts_that_may_not_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch):
    place = tmp_path / "a b" / "mlartifacts"
    place.parent.mkdir()
    asked = EXPERIMENT | {"create_experiment_kwargs": {"artifact_location": place.as_uri()}}
    store.make_store(f"sqlite:///{tmp_path / 'mlflow.db'}", asked)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setattr(store, "MlflowClient", lambda: client)
    monkeypatch.setattr(mlflow, "set_experiment", client.get_experiment_by_name)
    allowed = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place.parent and allowed(path, mode))
    with pytest.raises(EquidpError, match=r"Cannot write .*/a b/mlartifacts: writing there is not allowed"):
        store._chosen(asked)
