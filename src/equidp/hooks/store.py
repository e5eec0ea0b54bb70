"""MLflow's store: whether it can be written to, making the project's own, and what is said of one that fails."""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import mlflow
from kedro.config import AbstractConfigLoader
from mlflow import MlflowClient
from mlflow.entities import Experiment, ExperimentTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from equidp.errors import EquidpError, first_line, without_password
from equidp.hooks.views import add_views
from equidp.system import interrupts
from equidp.system.files import REFUSALS, refused, storage_error, unfinished

PORTS = {"http": 80, "https": 443}
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306}

FAILURES = (MlflowException, SQLAlchemyError)
"""What a failing store raises: MLflow lets some of SQLAlchemy's errors through as they are."""

UNANSWERED = (ConnectionError, TimeoutError, socket.gaierror)
"""What the system raises of a server that is gone, or hangs."""

LOCK_SECONDS = 10.0
"""Seconds that another process may hold the project's store at a run's start."""

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # MLflow's own would wait for a server that died for minutes, every epoch
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # a bar for every small file
}
"""How MLflow behaves unless its user has set something else."""

ONCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""How it asks a server that has just failed, for what can do without an answer."""


def connect(config: AbstractConfigLoader) -> str:
    """Point MLflow at the store and the experiment of mlflow.yml, and make them where they are missing.

    Returns:
        The experiment's id.

    Raises:
        EquidpError: a store that cannot be used.
    """
    settings = config["mlflow"]
    uri = settings["server"]["mlflow_tracking_uri"]
    os.environ.update(_credentials(config, settings["server"]["credentials"]))
    if without_password(uri) != uri:
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # MLflow would print the password behind each run
    check_store(uri)
    try:
        _check_database(uri)
        make_store(uri, settings["tracking"]["experiment"])
        mlflow.set_tracking_uri(uri)
        return _chosen(settings["tracking"]["experiment"])
    except FAILURES as error:
        raise refusal(uri, error, "Nothing was run.") from error
    except ModuleNotFoundError as error:  # the database's driver; SQLAlchemy's own choice is not the extra's
        install = "install its driver"
        if urlparse(uri).scheme.startswith("postgres"):
            install = "pip install 'equidp[postgres]', and let the address begin with postgresql+psycopg2://"
        raise EquidpError(
            f"MLflow's store {without_password(uri)} needs {error.name}, which is not here: {install}."
        ) from error


def _chosen(experiment: Mapping[str, Any]) -> str:
    client = MlflowClient()
    found = client.get_experiment_by_name(experiment["name"])
    if found is None:
        client.create_experiment(experiment["name"], **experiment["create_experiment_kwargs"])
    else:
        _refuse_elsewhere(found, experiment["create_experiment_kwargs"].get("artifact_location"))
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
    chosen = mlflow.set_experiment(experiment["name"])
    _refuse_unwritable(chosen)
    add_views(client, chosen)
    return chosen.experiment_id


def _refuse_elsewhere(found: Experiment, wanted: str | None) -> None:
    """Refuse an experiment whose artifacts go to another local folder than configured: MLflow keeps that for ever.

    A project that was moved or copied would write models and exact figures into its old place.
    """
    places = [urlparse(uri) for uri in (found.artifact_location, wanted or "")]
    if any(place.scheme != "file" for place in places):
        return
    old, new = (Path(url2pathname(place.path)) for place in places)
    if old.resolve() != new.resolve():
        raise EquidpError(
            f"Experiment {found.name!r} keeps its artifacts in {old}, and not in {new}, as is configured: was the "
            "project moved or copied, or is the experiment another project's on the same server? MLflow cannot change "
            "that. Move it back, or name another experiment in conf/local/mlflow.yml (tracking: {experiment: {name: "
            "…}}). Nothing was run."
        )


def _refuse_unwritable(experiment: Experiment) -> None:
    """Refuse a local folder of artifacts that nothing can be written to: it would be found after the training."""
    place = urlparse(experiment.artifact_location)
    folder = Path(url2pathname(place.path))
    if place.scheme == "file" and (error := refused(folder)):
        raise storage_error(folder, error)


def _credentials(config: AbstractConfigLoader, name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    known = config["credentials"]
    if name not in known:
        raise EquidpError(f"mlflow.yml: server.credentials names {name!r}, which conf/local/credentials.yml lacks.")
    return {key: str(value) for key, value in known[name].items()}


def check_store(uri: str) -> None:
    """Refuse a store that cannot be written to, before MLflow's client has retried for minutes.

    Raises:
        EquidpError: naming the address or the file.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        address = urlparse(uri)
        port = address.port or PORTS.get(address.scheme)
    except ValueError as error:
        raise EquidpError(f"{without_password(uri)} is no address of an MLflow store ({error}): correct it.") from error
    if path := _database_file(uri):
        _check_file(path)
    if port is None or address.scheme not in PORTS or address.hostname is None:
        return
    _refuse_silent(uri, address.hostname, port)


def _check_database(uri: str) -> None:
    """Refuse a database's server that does not answer, which MLflow would try for a hundred seconds without a word.

    Raises:
        ModuleNotFoundError: without its driver.
    """
    port = DATABASE_PORTS.get(urlparse(uri).scheme.partition("+")[0])
    if port is None:
        return
    address = make_url(uri)
    address.get_dialect().import_dbapi()
    if address.host and not address.host.startswith("/"):  # a socket's folder
        _refuse_silent(uri, address.host, address.port or port)


def _refuse_silent(uri: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise EquidpError(
            f"The MLflow server at {without_password(uri)} does not answer ({error}): start it, or take the project's "
            "own store by unsetting MLFLOW_TRACKING_URI and mlflow_tracking_uri in conf/local/mlflow.yml."
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
        if uri.endswith(path.name):  # as it was written: MLflow makes the folders of a quoted path, quotes and all
            location = uri.removesuffix(path.name) + part.name
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
            refused = storage_error(path, error).message
            raise EquidpError(f"{refused} Another place for MLflow's store is named by MLFLOW_TRACKING_URI.") from error
        finally:
            with suppress(OSError):
                tried.unlink()
        return
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TABLE tried (here)")  # a read-only file grants the right, and refuses its use
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise EquidpError(
                f"MLflow's store {path} is damaged ({error}): put back a copy of it, or move it away for a new one."
            ) from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise storage_error(path, OSError(errno.ENOSPC, str(error))) from error
        raise EquidpError(
            f"MLflow's store {path} cannot be written to ({error}): end the process that holds it, or make the file "
            "and its folder writable, or name another store as MLFLOW_TRACKING_URI."
        ) from error


def reason(error: BaseException) -> str:
    """Why a store failed, in a few words; around a server that is gone MLflow and its libraries put many."""
    if isinstance(error, MlflowException) and error.get_http_status_code() == HTTPStatus.UNAUTHORIZED:
        return (
            "the server asks for a login, or refuses this one: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or name them by server.credentials in conf/local/mlflow.yml"
        )
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, UNANSWERED):
        inner = inner.__cause__ or inner.__context__
    if inner is None:
        return first_line(error)
    return f"the server does not answer: {getattr(inner, 'strerror', None) or inner}"


def refusal(uri: str, error: Exception, consequence: str) -> EquidpError:
    """What to tell the user of a store that failed, `consequence` being a sentence.

    Raises:
        KeyboardInterrupt, SystemExit: where the store failed because it was interrupted.
    """
    interrupts.raise_hidden(error)
    if isinstance(error, OSError) and (why := REFUSALS.get(error.errno or 0)):  # a database has errors of its own
        return EquidpError(f"MLflow's artifacts of this run cannot be written: {why}. {consequence}")
    return EquidpError(f"MLflow's store {without_password(uri)} failed ({reason(error)}). {consequence}")
