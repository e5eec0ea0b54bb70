"""Which MLflow run belongs to which algorithm, and what is written there.

A single algorithm has the run that kedro-mlflow opened, with the baseline's figures as `baseline/…`. Several algorithms
have one child run each, written through `MlflowClient` alone: the fluent API knows only one active run.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.utils.time import get_current_time_millis
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

import equidp
from equidp.errors import EquidpError

PORTS = {"http": 80, "https": 443}

REFUSED = re.compile(r"[^\w\-./: ]", re.ASCII)
"""Characters MLflow refuses in names."""

BATCH = 100
"""MLflow takes at most so many params at once."""


@dataclass
class Tracking:
    """The open runs of this process. `runs` maps an algorithm to its run; algorithms without one are not logged."""

    client: MlflowClient | None = None
    runs: dict[str, str] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)


_current = Tracking()


def open_runs(client: MlflowClient, runs: Mapping[str, str], children: Iterable[str] = ()) -> None:
    """Set the runs that nodes write to."""
    _current.client, _current.runs, _current.children = client, dict(runs), list(children)


def close_runs(status: str) -> None:
    """Terminate the child runs; forget all."""
    if _current.client is not None:
        for run_id in _current.children:
            _current.client.set_terminated(run_id, status)
    forget_runs()


def forget_runs() -> None:
    """No run is written to from here on."""
    _current.client, _current.runs, _current.children = None, {}, []


def check_server(uri: str) -> None:
    """Refuse a tracking server that does not answer, before MLflow's client has retried for minutes.

    Raises:
        EquidpError: naming the address.
    """
    address = urlparse(uri)
    if address.scheme not in ("http", "https") or address.hostname is None:
        return
    try:
        socket.create_connection((address.hostname, address.port or PORTS[address.scheme]), timeout=5).close()
    except OSError as error:
        raise EquidpError(
            f"The MLflow server at {uri} does not answer ({error}): start it, or take the project's own store by "
            "unsetting MLFLOW_TRACKING_URI and mlflow_tracking_uri in conf/local/mlflow.yml."
        ) from error


def log_epoch(algorithm: str, row: Mapping[str, float]) -> None:
    """Live figures of one epoch; the epoch is the step."""
    log_metrics(algorithm, {k: v for k, v in row.items() if k != "epoch"}, step=int(row["epoch"]))


def log_metrics(algorithm: str, metrics: Mapping[str, float], *, step: int = 0) -> None:
    """Write metrics to the algorithm's run, all at once (one call is about 20 times cheaper than one per metric)."""
    now = get_current_time_millis()
    entries = [Metric(slug(name), float(value), now, step) for name, value in metrics.items() if value is not None]
    _write(algorithm, metrics=entries)


def log_params(algorithm: str, params: Mapping[str, Any]) -> None:
    """Write parameters to the algorithm's run."""
    entries = [Param(slug(name), str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in params.items()]
    for start in range(0, len(entries), BATCH):
        _write(algorithm, params=entries[start : start + BATCH])


def log_tags(algorithm: str, tags: Mapping[str, Any]) -> None:
    """Write tags to the algorithm's run."""
    _write(algorithm, tags=[RunTag(name, str(value)) for name, value in tags.items()])


def log_artifact(algorithm: str, path: Path, folder: str | None = None) -> None:
    """Upload a file, or all files of a folder."""
    run_id = _current.runs.get(algorithm)
    if _current.client is None or run_id is None:
        return
    if path.is_dir():
        _current.client.log_artifacts(run_id, str(path), folder)
    else:
        _current.client.log_artifact(run_id, str(path), folder)


def log_model(algorithm: str, weights: Path) -> None:
    """Upload the model as pyfunc: a code file and safetensors, loadable as `runs:/<run id>/model`."""
    if algorithm not in _current.runs:
        return
    import mlflow.pyfunc  # late: it brings a second of imports

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar for one small file
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        mlflow.pyfunc.save_model(
            str(target),
            python_model=str(Path(__file__).with_name("served_model.py")),
            artifacts={"weights": weights.as_uri()},
            # stated, as guessing them would import the model in a process of its own
            pip_requirements=[f"equidp=={equidp.__version__}"],
        )
        log_artifact(algorithm, target, "model")


def tracked() -> tuple[str, ...]:
    """Algorithms that have a run."""
    return tuple(_current.runs)


def _write(algorithm: str, **entries: Any) -> None:
    run_id = _current.runs.get(algorithm)
    if _current.client is not None and run_id is not None:
        _current.client.log_batch(run_id, **entries)


def slug(name: str) -> str:
    """A name MLflow accepts: other characters become `_`."""
    return REFUSED.sub("_", name)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, as kedro-mlflow does it."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
