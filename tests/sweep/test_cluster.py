"""The cluster of a sweep: its processes, its dashboard, and what a terminal sends to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from distributed import Client, Nanny
from distributed.core import Status

from equidp.errors import EquidpError
from equidp.sweep import cluster
from equidp.sweep.cluster import Cluster
from equidp.system.interrupts import handling

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"


def test_what_a_sweep_starts_does_not_hear_ctrl_c_and_it_does_again() -> None:
    with handling(signal.SIG_IGN, signal.SIGINT):
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

    def local(_: Cluster) -> None:
        heard.append(signal.getsignal(signal.SIGINT))
        raise RuntimeError("far enough")

    monkeypatch.setattr(Cluster, "_local", local)
    with pytest.raises(RuntimeError, match="far enough"), Cluster(workers=1).connect():
        pass
    assert heard == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_worker_that_is_killed_while_it_starts_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Nanny):
        async def start_unsafe(self) -> Killed:
            raise RuntimeError("Nanny failed to start worker process")

    monkeypatch.setattr(cluster, "Nanny", Killed)
    with pytest.raises(EquidpError, match=r"workers could not be started \(.*: Nanny failed to start worker process\)"):
        Cluster(workers=1).connect().__enter__()


@pytest.mark.xfail(
    sys.version_info >= (3, 14),
    reason="a broken connection of a worker is told of the scheduler too (github.com/python/cpython/issues/148594)",
    strict=False,
)
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")  # Dask's
@pytest.mark.slow
@pytest.mark.parametrize(("how", "fails"), [("given up", {2, 3}), ("forgotten", {2})])
def test_a_worker_that_cannot_be_started_again_is_replaced(
    how: str, fails: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dask closes one whose process fails as it starts again, and forgets one that takes long for it."""
    started: list[int] = []

    class Failing(Nanny):
        async def instantiate(self) -> Status:
            started.append(1)
            if len(started) in fails:
                if how == "given up":
                    await self.close()
                    raise RuntimeError("killed")
                await asyncio.sleep(3)
            return await super().instantiate()

    monkeypatch.setattr(cluster, "Nanny", Failing)
    monkeypatch.setattr(cluster, "SECONDS_TO_REPLACE", 0.5)
    monkeypatch.setitem(cluster.SETTINGS, "distributed.deploy.lost-worker-timeout", "1s")
    with Cluster(workers=1).connect() as client:
        (worker,) = client.run(os.getpid).values()
        os.kill(worker, signal.SIGKILL)
        assert client.submit(abs, -1).result(timeout=60) == 1
    assert len(started) == max(fails) + 1
    assert not [record for record in caplog.records if record.exc_info]
    gc.collect()  # Dask's sockets to the killed process, here and not in another test


def test_a_scheduler_with_certificates_is_refused_without_one() -> None:
    with (
        pytest.raises(EquidpError, match=r"No Dask scheduler answers at --scheduler=tls://127\.0\.0\.1:1 "),
        Cluster(scheduler="tls://127.0.0.1:1").connect(),
    ):
        pass


def test_dasks_client_does_not_tell_in_tracebacks_that_its_scheduler_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Cluster, "_remote", lambda _: contextlib.nullcontext())
    with Cluster(scheduler="tcp://127.0.0.1:1").connect():
        logging.getLogger("distributed.client").error("Traceback")
    assert not caplog.records


@pytest.mark.slow
def test_a_busy_dashboard_port_is_no_cause_for_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with Cluster(workers=1, dashboard=port).connect() as client:
            assert f":{port}/" not in client.dashboard_link
    assert not [one for one in recwarn if "already in use" in str(one.message)]


@pytest.mark.parametrize("gpus", [0, 1])
def test_nobody_without_its_certificate_gives_the_cluster_orders(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users of the machine reach its loopback, and would have code run with the data at hand."""
    monkeypatch.setattr(cluster, "gpus_here", lambda: gpus)
    with Cluster(workers=1, dashboard=0).connect() as client:
        assert client.submit(sum, [1, 2]).result() == 3
        reached = [client.scheduler.address, *client.scheduler_info()["workers"]]
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        for host, _, port in (address.removeprefix("tls://").partition(":") for address in reached):
            with pytest.raises(OSError, match=r"TLS|SSL|closed|reset|Timed out"):
                Client(f"tcp://{host}:{port}", timeout=2, set_as_default=False)
            line = stranger.wrap_socket(socket.create_connection((host, int(port)), 5))
            with line, pytest.raises(ssl.SSLError, match="CERTIFICATE"):
                line.recv(1)


def test_nobody_else_says_where_modules_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have made the folder that Dask would take, with modules in it that are called as others are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (theirs := tmp_path / "dask-scratch-space").mkdir()
    (theirs / "antigravity.py").write_text("raise SystemExit('theirs was run')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with Cluster(workers=1, dashboard=0).connect() as client:
        everywhere = [sys.path, client.run_on_scheduler(lambda: sys.path), *client.run(lambda: sys.path).values()]
        added = [Path(place) for places in everywhere for place in places if Path(place).is_relative_to(tmp_path)]
        assert theirs not in added
        assert {stat.S_IMODE(place.stat().st_mode) for place in tmp_path.iterdir() if place != theirs} == {0o700}
    assert list(tmp_path.iterdir()) == [theirs]
    assert not [place for place in sys.path if Path(place).is_relative_to(tmp_path)]
