"""A sweep over real servers: MLflow on PostgreSQL and two Dask workers, processes of their own on loopback."""

from __future__ import annotations

import pytest
import servers

from equidp.errors import first_line, without_password


@pytest.mark.slow
@pytest.mark.skipif(servers.missing() is not None, reason=str(servers.missing()))
def test_each_cell_of_a_sweep_over_two_dask_workers_is_finished_once_in_postgresql() -> None:
    result = servers.measured()
    assert servers.once_each(result), result


def test_a_machine_without_postgresql_is_told_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(servers, "programs", lambda: None)
    assert servers.main() == 2
    assert "apt-get install postgresql" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql+psycopg2://mlflow:a/b@c@host:5432/mlflow", "postgresql+psycopg2://mlflow:***@host:5432/mlflow"),
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("http://host:5000", "http://host:5000"),
        ("postgresql://me@corp:secret@host/mlflow", "postgresql://me@corp:***@host/mlflow"),
        ("postgresql://host/mlflow?user=me&password=s%3Dt&a=b", "postgresql://host/mlflow?user=me&password=***&a=b"),
        (
            "mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dst%3BA%3Db",
            "mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3D***%3BA%3Db",
        ),
        ("sqlite:////study/a:b@c/mlflow.db", "sqlite:////study/a:b@c/mlflow.db"),
    ],
)
def test_a_message_shows_a_stores_address_without_its_password(address: str, shown: str) -> None:
    assert without_password(address) == shown
    assert first_line(OSError(f"{address}/get-by-name: no, a@b")) == f"OSError: {shown}/get-by-name: no, a@b"
