"""Two runs of one dataset, seed and run_label: nodes read what nodes wrote, so the second one waits its turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from kedro.framework.session import KedroSession
from tests.end_to_end.kedro_project import QUICK, bootstrapped, kedro_run, mlflow_runs, report_folder

from equidp.errors import EquidpError
from equidp.hooks.entries import written_to
from equidp.hooks.guard import LOCK
from equidp.pipelines.training import nodes
from equidp.system.files import locked


def test_another_run_at_work_is_told_and_its_files_are_left_alone(project):
    """It may train another algorithm: the baseline's plan is one file, and its model. A release waits for its model."""
    path = report_folder(project, "ingestion") / LOCK
    path.parent.mkdir(parents=True)
    with path.open("wb") as other:
        assert locked(other)
        for pipeline, more in (("ingestion", {}), ("release", {"algorithm": "dpsgd"})):
            with pytest.raises(EquidpError, match="Another run of this dataset, seed and run_label is at work"):
                kedro_run(project, pipeline, **more)
        assert [file.name for file in path.parent.iterdir()] == [LOCK]
        kedro_run(project, "ingestion", run_label="mine")
    kedro_run(project, "ingestion")


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_at_work_until_its_results_are_logged(project, monkeypatch, fails):
    def free() -> bool:
        with (report_folder(project, "ingestion") / LOCK).open("rb") as file:
            return locked(file)

    def scored(*arguments):
        seen.append(free())
        if fails:
            raise RuntimeError("in the middle")
        return score(*arguments)

    seen, score = [], nodes.score_test
    monkeypatch.setattr(nodes, "score_test", scored)
    monkeypatch.setattr("equidp.training.forget", lambda workplace: seen.append(free()))
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            kedro_run(project, "sgd", **QUICK)
    else:
        kedro_run(project, "sgd", **QUICK)
        assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED"]
    assert seen
    assert not any(seen)
    assert free()


def test_a_second_run_in_another_thread_of_the_process_is_refused_and_leaves_the_first_alone(project, monkeypatch):
    """As two requests to `kedro server` begin them: the hooks and MLflow's active run are there once."""

    def scored(*arguments):
        at_work.set()
        assert told.wait(60)
        return score(*arguments)

    at_work, told, score = threading.Event(), threading.Event(), nodes.score_test
    monkeypatch.setattr(nodes, "score_test", scored)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(kedro_run, project, "sgd", **QUICK, run_label="first")
        assert at_work.wait(60)
        try:
            with pytest.raises(EquidpError, match="Another thread of this process runs a pipeline"):
                kedro_run(project, "sgd", **QUICK, run_label="second")
        finally:
            told.set()
        first.result()
    assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED"]
    kedro_run(project, "ingestion", run_label="second")
    assert not report_folder(project, "sgd").joinpath("second").exists()


def test_of_two_sessions_in_two_threads_each_has_its_own_settings_and_places(project):
    def context(seed: int):
        return KedroSession.create(project_path=project, runtime_params={"seed": seed}).load_context()

    def first() -> tuple[int, str]:
        mine = context(1)
        begun.set()
        assert other.wait(60)
        catalog = mine.catalog
        return catalog.load("settings").seed, written_to(catalog, "sgd.model").parent.name

    bootstrapped(project)
    begun, other = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        found = pool.submit(first)
        assert begun.wait(60)
        second = context(2)
        other.set()
        assert found.result() == (1, "seed=1")
    assert second.catalog.load("settings").seed == 2
