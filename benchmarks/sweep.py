"""Sweeps on this machine: how they scale with workers, and what killing them costs.

    python benchmarks/sweep.py                            # 24 cells: kill one worker, kill the sweep, call it again
    python benchmarks/sweep.py --workers 0,1,2 --cells 12 # seconds by number of workers; 0: `kedro run`s in a loop

Everything happens in a scratch project (this one's sources and configuration, an empty store), which goes at the end.
Prints one JSON object; exits with status 1 where a cell is not FINISHED exactly once.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from mlflow import MlflowClient

PROJECT = Path(__file__).resolve().parents[1]
EXPERIMENT = "equidp"


@contextmanager
def scratch_project() -> Iterator[Path]:
    """A Kedro project with this one's sources and configuration and nothing else."""
    with tempfile.TemporaryDirectory(prefix="equidp-sweep-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        for name in ("pyproject.toml", ".telemetry"):
            shutil.copy(PROJECT / name, path / name)
        shutil.copytree(PROJECT / "conf" / "base", path / "conf" / "base")
        (path / "conf" / "local").mkdir()
        (path / "src").mkdir()  # Kedro wants the folder; the package itself comes by PYTHONPATH
        yield path


def start(project: Path, seeds: int, epochs: int, workers: int | None) -> subprocess.Popen:
    """`kedro sweep` over 3 algorithms × 2 ε × seeds."""
    command = [sys.executable, "-m", "kedro", *arguments(seeds, epochs), "--dashboard=0"]
    command += [f"--workers={workers}"] if workers else []
    with (project / "sweep.log").open("a") as log:
        return subprocess.Popen(command, cwd=project, env=environment(project), stdout=log, stderr=log)


def arguments(seeds: int, epochs: int) -> list[str]:
    """What `kedro` is told."""
    grid = ["--algorithms=dpsgd,naive,dpsgd_f", "--datasets=digits", "--epsilons=1,3", f"--seeds={seeds}"]
    return ["sweep", *grid, f"--params=training.epochs={epochs}"]


def environment(project: Path) -> dict[str, str]:
    """That of its commands."""
    store = f"sqlite:///{project / 'mlflow.db'}"
    return {**os.environ, "PYTHONPATH": str(PROJECT / "src"), "MLFLOW_TRACKING_URI": store}


def loop(project: Path, seeds: int, epochs: int) -> int:
    """The same cells as anyone would run them: one `kedro run` with one thread after the other."""
    kedro, variables = [sys.executable, "-m", "kedro"], environment(project) | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [*kedro, *arguments(seeds, epochs), "--dry-run"], cwd=project, env=variables, capture_output=True, text=True
    )
    runs = [line.split()[1:] for line in told.stdout.splitlines() if line.startswith("kedro run ")]
    with (project / "sweep.log").open("a") as log:
        codes = [subprocess.call([*kedro, *run], cwd=project, env=variables, stdout=log, stderr=log) for run in runs]
    return max(codes, default=1)


def finished_runs(project: Path) -> collections.Counter[str]:
    """Number of FINISHED MLflow runs of each cell."""
    return by_label(project, "FINISHED")


def by_label(project: Path, status: str) -> collections.Counter[str]:
    """Number of runs of that status by cell; a run outside a sweep is a cell of its own."""
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return collections.Counter()
    runs = client.search_runs([experiment.experiment_id], f"attributes.status = '{status}'", max_results=5000)
    tags = [(run.info.run_id, run.data.tags) for run in runs if "summary" not in run.data.tags]
    return collections.Counter(own.get("run_label", run_id) for run_id, own in tags)


def markers(project: Path) -> list[Path]:
    """Markers of finished cells."""
    return list((project / "data").rglob("done.json")) if (project / "data").is_dir() else []


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, log: Path, limit: float = 900) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + limit
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the sweep does not come on: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def cells_at_work(process: subprocess.Popen) -> list[psutil.Process]:
    """Processes of cells under a sweep."""
    found = psutil.Process(process.pid).children(recursive=True)
    return [child for server in found if "forkserver import main" in command(server) for child in server.children()]


def command(process: psutil.Process) -> str:
    """Its command line; nothing where it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def interrupted(cells: int, epochs: int) -> dict:
    """Kill a worker early, then the whole sweep in the middle, then call it again."""
    with scratch_project() as project:
        begun, log = time.monotonic(), project / "sweep.log"
        first = start(project, cells // 6, epochs, None)
        wait_until(lambda: bool(markers(project)) and bool(cells_at_work(first)), first, log)
        at_work = cells_at_work(first)
        victim = at_work[0].parents()[1] if at_work else None  # the run, what it was forked from, the worker
        if victim is not None:
            victim.kill()
        wait_until(lambda: len(markers(project)) >= cells // 2, first, log)
        first.send_signal(signal.SIGKILL)
        first.wait()
        time.sleep(10)  # those cells that were at work notice, and stop
        kept = {path: path.stat().st_mtime_ns for path in markers(project)}
        second = start(project, cells // 6, epochs, None)
        status = second.wait()
        runs = finished_runs(project)
        return {
            "cells": cells,
            "finished_before_the_kill": len(kept),
            "untouched_by_the_second_call": all(path.stat().st_mtime_ns == t for path, t in kept.items()),
            "exit_status": status,
            "finished_in_mlflow": len(runs),
            "finished_more_than_once": sum(count > 1 for count in runs.values()),
            "killed_in_mlflow": sum(by_label(project, "KILLED").values()),
            "left_running_in_mlflow": sum(by_label(project, "RUNNING").values()),
            "seconds": round(time.monotonic() - begun, 1),
        }


def by_workers(cells: int, epochs: int, workers: list[int]) -> list[dict]:
    """Seconds of the same sweep with different numbers of workers."""
    results = []
    for count in workers:
        with scratch_project() as project:
            begun = time.monotonic()
            seeds = cells // 6
            status = start(project, seeds, epochs, count).wait() if count else loop(project, seeds, epochs)
            seconds = round(time.monotonic() - begun, 1)
            results.append({"workers": count, "cells": len(finished_runs(project)), "seconds": seconds, "exit": status})
    return results


def main() -> int:
    """Run what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=24, help="a multiple of 6")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", help="measure these numbers of workers instead of killing: 0,1,2")
    options = parser.parse_args()
    if options.workers:
        measured = by_workers(options.cells, options.epochs, [int(n) for n in options.workers.split(",")])
        print(json.dumps(measured, indent=2))
        return int(any(row["exit"] for row in measured))
    result = interrupted(options.cells, options.epochs)
    print(json.dumps(result, indent=2))
    once = result["finished_in_mlflow"] == options.cells and not result["finished_more_than_once"]
    return int(not once or result["exit_status"] != 0 or not result["untouched_by_the_second_call"])


if __name__ == "__main__":
    sys.exit(main())
