"""`kedro ui` names the views' addresses, and leaves no process behind."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from equidp.errors import EquidpError
from equidp.hooks import ui

SERVER = "import subprocess, time\nsubprocess.Popen(['sleep', '300'])\nprint('up', flush=True)\ntime.sleep(300)"
"""A server with a worker of its own, which does not end with it."""


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_a_server_ends_with_the_workers_that_it_has_started() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    assert server.stdout.readline() == b"up\n"
    ui._end(server)
    # the worker holds the other end of the pipe as long as it lives
    assert server.stdout.read() == b""
    server.stdout.close()
    assert server.returncode is not None


def test_of_a_server_elsewhere_the_addresses_are_told_and_nothing_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a server was started"))
    assert ui.serve("http://me:secret@mlflow.example.org:5000", "7", "127.0.0.1", 5000) == 0
    runs, means, charts = capsys.readouterr().out.splitlines()
    assert means.endswith(": http://mlflow.example.org:5000/#/experiments/7/runs?viewStateShareKey=equidp-means")
    assert charts.endswith("equidp-means&compareRunsMode=CHART")
    assert runs.endswith("equidp-runs")


def test_where_another_process_serves_no_address_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of the other one's runs, and MLflow's own words for the reason came after it."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a server was started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EquidpError, match=rf"^Port {port} of 127.0.0.1 is taken.*kedro ui --port"):
            ui.serve("sqlite:///mlflow.db", "7", "127.0.0.1", port)
    assert capsys.readouterr().out == ""
