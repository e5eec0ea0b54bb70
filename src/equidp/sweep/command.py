"""`kedro sweep`, from its options to its exit status."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import EquidpError, first_line
from equidp.options import dotted
from equidp.parameters.resolved import SAFE_NAME
from equidp.sweep.comparison import counterparts
from equidp.sweep.grid import Grid, choose_grid, nested
from equidp.sweep.project import Cell, Project, by_seed, digest
from equidp.system.interrupts import handling
from equidp.system.logs import terminal
from equidp.tasks import CLASSIFICATION

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from equidp.sweep.cell import CellResult, Job
    from equidp.sweep.fanout import Sweep
    from equidp.sweep.summary import Row

REPORTS = Path("data") / "08_reporting" / "sweeps"
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def run_command(
    project: Project,
    name: str | None,
    *,
    params: str,
    workers: int | None,
    scheduler: str | None,
    gpus_per_cell: int | None,
    dashboard: int,
    retries: int,
    dry_run: bool,
    listing: bool,
    **axes: str | None,
) -> None:
    """Run a sweep; ends the process with status 0 only if every cell is finished.

    Raises:
        EquidpError: for any wrong name or value, before anything runs.
    """
    console = terminal()
    grids = project.grids()
    if listing:
        return _list(grids, console)
    typed = dotted(nested(params))
    grid = choose_grid(grids, name, {**axes, "params": typed})
    cells = project.cells(grid)
    _refuse_unread(typed, cells)
    refuse_undeclared(cells)
    refuse_several_tasks(cells)
    against = counterparts(cells, grid.reference)
    name = _folder_name(name or unnamed(cells))
    _announce(name, grid, cells, console)
    if dry_run:
        for cell in cells:
            console.print(cell.command, soft_wrap=True, markup=False)
        return None
    if sys.platform == "win32":
        raise EquidpError(
            "kedro sweep passes its locks to its cells, which Windows cannot do: use WSL, or run the commands "
            "that --dry-run prints one by one."
        )
    # only now: wrong names are refused and a dry run is printed without waiting for MLflow, pandas and Dask
    from equidp.sweep.attended import forks
    from equidp.sweep.cell import Job, finished
    from equidp.sweep.cluster import Cluster
    from equidp.sweep.summary import labels_of

    store, experiment = project.store()
    rows, warm = labels_of(cells), scheduler is None and forks()
    jobs = {
        cell.key: Job(cell, project.path, store, experiment, name, rows[cell.key], project.env, retries, warm)
        for cell in cells
    }
    todo = [cell for cell in cells if not finished(jobs[cell.key])]
    console.print(f"Finished before: {len(cells) - len(todo)} of {len(cells)}.")

    cluster = Cluster(scheduler, workers, gpus_per_cell, dashboard)
    outcomes = fan_out(project, cluster, jobs, todo, console) if todo else []
    return _conclude(project, name, cells, jobs, outcomes, console, against)


def _refuse_unread(typed: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Refuse a setting of an algorithm that no cell trains: every cell would ignore it silently."""
    trained = {BASELINE, *(cell.algorithm for cell in cells)}
    for name in typed:
        if (section := name.split(".")[0]) in ALGORITHMS and section not in trained:
            raise EquidpError(f"--params sets {name}, and no cell of this sweep trains {section}: leave it out.")


def refuse_undeclared(cells: Sequence[Cell]) -> None:
    """Refuse more trials than their statements declare, and several trials under a law: a sweep does not draw them.

    Trials are cells of one data set, seed, algorithm and guarantee. Other cells are compared, but not chosen from.
    """
    trained = Counter(
        (cell.dataset, cell.seed, cell.algorithm, digest(cell.settings["privacy"]))
        for cell in cells
        if cell.settings["privacy"].get("trials", 0) != 1  # several declared trials, or trials under a law
    )
    for cell in cells:
        privacy = cell.settings["privacy"]
        count = trained[cell.dataset, cell.seed, cell.algorithm, digest(privacy)]
        if privacy.get("trials_law") and count > 1:
            raise EquidpError(
                f"privacy.trials_law={privacy['trials_law']}: a sweep goes through its cells in order and shows "
                "all; the ε of a law holds for trials drawn at random, of which one is shown. Take kedro run "
                "--pipeline=tune, or privacy.max_trials."
            )
        if count > (declared := privacy.get("trials", count)):
            raise EquidpError(
                f"privacy.max_trials={declared} is what each run will state, and this sweep trains {cell.algorithm} "
                f"{count} times on the same records of {cell.dataset}: declare all of them "
                f"(privacy.max_trials={count}), or make fewer cells."
            )


def refuse_several_tasks(cells: Sequence[Cell]) -> None:
    """Refuse cells of one data set and several tasks, before all train in vain: their figures have no common table."""
    kinds: dict[str, dict[str, None]] = {}
    for cell in cells:
        kinds.setdefault(cell.dataset, {})[cell.settings["data"].get("task", CLASSIFICATION)] = None
    for dataset, of in kinds.items():
        if len(of) > 1:
            raise EquidpError(
                f"This sweep has {dataset} as {' and as '.join(of)}, whose figures cannot be compared: make a sweep of "
                "each, or give each a preset of its own name."
            )


def _folder_name(name: str) -> str:
    """Return the sweep's name if it can be the name of a folder, and a word of MLflow's filters."""
    if not SAFE_NAME.fullmatch(name):
        raise EquidpError(f"The sweep {name!r} names a folder: use letters a-z, digits and . _ = - only.")
    return name


def unnamed(cells: Sequence[Cell]) -> str:
    """A name made from the cells, for a sweep without one, so that it does not overwrite another sweep's tables."""
    return f"sweep-{digest({'cells': sorted(cell.key for cell in cells)})[:8]}"


def _list(grids: Mapping[str, Any], console: Console) -> None:
    for name in grids:
        grid = choose_grid(grids, name, {})
        console.print(f"[bold]{escape(str(name))}[/]  {escape(grid.about)}")
        _tell(grid, console, "    ")


def _tell(grid: Grid, console: Console, indent: str = "") -> None:
    for word, text in (("takes", grid.takes), ("expect", grid.expect)):
        if text:
            console.print(f"{indent}{word}: {escape(text)}")


def _announce(name: str, grid: Grid, cells: Sequence[Cell], console: Console) -> None:
    if grid.about:
        console.print(escape(grid.about))
    _tell(grid, console)
    datasets = ", ".join(dict.fromkeys(cell.dataset for cell in cells))
    algorithms = ", ".join(dict.fromkeys(cell.algorithm for cell in cells))
    count, seeds = len(cells), len({cell.seed for cell in cells})
    console.print(
        f"{name}: {count} cell{'s' * (count != 1)}, {algorithms} on {datasets}, {seeds} seed{'s' * (seeds != 1)}.",
        markup=False,
    )


class Display:
    """Live progress: cells done, running, failed, and the time left."""

    def __init__(self, total: int, workers: int, console: Console) -> None:
        self.total, self.workers = total, workers
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self.task: TaskID = self.progress.add_task("cells", total=total, state="encoding records")

    def update(self, outcomes: Sequence[CellResult], running: int) -> None:
        """Show where the sweep is; without a terminal, print a line per finished cell."""
        failed = sum(outcome.reason is not None for outcome in outcomes)
        left = time_left([o.seconds for o in outcomes if o.attempts], self.total - len(outcomes), self.workers)
        state = f"{running} running, {failed} failed{f', {left} left' if left else ''}"
        self.progress.update(self.task, completed=len(outcomes), state=state)
        if not self.progress.console.is_terminal and outcomes:
            self.progress.console.print(f"{len(outcomes) - failed} of {self.total} done, {state}", soft_wrap=True)


def time_left(seconds: Sequence[float], cells: int, workers: int) -> str:
    """An estimate from the cells so far, in words; empty before the first."""
    if not seconds or not cells:
        return ""
    expected = sum(seconds) / len(seconds) * cells / max(1, min(workers, cells))
    return f"about {expected / 60:.0f} min" if expected >= 90 else f"about {expected:.0f} s"


def fan_out(
    project: Project, cluster: Any, jobs: Mapping[str, Job], cells: Sequence[Cell], console: Console
) -> list[CellResult]:
    """Run the cells on the cluster. Ctrl-C ends the process; finished cells are kept."""
    from equidp.sweep.cell import warm_up
    from equidp.sweep.fanout import Sweep

    sweep = None
    try:
        with handling(_stop, signal.SIGINT, signal.SIGTERM), cluster.connect() as client:
            if any(job.warm for job in jobs.values()):
                client.run(warm_up, project.path)  # now, while records are encoded
            # Dask's page of plots, /status, needs bokeh, which equidp does not install; the page of workers does not
            workers = client.dashboard_link.replace("/status", "/info/main/workers.html")
            console.print(f"Dask's workers: {workers}", soft_wrap=True)
            display = Display(len(cells), sum(client.nthreads().values()) or 1, console)
            sweep = Sweep(client, jobs, cluster.resources)
            with display.progress:
                return sweep.run(cells, display.update)
    except KeyboardInterrupt:
        console.print(
            f"Stopped. {_kept(sweep)}; call it again for the rest. Interrupted cells continue from their checkpoints."
        )
        sys.exit(INTERRUPTED)
    except OSError as error:  # of Dask's connections
        if sweep is None or cluster.scheduler is None:
            raise
        raise EquidpError(
            f"The Dask scheduler at {cluster.scheduler} answers no more ({first_line(error)}). {_kept(sweep)}; start "
            "it again, then call the sweep again for the rest. Interrupted cells continue from their checkpoints."
        ) from error


def _kept(sweep: Sweep | None) -> str:
    done = sum(outcome.reason is None for outcome in sweep.outcomes) if sweep else 0
    return f"{done} cells were finished by this call and are kept"


def _stop(number: int, frame: FrameType | None) -> None:
    """End the sweep, and say at once that it was heard: Dask and running cells take some seconds."""
    os.write(2, b"\nStopping: running cells end first, which takes some seconds.\n")
    raise KeyboardInterrupt


def _conclude(
    project: Project,
    name: str,
    cells: Sequence[Cell],
    jobs: Mapping[str, Job],
    outcomes: Sequence[CellResult],
    console: Console,
    against: Mapping[str, Sequence[str]],
) -> None:
    """Print and write tables and pages, and list cells that failed; `against` is as of `table_of`."""
    from equidp.sweep.cell import finished
    from equidp.sweep.doubts import doubts
    from equidp.sweep.printed import print_table
    from equidp.sweep.summary import rows_of, table_of, trained_badly, write_summary

    complete = [cell for cell in cells if finished(jobs[cell.key])]
    try:
        if complete:
            rows = rows_of(complete, cells)
            doubtful = doubts(cells, complete)
            table = table_of(rows, against, doubtful)
            print_table(table, console)
            for dataset, sentences in (*doubtful.items(), *trained_badly(rows).items()):
                for sentence in sentences:
                    console.print(f"{dataset}: {sentence}", soft_wrap=True, markup=False)
            folder = project.path / REPORTS / name
            written = write_summary(rows, table, folder, name, project.path / REPORTS.parent)
            for path in written:
                console.print(str(path), soft_wrap=True, markup=False)
            for path in sorted(set(folder.glob("*.html")) - set(written)):
                console.print(f"of an earlier call, and not in this table: {path}", soft_wrap=True, markup=False)
            _summarise(name, complete, jobs, rows, table, written)
    finally:  # also if the table cannot be written, for example because the disk is full
        _list_failed(cells, jobs, outcomes, console)
    if len(complete) < len(cells):
        raise EquidpError(
            f"{len(cells) - len(complete)} of {len(cells)} cells are not finished; call the sweep again to retry them."
        )


def _list_failed(
    cells: Sequence[Cell], jobs: Mapping[str, Job], outcomes: Sequence[CellResult], console: Console
) -> None:
    failed = {outcome.key: outcome.reason for outcome in outcomes if outcome.reason is not None}
    for cell in cells:
        if cell.key in failed:
            console.print(f"failed: {cell}", style="red", soft_wrap=True, markup=False)
            console.print(f"    {failed[cell.key]}", soft_wrap=True, markup=False)
            log = jobs[cell.key].log
            if log.exists():  # the cell may have failed before it began to print
                console.print(f"    log: {shlex.quote(str(log))}", soft_wrap=True, markup=False)


def _summarise(
    name: str,
    cells: Sequence[Cell],
    jobs: Mapping[str, Job],
    rows: Sequence[Row],
    table: pd.DataFrame,
    written: Sequence[Path],
) -> None:
    """Write means to MLflow, above the runs of the cells."""
    from equidp.sweep.cell import marked
    from equidp.sweep.summary import means_of
    from equidp.sweep.tracked import summarise

    runs = {cell.key: str(marked(jobs[cell.key])) for cell in cells}
    lines = [{str(name): value for name, value in line.items()} for line in table.to_dict("records")]
    means = [means_of(of, row, line, runs) for of, row, line in zip(by_seed(cells), rows, lines, strict=True)]
    pages = {path.stem: path for path in written if path.suffix == ".html"}
    job = jobs[cells[0].key]
    summarise(name, means, pages, job.project, job.store, job.experiment)
