"""`kedro sweep` as a user types it: refusals, a dry run, and one real sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from distributed.comm import CommClosedError
from mlflow import MlflowClient
from mlflow.entities import Run
from rich.console import Console
from tests.end_to_end.kedro_project import bootstrapped

from equidp.cli import sweep
from equidp.errors import EquidpError
from equidp.options import dotted
from equidp.sweep.cell import CellResult
from equidp.sweep.command import (
    INTERRUPTED,
    _conclude,
    fan_out,
    refuse_several_tasks,
    refuse_undeclared,
    time_left,
    unnamed,
)
from equidp.sweep.fanout import Sweep

ROOT = Path(__file__).resolve().parents[2]


def kedro_sweep(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kedro", "sweep", *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def finished_runs(project: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("equidp")
    runs = client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED' and tags.run_label != ''")
    client._tracking_client.store.engine.dispose()
    return list(runs)


def finished_labels(project: Path) -> list[str]:
    return [run.data.tags["run_label"] for run in finished_runs(project)]


def test_a_mistyped_name_is_refused_in_one_line_before_anything_starts(project):
    bootstrapped(project)
    call = partial(CliRunner().invoke, sweep, obj=SimpleNamespace(project_path=project))
    done = call(["--algorithms=dpsgd,dpsgdf", "--datasets=digits"])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith("Error: Unknown algorithm 'dpsgdf'. Did you mean 'dpsgd_f'?")
    done = call(["--algorithms=dpsgd,sgd", "--datasets=digits", "--reference=dpsdg"])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith("Error: Unknown reference 'dpsdg'. Did you mean 'dpsgd'?")
    assert not (project / "data" / "08_reporting").exists()


def test_an_option_that_no_cell_reads_is_refused(project):
    bootstrapped(project)
    call = partial(CliRunner().invoke, sweep, obj=SimpleNamespace(project_path=project))
    done = call(["--algorithms=dpsgd", "--params=dpsgd_f.options.base_clip_norm=1", "--dry-run"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: --params sets dpsgd_f.options.base_clip_norm, and no cell of this sweep")
    params = "--params=dpsgd_f.options.base_clip_norm=2,sgd.options.learning_rate=1"
    read = call(["--algorithms=dpsgd,dpsgd_f", params, "--dry-run"])
    assert (read.exit_code, read.stdout.count("base_clip_norm=2"), read.stdout.count("sgd.options")) == (0, 1, 2)


def cells(count: int, seeds: int = 1, **privacy: object) -> list[SimpleNamespace]:
    one = partial(SimpleNamespace, dataset="adult", algorithm="dpsgd", settings={"privacy": privacy})
    return [one(seed=seed) for seed in range(seeds) for _ in range(count)]


def test_a_sweep_trains_no_more_often_than_its_runs_state():
    """Each stated the ε of two trainings together, and there were three."""
    refuse_undeclared(cells(2, seeds=3, trials=2))  # repeated, each seed for itself
    with pytest.raises(EquidpError, match=r"max_trials=2 is what each .* trains dpsgd 3 times .* of adult"):
        refuse_undeclared(cells(3, seeds=2, trials=2))
    refuse_undeclared([*cells(2, trials=2, epsilon=1.0), *cells(2, trials=2, epsilon=3.0)])  # compared, none chosen
    refuse_undeclared(cells(6, trials=1))  # each for itself, as its statement says
    refuse_undeclared(cells(2, unit="record"))  # the baseline's


def test_a_sweep_of_two_tasks_on_one_data_set_is_refused_before_it_trains():
    """Its cells trained, and no page could be made of them; it never ended with status 0."""
    plain, ordered = (SimpleNamespace(dataset="visits", settings={"data": of}) for of in ({}, {"task": "ordinal"}))
    with pytest.raises(EquidpError, match="has visits as classification and as ordinal, whose figures cannot be"):
        refuse_several_tasks([plain, ordered])
    refuse_several_tasks([plain, plain])
    refuse_several_tasks([plain, SimpleNamespace(dataset="grades", settings=ordered.settings)])


def test_a_sweep_takes_no_law_of_trials():
    """Its cells are gone through in order, equal ones are one, and its table tells how many there were."""
    with pytest.raises(EquidpError, match="trials_law=geometric: a sweep goes through its cells in order"):
        refuse_undeclared(cells(3, trials_law="geometric", trials_mean=3.0, max_trials=1))
    refuse_undeclared(cells(1, seeds=3, trials_law="geometric", trials_mean=3.0, max_trials=1))


@pytest.mark.slow
def test_a_sweep_runs_its_cells_once_and_tells_what_failed(project):
    """One cell that runs and one that cannot; a second call has nothing to do for the first."""
    settings = ("--algorithms=dpsgd", "--datasets=digits", "--epsilons=3", "--params=training.epochs=1")
    (project / "conf" / "local" / "sweeps.yml").write_text(
        "both:\n  grids:\n    - {}\n    - {seeds: [0], params: {training.batch_size: 99999}}\n"
    )

    first = kedro_sweep(project, "both", *settings, "--workers=2", "--dashboard=0", "--retries=0")
    labels = finished_labels(project)

    assert first.returncode == 1, first.stderr[-2000:]
    assert len(labels) == 1
    assert finished_runs(project)[0].info.run_name == "dpsgd digits seed=0"  # what all cells share is not told
    assert "training.batch_size=99999 exceeds the" in first.stdout
    assert "1 of 2 cells are not finished" in first.stderr
    assert "INFO" not in first.stderr  # neither Dask nor MLflow talks into the progress

    second = kedro_sweep(project, *settings)

    assert second.returncode == 0, second.stderr[-2000:]
    assert "Finished before: 1 of 1." in second.stdout
    assert finished_labels(project) == labels
    # a folder of its own, named on the terminal
    reports = project / "data" / "08_reporting" / "sweeps"
    (folder,) = [path for path in reports.iterdir() if path.name != "both"]
    assert second.stdout.startswith(f"{folder.name}: 1 cell, dpsgd on digits")
    assert (folder / "digits.html").is_file()


def test_sigterm_ends_a_sweep_as_ctrl_c_does(capfd):
    class Cluster:
        @contextmanager
        def connect(self):
            signal.raise_signal(signal.SIGTERM)
            yield

    with pytest.raises(SystemExit) as ended:
        fan_out(None, Cluster(), {}, [], Console())
    assert ended.value.code == INTERRUPTED
    said = capfd.readouterr()
    assert said.err.strip().startswith("Stopping: running cells end first")
    assert said.out.startswith("Stopped. 0 cells")


def test_a_scheduler_that_is_lost_is_told_in_a_sentence(monkeypatch):
    class Client:
        dashboard_link = "/status"
        nthreads = staticmethod(dict)

    class Cluster:
        scheduler, resources = "tcp://there:8786", None

        @contextmanager
        def connect(self):
            yield Client()

    def lost(sweep, cells, update):
        sweep.outcomes.append(CellResult("cell-a"))
        raise CommClosedError("in <TCP (closed)>: ConnectionResetError")

    monkeypatch.setattr(Sweep, "run", lost)
    with pytest.raises(
        EquidpError, match=r"The Dask scheduler at tcp://there:8786 answers no more .* 1 cells were fini"
    ):
        fan_out(None, Cluster(), {}, [], Console())


def test_what_failed_is_told_where_the_disk_takes_no_table(make_job, monkeypatch, capsys):
    done, failed = make_job("cell-a"), make_job("cell-b")

    def refused(*_):
        raise EquidpError("the disk is full")

    monkeypatch.setattr("equidp.sweep.cell.finished", lambda job: job is done)
    monkeypatch.setattr("equidp.sweep.summary.rows_of", refused)
    jobs = {job.cell.key: job for job in (done, failed)}
    cells, outcomes = [done.cell, failed.cell], [CellResult("cell-b", "Error: no space")]
    with pytest.raises(EquidpError, match="the disk is full"):
        _conclude(None, "demo", cells, jobs, outcomes, Console(), {})
    assert "failed: dpsgd" in (said := capsys.readouterr().out)
    assert "Error: no space" in said


def test_a_page_of_an_earlier_call_is_told_from_those_of_this_one(make_job, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "data" / "08_reporting" / "sweeps" / "demo"
    folder.mkdir(parents=True)
    (folder / "adult.html").write_text("of a data set that is no more in the sweep")
    done = make_job("cell-a")
    monkeypatch.setattr("equidp.sweep.cell.finished", lambda _: True)
    for name in ("summary.rows_of", "summary.table_of", "printed.print_table", "doubts.doubts"):
        monkeypatch.setattr(f"equidp.sweep.{name}", lambda *_: {})
    monkeypatch.setattr("equidp.sweep.summary.write_summary", lambda *_: [folder / "table.csv", folder / "dutch.html"])
    monkeypatch.setattr("equidp.sweep.summary.trained_badly", lambda _: {"dutch": ["dpsgd did better."]})
    monkeypatch.setattr("equidp.sweep.command._summarise", lambda *_: None)
    _conclude(SimpleNamespace(path=tmp_path), "demo", [done.cell], {"cell-a": done}, [], Console(width=200), {})
    said = capsys.readouterr().out
    assert f"of an earlier call, and not in this table: {folder / 'adult.html'}" in said
    assert "dutch: dpsgd did better.\n" in said


@pytest.mark.parametrize("name", ["../../x", "it's", "a/b", "größe"])
def test_a_sweeps_name_leads_nowhere_and_is_a_word_for_mlflow(project, name):
    (project / "conf" / "local" / "sweeps.yml").write_text(
        f'"{name}": {{algorithms: [dpsgd], datasets: [digits]}}\n', encoding="utf-8"
    )
    bootstrapped(project)
    done = CliRunner().invoke(sweep, [name, "--dry-run"], obj=SimpleNamespace(project_path=project))
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: The sweep {name!r} names a folder: use letters")


def test_a_sweep_without_a_name_is_named_after_its_cells():
    one, two = SimpleNamespace(key="cell-a"), SimpleNamespace(key="cell-b")

    assert unnamed([one, two]) == unnamed([two, one])
    assert len({unnamed([one]), unnamed([two]), unnamed([one, two])}) == 3


@pytest.mark.parametrize(
    ("seconds", "cells", "workers", "words"),
    [([], 3, 2, ""), ([10.0], 0, 2, ""), ([10.0, 30.0], 4, 2, "about 40 s"), ([60.0], 8, 2, "about 4 min")],
)
def test_time_left_follows_from_the_cells_so_far(seconds, cells, workers, words):
    assert time_left(seconds, cells, workers) == words


def test_nested_settings_by_dotted_name():
    assert dotted({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}
