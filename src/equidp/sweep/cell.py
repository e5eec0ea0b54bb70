"""One cell: a `kedro run` in a process of its own, done exactly once, however often it is requested.

This makes "once" hold even if processes are killed at any moment:

* A lock file in the cell's folder, held by worker and run together, and released by the system when both have ended.
* A marker, written last: a cell with its marker is never run again. Where the worker died between the run's end and the
  marker, the run's files and its FINISHED state in MLflow take its place.
* The run ends when the worker that started it ends; no orphan process continues to write.
* Runs that a crash left open in MLflow are closed as KILLED before the next attempt. A checkpoint is continued.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any

from equidp.errors import first_line
from equidp.sweep import tracked
from equidp.sweep.attended import SECONDS_TO_STOP, Descriptor, kedro, reason_of
from equidp.sweep.project import Cell
from equidp.system.files import replacing
from equidp.system.installed import CODE_DIGEST
from equidp.system.threads import environment
from equidp.system.workplace import JOURNAL_FILE

MARKER, LOG, LOCK = "done.json", "run.log", "sweep.lock"
CONTEXT = "MLFLOW_RUN_CONTEXT"
"""Environment variable from which MLflow takes tags for every run it starts."""

ROW = "row"
"""The tag that says which row of the sweep's table a run belongs to."""

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

PRELOADED = "equidp.hooks.warm"
"""The module that warm processes import."""

STARTING = threading.Lock()
"""Held while a process starts, because all threads of a worker share one environment."""


@dataclass(frozen=True)
class Job:
    """All that a worker on any machine needs to run a cell; plain values, which can be sent to it.

    Attributes:
        project: root folder, with the same path on every machine.
        store, experiment: MLflow's address and the experiment's id.
        sweep, row: name of the sweep, a tag of the MLflow run, and of the cell's row in its table, in the run's name.
        retries: how often a failed run is tried again.
        warm: whether runs are forked from a process that has imported everything, which saves each of them some five
            seconds. Only for workers that end with the sweep, because such a process never imports changed code.
        code: digest of the code that trains where the sweep was called.
    """

    cell: Cell
    project: Path
    store: str
    experiment: str
    sweep: str = ""
    row: str = ""
    env: str | None = None
    retries: int = 1
    warm: bool = False
    code: str = CODE_DIGEST

    @property
    def marker(self) -> Path:
        """Written last of all."""
        return self.cell.folder / MARKER

    @property
    def log(self) -> Path:
        """Everything the run has printed."""
        return self.cell.folder / LOG


@dataclass(frozen=True)
class CellResult:
    """The result of a cell, and why it failed. Seconds and attempts are this call's; 0 where it was finished before."""

    key: str
    reason: str | None = None
    seconds: float = 0.0
    attempts: int = 0
    run_id: str | None = None


def finished(job: Job) -> bool:
    """Whether the cell has its marker and its files."""
    return marked(job) is not None and all(path.is_file() for path in job.cell.outputs.values())


def marked(job: Job) -> str | None:
    """MLflow's id of the cell's run, by its marker; None without one, or where a power cut left it empty."""
    try:
        return str(json.loads(job.marker.read_text())["run_id"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def run_cell(job: Job) -> CellResult:
    """Run a cell unless it is finished; never raises for a failed run."""
    begun, key = time.monotonic(), job.cell.key
    if job.code != CODE_DIGEST:  # else a table would mix results of two versions, and nobody could tell which is which
        return CellResult(
            key,
            f"the worker on {socket.gethostname()} runs another version of equidp or of its libraries than this sweep: "
            "install the same there, and start the worker again",
        )
    job.cell.folder.mkdir(parents=True, exist_ok=True)
    with held(job.cell.folder / LOCK) as lock:
        if finished(job):
            return CellResult(key, run_id=marked(job))
        job.marker.unlink(missing_ok=True)
        if run_id := _finished_run(job):
            return _mark(job, CellResult(key, run_id=run_id))
        reason = None
        for attempt in range(1, job.retries + 2):
            tracked.close(key, job.project, job.store, job.experiment)
            reason = _attempt(job, lock)
            run_id = None if reason else _finished_run(job)
            if run_id:
                return _mark(job, CellResult(key, None, time.monotonic() - begun, attempt, run_id))
            reason = reason or "it ended well, but its files or its MLflow run are missing"
    return CellResult(key, reason, time.monotonic() - begun, job.retries + 1)


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """Wait for the lock, hold it, and yield its descriptor. A child that inherits the descriptor holds the lock too."""
    import fcntl  # not on Windows, where every `kedro` command imports this module

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _attempt(job: Job, lock: int) -> str | None:
    """Run the cell once; return why it failed, or None."""
    resume = ",resume=true" if (job.cell.workplace / JOURNAL_FILE).exists() else ""  # after an interrupted run
    arguments = ["run", f"--pipeline={job.cell.algorithm}", f"--params={job.cell.params}{resume}"]
    arguments += [f"--env={job.env}"] if job.env else []
    try:
        with job.log.open("w") as log:
            code = run_kedro(arguments, job, log, lock)
    except (EOFError, OSError) as error:  # the warm process was killed meanwhile; the next attempt starts another
        return f"its process could not be started ({first_line(error)})"
    return None if code == 0 else reason_of(job.log, code)


def run_kedro(arguments: list[str], job: Job, log: IO[str], lock: int) -> int:
    """Run `kedro …` in a process that ends when this one does; return its exit status."""
    tags = json.dumps({"run_label": job.cell.key, "sweep": job.sweep, ROW: job.row, tracked.PROJECT: str(job.project)})
    # the same store and settings on every machine, whatever its worker was started with
    environment = {CONTEXT: tags, "MLFLOW_TRACKING_URI": job.store, "KEDRO_ENV": job.env or ""}
    if job.warm:
        warm_up(job.project)
    # `dask worker` marks its processes as daemons, which may not start processes. Runs still end with their workers
    multiprocessing.current_process().daemon = False
    context: Any = multiprocessing.get_context("forkserver" if job.warm else "spawn")
    process = context.Process(
        target=kedro, args=(arguments, job.project, environment, Descriptor(log.fileno()), Descriptor(lock))
    )
    with _variables(job.project):
        process.start()
    atexit.register(process.terminate)  # else this process, if it has to end, would wait for the whole run
    try:
        process.join()
        return int(process.exitcode)
    finally:
        process.terminate()  # in case an exception has ended the wait
        process.join(SECONDS_TO_STOP)
        process.kill()
        atexit.unregister(process.terminate)


def warm_up(project: Path) -> None:
    """Start this worker's process that imports everything, unless it exists. Does not wait for it."""
    with _variables(project):
        forkserver.set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


@contextlib.contextmanager
def _variables(project: Path) -> Iterator[None]:
    """Set environment variables that imports read, so that they are set before the process starts."""
    wanted = {**dict.fromkeys(ONE_THREAD, "1"), "COLUMNS": "200"}
    logging = project / "conf" / "logging.yml"
    if logging.is_file():
        wanted["KEDRO_LOGGING_CONFIG"] = str(logging)
    with STARTING, environment(wanted):
        yield


def _mark(job: Job, result: CellResult) -> CellResult:
    with replacing(job.marker) as part:
        part.write_text(json.dumps({"command": job.cell.command, **asdict(result)}, indent=2))
    return result


def _finished_run(job: Job) -> str | None:
    """Return the id of the cell's FINISHED run, if all of the cell's files are there too."""
    if not all(path.is_file() for path in job.cell.outputs.values()):
        return None
    runs = tracked.runs_of(job.cell.key, job.project, job.store, job.experiment, "FINISHED")
    return next((run.info.run_id for run in runs), None)
