"""Kill a training run with SIGKILL at many moments, resume it each time, and check what it comes to.

    python benchmarks/crash.py --kills 200                          # seeded and secure
    python benchmarks/crash.py --kills 50 --algorithms dpsgd_f dpis

Two ways of dying alternate: at a random moment, by the parent; and at a random one of the points where it could hurt
most, by the child itself: around every charge, sync, rename and release, and in the middle of writing a line.

After every death the folder must hold no checkpoint or a whole one, and the journal must charge at least every step
that was begun. A finished seeded run must have the weights, the history and the ledger of an uninterrupted one, bit by
bit; a finished secure run must be charged for every step that it ever began.

Prints one line per algorithm and mode; the exit status is 1 if anything failed. Expect 0 failures.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.noise import RandomSource, SeededRandom
from equidp.mechanism.sampling import Population
from equidp.mechanism.secure import SecureRandom
from equidp.mechanism.trainer import Trainer
from equidp.system.workplace import CHECKPOINT_FILE, JOURNAL_FILE
from equidp.training.checkpoint import Checkpointer, read_checkpoint
from equidp.training.journal import Journal

ALGORITHMS = ("dpsgd", "dpsgd_f", "psasc_momentum", "sa_dpsgd", "dpis")
SCHEMA = Schema("toy", "tabular", (6,), ("a", "b", "c"), {"class": ("a", "b", "c")})
PLAN = Plan(records=120, batch_size=12, epochs=5, groups=3, delta=1e-5, noise_multiplier=1.0)
"""50 steps in 5 epochs."""

SETTINGS = {"benchmark": "crash"}
BLOCK = 8
PACE = 0.003
"""Seconds a step is made to last, so that a death at a random moment finds the run at work."""

LIFETIME = 0.25
"""A parent kills within so many seconds of the start of training."""

POINTS = 450
"""A child that kills itself picks one of its first so many points; some lives end before."""


@dataclass
class Tally:
    """What happened to one algorithm in one mode."""

    deaths: int = 0
    finished: int = 0
    failures: list[str] = field(default_factory=list)


class Witness:
    """A random source that notes, before anything is released, that a step's release is about to be made."""

    def __init__(self, source: RandomSource, begun: Any, trainer: Callable[[], Trainer], strike: Callable[[], None]):
        self.source, self.repeatable, self.device = source, source.repeatable, source.device
        self.begun, self.trainer, self.strike = begun, trainer, strike

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        self.strike()
        if len(values) == self.trainer().engine.dimension:
            time.sleep(PACE)
            self.begun[0] += 1
            self.begun[1] = max(self.begun[1], self.trainer().steps_done + 1)
        released = self.source.perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)
        self.strike()
        return released

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def records(count: int, seed: int) -> Records:
    """Random records of three classes."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=stream)
    return Records(torch.randn(count, 6, generator=stream), labels, {"class": labels}, SCHEMA)


def live(folder: Path, name: str, secure: bool, begun: Any, point: int | None) -> None:
    """One life: continue what is in the folder, to the end or to death at the given point."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own lock is shared between processes, and would outlive a killed one
    strike = _death_at(point) if point else lambda: None
    if point:
        _surround(os, "fsync", strike)
        _surround(os, "replace", strike)
        _tear_lines(strike)
    data, holder = records(PLAN.records, 1), {}
    source = Witness(SecureRandom("cpu") if secure else SeededRandom(1, "cpu"), begun, lambda: holder["it"], strike)
    keeper = Checkpointer(folder, SETTINGS, resume=True, every_epochs=1, block=BLOCK)
    torch.manual_seed(1)
    trainer = holder["it"] = Trainer(
        model=nn.Linear(6, 3),
        loss=CrossEntropy(),
        algorithm=algorithm_settings(name).build(),
        plan=PLAN,
        population=Population(data, data.labels),
        random=source,
        ledger=keeper.ledger(source),
        learning_rate=0.1,
        optimizer="adam",
        public=records(32, 2),
    )
    begun[2] = 1
    history = keeper.train(trainer, progress=False)
    outcome = {
        "weights": trainer.engine.flatten().tolist(),
        "history": history,
        "ledger": [event.to_dict() for event in trainer.ledger.events],
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))


def _death_at(point: int) -> Callable[[], None]:
    left = [point]

    def strike() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


def _surround(module: Any, name: str, strike: Callable[[], None]) -> None:
    real = getattr(module, name)

    def wrapped(*arguments: Any) -> Any:
        strike()
        result = real(*arguments)
        strike()
        return result

    setattr(module, name, wrapped)


def _tear_lines(strike: Callable[[], None]) -> None:
    """Write each line of the journal in two pieces, with a chance to die between them."""
    real = Journal._write

    def torn(self: Journal, entry: dict[str, Any]) -> None:
        whole, file = self._file, self._file

        class Halves:
            def write(self, line: bytes) -> None:
                file.write(line[: len(line) // 2])
                file.flush()
                strike()
                file.write(line[len(line) // 2 :])

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        self._file = Halves()  # type: ignore[assignment]
        try:
            real(self, entry)
        finally:
            self._file = whole

    Journal._write = torn  # type: ignore[method-assign]


def one_run(name: str, *, secure: bool, chance: random.Random, most: int, reference: dict | None) -> Tally:
    """Lives of one run until it finishes, or `most` deaths."""
    context, tally = _context(), Tally()
    begun = context.Array(ctypes.c_long, 3, lock=False)  # steps begun in all lives; the furthest; whether it trains
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        while tally.deaths < most:
            point = chance.randrange(1, POINTS) if chance.random() < 0.5 else None
            if not _one_life(context, folder, name, secure, begun, point, chance):
                tally.finished = 1
                tally.failures += _faults_of_finished(folder, secure, begun, reference)
                return tally
            tally.deaths += 1
            tally.failures += _faults_of_dead(folder, secure, begun)
    return tally


def _one_life(
    context: Any, folder: Path, name: str, secure: bool, begun: Any, point: int | None, chance: random.Random
) -> bool:
    """Whether it died. A child that fails otherwise raises here."""
    begun[2] = 0
    child = context.Process(target=live, args=(folder, name, secure, begun, point))
    child.start()
    if point is None:
        while not begun[2] and child.is_alive():
            time.sleep(0.001)
        child.join(chance.uniform(0.0, LIFETIME))
        child.kill()
    child.join(120)
    if child.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{name}: a life ended with exit status {child.exitcode}.")
    return child.exitcode != 0


def _faults_of_dead(folder: Path, secure: bool, begun: Any) -> list[str]:
    faults = []
    try:
        if (folder / CHECKPOINT_FILE).exists():
            read_checkpoint(folder / CHECKPOINT_FILE, SETTINGS)
        charged = _charged(folder)
    except Exception as error:
        return [f"after a death: {error}"]
    owed = begun[0] if secure else begun[1]
    if charged < owed:
        faults.append(f"after a death: {charged} charged of {owed} begun")
    return faults


def _charged(folder: Path) -> int:
    if not (folder / JOURNAL_FILE).exists():
        return 0
    journal = Journal(folder / JOURNAL_FILE, SETTINGS)
    try:
        return sum(event.count for event in journal.charged_since(0))
    finally:
        journal.close()


def _faults_of_finished(folder: Path, secure: bool, begun: Any, reference: dict | None) -> list[str]:
    outcome = json.loads((folder / "outcome.json").read_text())
    if reference is not None:
        return [f"finished with other {key}" for key in reference if outcome[key] != reference[key]]
    charged = sum(event["count"] for event in outcome["ledger"])
    faults = [] if charged >= begun[0] else [f"finished with {charged} charged of {begun[0]} begun"]
    leftovers = [path.name for path in folder.iterdir() if path.suffix == ".tmp"]
    return faults + [f"left {name}" for name in leftovers]


def uninterrupted(name: str) -> dict:
    """The outcome of a seeded run that nobody kills."""
    context = _context()
    begun = context.Array(ctypes.c_long, 3, lock=False)
    with tempfile.TemporaryDirectory() as place:
        child = context.Process(target=live, args=(Path(place), name, False, begun, None))
        child.start()
        child.join(120)
        return json.loads((Path(place) / "outcome.json").read_text())


def kill_and_resume(name: str, *, kills: int, secure: bool, seed: int = 0) -> Tally:
    """Runs of one algorithm, killed and resumed until `kills` deaths are reached, the last run finished as well."""
    chance, total = random.Random(f"{seed}/{name}/{secure}"), Tally()
    reference = None if secure else uninterrupted(name)
    while total.deaths < kills:
        tally = one_run(name, secure=secure, chance=chance, most=10 * kills, reference=reference)
        total.deaths += tally.deaths
        total.finished += tally.finished
        total.failures += tally.failures
    return total


def _context() -> Any:
    """A server that has everything imported and forks each child from itself: a life costs milliseconds to start."""
    context = mp.get_context("forkserver")
    # the optimisers import torch._dynamo when first used, which takes seconds
    context.set_forkserver_preload(["torch._dynamo", "equidp.algorithms", "equidp.training.checkpoint"])
    return context


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="deaths in all, at least")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    cells = [(name, secure) for name in options.algorithms for secure in (False, True)]
    failed = False
    for name, secure in cells:
        began = time.perf_counter()
        tally = kill_and_resume(name, kills=-(-options.kills // len(cells)), secure=secure, seed=options.seed)
        failed |= bool(tally.failures)
        print(
            f"{name:16} {'secure' if secure else 'seeded'}  {tally.deaths:4} kills  {tally.finished:3} finished  "
            f"{len(tally.failures)} failures  {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        for failure in tally.failures[:5]:
            print(f"    {failure}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
