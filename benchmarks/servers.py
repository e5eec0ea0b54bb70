"""A sweep over real servers on loopback: MLflow on PostgreSQL, a Dask scheduler and two workers, each a process.

    python benchmarks/servers.py            # needs PostgreSQL's programs, and pip install 'equidp[postgres]'

Starts the servers, runs eight cells (2 algorithms × 2 ε × 2 seeds on digits, one epoch), runs the sweep once more, asks
PostgreSQL for the runs, and stops the servers. Everything is in scratch folders, which go at the end. Prints one JSON
object; exits with status 1 where a cell is not FINISHED exactly once.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from distributed import Client
from sqlalchemy import URL, NullPool, create_engine, text
from sweep import PROJECT, scratch_project

CELLS, WORKERS = 8, 2
SWEEP = ["--algorithms=dpsgd,dpsgd_f", "--datasets=digits", "--epsilons=3,8", "--seeds=2", "--params=training.epochs=1"]
SECONDS_TO_START, SECONDS_TO_STOP = 300, 30
"""On a busy machine MLflow's server needs minutes to start."""

DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian keeps the server's programs, by version: they are not on PATH."""

RUNS = """
    SELECT tags.value AS cell, runs.status AS status
    FROM runs LEFT JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = 'run_label'
    WHERE NOT EXISTS (SELECT 1 FROM tags AS other WHERE other.run_uuid = runs.run_uuid AND other.key = 'summary')
"""


def missing() -> str | None:
    """What this machine lacks, in a sentence; None where the servers can be started."""
    if programs() is None:
        return (
            "PostgreSQL's server (initdb, postgres) is not here: install it, on Debian by `apt-get install postgresql`."
        )
    if importlib.util.find_spec("psycopg2") is None:
        return "PostgreSQL's driver, psycopg2, is not here: pip install 'equidp[postgres]'."
    return None


def programs() -> Path | None:
    """The folder with PostgreSQL's initdb and postgres, the newest version's."""
    on_path = shutil.which("postgres")
    by_version = sorted(DEBIAN.glob("*/bin"), key=lambda folder: float(folder.parent.name), reverse=True)
    folders = [*([Path(on_path).parent] if on_path else []), *by_version]
    return next((one for one in folders if (one / "initdb").exists() and (one / "postgres").exists()), None)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@contextmanager
def server(
    command: list[Any], ready: Callable[[], object], log: Path, stop: int = signal.SIGTERM, **options: Any
) -> Iterator[None]:
    """A server's process, from when it answers to when it has ended."""
    with log.open("ab") as output:
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=output, **options)
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{Path(str(command[0])).name} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(stop)
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(ready: Callable[[], object]) -> bool:
    """Whether a server answers already."""
    try:
        ready()
    except OSError:
        return False
    return True


@contextmanager
def postgres(port: int, password: str) -> Iterator[URL]:
    """A new database server with one user, who needs the password; the database's address."""
    found = programs()
    assert found is not None
    with tempfile.TemporaryDirectory(prefix="equidp-postgres-", ignore_cleanup_errors=True) as folder:
        place, options = Path(folder), {}
        key = place / "password"
        key.write_text(password)
        if os.geteuid() == 0:  # as root the server refuses to start: it takes the user that its package has made
            options = {"user": "postgres"}
            for mine in (place, key):
                shutil.chown(mine, "postgres")
        data, log = place / "data", place / "log"
        make = [found / "initdb", "--pgdata", data, "--username=mlflow", "--auth=scram-sha-256", "--pwfile", key]
        subprocess.run([str(word) for word in make], check=True, capture_output=True, cwd=place, **options)
        command = [found / "postgres", "-D", data, "-h", "127.0.0.1", "-p", port, "-k", place]
        address = URL.create("postgresql+psycopg2", "mlflow", password, "127.0.0.1", port, "postgres")
        # SIGINT ends sessions that are open; SIGTERM would wait for them
        with server(command, lambda: connected(port), log, signal.SIGINT, cwd=place, **options):
            yield address


def connected(port: int) -> None:
    """Open a connection and close it."""
    socket.create_connection(("127.0.0.1", port), timeout=2).close()


@contextmanager
def servers(project: Path) -> Iterator[tuple[URL, dict[str, str], str]]:
    """All servers: the database's address, the environment of a sweep, and the scheduler's address."""
    path = os.pathsep.join([*(str(PROJECT / name) for name in ("src", "benchmarks")), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    port, scheduler_port = free_port(), free_port()
    scheduler, logs = f"tcp://127.0.0.1:{scheduler_port}", project / "logs"
    logs.mkdir()
    python = [sys.executable, "-m"]
    with ExitStack() as stack:
        database = stack.enter_context(postgres(free_port(), secrets.token_hex(16)))
        secret = {**environment, "MLFLOW_BACKEND_STORE_URI": database.render_as_string(hide_password=False)}
        mlflow = [
            *python,
            "mlflow",
            "server",
            "--host=127.0.0.1",
            f"--port={port}",
            "--workers=1",
            "--no-serve-artifacts",
        ]
        asked = f"http://127.0.0.1:{port}/health"
        stack.enter_context(
            server(mlflow, lambda: urlopen(asked, timeout=2).close(), logs / "mlflow", cwd=project, env=secret)
        )
        dask = [*python, "dask", "scheduler", "--host=127.0.0.1", f"--port={scheduler_port}", "--no-dashboard"]
        stack.enter_context(
            server(dask, lambda: connected(scheduler_port), logs / "scheduler", cwd=project, env=environment)
        )
        for number in range(WORKERS):
            worker = [*python, "dask", "worker", scheduler, "--nthreads=1", "--no-dashboard", f"--name={number}"]
            worker += ["--host=127.0.0.1", "--local-directory", project / f"worker-{number}"]
            stack.enter_context(server(worker, lambda: None, logs / f"worker-{number}", cwd=project, env=environment))
        with Client(scheduler, timeout=SECONDS_TO_START, set_as_default=False) as client:
            client.wait_for_workers(WORKERS, timeout=SECONDS_TO_START)
        yield database, {**environment, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}, scheduler


def sweep(project: Path, environment: dict[str, str], scheduler: str) -> subprocess.CompletedProcess[str]:
    """The eight cells, by `kedro sweep`."""
    command = [sys.executable, "-m", "kedro", "sweep", *SWEEP, f"--scheduler={scheduler}"]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def runs(database: URL) -> list[tuple[str | None, str]]:
    """Cell and status of every run, as PostgreSQL has them."""
    with create_engine(database, poolclass=NullPool).connect() as connection:
        return [(cell, status) for cell, status in connection.execute(text(RUNS))]


def tasks_by_worker(scheduler: str) -> dict[str, int]:
    """How many tasks each worker has run, by its address: the cells, and the encoding of records."""
    with Client(scheduler, timeout=SECONDS_TO_START, set_as_default=False) as client:
        return client.run(executed)


def executed(dask_worker: Any) -> int:
    """On a worker: the number of tasks that it has run."""
    return dask_worker.state.executed_count


def measured() -> dict[str, Any]:
    """Start, sweep twice, ask, stop."""
    begun = time.monotonic()
    with scratch_project() as project, servers(project) as (database, environment, scheduler):
        first = sweep(project, environment, scheduler)
        if first.returncode:
            raise RuntimeError(
                f"the sweep ends with status {first.returncode}: {first.stdout[-2000:]}{first.stderr[-2000:]}"
            )
        tasks = tasks_by_worker(scheduler)
        second = sweep(project, environment, scheduler)
        found = runs(database)
        finished = collections.Counter(cell for cell, status in found if status == "FINISHED")
        return {
            "cells_finished": len(finished),
            "finished_more_than_once": sum(count > 1 for count in finished.values()),
            "runs_by_status": dict(collections.Counter(status for _, status in found)),
            "tasks_by_worker": sorted(tasks.values()),
            "nothing_left_for_the_second_call": f"Finished before: {CELLS} of {CELLS}." in second.stdout,
            "exit_status": [first.returncode, second.returncode],
            "seconds": round(time.monotonic() - begun, 1),
        }


def once_each(result: dict[str, Any]) -> bool:
    """Whether every cell is FINISHED exactly once, and no other run exists."""
    return (
        result["runs_by_status"] == {"FINISHED": CELLS}
        and result["cells_finished"] == CELLS
        and min(result["tasks_by_worker"]) > 0
        and result["nothing_left_for_the_second_call"]
        and result["exit_status"] == [0, 0]
    )


def main() -> int:
    """Run it, and print what PostgreSQL holds."""
    if lacks := missing():
        print(lacks, file=sys.stderr)
        return 2
    result = measured()
    print(json.dumps(result, indent=2))
    return int(not once_each(result))


if __name__ == "__main__":
    sys.exit(main())
