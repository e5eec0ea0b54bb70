"""Which MLflow run belongs to which algorithm, and what is written there.

A single algorithm has the run that kedro-mlflow opened, with the baseline's figures as `baseline/…`. Several algorithms
have one child run each, written through `MlflowClient` alone: the fluent API knows only one active run.

A store that fails while a run trains does not end the training: what it did not take is kept and written at the end.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import re
import shutil
import signal
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlparse

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, ExperimentTag, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT
from mlflow.utils.time import get_current_time_millis
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

import equidp
from equidp.errors import EquidpError
from equidp.evaluation.metrics import numbered
from equidp.system import interrupts
from equidp.system.files import storage_error, unfinished
from equidp.system.logs import held_back
from equidp.system.network import first_line
from equidp.system.threads import alone

PORTS = {"http": 80, "https": 443}

FAILURES = (MlflowException, SQLAlchemyError)
"""What a failing store raises: MLflow lets some of SQLAlchemy's errors through as they are."""

PATIENCE = 10.0
"""Seconds that another process may hold the project's store at a run's start."""

MANNERS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # MLflow's own would wait for a server that died for minutes, every epoch
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # a bar for every small file
}
"""How MLflow behaves unless set otherwise."""

REFUSED = re.compile(r"[^\w\-./: ]", re.ASCII)
"""Characters MLflow refuses in names."""

LONGEST_KEY = 240
"""Letters of a name: MLflow takes 250, and a number may follow."""

BATCH, MOST_METRICS = 100, 1000
"""MLflow takes at most so many params, and so many metrics, at once."""

DIGEST_LENGTH = 8
"""Of a dataset's fingerprint in MLflow's list of runs, as of MLflow's own; the tag has all of it."""

SECONDS_BETWEEN_ROWS = 1.0


@dataclass
class Tracking:
    """The open runs of this process.

    `ours` says that the one that is active, if any, is a pipeline's. `runs` maps an algorithm to its run, which is that
    one or its child; algorithms without one are not logged. `opened` are those that an interrupt must end: MLflow no
    longer counts a run as active while it ends it. `live` maps an algorithm to the metrics its epochs have given, and
    `epochs` to the last of these.
    """

    ours: bool = False
    client: MlflowClient | None = None
    runs: dict[str, str] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    lost: bool = False
    held: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    rows: dict[str, list[Metric]] = field(default_factory=dict)
    live: dict[str, set[str]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    written: float = 0.0


_current = Tracking()

logger = logging.getLogger(__name__)


def begin(ours: bool) -> None:
    """Forget earlier runs; what is opened from here on is the pipeline's, and ended if the process is stopped."""
    global _current
    _current = Tracking(ours)
    if alone():
        before, after = (signal.SIG_DFL, _leave) if ours else (_leave, signal.SIG_DFL)
        if signal.getsignal(signal.SIGTERM) is before:  # training has a handler of its own meanwhile
            signal.signal(signal.SIGTERM, after)


def _leave(signum: int, frame: FrameType | None) -> None:
    """End the process in order, where SIGTERM would end it on the spot."""
    raise SystemExit(interrupts.SIGTERM_STATUS)


def open_run(client: MlflowClient, algorithm: str, run_id: str, *, child: bool = False) -> None:
    """Add a run that nodes write to, at once when it is made: an interrupt may come before the next one."""
    _current.client = client
    _current.opened.append(run_id)
    _current.runs[algorithm] = run_id
    if child:
        _current.children.append(run_id)


def close_runs(status: str) -> None:
    """Terminate the child runs; nothing is written to any run from here on."""
    global _current
    _write_rows()
    if _current.client is not None:
        for run_id in _current.children:
            _current.client.set_terminated(run_id, status)
    _current = Tracking(_current.ours, opened=_current.opened)


def forget_runs() -> None:
    """The pipeline's runs have ended."""
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
        forget_runs()


@atexit.register  # after MLflow registered what would end the run as finished, hence before that is called
def _end_with_process() -> None:
    """Interrupted once more it begins again: Ctrl-C is often pressed twice, and some launchers pass it on twice."""
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


def check_store(uri: str) -> None:
    """Refuse a store that cannot be written to, before MLflow's client has retried for minutes.

    Raises:
        EquidpError: naming the address or the file.
    """
    for name, value in MANNERS.items():
        os.environ.setdefault(name, value)
    address = urlparse(uri)
    if path := _database_file(uri):
        _check_file(path)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    try:
        socket.create_connection((address.hostname, address.port or PORTS[address.scheme]), timeout=5).close()
    except OSError as error:
        raise EquidpError(
            f"The MLflow server at {uri} does not answer ({error}): start it, or take the project's own store by "
            "unsetting MLFLOW_TRACKING_URI and mlflow_tracking_uri in conf/local/mlflow.yml."
        ) from error


def make_store(uri: str, experiment: Mapping[str, Any]) -> None:
    """Make the project's database unless it is there; it is seen under its name only once it is complete.

    MLflow makes its tables one by one, under that name: two first runs at once would both fail, and so would every
    later run, and it would be the same after one that was stopped. `experiment` is mlflow.yml's.
    """
    path = _database_file(uri)
    if path is None or path.exists():
        return
    part = unfinished(path)
    asked = experiment.get("create_experiment_kwargs") or {}
    tags = [ExperimentTag(key, value) for key, value in (asked.get("tags") or {}).items()]
    try:
        location = make_url(uri).set(database=str(part)).render_as_string(hide_password=False)
        store = SqlAlchemyStore(location, DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store.create_experiment(experiment["name"], asked.get("artifact_location"), tags)
        store.engine.dispose()
        # unlike a renaming, a link does not replace what another run has made meanwhile; no links here: MLflow makes it
        with suppress(OSError):
            path.hardlink_to(part)
    finally:
        part.unlink(missing_ok=True)


def _database_file(uri: str) -> Path | None:
    """Where an SQLite store is, there or not; None for other stores."""
    if not urlparse(uri).scheme.startswith("sqlite"):
        return None
    database = make_url(uri).database
    return Path(database) if database else None


def _check_file(path: Path) -> None:
    """Try for the right to write to a database, and give it back; to its folder, where it is to be made."""
    if not path.exists():
        tried = unfinished(path)
        try:
            tried.write_bytes(b"x")
        except OSError as error:
            told = storage_error(path, error).message
            raise EquidpError(f"{told} Another place for MLflow's store is named by MLFLOW_TRACKING_URI.") from error
        finally:
            with suppress(OSError):
                tried.unlink()
        return
    try:
        with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE tried (here)")  # a read-only file grants the right, and refuses its use
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise EquidpError(
                f"MLflow's store {path} is damaged ({error}): put back a copy of it, or move it away for a new one."
            ) from error
        raise EquidpError(
            f"MLflow's store {path} cannot be written to ({error}): end the process that holds it, or make the file "
            "writable, or name another store as MLFLOW_TRACKING_URI."
        ) from error


def refusal(uri: str, error: Exception, consequence: str) -> EquidpError:
    """What to tell the user of a store that failed, `consequence` being a sentence.

    Raises:
        KeyboardInterrupt, SystemExit: where the store failed because it was interrupted.
    """
    interrupts.raise_hidden(error)
    return EquidpError(f"MLflow's store {uri} failed ({first_line(error)}). {consequence}")


def lose(error: Exception) -> None:
    """Keep all that is to be logged until the end: each further attempt would wait as long as this one did.

    Raises:
        KeyboardInterrupt, SystemExit: where the store failed because it was interrupted.
    """
    interrupts.raise_hidden(error)
    if not _current.lost:
        logger.warning(
            "MLflow's store failed (%s): the run goes on, and what is to be logged is written at its end.",
            first_line(error),
        )
    _current.lost = True


def lost() -> bool:
    """Whether the store has failed in this run."""
    return _current.lost


def catch_up() -> None:
    """Write what was kept, in its order, and the epochs that were not written yet.

    Raises:
        MlflowException: where the store still fails.
    """
    _write_rows()
    if _current.client is not None:
        while _current.held:
            run_id, entries = _current.held[0]
            _current.client.log_batch(run_id, **entries)
            del _current.held[0]


def log_epoch(algorithm: str, row: Mapping[str, float]) -> None:
    """Live figures of one epoch; the epoch is the step. Written once a second: a call costs as much as an epoch may."""
    figures, epoch = {k: v for k, v in row.items() if k != "epoch"}, int(row["epoch"])
    _current.epochs[algorithm] = max(epoch, _current.epochs.get(algorithm, 0))
    _current.live.setdefault(algorithm, set()).update(figures)
    _current.rows.setdefault(algorithm, []).extend(_metrics(figures, epoch))
    if time.monotonic() - _current.written >= SECONDS_BETWEEN_ROWS:
        _write_rows()


def log_metrics(algorithm: str, metrics: Mapping[str, float]) -> None:
    """Write a run's results, all at once (one call is about 20 times cheaper than one per metric).

    Those that epochs have given too end their curves: MLflow takes the latest value of the last step for the run's own.
    """
    live, last = _current.live.get(algorithm, set()), _current.epochs.get(algorithm, 0)
    ending = {name: value for name, value in metrics.items() if name in live}
    others = {name: value for name, value in metrics.items() if name not in live}
    _write_metrics(algorithm, [*_metrics(ending, last), *_metrics(others, 0)])


def log_params(algorithm: str, params: Mapping[str, Any]) -> None:
    """Write parameters to the algorithm's run."""
    names = numbered(params, slug)  # two names in other scripts may share a slug, and MLflow takes each once
    entries = [Param(names[name], str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in params.items()]
    for start in range(0, len(entries), BATCH):
        _write(algorithm, params=entries[start : start + BATCH])


def log_tags(algorithm: str, tags: Mapping[str, Any]) -> None:
    """Write tags to the algorithm's run."""
    _write(algorithm, tags=[RunTag(name, str(value)) for name, value in tags.items()])


def log_dataset(algorithm: str, name: str, fingerprint: str, folder: Path) -> None:
    """Say what the algorithm's run trains on, in MLflow's own terms; how many records it holds may be private.

    A store that fails is not asked again: the tags say the same.
    """
    run_id = _current.runs.get(algorithm)
    if _current.client is None or run_id is None or _current.lost:
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
    if _current.client is None or run_id is None:
        return
    if path.is_dir():
        _current.client.log_artifacts(run_id, str(path), folder)
    else:
        _current.client.log_artifact(run_id, str(path), folder)


def log_model(algorithm: str, weights: Path, statement: Iterable[Path] = ()) -> None:
    """Upload the model as pyfunc: a code file and safetensors, loadable as `runs:/<run id>/model`.

    Files of its privacy `statement` lie beside them, so that who is given the model is told its ε.
    """
    if algorithm not in _current.runs:
        return
    import mlflow.pyfunc  # late: it brings a second of imports

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        # a data frame of a dataset's own columns has no signature, and needs none
        with held_back("mlflow.pyfunc", below=logging.ERROR), _unchecked_requirements():
            mlflow.pyfunc.save_model(
                str(target),
                python_model=str(Path(__file__).with_name("served_model.py")),
                artifacts={"weights": weights.as_uri()},
                # stated, as guessing them would import the model in a process of its own
                pip_requirements=[f"equidp=={equidp.__version__}"],
            )
        _forget_paths(target)
        for path in statement:
            shutil.copy(path, target)
        log_artifact(algorithm, target, "model")


def _forget_paths(model: Path) -> None:
    """MLflow notes where code and weights lay on this machine; whoever is handed the model need not know."""
    from mlflow.models import Model

    saved = Model.load(str(model))
    kept = saved.flavors["python_function"]
    kept["model_code_path"] = Path(kept["model_code_path"]).name  # all of it that loading looks at
    for artifact in kept["artifacts"].values():
        artifact.pop("uri", None)
    saved.save(str(model / "MLmodel"))


@contextmanager
def _unchecked_requirements() -> Iterator[None]:
    """Spare the question whether this version of this package is installed: MLflow reads every package to answer it."""
    import mlflow.utils.environment as environment

    name = "warn_dependency_requirement_mismatches"
    check = getattr(environment, name, None)
    setattr(environment, name, lambda requirements: None)
    try:
        yield
    finally:
        setattr(environment, name, check)


def tracked() -> tuple[str, ...]:
    """Algorithms that have a run."""
    return tuple(_current.runs)


def _metrics(figures: Mapping[str, float], step: int) -> list[Metric]:
    now = get_current_time_millis()
    return [Metric(slug(name), float(value), now, step) for name, value in figures.items() if value is not None]


def _write_metrics(algorithm: str, entries: Sequence[Metric]) -> None:
    for start in range(0, len(entries), MOST_METRICS):
        _write(algorithm, metrics=entries[start : start + MOST_METRICS])


def _write_rows() -> None:
    """Write the epochs that have come in since the last time."""
    rows, _current.rows = _current.rows, {}
    for algorithm, entries in rows.items():
        _write_metrics(algorithm, entries)
    _current.written = time.monotonic()


def _write(algorithm: str, **entries: Any) -> None:
    run_id = _current.runs.get(algorithm)
    if _current.client is None or run_id is None:
        return
    if not _current.lost:
        try:
            _current.client.log_batch(run_id, **entries)
        except FAILURES as error:
            lose(error)
    if _current.lost:
        _current.held.append((run_id, entries))


def slug(name: str) -> str:
    """A name MLflow accepts: other characters become `_`, and it leads nowhere, as MLflow takes names for paths.

    A column's name may be a whole question of a form: what is too long is cut.
    """
    parts = REFUSED.sub("_", name).split("/")
    whole = "/".join(part if part.strip(".") else "_" for part in parts)
    return whole if len(whole) <= LONGEST_KEY else whole[:LONGEST_KEY].rstrip("./")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, as kedro-mlflow does it."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
