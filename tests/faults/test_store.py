"""MLflow's store held by another process: refused at the start; later, no training is lost, and the end says so."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_param
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError
from tests.end_to_end.kedro_project import QUICK, kedro_run, mlflow_runs, read_json, report_folder

from equidp.errors import EquidpError
from equidp.hooks import guard, runs, store
from equidp.hooks import print as prints
from equidp.pipelines.training import nodes

FILES = {"metrics.json", "privacy.json", "history.parquet", "report.html"}


class Lock:
    """An exclusive lock on the project's store, by a connection of its own; once given back, it is not taken again."""

    def __init__(self, project: Path) -> None:
        self._database = sqlite3.connect(project / "mlflow.db", isolation_level=None)
        self._over = False

    def take(self) -> None:
        if not (self._over or self._database.in_transaction):
            self._database.execute("BEGIN EXCLUSIVE")

    def give_back(self) -> None:
        self._over = True
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")


@pytest.fixture
def lock(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lock]:
    """The lock, and a tenth of a second instead of ten or twenty to wait for it."""

    def impatient(connection, cursor, statement, parameters, context, many):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 100"), parameters

    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    event.listen(Engine, "before_cursor_execute", impatient, retval=True)
    held = Lock(project)
    yield held
    held.give_back()
    event.remove(Engine, "before_cursor_execute", impatient)


@pytest.fixture
def locked_in_training(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """Taken when the first epoch is about to be logged."""
    log_epoch = runs.log_epoch

    def take_and_log(*row):
        lock.take()
        log_epoch(*row)

    monkeypatch.setattr(runs, "log_epoch", take_and_log)
    return lock


def test_a_locked_store_is_refused_before_anything_runs(project, lock):
    lock.take()
    with pytest.raises(EquidpError, match=r"mlflow\.db cannot be written to \(database is locked\)") as caught:
        kedro_run(project, "dpsgd", **QUICK)
    assert "\n" not in caught.value.message
    assert not (project / "data" / "08_reporting").exists()


def test_a_file_that_is_no_database_is_refused(project):
    (project / "mlflow.db").write_bytes(b"something else entirely" * 100)
    with pytest.raises(EquidpError, match=r"mlflow\.db is damaged \(file is not a database\): put back"):
        kedro_run(project, "dpsgd", **QUICK)


def test_a_read_only_store_is_refused_before_anything_runs(project, monkeypatch):
    kedro_run(project, "ingestion")
    connect = sqlite3.connect  # root may write to any file: here it may not
    monkeypatch.setattr(sqlite3, "connect", lambda path, **how: connect(f"file:{path}?mode=ro", uri=True, **how))
    with pytest.raises(EquidpError, match=r"mlflow\.db cannot be written to \(attempt to write a readonly database\)"):
        store.check_store(f"sqlite:///{project / 'mlflow.db'}")


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://127.0.0.1:99999", r"http://127\.0\.0\.1:99999 is no address of an MLflow store \(Port out of range"),
        ("http://[::1", r"\[::1 is no address of an MLflow store \("),
        ("mysql+nothere://a:secret@b/c", r"mysql\+nothere://a:\*\*\*@b/c failed"),
        (
            "postgresql://a:secret@b/c",
            r"postgresql://a:.* needs psycopg, which .* begin with postgresql\+psycopg2://\.",
        ),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_in_a_sentence(uri, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)  # SQLAlchemy's own choice, which the extra does not bring
    settings = {"experiment": {"name": "equidp", "create_experiment_kwargs": {}}}
    config = {"mlflow": {"server": {"mlflow_tracking_uri": uri, "credentials": None}, "tracking": settings}}
    with pytest.raises(EquidpError, match=words) as refused:
        store.connect(config)
    assert "secret" not in refused.value.message


class Answering(BaseHTTPRequestHandler):
    """A server that has one answer to everything."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (HTTPStatus.SERVICE_UNAVAILABLE, r"to http://me:\*\*\*@.*too many 503"),
        (HTTPStatus.UNAUTHORIZED, r"asks for a login, .* MLFLOW_TRACKING_USERNAME and .* server\.credentials"),
    ],
)
def test_a_server_that_refuses_is_told_without_the_password_in_its_address(status, words, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "false")
    monkeypatch.setattr(Answering, "status", status)
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://me:secret@127.0.0.1:{server.server_port}"
        experiment = {"name": "equidp", "create_experiment_kwargs": {}}
        of = {"server": {"mlflow_tracking_uri": uri, "credentials": None}, "tracking": {"experiment": experiment}}
        with pytest.raises(EquidpError, match=words) as refused:
            store.connect({"mlflow": of})
        server.shutdown()
    assert "secret" not in refused.value.message
    # nor does MLflow print it behind each run
    assert os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] == "true"


@pytest.mark.parametrize("place", ["127.0.0.1:{}", "127.0.0.1"])
def test_a_database_that_does_not_answer_is_refused_before_mlflow_tries_it(place, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setitem(sys.modules, "psycopg2", SimpleNamespace(__version__="2.9"))
    monkeypatch.setitem(store.DATABASE_PORTS, "postgresql", port)
    monkeypatch.setattr(store, "make_store", lambda *_: pytest.fail("MLflow tried it"))
    uri = f"postgresql+psycopg2://a:secret@{place.format(port)}/c"
    config = {"mlflow": {"server": {"mlflow_tracking_uri": uri, "credentials": None}, "tracking": {"experiment": {}}}}
    with pytest.raises(EquidpError, match=r"server at postgresql.*a:\*\*\*@.* does not answer \(.*refused\)"):
        store.connect(config)


def test_a_full_disk_below_the_store_is_told(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def full(path, **how):
        database = connect(path, **how)
        database.execute("PRAGMA max_page_count = 1")
        return database

    connect(tmp_path / "mlflow.db").execute("CREATE TABLE t (x)").connection.close()
    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(EquidpError, match=r"mlflow\.db: the disk is full; free some space"):
        store.check_store(f"sqlite:///{tmp_path / 'mlflow.db'}")


def test_a_user_without_a_home_is_refused_in_a_sentence(project, monkeypatch):
    def none(*_) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(EquidpError, match=r"no home folder: HOME is not set, .* Set HOME to a folder"):
        kedro_run(project, "ingestion")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_path_that_the_locale_reads_wrongly_is_refused_in_a_sentence(encoding, monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode(encoding, "surrogateescape"))
    read = "/Ü".encode().decode(encoding, "surrogateescape")
    with pytest.raises(EquidpError, match=r"letters that are not read as UTF-8 here: set PYTHONUTF8=1"):
        guard._refuse_undecoded(Path(read))
    guard._refuse_undecoded(Path("/U"))


def test_a_path_of_any_letters_is_taken_where_they_are_utf_8():
    guard._refuse_undecoded(Path("/Ünï cödé"))


def test_the_reason_is_told_and_not_a_remark_in_front_of_it():
    remark = "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block)"
    assert "disk is full" in str(store.refusal("x", OSError(f"{remark}\n(sqlite3) disk is full\n[SQL: …]"), "").message)


def test_a_database_that_fills_the_disk_says_what_to_do():
    """It stopped at "database or disk is full" where the store was being made."""
    with create_engine("sqlite://").connect() as database:
        database.exec_driver_sql("PRAGMA max_page_count = 1")
        with pytest.raises(OperationalError) as full:
            database.exec_driver_sql("CREATE TABLE t (x)")
    said = store.refusal("sqlite:///mlflow.db", full.value, "Nothing was run.").message
    assert said == "MLflow's store sqlite:///mlflow.db failed (the disk is full; free some space). Nothing was run."


def test_an_empty_address_of_the_store_is_refused_by_its_name():
    """MLflow takes it for a folder, and told of a file store that nobody had asked for."""
    with pytest.raises(EquidpError, match=r"address .* is empty: unset MLFLOW_TRACKING_URI"):
        store.check_store("")


def test_a_full_folder_of_artifacts_is_not_taken_for_the_database():
    """MLflow's store sqlite:///… failed, said a run whose folder of artifacts is on another disk, which was full."""
    full = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
    said = store.refusal("sqlite:///mlflow.db", full, "All results are on disk.").message
    assert said == (
        "MLflow's artifacts of this run cannot be written: the disk is full; free some space. All results are on disk."
    )


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes every call and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_why_a_server_does_not_answer_is_told_in_a_few_words(silent, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    gone = "http://127.0.0.1:1"
    for address, words in ((gone, "Connection refused"), (silent, "timed out")):
        with pytest.raises(MlflowException) as failed:
            mlflow.MlflowClient(address).search_experiments()
        assert store.reason(failed.value) == f"the server does not answer: {words}"
    assert store.reason(OSError("no answer at all")) == "OSError: no answer at all"


def test_a_server_that_has_just_failed_is_not_waited_for_again(monkeypatch):
    """Each of four attempts would take half a minute, for nothing but the word that the run has failed."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    asked = []

    def end_run(status: str) -> None:
        asked.append({name: os.environ[name] for name in store.ONCE})
        raise MlflowException("no answer")

    monkeypatch.setattr(mlflow, "active_run", lambda: SimpleNamespace(info=None))
    monkeypatch.setattr(mlflow, "end_run", end_run)
    monkeypatch.setattr(runs, "_current", runs.Tracking(ours=True))
    runs.abandon()
    assert asked == [store.ONCE]
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"


def test_a_folder_without_room_for_a_store_is_refused_at_once(project, monkeypatch):
    def refuse(*_, **__) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(EquidpError, match=r"Cannot write .*other\.db: writing there is not .* MLFLOW_TRACKING_URI"):
        store.check_store(f"sqlite:///{project / 'other.db'}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_leaves_a_sentence_and_no_half_file(project):
    groups = report_folder(project, "ingestion") / "groups.csv"
    groups.parent.mkdir(parents=True)
    groups.symlink_to("/dev/full")
    with pytest.raises(EquidpError, match=r"Cannot write .*groups\.csv: the disk is full; free some space") as caught:
        kedro_run(project, "ingestion")
    assert "\n" not in caught.value.message
    assert not groups.is_symlink()


@pytest.mark.slow
def test_a_store_locked_for_a_while_misses_nothing(project, locked_in_training, monkeypatch, caplog):
    printed = prints.print_results
    monkeypatch.setattr(prints, "print_results", lambda *given: (locked_in_training.give_back(), printed(*given)))
    logging.getLogger("equidp").propagate = True
    with caplog.at_level(logging.WARNING, "equidp"):
        kedro_run(project, "dpsgd", **QUICK)

    assert [record.message for record in caplog.records if "MLflow's store failed" in record.message] == [
        "MLflow's store failed (MlflowException: (sqlite3.OperationalError) database is locked): the run goes on, and "
        "what is to be logged is written at its end."
    ]
    (run,) = mlflow_runs(project)
    assert run.info.status == "FINISHED"
    logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, "noise_multiplier")
    assert [metric.step for metric in logged] == [1, 2]
    assert "cost_of_privacy/accuracy" in run.data.metrics


@pytest.mark.slow
def test_a_run_whose_output_cannot_be_printed_is_logged_and_finished(project, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prints, "print_results", full)
    logging.getLogger("equidp").propagate = True
    with caplog.at_level(logging.WARNING, "equidp"):
        kedro_run(project, "dpsgd", **QUICK)
    assert "The results could not be printed ([Errno 28] No space left on device)" in caplog.text
    assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED"]


@pytest.mark.slow
def test_a_store_locked_to_the_end_loses_no_result(project, locked_in_training, capsys):
    with pytest.raises(EquidpError, match=r"database is locked\)\. All results are on disk, .* resume=true") as caught:
        kedro_run(project, "dpsgd", **QUICK)
    assert "\n" not in caught.value.message
    assert "dpsgd.report: " in capsys.readouterr().out
    folder = report_folder(project, "dpsgd")
    assert {path.name for path in folder.iterdir()} >= FILES
    assert mlflow.active_run() is None
    assert not list(project.rglob("*.part"))
    first = read_json(folder / "metrics.json")

    locked_in_training.give_back()
    kedro_run(project, "dpsgd", **QUICK, resume=True)
    assert read_json(folder / "metrics.json") == first
    unfinished, finished = mlflow_runs(project)
    assert unfinished.info.status != "FINISHED"
    assert finished.info.status == "FINISHED"
    assert finished.data.metrics["test/accuracy"] == first["overall"]["accuracy"]
    assert not list(project.rglob("checkpoint.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("pipelines", [("dpsgd",), ("dpsgd", "naive")], ids=["one run", "parent and children"])
def test_a_locked_store_does_not_hide_why_a_run_failed(project, lock, monkeypatch, pipelines, caplog):
    def refuse(*_, **__):
        lock.take()
        raise EquidpError("This is the reason.")

    monkeypatch.setattr(nodes, "train_model", refuse)
    logging.getLogger("equidp").propagate = True
    with caplog.at_level(logging.WARNING, "equidp"), pytest.raises(EquidpError, match=r"^This is the reason\.$"):
        kedro_run(project, *pipelines, **QUICK)
    assert mlflow.active_run() is None
    (told,) = [record.message for record in caplog.records if "MLflow's store" in record.message]
    assert told.endswith("database is locked): there this run stays open.")  # it does not go on


def test_settings_of_one_slug_are_all_kept(monkeypatch):
    """Names in other scripts: MLflow refuses a second value for one name, and with it all the others."""
    kept = {}
    monkeypatch.setattr(
        runs, "write", lambda algorithm, kind, params: kept.update({entry.key: entry.value for entry in params})
    )
    runs.log_params("dpsgd", {"性別": 1, "年齢": 2, "age [y]": 3, "age (y)": 4})
    assert sorted(kept.values()) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("column", ["w//o", "a/../../b", "a/.", "..", "What is " + "your age? " * 40, "x/" * 200])
def test_whatever_a_column_is_called_its_settings_are_kept(monkeypatch, column):
    """MLflow takes names for paths, of 250 letters at most; by one that it refuses the whole run would be lost."""
    kept = []
    monkeypatch.setattr(runs, "write", lambda algorithm, kind, params: kept.extend(params))
    runs.log_params("dpsgd", {f"data.options.features.{column}.{n}": n for n in ("kind", "categories")})
    assert len({entry.key for entry in kept}) == 2
    for entry in kept:
        _validate_param(entry.key, entry.value)
