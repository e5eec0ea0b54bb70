"""The asking side of a training on ranks: send a job, answer calls, collect results, tell what went wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load, load_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from equidp.data import storage
from equidp.data.records import Split
from equidp.errors import EquidpError
from equidp.mechanism.device import choose_device
from equidp.system.files import replacing, sockets_fit, storage_error
from equidp.system.logs import held_back
from equidp.system.threads import environment
from equidp.training.ranks.job import (
    ARRIVED,
    FOLDER,
    HISTORY,
    JOB,
    MEETING,
    NODES,
    PUBLIC,
    RENDEZVOUS,
    SOCKET,
    STATEMENT,
    STORE,
    TRAIN,
    WEIGHTS,
    reported,
)
from equidp.training.ranks.worker import work

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Linux's folder in memory."""

NO_PORT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment variables with which torch's launcher opens no port for its ranks."""

POLL_SECONDS = 0.5
"""How often machines look for each other's files in the shared folder."""

Evaluation = Callable[[dict[str, float], dict[str, Tensor]], Mapping[str, float]]
"""Takes a history row and the weights after that epoch; returns more columns."""


@dataclass(frozen=True)
class Machines:
    """The machines of one training; one machine, unless the environment says otherwise.

    Attributes:
        nodes: how many there are.
        node: which one this is, from 0.
        rendezvous: host:port where they meet; empty on one machine.
    """

    nodes: int = 1
    node: int = 0
    rendezvous: str = ""

    @classmethod
    def from_environment(cls) -> Machines:
        """Read the environment.

        Raises:
            EquidpError: if the number of machines is not 1 or more, if several have no place to meet or no folder, and
                if there is a place to meet without a number of machines.
        """
        asked, rendezvous = os.environ.get(NODES, "1"), os.environ.get(RENDEZVOUS, "")
        if rendezvous and NODES not in os.environ:  # all ranks would be here, and the other machines wait for ever
            raise EquidpError(
                f"{RENDEZVOUS} is set, and {NODES} is not: say how many machines meet there, or unset it."
            )
        if not asked.isdecimal() or not int(asked):
            raise EquidpError(f"{NODES}={asked} is no number of machines: give 1 or more, or unset it.")
        nodes = int(asked)
        if nodes > 1 and not (is_address(rendezvous) and os.environ.get(FOLDER)):
            raise EquidpError(
                f"{NODES}={nodes} needs {RENDEZVOUS}=host:port, the same on all machines, and {FOLDER}, a folder that "
                f"all of them see."
            )
        return cls(nodes, 0, rendezvous)

    def share(self, devices: int) -> int:
        """Ranks of each machine, of `devices` in all. Raises EquidpError if they cannot be divided."""
        if devices % self.nodes:
            raise EquidpError(
                f"training.devices={devices} cannot be divided among {self.nodes} machines: give a multiple of it."
            )
        return devices // self.nodes

    def launch(self, devices: int, folder: Path) -> LaunchConfig:
        """Torch's launch configuration for `devices` ranks in all.

        On one machine they meet over files in the job's `folder`, which is private. Torch's store over TCP would listen
        on every interface, and ask nobody for a password, and what is in it is unpickled here.

        Raises:
            EquidpError: if they cannot be divided among the machines.
        """
        common: dict[str, Any] = {
            "min_nodes": self.nodes,
            "max_nodes": self.nodes,
            "nproc_per_node": self.share(devices),
            "max_restarts": 0,  # steps done again may be charged again, so the user decides whether to go on
            "monitor_interval": 0.1,
            "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),  # torch would leave a folder behind for every training
        }
        if self.nodes == 1:
            return LaunchConfig(**common, run_id=uuid.uuid4().hex, rdzv_backend="c10d", local_addr="127.0.0.1",
                                rdzv_endpoint=str(folder / MEETING), rdzv_configs={"store_type": "file"})  # fmt: skip
        return LaunchConfig(**common, run_id="equidp", rdzv_backend="static", rdzv_endpoint=self.rendezvous,
                            rdzv_configs={"rank": self.node})  # fmt: skip


def is_address(text: str) -> bool:
    """Whether a text is host:port."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal()


def train(
    job: Mapping[str, Any], split: Split, devices: int, on_epoch: Evaluation | None
) -> tuple[dict[str, Tensor], pd.DataFrame, dict[str, Any]]:
    """Train on `devices` ranks; returns weights, history and privacy statement.

    Args:
        job: what `TrainingRequest.to_dict` tells, and whether to show progress.
        split: the records.
        devices: how many ranks, on all machines.
        on_epoch: called in this process after every epoch.

    Raises:
        EquidpError: if a rank fails or is killed.
    """
    machines = Machines.from_environment()
    # by the public N, because the actual number of records must not show
    _refuse_too_many(job["training"]["device"], devices, machines, job["plan"]["records"])
    with _job_folder() as folder, _meeting_in_memory(folder, machines), _listening(on_epoch) as socket:
        storage.save(split.train, folder / TRAIN)
        if len(split.public):
            storage.save(split.public, folder / PUBLIC)
        # last: other machines begin once it is there
        with replacing(folder / JOB) as part:
            part.write_text(json.dumps({**job, "evaluated_at": socket}))
        if machines.nodes > 1:
            logger.info("Waiting at %s for python -m equidp.training.ranks of the other machines.", machines.rendezvous)
            _await_others(folder, machines.nodes)
        launch(machines.launch(devices, folder), folder, job)
        return (
            load_file(folder / WEIGHTS),
            pd.read_parquet(folder / HISTORY),
            json.loads((folder / STATEMENT).read_text()),
        )


def _refuse_too_many(device: str, devices: int, machines: Machines, records: int) -> None:
    here = machines.share(devices)
    if choose_device(device).type == "cuda" and here > torch.cuda.device_count():
        raise EquidpError(
            f"training.devices={devices} asks for {here} GPUs here, and there are {torch.cuda.device_count()}: lower "
            f"it, or set training.device=cpu."
        )
    if devices > records:
        raise EquidpError(f"training.devices={devices} exceeds the {records} expected training records: lower it.")


def _await_others(folder: Path, nodes: int) -> None:
    """Return when all other machines have seen the job. Torch would wait too, but without noticing Ctrl-C.

    Raises:
        EquidpError: if one was told of another number of machines.
    """
    for node in range(1, nodes):
        while not (sign := folder / ARRIVED.format(node)).exists():
            time.sleep(POLL_SECONDS)
        if (told := sign.read_text(encoding="utf-8")) != str(nodes):
            raise EquidpError(
                f"Machine {node} was started with --nodes {told}, and here {NODES}={nodes}: say the same."
            )


@contextlib.contextmanager
def _job_folder() -> Iterator[Path]:
    """A folder that nobody else may read. It holds records, and is removed at the end."""
    shared = os.environ.get(FOLDER)
    if shared is None:
        with tempfile.TemporaryDirectory(prefix="equidp-ranks-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    folder = Path(shared)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=False)
    except FileExistsError as error:
        raise EquidpError(
            f"{FOLDER}={folder} is there already: another training uses it, or was killed, and then its records are "
            "still in it. Name another folder, or delete it."
        ) from error
    except OSError as error:
        raise storage_error(folder, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _meeting_in_memory(folder: Path, machines: Machines) -> Iterator[None]:
    """Let ranks of one machine meet over files in memory, if there is such a folder.

    If a disk has become full, torch tries for minutes to write a few bytes to it, and does not notice Ctrl-C meanwhile.
    """
    with contextlib.ExitStack() as kept:
        if machines.nodes == 1:
            with contextlib.suppress(OSError):  # if there is none or it is full, they meet in the job's folder
                own = kept.enter_context(tempfile.TemporaryDirectory(prefix="equidp-", dir=MEMORY))
                for name in (MEETING, STORE):
                    (folder / name).symlink_to(Path(own) / name)
        yield


@contextlib.contextmanager
def _listening(on_epoch: Evaluation | None) -> Iterator[str | None]:
    """Answer rank 0's calls in a thread, while the main one waits for the ranks; yields the address, or None."""
    if on_epoch is None:
        yield None
        return
    # not in the job's folder: a socket needs a short path, and a file system that machines share may have no sockets
    place = tempfile.TemporaryDirectory(prefix="equidp-", dir=None if sockets_fit() else "/tmp")
    with place as own, Listener(address := str(Path(own) / SOCKET), family="AF_UNIX") as listener:
        thread = threading.Thread(target=_answer, args=(listener, on_epoch), daemon=True)
        thread.start()
        try:
            yield address
        finally:
            # if nobody has called, the thread still waits: a call from here ends it
            with contextlib.suppress(OSError):
                Client(address, family="AF_UNIX").close()
            thread.join(timeout=60)


def _answer(listener: Listener, on_epoch: Evaluation) -> None:
    with contextlib.suppress(EOFError, OSError), listener.accept() as line:
        while True:
            _answer_one(line, on_epoch)


def _answer_one(line: Connection, on_epoch: Evaluation) -> None:
    row, weights = json.loads(line.recv_bytes()), load(line.recv_bytes())
    try:
        reply: dict[str, Any] = {"columns": dict(on_epoch(row, weights))}
    except Exception as error:  # answered, because the ranks must not wait for ever
        reason = error.message if isinstance(error, EquidpError) else repr(error)
        reply = {"error": f"After epoch {row['epoch']:g}: {reason}"}
    line.send_bytes(json.dumps(reply).encode())


def launch(config: LaunchConfig, folder: Path, job: Mapping[str, Any], *, worker: Callable[[str], None] = work) -> None:
    """Run `worker(folder)` on every rank of this machine, to its end.

    Raises:
        EquidpError: with the reason of the rank that failed first.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        # torch's launcher would log what `_reason` tells
        launcher, starter = (
            held_back(f"torch.{name}", below=logging.CRITICAL) for name in ("distributed.elastic", "multiprocessing")
        )
        with launcher, starter, environment(NO_PORT):
            elastic_launch(config, worker)(str(folder))
    except ChildFailedError as error:
        raise _reason(error, folder, job) from None
    except SignalException as error:
        raise reported(folder) or KeyboardInterrupt from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _reason(error: ChildFailedError, folder: Path, job: Mapping[str, Any]) -> EquidpError:
    if error_left := reported(folder):
        return error_left
    if not folder.exists():
        return EquidpError("The training has ended with an error. The machine that was asked for it says which.")
    rank, failure = error.get_first_failure()
    cause = f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else "failed; its error is above"
    remedy = (
        "Go on by the same command with resume=true added to --params: what was charged stays charged."
        if job["workplace"]
        else "Start the training again."
    )
    return EquidpError(f"Rank {rank} of {job['training']['devices']} {cause}, and the others were stopped. {remedy}")
