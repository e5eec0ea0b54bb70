"""Pieces of work in processes of their own, several at a time. If a process is killed, its work is begun again.

On Linux the processes are forked from one that has imported what they need. Each process ends when the process that
started it ends, and holds the lock until then. So whoever gets the lock knows that none of these processes is left.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from equidp.errors import EquidpError
from equidp.sweep.attended import SECONDS_TO_STOP, Descriptor, attend, forks, reason_of
from equidp.system.files import locked, private

MOST_DEATHS = 10
"""So often one piece of work may be killed; once more, and all pieces are given up."""

logger = logging.getLogger(__name__)


@dataclass
class Apart:
    """Work that is done in other processes.

    Args:
        work: a module's function, called in the other process with the arguments that `before` returned.
        preload: the module of `work`.
        before: called in this process with a number each time its work begins; returns the arguments of `work`.
        lock: an open file, which each process keeps open until it has ended.
        log: returns the file to which the work of a number prints.
        workers: pieces of work at the same time.
    """

    work: Callable[..., None]
    preload: str
    before: Callable[[int], tuple[Any, ...]]
    lock: int
    log: Callable[[int], Path]
    workers: int
    _running: dict[Any, tuple[int, Any]] = field(default_factory=dict, init=False)

    def run(self, numbers: Iterable[int]) -> None:
        """Do the work of every number.

        Raises:
            EquidpError: a piece of work fails, or is killed too often; the others are then stopped.
        """
        waiting, deaths = deque(numbers), Counter[int]()
        with self._stopped_at_the_end():
            while waiting or self._running:
                while waiting and len(self._running) < self.workers:
                    self._start(waiting.popleft())
                for sentinel in wait(list(self._running)):
                    number, process = self._running.pop(sentinel)
                    process.join()
                    if process.exitcode == 0:
                        continue
                    deaths[number] += 1
                    reason = reason_of(self.log(number), process.exitcode)
                    if process.exitcode > 0 or deaths[number] > MOST_DEATHS:
                        raise EquidpError(reason)
                    logger.warning("A trial was %s. It goes on.", reason)
                    waiting.appendleft(number)

    def _start(self, number: int) -> None:
        content = pickle.dumps(self.before(number))  # else torch puts tensors into shared memory, which is scarce
        context: Any = multiprocessing.get_context("forkserver" if forks() else "spawn")
        if forks():
            context.set_forkserver_preload([self.preload])
        with open(self.log(number), "w", opener=private, encoding="utf-8") as log:
            descriptors = Descriptor(log.fileno()), Descriptor(self.lock)
            process = context.Process(target=_attended, args=(*descriptors, self.work, content))
            process.start()
        self._running[process.sentinel] = number, process

    @contextlib.contextmanager
    def _stopped_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            for _, process in self._running.values():
                process.terminate()
            for _, process in self._running.values():
                process.join(SECONDS_TO_STOP)
                process.kill()
                process.join()


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """Wait until no process holds the lock file, hold it, and yield its descriptor."""
    with open(path, "ab", opener=private) as file:
        waited = False
        while not locked(file):
            if not waited:
                logger.info("Waiting until the processes of an interrupted call have ended.")
            waited = True
            time.sleep(0.2)
        yield file.fileno()


def _attended(output: Descriptor, _held: Descriptor, work: Callable[..., None], content: bytes) -> None:
    attend(output)
    try:
        work(*pickle.loads(content))
    except EquidpError as error:
        raise SystemExit(error.message) from None
