"""Store: checks MLflow's store, makes the project's own one, and explains a store that fails."""

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
"""Errors of a failing store. MLflow does not wrap some of SQLAlchemy's errors."""

UNANSWERED = (ConnectionError, TimeoutError, socket.gaierror)
"""Errors of the system if a server is gone or hangs."""

LOCK_SECONDS = 10.0
"""The most seconds that a run waits, at its start, for another process that holds the project's store."""

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # by MLflow's default a dead server would cost minutes in every epoch
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # there would be a bar for every small file
}
"""MLflow's variables, unless the user has set them."""

ONCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""MLflow's variables for a request to a server that has just failed, if the request may fail."""


def connect(config: AbstractConfigLoader) -> str:
    """Point MLflow at the store and the experiment of mlflow.yml, and make them if they are missing.

    Returns:
        The experiment's id.

    Raises:
        EquidpError: the store cannot be used.
    """
    settings = config["mlflow"]
    uri = settings["server"]["mlflow_tracking_uri"]
    os.environ.update(_credentials(config, settings["server"]["credentials"]))
    if without_password(uri) != uri:
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # MLflow would print the password after each run
    check_store(uri)
    try:
        _check_database(uri)
        make_store(uri, settings["tracking"]["experiment"])
        mlflow.set_tracking_uri(uri)
        return _chosen(settings["tracking"]["experiment"])
    except FAILURES as error:
        raise refusal(uri, error, "Nothing was run.") from error
    except ModuleNotFoundError as error:  # the database's driver; SQLAlchemy's default one is not that of the extra
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
    """Refuse an experiment whose artifacts go to another local folder than configured, which MLflow cannot change.

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
    """Refuse a local folder of artifacts that cannot be written to: otherwise this shows only after the training."""
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
    """Refuse a store that cannot be written to, because MLflow's client would retry for minutes.

    Raises:
        EquidpError: the store cannot be written to; the message names the address or the file.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not uri:  # MLflow would take it for a folder
        raise EquidpError(
            "The address of MLflow's store is empty: unset MLFLOW_TRACKING_URI, or mlflow_tracking_uri in "
            "conf/local/mlflow.yml, to take the project's own store, or name another."
        )
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
    """Refuse a database server that does not answer, because MLflow would try for a hundred seconds without a message.

    Raises:
        ModuleNotFoundError: the database's driver is not installed.
        EquidpError: the server does not answer.
    """
    port = DATABASE_PORTS.get(urlparse(uri).scheme.partition("+")[0])
    if port is None:
        return
    address = make_url(uri)
    address.get_dialect().import_dbapi()
    if address.host and not address.host.startswith("/"):  # "/…" is the folder of a socket
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
    """Make the project's database, if it does not exist. It gets its name only once it is complete.

    MLflow would make its tables one by one under the final name. If two first runs came at once, or a first run were
    stopped, this run and every later one would fail.

    Args:
        uri: the store's address.
        experiment: settings of the experiment in mlflow.yml.
    """
    path = _database_file(uri)
    if path is None or path.exists():
        return
    part = unfinished(path)
    asked = experiment.get("create_experiment_kwargs") or {}
    tags = [ExperimentTag(key, value) for key, value in (asked.get("tags") or {}).items()]
    try:
        location = make_url(uri).set(database=str(part)).render_as_string(hide_password=False)
        if uri.endswith(path.name):  # keep the address as the user wrote it: of a quoted path MLflow makes odd folders
            location = uri.removesuffix(path.name) + part.name
        store = SqlAlchemyStore(location, DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store.create_experiment(experiment["name"], asked.get("artifact_location"), tags)
        store.engine.dispose()
        # unlike a renaming, a link does not replace a file that another run has made meanwhile; if the file system has
        # no links, MLflow makes the database
        with suppress(OSError):
            path.hardlink_to(part)
    finally:
        part.unlink(missing_ok=True)


def _database_file(uri: str) -> Path | None:
    """Return the path of an SQLite store, which may not exist; None for other stores."""
    if not urlparse(uri).scheme.startswith("sqlite"):
        return None
    database = make_url(uri).database
    return Path(database) if database else None


def _check_file(path: Path) -> None:
    """Refuse a database that cannot be written to; or its folder, if the database does not exist yet."""
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
            database.execute("CREATE TABLE tried (here)")  # a read-only file allows BEGIN, but refuses this
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
    """Return why a store failed, in a few words; MLflow and its libraries use many words for a server that is gone."""
    if isinstance(error, MlflowException) and error.get_http_status_code() == HTTPStatus.UNAUTHORIZED:
        return (
            "the server asks for a login, or refuses this one: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or name them by server.credentials in conf/local/mlflow.yml"
        )
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, UNANSWERED):
        if getattr(inner, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return REFUSALS[errno.ENOSPC]
        inner = inner.__cause__ or inner.__context__
    if inner is None:
        return first_line(error)
    return f"the server does not answer: {getattr(inner, 'strerror', None) or inner}"


def refusal(uri: str, error: Exception, consequence: str) -> EquidpError:
    """Return the refusal for a store that failed; `consequence` is a sentence that is added.

    Raises:
        KeyboardInterrupt, SystemExit: the store failed because it was interrupted.
    """
    interrupts.raise_hidden(error)
    if isinstance(error, OSError) and (why := REFUSALS.get(error.errno or 0)):  # databases raise other errors
        return EquidpError(f"MLflow's artifacts of this run cannot be written: {why}. {consequence}")
    return EquidpError(f"MLflow's store {without_password(uri)} failed ({reason(error)}). {consequence}")
