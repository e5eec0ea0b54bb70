"""Which MLflow run belongs to which algorithm, and what is written there.

A single algorithm has the pipeline's own run, with the baseline's figures as `baseline/…`. Several algorithms have one
child run each, written through `MlflowClient` alone: the fluent API knows only one active run.

A store that fails while a run trains does not end the training: what it did not take is kept and written at the end.
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
"""Characters MLflow refuses in names."""

LONGEST_KEY = MAX_ENTITY_KEY_LENGTH - 10
"""Letters of a name: a number may follow."""

AT_ONCE = {"metrics": MAX_METRICS_PER_BATCH} | dict.fromkeys(("params", "tags"), MAX_PARAMS_TAGS_PER_BATCH)

DIGEST_LENGTH = 8
"""Of a dataset's fingerprint in MLflow's list of runs, as of MLflow's own; the tag has all of it."""

SECONDS_BETWEEN_ROWS = 1.0

FILES = ("project_path", "dataset", "seed", "run_label")
"""Tags of runs that write the same files."""


@dataclass
class Tracking:
    """The open runs of this process.

    Attributes:
        ours: whether the active run, if there is one, is a pipeline's; else it is the user's, and stays open.
        runs: an algorithm's run: the active one or a child of it. Algorithms without one are not logged.
        opened: runs that an interrupt must end: MLflow no longer counts a run as active while it ends it.
        lost, held: whether the store has failed, and what is to be written once it answers again.
        rows: figures of epochs that are not written yet; `written` is when the last ones were.
        live, epochs: per algorithm, the metrics that epochs have given, and which epochs those were.
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
        """Of the store that MLflow is pointed at."""
        return MlflowClient()


_current = Tracking()
"""Of the pipeline that is at work: `begin` and `close_runs` put a new one in its place."""

logger = logging.getLogger(__name__)


def begin(ours: bool) -> None:
    """Forget earlier runs; what is opened from here on is the pipeline's, and ended if the process is stopped."""
    global _current
    _current = Tracking(ours)
    if alone():
        replaced, handler = (signal.SIG_DFL, _leave) if ours else (_leave, signal.SIG_DFL)
        if signal.getsignal(signal.SIGTERM) is replaced:  # training has a handler of its own meanwhile
            signal.signal(signal.SIGTERM, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    """End the process in order, where SIGTERM would end it on the spot."""
    raise SystemExit(interrupts.SIGTERM_STATUS)


def open_run(algorithm: str, run_id: str, *, child: bool = False) -> None:
    """Add a run that nodes write to, at once when it is made: an interrupt may come before the next one."""
    _current.opened.append(run_id)
    _current.runs[algorithm] = run_id
    if child:
        _current.children.append(run_id)


def close_runs(status: str) -> None:
    """End all runs of the pipeline, the children first; nothing is written to any run from here on."""
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
    """End the pipeline's runs and take them out of MLflow's list (`State: Deleted` shows them); a user's own stays."""
    active, client = mlflow.active_run(), _current.client
    unwanted = [*_current.children, *([active.info.run_id] if active is not None and _current.ours else [])]
    close_runs("FAILED")
    for run_id in unwanted:
        client.delete_run(run_id)


def abandon() -> None:
    """End the pipeline's run as failed, and leave its children: MLflow would end it as finished with the process.

    The store has just failed: it is asked once, as a server that hangs would be waited for minutes, again.
    """
    with suppress(*FAILURES), environment(ONCE):
        if _current.ours and mlflow.active_run() is not None:
            mlflow.end_run("FAILED")
    begin(False)


def end_interrupted() -> None:
    """End what Ctrl-C or SIGTERM has left open: Kedro tells its hooks of errors only.

    Raises:
        KeyboardInterrupt, SystemExit: where it is interrupted itself.
    """
    if not _current.ours:
        return
    try:
        gc.collect()  # a cursor that was cut off in the middle may still lock the store, for this process too
        _kill()
    except FAILURES as error:
        interrupts.raise_hidden(error)
    else:
        begin(False)


@atexit.register  # after MLflow registered what would end the run as finished, hence before that is called
def _end_with_process() -> None:
    """Retry once if interrupted again: Ctrl-C is often pressed twice, and some launchers pass it on twice."""
    if begun():  # without a word users repeat the command as it is, and pay for a model that is trained already
        print("What is finished is kept: the same command with resume=true in --params goes on.", file=sys.stderr)
    for _ in range(2):
        with suppress(KeyboardInterrupt, SystemExit):
            end_interrupted()
            return


def _kill() -> None:
    """End every run of the pipeline as killed, but for those that have finished."""
    active = mlflow.active_run()
    if active is not None:
        _current.opened.append(active.info.run_id)
        mlflow.end_run("KILLED")  # first: what is active when the process ends would be ended as finished
    _write_rows()
    client = MlflowClient()
    for run_id in dict.fromkeys(_current.opened):
        if client.get_run(run_id).info.status not in ("KILLED", "FINISHED"):
            client.set_terminated(run_id, "KILLED")


def close_crashed() -> None:
    """Set to KILLED what a crash left open of runs on the active run's files: it would seem to be running for ever.

    None of them is at work, as the guard holds these files' lock. One of the same path on another machine, whose files
    are others, is told to be finished when it is.
    """
    client, active = MlflowClient(), mlflow.active_run()
    assert active is not None
    tags = client.get_run(active.info.run_id).data.tags
    spared = {active.info.run_id, tags.get(MLFLOW_PARENT_RUN_ID)}  # a user's own around this one
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
    """From now on keep what is to be logged until the end: every further attempt would wait as long as this one did.

    Raises:
        KeyboardInterrupt, SystemExit: where the store failed because it was interrupted.
    """
    interrupts.raise_hidden(error)
    if not _current.lost:
        logger.warning(
            "MLflow's store failed (%s): the run goes on, and what is to be logged is written at its end.",
            reason(error),
        )
    _current.lost = True


def catch_up() -> None:
    """Write what was kept, in its order, and the epochs that were not written yet.

    Raises:
        MlflowException: where the store still fails.
    """
    _write_rows()
    while _current.held:
        run_id, entries = _current.held[0]
        _current.client.log_batch(run_id, **entries)
        del _current.held[0]


def log_epoch(algorithm: str, row: Mapping[str, float]) -> None:
    """Live figures of one epoch; the epoch is the step. Written once a second: a call costs as much as an epoch may."""
    figures, epoch = {k: v for k, v in row.items() if k != "epoch"}, int(row["epoch"])
    _current.epochs.setdefault(algorithm, set()).add(epoch)
    _current.live.setdefault(algorithm, set()).update(figures)
    _current.rows.setdefault(algorithm, []).extend(_metrics(figures, epoch))
    if time.monotonic() - _current.written >= SECONDS_BETWEEN_ROWS:
        _write_rows()


def log_history(algorithm: str, history: Iterable[Mapping[str, Any]]) -> None:
    """Figures of those epochs that this process did not train: those before a resume, or of a baseline kept.

    ε of an epoch is known at the end only, and no run's curves have it.
    """
    known = set(_current.epochs.get(algorithm, ()))
    for row in history:
        if int(row["epoch"]) not in known:
            kept = {name: v for name, v in row.items() if v is not None and v == v and name != "epsilon"}  # NaN: none
            log_epoch(algorithm, kept)


def log_metrics(algorithm: str, metrics: Mapping[str, float]) -> None:
    """Write a run's results, all at once (one call is about 20 times cheaper than one per metric).

    Those that epochs have given too end their curves: MLflow takes the latest value of the last step for the run's own.
    """
    live, last = _current.live.get(algorithm, set()), max(_current.epochs.get(algorithm, {0}))
    ending = {name: value for name, value in metrics.items() if name in live}
    others = {name: value for name, value in metrics.items() if name not in live}
    write(algorithm, "metrics", [*_metrics(ending, last), *_metrics(others, 0)])


def log_params(algorithm: str, params: Mapping[str, Any]) -> None:
    """Write parameters to the algorithm's run."""
    names = numbered(params, slug)  # two names in other scripts may share a slug, and MLflow takes each once
    entries = [Param(names[name], str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in params.items()]
    write(algorithm, "params", entries)


def log_tags(algorithm: str, tags: Mapping[str, Any]) -> None:
    """Write tags to the algorithm's run."""
    write(algorithm, "tags", [RunTag(name, str(value)) for name, value in tags.items()])


def log_dataset(algorithm: str, name: str, fingerprint: str, folder: Path) -> None:
    """Say what the algorithm's run trains on, in MLflow's own terms; how many records it holds may be private.

    A store that fails is not asked again: the tags say the same.
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
    elif path.suffix == ".html":  # as one self-contained file
        from equidp.reporting.rendering import whole  # late: it imports Plotly

        _current.client.log_text(run_id, whole(path.read_text(encoding="utf-8")), path.name)
    else:
        _current.client.log_artifact(run_id, str(path), folder)


def log_model(algorithm: str, weights: Path, statement: Iterable[Path] = ()) -> None:
    """Upload the model as pyfunc, loadable as `runs:/<run id>/model`, its privacy statement beside it."""
    if algorithm not in _current.runs:
        return
    from equidp.hooks.packing import pack  # late: it brings a second of imports

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        pack(target, weights, statement)
        log_artifact(algorithm, target, "model")


def tracked() -> tuple[str, ...]:
    """Algorithms that have a run."""
    return tuple(_current.runs)


def _metrics(figures: Mapping[str, float], step: int) -> list[Metric]:
    now = get_current_time_millis()
    return [Metric(slug(name), float(value), now, step) for name, value in figures.items() if value is not None]


def _write_rows() -> None:
    """Write the epochs that have come in since the last time."""
    rows, _current.rows = _current.rows, {}
    for algorithm, entries in rows.items():
        write(algorithm, "metrics", entries)
    _current.written = time.monotonic()


def write(algorithm: str, kind: str, entries: Sequence[Any]) -> None:
    """Write `metrics`, `params` or `tags` to the algorithm's run; kept for the end where the store has failed."""
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
    """A name MLflow accepts: other characters become `_`, and it leads nowhere, as MLflow takes names for paths.

    A column's name may be a whole question of a form: what is too long is cut.
    """
    parts = REFUSED.sub("_", name).split("/")
    whole = "/".join(part if part.strip(".") else "_" for part in parts)
    return whole if len(whole) <= LONGEST_KEY else whole[:LONGEST_KEY].rstrip("./")
