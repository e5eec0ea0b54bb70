"""The machines a sweep runs on: all cores of this one, its GPUs, or any Dask cluster by its scheduler's address."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, Security, SpecCluster
from distributed.core import Status

from equidp.errors import EquidpError, first_line
from equidp.system.interrupts import handling
from equidp.system.logs import held_back

GPU = "GPU"
"""Name of the Dask resource that stands for one GPU: `dask worker … --resources "GPU=1"`."""

CONNECT_SECONDS = 10

SECONDS_TO_REPLACE = 5.0
"""Time between two looks at which of this machine's workers must be replaced."""

TLS = "tls://"

DASKS_LOGGERS = ("distributed", "distributed.client", "tornado.application")
"""Dask's loggers. The client's is named too, because Dask gives it a level of its own."""

SETTINGS = {
    "distributed.scheduler.worker-saturation": 1.0,  # a cell waits at the scheduler, not at a busy worker
    "distributed.scheduler.allowed-failures": 10,  # so many workers may die under one cell before it is given up
    "distributed.worker.daemon": False,
    "distributed.deploy.lost-worker-timeout": "60s",  # a busy machine needs longer than Dask's 15 to start one again
    # set before a worker's first import: once Kedro has set up the terminal there, Dask's own silencing has no effect
    "distributed.nanny.pre-spawn-environ.DASK_LOGGING__DISTRIBUTED": "critical",
}


@dataclass(frozen=True)
class Cluster:
    """The processes that run cells.

    Attributes:
        scheduler: address of a running cluster, None for this machine.
        workers: cells that run at the same time on this machine; None for one per core, or per group of GPUs.
        gpus_per_cell: GPUs that each cell holds; None for one where this machine has any.
        dashboard: port of the local cluster's dashboard, 0 for any free one.
    """

    scheduler: str | None = None
    workers: int | None = None
    gpus_per_cell: int | None = None
    dashboard: int = 8787

    @property
    def resources(self) -> dict[str, float] | None:
        """Dask resources that a worker must have for a cell."""
        held = self.gpus_per_cell if self.scheduler else self._local_gpus_per_cell()
        return {GPU: float(held)} if held else None

    def _local_gpus_per_cell(self) -> int:
        return min(1, gpus_here()) if self.gpus_per_cell is None else self.gpus_per_cell

    @contextlib.contextmanager
    def connect(self) -> Iterator[Client]:
        """Yield a client; start a local cluster if no scheduler is named.

        Raises:
            EquidpError: the scheduler does not answer, or this machine has too few GPUs.
        """
        # Dask's remarks on workers that come and go would break the progress display; failures are listed at the end
        distributed, its_client, loop = (held_back(name, below=logging.CRITICAL) for name in DASKS_LOGGERS)
        with dask.config.set(SETTINGS), distributed, its_client, loop:
            if self.scheduler:
                with self._remote() as client:
                    yield client
            else:
                with _own_folder():
                    with handling(signal.SIG_IGN, signal.SIGINT), warnings.catch_warnings():
                        # A terminal sends Ctrl-C to all processes, but only this one obeys: it stops the workers in
                        # order. If the dashboard's port is in use, Dask takes another, which the printed address has
                        warnings.filterwarnings("ignore", r"Port \d+ is already in use", UserWarning)
                        cluster = self._local()
                    with cluster, Client(cluster) as client, _kept_up(cluster):
                        yield client

    def _remote(self) -> Client:
        try:
            return Client(self.scheduler, timeout=CONNECT_SECONDS)
        except (OSError, TimeoutError, ValueError, TypeError) as error:  # the last: tls:// without a certificate
            raise EquidpError(
                f"No Dask scheduler answers at --scheduler={self.scheduler} ({error}): start one with `dask scheduler`."
            ) from error

    def _local(self) -> SpecCluster:
        # Every user of this machine can reach the loopback address, and a client can run code. So each client needs a
        # certificate, which is made for this cluster alone
        security, held = Security.temporary(), self._local_gpus_per_cell()
        slots = gpus_here() // held if held else self.workers or os.cpu_count() or 1
        if not slots:
            raise EquidpError(f"--gpus-per-cell={held} is more than the {gpus_here()} GPUs of this machine.")
        common = {"host": "127.0.0.1", "security": security, "protocol": TLS}
        scheduler = {"cls": Scheduler, "options": {**common, "dashboard_address": f"127.0.0.1:{self.dashboard}"}}
        workers = {}
        for slot in range(min(slots, self.workers or slots)):
            options: dict[str, Any] = {**common, "nthreads": 1}
            if held:  # the worker sees its own GPUs only
                visible = ",".join(str(slot * held + i) for i in range(held))
                options |= {"resources": {GPU: held}, "env": {"CUDA_VISIBLE_DEVICES": visible}}
            workers[slot] = {"cls": Nanny, "options": options}
        try:
            return SpecCluster(workers=workers, scheduler=scheduler, security=security)
        except RuntimeError as error:  # for example, a worker was killed for lack of memory
            raise EquidpError(
                f"The sweep's workers could not be started ({first_line(error.__cause__ or error)}): nothing was run. "
                "Call it again, with fewer --workers if memory is scarce."
            ) from error


@contextlib.contextmanager
def _kept_up(cluster: SpecCluster) -> Iterator[None]:
    """Replace workers that are gone for good.

    Dask gives up a worker that is killed again while it starts, and a sweep without workers would wait for ever.
    """
    ended, loop = threading.Event(), cluster.loop
    assert loop is not None

    def replace() -> None:
        if ended.is_set():
            return
        for slot, worker in list(cluster.workers.items()):
            if worker.status in (Status.closed, Status.failed):
                del cluster.workers[slot]
        cluster.scale(len(cluster.worker_spec))

    def watch() -> None:
        while not ended.wait(SECONDS_TO_REPLACE):
            loop.add_callback(replace)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Give Dask a folder of our own to work in. Its default has one name for all users of the machine. Another user
    could create it first and put modules into it, and Dask puts it in front of Python's search path.
    """
    place = tempfile.TemporaryDirectory(prefix="equidp-sweep-", ignore_cleanup_errors=True)
    with place as folder, dask.config.set({"temporary-directory": folder}):
        try:
            yield
        finally:  # before the folder is removed, when anybody may take its name
            sys.path[:] = [one for one in sys.path if not one.startswith(folder)]


def gpus_here() -> int:
    """CUDA devices of this machine."""
    import torch

    return torch.cuda.device_count()
