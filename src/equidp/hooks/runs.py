"""Runs: the MLflow run of each algorithm, and writing to it.

A single algorithm has the pipeline's own run, with the baseline's figures as `baseline/…`. Several algorithms have a
child run each, which is written through `MlflowClient` alone, because the fluent API knows only one active run.

If the store fails during a training, the training goes on. Entries that the store did not take are kept, and written at
the end.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID
from mlflow.utils.time import get_current_time_millis
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
)

from equidp.evaluation.metrics import numbered
from equidp.hooks.store import FAILURES, ONCE, reason
from equidp.system import interrupts
from equidp.system.threads import alone, environment

REFUSED = re.compile(r"[^\w\-./: ]", re.ASCII)
"""Characters that MLflow refuses in names."""

LONGEST_KEY = MAX_ENTITY_KEY_LENGTH - 10
"""The most letters of a name, to which a number may be added."""

AT_ONCE = {"metrics": MAX_METRICS_PER_BATCH} | dict.fromkeys(("params", "tags"), MAX_PARAMS_TAGS_PER_BATCH)

DIGEST_LENGTH = 8
"""Letters of a dataset's fingerprint in MLflow's list of runs, as MLflow's own digests have; the tag has all of it."""

SECONDS_BETWEEN_ROWS = 1.0

FILES = ("project_path", "dataset", "seed", "run_label")
"""Tags that are equal for runs that write the same files."""


@dataclass
class Tracking:
    """The open runs of this process.

    Attributes:
        ours: whether the active run, if there is one, is a pipeline's; else it is the user's, and stays open.
        runs: ids of the algorithms' runs: the active run or its children. Algorithms without a run are not logged.
        children: ids of the children of the active run.
        opened: runs that an interrupt must end, because MLflow no longer counts a run as active while it ends it.
        lost: whether the store has failed.
        held: entries that are written once the store answers again.
        rows: figures of epochs that are not written yet.
        live: per algorithm, the names of metrics that epochs have given.
        epochs: per algorithm, the epochs that have given metrics.
        written: when figures of epochs were last written.
    """

    ours: bool = False
    runs: dict[str, str] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    lost: bool = False
    held: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    rows: dict[str, list[Metric]] = field(default_factory=dict)
    live: dict[str, set[str]] = field(default_factory=dict)
    epochs: dict[str, set[int]] = field(default_factory=dict)
    written: float = 0.0

    @cached_property
    def client(self) -> MlflowClient:
        """The client of MLflow's present store."""
        return MlflowClient()


_current = Tracking()
"""The tracking of the pipeline that is at work; `begin` and `close_runs` replace it."""

logger = logging.getLogger(__name__)


def begin(ours: bool) -> None:
    """Forget earlier runs. Runs that are opened from here on are the pipeline's if `ours`, and end with the process."""
    global _current
    _current = Tracking(ours)
    if alone():
        replaced, handler = (signal.SIG_DFL, _leave) if ours else (_leave, signal.SIG_DFL)
        if signal.getsignal(signal.SIGTERM) is replaced:  # during a training another handler is set
            signal.signal(signal.SIGTERM, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Exit the process in an orderly way, where SIGTERM would end it at once."""
    raise SystemExit(interrupts.SIGTERM_STATUS)


def open_run(algorithm: str, run_id: str, *, child: bool = False) -> None:
    """Add a run that nodes write to. Call it as soon as the run is made: an interrupt may come before the next run."""
    _current.opened.append(run_id)
    _current.runs[algorithm] = run_id
    if child:
        _current.children.append(run_id)


def close_runs(status: str) -> None:
    """End all runs of the pipeline, the children first. After this nothing is written to them."""
    global _current
    _write_rows()
    for run_id in _current.children:
        _current.client.set_terminated(run_id, status)
    _current = Tracking(_current.ours, opened=_current.opened)
    if _current.ours and mlflow.active_run() is not None:
        mlflow.end_run(status)


def begun() -> bool:
    """Whether an algorithm that has a run has trained an epoch."""
    return any(_current.epochs.get(algorithm) for algorithm in _current.runs)


def discard() -> None:
    """End the pipeline's runs and delete them in MLflow (`State: Deleted` shows them); a user's own run stays."""
    active, client = mlflow.active_run(), _current.client
    unwanted = [*_current.children, *([active.info.run_id] if active is not None and _current.ours else [])]
    close_runs("FAILED")
    for run_id in unwanted:
        client.delete_run(run_id)


def abandon() -> None:
    """End the pipeline's run as failed, because MLflow would end it as finished with the process. Children are left.

    The store has just failed. So it is asked only once, because a server that hangs would cost minutes again.
    """
    with suppress(*FAILURES), environment(ONCE):
        if _current.ours and mlflow.active_run() is not None:
            mlflow.end_run("FAILED")
    begin(False)


def end_interrupted() -> None:
    """End runs that Ctrl-C or SIGTERM has left open, because Kedro tells its hooks only of errors.

    Raises:
        KeyboardInterrupt, SystemExit: this function is interrupted itself.
    """
    if not _current.ours:
        return
    try:
        gc.collect()  # an interrupted cursor may still lock the store, also for this process
        _kill()
    except FAILURES as error:
        interrupts.raise_hidden(error)
    else:
        begin(False)


@atexit.register  # MLflow has registered its function, which ends the run as finished, before: so this is called first
def _end_with_process() -> None:
    """End runs, and try again if interrupted: Ctrl-C is often pressed twice, and some launchers pass it on twice."""
    if begun():  # without this users repeat the command as it is, and train a model again that is trained already
        print("What is finished is kept: the same command with resume=true in --params goes on.", file=sys.stderr)
    for _ in range(2):
        with suppress(KeyboardInterrupt, SystemExit):
            end_interrupted()
            return


def _kill() -> None:
    """End every run of the pipeline as killed, except runs that have finished."""
    active = mlflow.active_run()
    if active is not None:
        _current.opened.append(active.info.run_id)
        mlflow.end_run("KILLED")  # first, because a run that is active at the process's end is ended as finished
    _write_rows()
    client = MlflowClient()
    for run_id in dict.fromkeys(_current.opened):
        if client.get_run(run_id).info.status not in ("KILLED", "FINISHED"):
            client.set_terminated(run_id, "KILLED")


def close_crashed() -> None:
    """Set runs to KILLED that a crash left open and that write the active run's files, and their children.

    Otherwise they would seem to run for ever. None of them is at work, because the guard holds the lock of these files.
    A run with the same path on another machine has other files; it gets its right status when it finishes.
    """
    client, active = MlflowClient(), mlflow.active_run()
    assert active is not None
    tags = client.get_run(active.info.run_id).data.tags
    spared = {active.info.run_id, tags.get(MLFLOW_PARENT_RUN_ID)}  # the parent may be a user's own run
    found = client.search_runs([active.info.experiment_id], "attributes.status = 'RUNNING'")
    left = {
        run.info.run_id
        for run in found
        if run.info.run_id not in spared and all(run.data.tags.get(name) == tags.get(name) for name in FILES)
    }
    for run in found:
        if run.info.run_id in left or run.data.tags.get(MLFLOW_PARENT_RUN_ID) in left:
            client.set_terminated(run.info.run_id, "KILLED")


def lose(error: Exception) -> None:
    """Keep all entries until the end from here on, because every further attempt would wait as long as this one.

    Raises:
        KeyboardInterrupt, SystemExit: the store failed because it was interrupted.
    """
    interrupts.raise_hidden(error)
    if not _current.lost:
        logger.warning(
            "MLflow's store failed (%s): the run goes on, and what is to be logged is written at its end.",
            reason(error),
        )
    _current.lost = True


def catch_up() -> None:
    """Write the kept entries, in order, and the epochs that are not written yet.

    Raises:
        MlflowException: the store still fails.
    """
    _write_rows()
    while _current.held:
        run_id, entries = _current.held[0]
        _current.client.log_batch(run_id, **entries)
        del _current.held[0]


def log_epoch(algorithm: str, row: Mapping[str, float]) -> None:
    """Log the live figures of one epoch, which is the step. They are written once a second, because a call is slow."""
    figures, epoch = {k: v for k, v in row.items() if k != "epoch"}, int(row["epoch"])
    _current.epochs.setdefault(algorithm, set()).add(epoch)
    _current.live.setdefault(algorithm, set()).update(figures)
    _current.rows.setdefault(algorithm, []).extend(_metrics(figures, epoch))
    if time.monotonic() - _current.written >= SECONDS_BETWEEN_ROWS:
        _write_rows()


def log_history(algorithm: str, history: Iterable[Mapping[str, Any]]) -> None:
    """Log figures of the epochs that this process did not train: epochs before a resume, or of a kept baseline.

    The ε of an epoch is left out: it is known only at the end, so no run's curves have it.
    """
    known = set(_current.epochs.get(algorithm, ()))
    for row in history:
        if int(row["epoch"]) not in known:
            kept = {name: v for name, v in row.items() if v is not None and v == v and name != "epsilon"}  # no NaN
            log_epoch(algorithm, kept)


def log_metrics(algorithm: str, metrics: Mapping[str, float]) -> None:
    """Write a run's results in one call, which is about 20 times cheaper than a call for each metric.

    A metric that epochs have given, too, is written at the last epoch: MLflow shows the latest value of the last step
    as the run's value.
    """
    live, last = _current.live.get(algorithm, set()), max(_current.epochs.get(algorithm, {0}))
    ending = {name: value for name, value in metrics.items() if name in live}
    others = {name: value for name, value in metrics.items() if name not in live}
    write(algorithm, "metrics", [*_metrics(ending, last), *_metrics(others, 0)])


def log_params(algorithm: str, params: Mapping[str, Any]) -> None:
    """Write parameters to the algorithm's run."""
    names = numbered(params, slug)  # two names that are not Latin may share a slug, and MLflow takes each name once
    entries = [Param(names[name], str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in params.items()]
    write(algorithm, "params", entries)


def log_tags(algorithm: str, tags: Mapping[str, Any]) -> None:
    """Write tags to the algorithm's run."""
    write(algorithm, "tags", [RunTag(name, str(value)) for name, value in tags.items()])


def log_dataset(algorithm: str, name: str, fingerprint: str, folder: Path) -> None:
    """Log the data set of the algorithm's run in MLflow's own terms; its number of records may be private.

    If the store fails, this is not tried again, because the tags say the same.
    """
    run_id = _current.runs.get(algorithm)
    if run_id is None or _current.lost:
        return
    source = json.dumps({"uri": folder.absolute().as_uri()})
    dataset = Dataset(name, fingerprint[:DIGEST_LENGTH], source_type="local", source=source)
    try:
        _current.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "training")])])
    except FAILURES as error:
        lose(error)


def log_artifact(algorithm: str, path: Path, folder: str | None = None) -> None:
    """Upload a file, or all files of a folder."""
    run_id = _current.runs.get(algorithm)
    if run_id is None:
        return
    if path.is_dir():
        _current.client.log_artifacts(run_id, str(path), folder)
    elif path.suffix == ".html":  # as a single file with all that it needs
        from equidp.reporting.rendering import whole  # late: it imports Plotly

        _current.client.log_text(run_id, whole(path.read_text(encoding="utf-8")), path.name)
    else:
        _current.client.log_artifact(run_id, str(path), folder)


def log_model(algorithm: str, weights: Path, statement: Iterable[Path] = ()) -> None:
    """Upload the model as pyfunc, loadable as `runs:/<run id>/model`, with its privacy statement beside it."""
    if algorithm not in _current.runs:
        return
    from equidp.hooks.packing import pack  # late: its imports take a second

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        pack(target, weights, statement)
        log_artifact(algorithm, target, "model")


def tracked() -> tuple[str, ...]:
    """Return the algorithms that have a run."""
    return tuple(_current.runs)


def _metrics(figures: Mapping[str, float], step: int) -> list[Metric]:
    now = get_current_time_millis()
    return [Metric(slug(name), float(value), now, step) for name, value in figures.items() if value is not None]


def _write_rows() -> None:
    """Write the figures of epochs that are not written yet."""
    rows, _current.rows = _current.rows, {}
    for algorithm, entries in rows.items():
        write(algorithm, "metrics", entries)
    _current.written = time.monotonic()


def write(algorithm: str, kind: str, entries: Sequence[Any]) -> None:
    """Write `metrics`, `params` or `tags` to the algorithm's run, or keep them for the end if the store has failed."""
    run_id = _current.runs.get(algorithm)
    if run_id is None:
        return
    for start in range(0, len(entries), AT_ONCE[kind]):
        batch: dict[str, Any] = {kind: entries[start : start + AT_ONCE[kind]]}
        if not _current.lost:
            try:
                _current.client.log_batch(run_id, **batch)
            except FAILURES as error:
                lose(error)
        if _current.lost:
            _current.held.append((run_id, batch))


def slug(name: str) -> str:
    """Return a name that MLflow accepts: other characters become `_`, also a part such as `..`: MLflow reads paths.

    A long name is cut: a column's name may be a whole question of a form.
    """
    parts = REFUSED.sub("_", name).split("/")
    whole = "/".join(part if part.strip(".") else "_" for part in parts)
    return whole if len(whole) <= LONGEST_KEY else whole[:LONGEST_KEY].rstrip("./")
