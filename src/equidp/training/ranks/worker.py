"""What each rank runs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import nn

from equidp.data import storage
from equidp.data.records import Split
from equidp.errors import EquidpError
from equidp.mechanism.device import choose_device, fixed_order
from equidp.mechanism.trainer import EpochCallback
from equidp.models import weights_of
from equidp.system.files import replacing
from equidp.training.conclusion import conclude
from equidp.training.preparation import prepare, refuse_other_code
from equidp.training.ranks.job import (
    HISTORY,
    JOB,
    MEETING,
    PUBLIC,
    STATEMENT,
    STORE,
    TRAIN,
    WEIGHTS,
    report,
    reported,
)
from equidp.training.ranks.peers import Peers, at_home
from equidp.training.ranks.trainer import FollowedError
from equidp.training.request import TrainingRequest

AFTERMATH_SECONDS = 2.0
"""How long a rank that has only lost its peers waits before it fails, so that the rank that died is found first."""

PR_SET_PDEATHSIG = 1
"""Linux's number of the option that sets which signal this process gets when the process that started it ends."""


def work(folder: str) -> None:
    """Run a rank: load the job, train, and on rank 0 write the results. At top level, so that it can be sent."""
    os.setsid()  # Ctrl-C goes to the process that was asked to train, which tells the ranks
    with _ending_with_starter(Path(folder)):
        _work(folder)


def _work(folder: str) -> None:
    peers = None
    try:
        job = json.loads((Path(folder) / JOB).read_text())
        device = _device(job["training"]["device"])
        peers = Peers(device, Path(folder))
        _train(Path(folder), job, peers)
        peers.leave()
    except FollowedError:
        if at_home():
            # With torch, a rank that returns waits until its result is read. A launcher that was told to stop reads
            # none, and would kill this rank after 30 seconds. Rank 0 reports how the training ended.
            os._exit(0)
    except EquidpError as error:
        report(Path(folder), error)
        sys.exit(error.exit_code)
    except Exception:
        # if another rank has died, the launcher ends this one while it sleeps, and reports that one alone
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(AFTERMATH_SECONDS)
        if (Path(folder) / JOB).exists() and not reported(Path(folder)):  # if not, the cause is known
            traceback.print_exc()  # the launcher would not show it
        raise


@contextlib.contextmanager
def _ending_with_starter(folder: Path) -> Iterator[None]:
    """Within the context, stop this rank if the process that started it ends, and then end this process.

    With torch it would wait for that process for ever. The records would stay in its memory, and in a folder that
    nobody would remove. Rank 0 finishes its step, saves, and takes the others along, as after Ctrl-C.
    """
    starter, left = multiprocessing.parent_process(), threading.Event()
    assert starter is not None
    if sys.platform == "linux":
        # Torch makes the system send SIGINT as well, once for each of the starter's threads. A second signal would
        # interrupt the checkpoint.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)

    def watch() -> None:
        wait([starter.sentinel])
        if at_home():  # with several machines, ranks may still have to read there what went wrong
            _remove(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        left.wait()
        os._exit(1)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        left.set()
        if not starter.is_alive():  # nobody reads how this rank ended, and torch would leave a file about it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            watching.join()


def _remove(folder: Path) -> None:
    """Remove a job's folder, that in which the ranks have met, and that of the socket to the asking process."""
    places = {(folder / name).resolve().parent for name in (MEETING, STORE)}
    with contextlib.suppress(OSError, ValueError, KeyError):
        if address := json.loads((folder / JOB).read_text())["evaluated_at"]:
            places.add(Path(address).parent)
    for place in (*places, folder):
        shutil.rmtree(place, ignore_errors=True)


def _device(name: str) -> torch.device:
    if name != "cpu" and torch.cuda.is_available():  # first, before anything opens a context on another rank's GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = choose_device(name)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])  # the ranks of this machine share its threads
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    return device


def _train(folder: Path, job: Mapping[str, Any], peers: Peers) -> None:
    if not peers.first:
        # rank 0 decides when to stop, and takes the others along
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    refuse_other_code(peers)  # before the settings are read, which other code may not know
    train = storage.load(folder / TRAIN)
    public = storage.load(folder / PUBLIC) if (folder / PUBLIC).exists() else train.take(torch.arange(0))
    split = Split(train, train.take(torch.arange(0)), public)
    request = TrainingRequest.from_dict(job)
    with fixed_order(request.training.deterministic, peers.device):
        prepared = prepare(request, split, peers)
        if peers.first:  # all ranks have their records by now; a copy on disk would stay if they are killed
            (folder / TRAIN).unlink(missing_ok=True)
        with _evaluating(job["evaluated_at"] if peers.first else None) as on_epoch:
            rows = prepared.run(on_epoch, progress=job["progress"])
    if peers.first:
        trained = conclude(prepared, rows)
        with replacing(folder / WEIGHTS) as part:
            save_file(trained.weights, part)
        with replacing(folder / HISTORY) as part:
            trained.history.to_parquet(part)
        with replacing(folder / STATEMENT) as part:
            part.write_text(json.dumps(trained.privacy))


@contextlib.contextmanager
def _evaluating(address: str | None) -> Iterator[EpochCallback | None]:
    """Yield a callback that lets the asking process evaluate, and waits for its columns; None without an address."""
    if address is None:
        yield None
        return
    with Client(address, family="AF_UNIX") as line:

        def on_epoch(row: dict[str, float], model: nn.Module) -> Mapping[str, float]:
            line.send_bytes(json.dumps(row).encode())
            line.send_bytes(save(weights_of(model)))
            reply = json.loads(line.recv_bytes())
            if "error" in reply:
                raise EquidpError(reply["error"])
            return reply["columns"]

        yield on_epoch
