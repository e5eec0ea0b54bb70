"""One cell: done once, whatever is killed in between. The run itself is replaced; a child process stands in for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from equidp.sweep import cell as cells
from equidp.sweep import tracked
from equidp.sweep.cell import finished, run_cell
from equidp.system.workplace import JOURNAL_FILE

fcntl = pytest.importorskip("fcntl", reason="no sweeps on this system")


class Store:
    """MLflow with one experiment: states of runs by id."""

    def __init__(self) -> None:
        self.runs: dict[str, tuple[str, str]] = {}
        self.tags: dict[str, dict[str, str]] = {}

    def search_runs(self, experiments, wanted):
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=run_id), data=SimpleNamespace(tags=self.tags.get(run_id, {})))
            for run_id, (label, status) in self.runs.items()
            if wanted == f"tags.run_label = '{label}' and attributes.status = '{status}'"
        ]

    def set_terminated(self, run_id, status):
        self.runs[run_id] = (self.runs[run_id][0], status)


@pytest.fixture
def store(monkeypatch) -> Store:
    """The MLflow that cells see."""
    store = Store()
    monkeypatch.setattr(tracked, "MlflowClient", lambda address: store)
    return store


@pytest.fixture
def calls(monkeypatch, store) -> list[list[str]]:
    """Runs that were started; each writes its files and finishes, unless `failing` says how often it does not."""
    started: list[list[str]] = []

    def kedro(arguments, job, log, lock):
        started.append(arguments)
        run_id = f"run-{len(started)}"
        store.runs[run_id] = (job.cell.key, "RUNNING")
        if len(started) <= int(os.environ.get("FAILING", "0")):
            log.write("INFO something\nError: the disk is full.\n\n")
            return 1
        for path in job.cell.outputs.values():
            path.write_text("{}")
        store.runs[run_id] = (job.cell.key, "FINISHED")
        return 0

    monkeypatch.setattr(cells, "run_kedro", kedro)
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


def test_a_cell_of_another_project_in_the_same_experiment_is_left_alone(make_job, calls, store):
    job = make_job()
    store.runs = {"theirs": ("cell-a", "RUNNING"), "crashed": ("cell-a", "RUNNING"), "done": ("cell-a", "FINISHED")}
    store.tags = {"theirs": {"project": "/elsewhere"}, "crashed": {"project": str(job.project)}}
    store.tags["done"] = {"project": "/elsewhere"}
    for path in job.cell.outputs.values():  # of a run that was killed before its marker was written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    assert run_cell(job).run_id == "run-1"
    assert store.runs == {
        "theirs": ("cell-a", "RUNNING"), "crashed": ("cell-a", "KILLED"), "done": ("cell-a", "FINISHED"),
        "run-1": ("cell-a", "FINISHED"),
    }  # fmt: skip


def test_a_cell_whose_process_could_not_be_started_is_tried_again(make_job, calls, monkeypatch):
    """The process that runs are forked from may be killed between two of them."""
    run, begun = cells.run_kedro, []

    def killed(*given):
        begun.append(1)
        if len(begun) % 2:
            raise EOFError("unexpected EOF")
        return run(*given)

    monkeypatch.setattr(cells, "run_kedro", killed)
    assert (outcome := run_cell(make_job(retries=1))).reason is None
    assert outcome.attempts == 2
    outcome = run_cell(make_job("cell-b", retries=0))
    assert outcome.reason == "its process could not be started (EOFError: unexpected EOF)"


def test_a_worker_of_another_version_runs_no_cell(make_job, calls):
    """A table would hold results of both, and nobody could tell which."""
    outcome = run_cell(make_job(code="of another version"))
    assert (calls, outcome.attempts) == ([], 0)
    assert "runs another version of equidp" in outcome.reason


def test_a_cell_that_keeps_failing_tells_its_last_line(make_job, calls, monkeypatch):
    monkeypatch.setenv("FAILING", "9")
    job = make_job(retries=2)

    outcome = run_cell(job)

    assert (outcome.reason, outcome.attempts) == ("Error: the disk is full.", 3)
    assert not finished(job)


def test_a_marker_that_a_power_cut_left_empty_is_written_again_and_the_run_is_not_repeated(make_job, calls, store):
    job = make_job()
    run_cell(job)
    for left in ("", "{", "[]"):
        job.marker.write_text(left)
        assert not finished(job)
        assert run_cell(job).run_id == "run-1"
        assert finished(job)
    assert len(calls) == 1


def test_a_run_that_finished_before_its_marker_was_written_is_not_repeated(make_job, calls, store):
    job = make_job()
    job.cell.folder.mkdir(parents=True)
    for path in job.cell.outputs.values():
        path.write_text("{}")
    store.runs["run-0"] = ("cell-a", "FINISHED")

    outcome = run_cell(job)

    assert calls == []
    assert outcome.run_id == "run-0"
    assert finished(job)


def test_a_cell_without_its_files_is_run_again(make_job, calls):
    job = make_job()
    run_cell(job)
    job.cell.outputs["metrics"].unlink()

    assert not finished(job)
    assert run_cell(job).attempts == 1
    assert len(calls) == 2


def test_a_checkpoint_is_continued(make_job, calls):
    job = make_job()
    job.cell.workplace.mkdir(parents=True)
    (job.cell.workplace / JOURNAL_FILE).touch()

    run_cell(job)

    assert calls[0][-1] == "--params=run_label=cell-a,resume=true"


def _hold(path, seconds: float) -> None:
    with cells.held(path):
        path.with_suffix(".held").touch()
        time.sleep(seconds)
        path.with_suffix(".freed").touch()


def test_two_sweeps_do_not_run_a_cell_at_once(make_job, calls):
    job = make_job()
    job.cell.folder.mkdir(parents=True)
    lock = job.cell.folder / "sweep.lock"
    other = threading.Thread(target=_hold, args=(lock, 0.5))
    other.start()
    while not lock.with_suffix(".held").exists():
        time.sleep(0.02)

    run_cell(job)

    assert lock.with_suffix(".freed").exists()
    other.join()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts code in the place of Kedro, in processes started from now on."""

    def replace(code: str) -> None:
        package = tmp_path / "kedro" / "framework" / "cli"
        package.mkdir(parents=True)
        for folder in (package.parent.parent, package.parent):
            (folder / "__init__.py").touch()
        (package / "__init__.py").write_text("def main():\n" + textwrap.indent(textwrap.dedent(code), "    "))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    return replace


@pytest.mark.parametrize("env", [None, "prod"])
def test_the_run_is_a_kedro_process_that_knows_its_label(make_job, tmp_path, stand_in, monkeypatch, env):
    monkeypatch.setenv("KEDRO_ENV", "of-the-worker")  # whose settings are not those that the cell is named by
    stand_in("""
        import os, sys
        print(sys.argv, os.getcwd())
        print(os.environ["MLFLOW_RUN_CONTEXT"], os.environ["OMP_NUM_THREADS"])
        print("environment", repr(os.environ["KEDRO_ENV"]))
        print("to stderr", file=sys.stderr)
        sys.exit(3)
    """)
    job = make_job(project=tmp_path, sweep="demo", env=env)
    job.cell.folder.mkdir(parents=True)
    before = dict(os.environ)

    with job.log.open("w") as log, cells.held(job.cell.folder / "lock") as lock:
        code = cells.run_kedro(["run", "--params=a=1"], job, log, lock)

    assert code == 3
    assert f"environment {env or ''!r}" in job.log.read_text()
    printed = job.log.read_text().splitlines()
    assert f"['kedro', 'run', '--params=a=1'] {tmp_path}" in printed
    tags = json.dumps({"run_label": "cell-a", "sweep": "demo", "row": "", "project": str(tmp_path)})
    assert f"{tags} 1" in printed
    assert "to stderr" in printed
    assert dict(os.environ) == before


def test_a_worker_that_dask_made_a_daemon_starts_runs(make_job, tmp_path, stand_in):
    """`dask worker` does so, and multiprocessing lets no daemon start a process."""
    stand_in("raise SystemExit(3)")
    me, job = multiprocessing.current_process(), make_job(project=tmp_path)
    me.daemon = True
    try:
        with (tmp_path / "log").open("w") as log, (tmp_path / "lock").open("w") as lock:
            assert cells.run_kedro(["run"], job, log, lock.fileno()) == 3
    finally:
        me.daemon = False


def test_a_run_holds_the_cells_lock_itself(make_job, tmp_path, stand_in):
    stand_in("import pathlib, time; pathlib.Path('on').touch(); time.sleep(60)")
    job = make_job(project=tmp_path)
    job.cell.folder.mkdir(parents=True)
    path = job.cell.folder / "lock"

    def start() -> None:
        with job.log.open("w") as log, path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            cells.run_kedro([], job, log, file.fileno())

    starter = multiprocessing.get_context("fork").Process(target=start)
    starter.start()
    try:
        wait_for((tmp_path / "on").exists)
        (run,) = [
            child for child in psutil.Process(starter.pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
        run.suspend()  # so that it cannot stop when its starter is gone
        starter.kill()
        starter.join()
        with path.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        starter.kill()
        run.resume()
    wait_for(lambda: not run.is_running())
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


START = """
import multiprocessing, pathlib, sys
from equidp.sweep.attended import Descriptor, kedro
context = multiprocessing.get_context(sys.argv[1])
run = context.Process(target=kedro, args=(["run"], pathlib.Path(), {}, Descriptor(1), Descriptor(0)))
run.start()
run.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_run_is_asked_to_stop_when_its_starter_is_gone(stand_in, method):
    stand_in("""
        import os, signal, sys, time
        def stop(*_):
            os.write(1, b"asked to stop\\n")  # a print may be interrupted by it, and is not entered twice
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("on", flush=True)
        time.sleep(60)
    """)
    starter = subprocess.Popen([sys.executable, "-c", START, method], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "on\n"

    starter.kill()
    starter.wait()

    assert starter.stdout.read() == "asked to stop\n"
    starter.stdout.close()
