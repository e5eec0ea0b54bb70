"""Machines: what a terminal does to the processes of a sweep."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

from equidp.sweep.cluster import Machines
from equidp.sweep.signals import deaf_to_ctrl_c

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"


def test_what_a_sweep_starts_does_not_hear_ctrl_c_and_it_does_again() -> None:
    with deaf_to_ctrl_c():
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert child.poll() is None
    child.kill()
    child.communicate()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_dask_starts_its_workers_so(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def local(_: Machines) -> None:
        heard.append(signal.getsignal(signal.SIGINT))
        raise RuntimeError("far enough")

    monkeypatch.setattr(Machines, "_local", local)
    with pytest.raises(RuntimeError, match="far enough"), Machines(workers=1).connect():
        pass
    assert heard == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_busy_dashboard_port_is_no_cause_for_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with Machines(workers=1, dashboard=port).connect() as client:
            assert f":{port}/" not in client.dashboard_link
    assert not [one for one in recwarn if "already in use" in str(one.message)]
