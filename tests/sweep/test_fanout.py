"""The order of cells, and what becomes of a sweep whose cells, records or workers fail. Cells are stand-ins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from distributed import Client, Future

from equidp.sweep import fanout
from equidp.sweep.cell import CellResult, Job
from equidp.sweep.cluster import Cluster
from equidp.sweep.fanout import Sweep
from equidp.sweep.project import Cell

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Dask's own sockets, as its cluster closes


class Seen:
    """Remembers what it was told."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.states: list[tuple[int, int]] = []
        self.stop_after = stop_after

    def update(self, outcomes, running):
        self.states.append((len(outcomes), running))
        if self.stop_after is not None and len(outcomes) >= self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers in processes of their own."""
    with Cluster(workers=2, gpus_per_cell=0, dashboard=0).connect() as client:
        yield client


def cell(key: str, baseline: str = "b", records: str = "r") -> Cell:
    return Cell("dpsgd", {"seed": 0}, {"dataset": "digits", "seed": 0}, key, baseline, records, {}, Path(), Path())


def record(job: Job) -> CellResult:
    """Instead of a run: note when it began and ended."""
    job.cell.folder.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    time.sleep(0.1)
    (job.cell.folder / "times").write_text(f"{begun} {time.time()}")
    return CellResult(job.cell.key, attempts=1, seconds=0.1)


def die_once(job: Job) -> CellResult:
    """The first time, the worker is killed under it."""
    job.cell.folder.mkdir(parents=True, exist_ok=True)
    if not (job.cell.folder / "died").exists():
        (job.cell.folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return record(job)


def no_records(reason: str | None, cell: Cell) -> str | None:
    return reason


def sweep(client: Client, jobs: list[Job], reason: str | None = None) -> Sweep:
    return Sweep(client, {job.cell.key: job for job in jobs}, ingest=partial(no_records, reason))


@pytest.mark.slow
def test_cells_that_share_a_baseline_wait_for_the_first_of_them(client, make_job: Callable[..., Job], monkeypatch):
    monkeypatch.setattr(fanout, "run_cell", record)
    cells = [cell("a0", "A"), cell("a1", "A"), cell("b0", "B"), cell("b1", "B"), cell("a2", "A")]
    jobs = [make_job(c.key) for c in cells]
    seen = Seen()

    outcomes = sweep(client, jobs).run(cells, seen.update)

    assert sorted(outcome.key for outcome in outcomes) == sorted(job.cell.key for job in jobs)
    times = {job.cell.key: [float(t) for t in (job.cell.folder / "times").read_text().split()] for job in jobs}
    assert min(times["a1"][0], times["a2"][0]) >= times["a0"][1]
    assert times["b1"][0] >= times["b0"][1]
    assert seen.states[0] == (0, 0)
    assert seen.states[-1] == (5, 0)
    assert max(running for _, running in seen.states) == 2


def test_without_records_no_cell_of_that_dataset_starts(client, make_job, monkeypatch):
    monkeypatch.setattr(fanout, "run_cell", record)
    jobs = [make_job("a"), make_job("b")]

    outcomes = sweep(client, jobs, "adult.data is missing").run([cell("a"), cell("b")], Seen().update)

    assert [outcome.reason for outcome in outcomes] == ["records: adult.data is missing"] * 2
    assert not any(job.cell.folder.exists() for job in jobs)


@pytest.mark.slow
def test_a_cell_of_the_same_settings_in_another_project_runs_too(client, make_job, monkeypatch, tmp_path):
    monkeypatch.setattr(fanout, "run_cell", record)
    here = make_job("a")
    there = replace(here, cell=replace(here.cell, folder=tmp_path / "another project"))
    first, second = sweep(client, [here]), sweep(client, [there])
    held: list[Future] = []  # so that the cluster still knows them, as it would another client's

    def submit(*args, **options):
        held.append(plain(*args, **options))
        return held[-1]

    plain = client.submit
    monkeypatch.setattr(client, "submit", submit)

    first.run([cell("a")], Seen().update)
    second.run([cell("a")], Seen().update)

    assert len(held) == 4
    assert (here.cell.folder / "times").exists()
    assert (there.cell.folder / "times").exists()


@pytest.mark.slow
def test_a_cell_outlives_its_worker(client, make_job, monkeypatch):
    monkeypatch.setattr(fanout, "run_cell", die_once)
    job = make_job("a")

    (outcome,) = sweep(client, [job]).run([cell("a")], Seen().update)

    assert outcome.reason is None
    assert (job.cell.folder / "died").exists()


def test_a_task_that_raises_is_a_failed_cell_and_the_others_go_on(client, make_job, monkeypatch):
    monkeypatch.setattr(fanout, "run_cell", record)
    first = make_job("a")
    first.cell.folder.parent.mkdir(parents=True)
    first.cell.folder.write_text("a file where its folder should be")

    outcomes = sweep(client, [first, make_job("b")]).run([cell("a"), cell("b")], Seen().update)

    reasons = {outcome.key: outcome.reason for outcome in outcomes}
    assert reasons["b"] is None
    assert "FileExistsError" in (reasons["a"] or "")


def test_ctrl_c_keeps_what_is_finished(client, make_job, monkeypatch):
    monkeypatch.setattr(fanout, "run_cell", record)
    cells = [cell(f"c{i}", baseline=str(i)) for i in range(8)]
    running = sweep(client, [make_job(c.key) for c in cells])

    with pytest.raises(KeyboardInterrupt):
        running.run(cells, Seen(stop_after=2).update)

    assert len(running.outcomes) == 2
    assert all(outcome.reason is None for outcome in running.outcomes)


def test_gpu_slots_are_dask_resources():
    assert Cluster(gpus_per_cell=0).resources is None
    assert Cluster(scheduler="tcp://there:1", gpus_per_cell=2).resources == {"GPU": 2.0}
    assert Cluster(scheduler="tcp://there:1").resources is None
