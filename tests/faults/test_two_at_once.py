"""Two runs of one dataset, seed and run_label, or of one process: the second one has to wait for its turn."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
from kedro.framework.session import KedroSession
from tests.end_to_end.kedro_project import QUICK, bootstrapped, kedro_run, mlflow_runs, report_folder

from equidp.errors import EquidpError
from equidp.hooks.entries import written_to
from equidp.hooks.guard import LOCK
from equidp.hooks.turn import Turn
from equidp.pipelines.training import nodes
from equidp.system.files import locked


def test_another_run_at_work_is_told_and_its_files_are_left_alone(project, monkeypatch):
    """It may train another algorithm: the baseline's plan is one file, and its model. A release waits for its model."""
    path = report_folder(project, "ingestion") / LOCK
    path.parent.mkdir(parents=True)
    with path.open("wb") as other:
        assert locked(other)
        for pipeline, more in (("ingestion", {}), ("release", {"algorithm": "dpsgd"})):
            with pytest.raises(EquidpError, match="Another run of this dataset, seed and run_label is at work") as told:
                kedro_run(project, pipeline, **more)
            assert "several ranks" not in told.value.message  # multiprocessing gives every script that name
        assert [file.name for file in path.parent.iterdir()] == [LOCK]
        # the other one may be the same script, which Python runs again in each of its ranks
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "__mp_main__", ModuleType("__mp_main__"))
            with pytest.raises(EquidpError, match=r'several ranks.* under if __name__ == "__main__"\.'):
                kedro_run(project, "ingestion")
        kedro_run(project, "ingestion", run_label="mine")
    kedro_run(project, "ingestion")


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
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


@pytest.mark.slow
def test_a_run_in_another_thread_is_refused_and_changes_nothing_of_the_one_at_work(project, monkeypatch):
    """`kedro server` answers each request in a thread: one wrote its results into the folder of the other's seed."""
    told: list[BaseException | None] = []

    def scored(*arguments):
        if not told:
            told.append(other.submit(kedro_run, project, "sgd", seed=1, **QUICK).exception())
        return score(*arguments)

    score = nodes.score_test
    monkeypatch.setattr(nodes, "score_test", scored)
    with ThreadPoolExecutor(1) as other:
        kedro_run(project, "sgd", **QUICK)
        assert "Another run of this process" in str(told[0])
        assert {path.parent.name for path in (project / "data").rglob("metrics.json")} == {"seed=0"}
        other.submit(kedro_run, project, "sgd", seed=1, **QUICK).result()
    assert {run.data.params["seed"]: run.info.status for run in mlflow_runs(project)} == {
        "0": "FINISHED",
        "1": "FINISHED",
    }


def test_a_run_within_a_node_of_another_is_refused(project, monkeypatch):
    """What the inner one had made was removed as the outer one saved its model, or took the outer one's settings."""
    kedro_run(project, "sgd", seed=1, **QUICK)
    told = list[str]()

    def scored(*arguments):
        with pytest.raises(EquidpError) as refused:
            kedro_run(project, "sgd", seed=1, **QUICK)
        told.append(str(refused.value))
        return score(*arguments)

    score = nodes.score_test
    monkeypatch.setattr(nodes, "score_test", scored)
    kedro_run(project, "sgd", **QUICK)
    assert told[0].startswith("Another run of this process")
    assert (report_folder(project, "sgd", seed=1) / "metrics.json").is_file()
    assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED", "FINISHED"]


@pytest.mark.slow
def test_after_ctrl_c_which_no_hook_is_told_of_the_same_thread_may_run(project, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(nodes, "score_test", stopped)
        with pytest.raises(KeyboardInterrupt):
            kedro_run(project, "sgd", **QUICK)
    kedro_run(project, "sgd", **QUICK)
    assert (report_folder(project, "sgd") / "metrics.json").is_file()


def test_a_context_made_within_anothers_hook_is_refused():
    turn = Turn()
    with turn.prepared(), pytest.raises(EquidpError, match="Another run of this process"), turn.prepared():
        pass
    with turn.prepared():
        pass


def test_of_two_contexts_made_at_once_the_later_one_runs():
    turn = Turn()

    def begins(*, prepare: bool) -> str:
        try:
            if prepare:
                with turn.prepared():
                    pass
            with turn.begun(object()):
                return "begun"
        except EquidpError as error:
            return str(error)

    with ThreadPoolExecutor(1) as other, turn.prepared():
        pass
    with ThreadPoolExecutor(1) as other:
        assert other.submit(begins, prepare=False).result().startswith("Another run of this process")
        assert other.submit(begins, prepare=True).result() == "begun"
        assert begins(prepare=True).startswith("Another run of this process")
        assert begins(prepare=False).startswith("Another run of this process")
    assert begins(prepare=True) == "begun"  # that thread has ended: nothing is at work in it


def test_a_refused_run_leaves_the_turn_to_others():
    turn = Turn()
    with ThreadPoolExecutor(1) as other:
        with turn.prepared():
            pass
        with pytest.raises(EquidpError, match="refused"), turn.begun(object()):
            raise EquidpError("refused")
        with other.submit(turn.prepared).result():
            pass


def test_of_two_sessions_in_two_threads_each_has_its_own_places(project):
    def context(seed: int):
        return KedroSession.create(project_path=project, runtime_params={"seed": seed}).load_context()

    def first() -> str:
        mine = context(1)
        begun.set()
        assert other.wait(60)
        return written_to(mine.catalog, "sgd.model").parent.name

    bootstrapped(project)
    begun, other = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        found = pool.submit(first)
        assert begun.wait(60)
        second = context(2)
        other.set()
        assert found.result() == "seed=1"
    assert written_to(second.catalog, "sgd.model").parent.name == "seed=2"
