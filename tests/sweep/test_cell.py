"""One cell: done once, whatever is killed in between. The run itself is replaced; a child process stands in for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from equidp.sweep import cell as cells
from equidp.sweep.cell import finished, run_cell


class Store:
    """MLflow with one experiment: states of runs by id."""

    def __init__(self) -> None:
        self.runs: dict[str, tuple[str, str]] = {}

    def search_runs(self, experiments, wanted):
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=run_id))
            for run_id, (label, status) in self.runs.items()
            if wanted == f"tags.run_label = '{label}' and attributes.status = '{status}'"
        ]

    def set_terminated(self, run_id, status):
        self.runs[run_id] = (self.runs[run_id][0], status)


@pytest.fixture
def store(monkeypatch) -> Store:
    """The MLflow that cells see."""
    store = Store()
    monkeypatch.setattr(cells, "_client", lambda address: store)
    return store


@pytest.fixture
def calls(monkeypatch, store) -> list[list[str]]:
    """Runs that were started; each writes its files and finishes, unless `failing` says how often it does not."""
    started: list[list[str]] = []

    def kedro(arguments, job, log, lock):
        started.append(arguments)
        run_id = f"run-{len(started)}"
        store.runs[run_id] = (job.key, "RUNNING")
        if len(started) <= int(os.environ.get("FAILING", "0")):
            log.write("INFO something\nError: the disk is full.\n\n")
            return 1
        for path in job.outputs:
            path.write_text("{}")
        store.runs[run_id] = (job.key, "FINISHED")
        return 0

    monkeypatch.setattr(cells, "_kedro", kedro)
    return started


def test_a_cell_is_run_once_and_then_skipped(make_job, calls):
    job = make_job()

    first, second = run_cell(job), run_cell(job)

    assert len(calls) == 1
    assert calls[0] == ["run", "--pipeline=dpsgd", "--params=run_label=cell-a"]
    assert (first.reason, first.attempts, first.run_id) == (None, 1, "run-1")
    assert (second.reason, second.attempts, second.run_id) == (None, 0, "run-1")
    assert json.loads(job.marker.read_text())["command"] == "kedro run --pipeline=dpsgd --params=run_label=cell-a"


def test_a_failed_run_is_tried_again_and_its_run_closed(make_job, calls, store, monkeypatch):
    monkeypatch.setenv("FAILING", "1")

    outcome = run_cell(make_job(retries=1))

    assert (outcome.reason, outcome.attempts) == (None, 2)
    assert store.runs == {"run-1": ("cell-a", "KILLED"), "run-2": ("cell-a", "FINISHED")}


def test_a_cell_that_keeps_failing_tells_its_last_line(make_job, calls, monkeypatch):
    monkeypatch.setenv("FAILING", "9")
    job = make_job(retries=2)

    outcome = run_cell(job)

    assert (outcome.reason, outcome.attempts) == ("Error: the disk is full.", 3)
    assert not finished(job)


def test_a_run_that_finished_before_its_marker_was_written_is_not_repeated(make_job, calls, store):
    job = make_job()
    job.folder.mkdir(parents=True)
    for path in job.outputs:
        path.write_text("{}")
    store.runs["run-0"] = ("cell-a", "FINISHED")

    outcome = run_cell(job)

    assert calls == []
    assert outcome.run_id == "run-0"
    assert finished(job)


def test_a_cell_without_its_files_is_run_again(make_job, calls):
    job = make_job()
    run_cell(job)
    job.outputs[0].unlink()

    assert not finished(job)
    assert run_cell(job).attempts == 1
    assert len(calls) == 2


def test_a_checkpoint_is_continued(make_job, calls):
    job = make_job()
    job.journal.parent.mkdir(parents=True)
    job.journal.touch()

    run_cell(job)

    assert calls[0][-1] == "--params=run_label=cell-a,resume=true"


def _hold(path, seconds: float) -> None:
    with cells._locked(path):
        path.with_suffix(".held").touch()
        time.sleep(seconds)
        path.with_suffix(".freed").touch()


def test_two_sweeps_do_not_run_a_cell_at_once(make_job, calls):
    job = make_job()
    job.folder.mkdir(parents=True)
    lock = job.folder / "sweep.lock"
    other = multiprocessing.get_context("spawn").Process(target=_hold, args=(lock, 0.5))
    other.start()
    while not lock.with_suffix(".held").exists():
        time.sleep(0.02)

    run_cell(job)

    assert lock.with_suffix(".freed").exists()
    other.join()


def stand_in(folder: Path, code: str) -> str:
    """A PYTHONPATH on which `python -m kedro` is this code."""
    (folder / "kedro").mkdir()
    (folder / "kedro" / "__init__.py").touch()
    (folder / "kedro" / "__main__.py").write_text(code)
    return os.pathsep.join([str(folder), str(Path(cells.__file__).parents[2])])


def test_the_run_is_a_kedro_process_that_knows_its_label(make_job, tmp_path, monkeypatch):
    show = "import os, sys; print(sys.argv[1:]); print(os.environ['MLFLOW_RUN_CONTEXT'], os.environ['OMP_NUM_THREADS'])"
    monkeypatch.setenv("PYTHONPATH", stand_in(tmp_path, show))
    job = make_job(project=tmp_path, sweep="demo")
    job.folder.mkdir(parents=True)

    with job.log.open("w") as log, cells._locked(job.folder / "lock") as lock:
        code = cells._kedro(["run", "--params=a=1"], job, log, lock)

    assert code == 0
    assert job.log.read_text().splitlines() == [
        "['run', '--params=a=1']",
        '{"run_label": "cell-a", "sweep": "demo"} 1',
    ]


def test_a_run_stops_when_its_starter_is_gone(tmp_path):
    path = stand_in(tmp_path, "import time; print('on', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "equidp.sweep.attended", "run"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"on\n"

    process.stdin.close()

    assert process.wait(timeout=10) == -15
    process.stdout.close()
