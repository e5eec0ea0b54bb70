"""Turn: lets only one run at a time use a process.

Kedro's sessions share their hooks, and these hold the settings and the MLflow run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import currentframe
from threading import RLock, Thread, current_thread

from equidp.errors import EquidpError

BESIDE = (
    "Another run of this process is at work or begins, and the two would be told, named and logged by each other's "
    "settings: wait for it, or start this one by `kedro run` in a process of its own."
)
"""The refusal, for example in threads of a notebook, or of `kedro server`, which answers each request in a thread."""


class Turn:
    """The thread whose run the hooks belong to, from the creation of its context on.

    Kedro makes the context and runs the pipeline in one thread; nodes and datasets may have others.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._thread: Thread | None = None
        self._at_work = self._preparing = False
        self._catalog: object = None

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Enter this context while hooks store a new Kedro context.

        Raises:
            EquidpError: another thread's run is at work; or the call comes from within a run, from its nodes or hooks.
        """
        with self._lock:
            # Ctrl-C in a notebook ends a run without a call of the hooks; the next run then has the same thread
            others = self._thread is not current_thread() and self._alive()
            if self._preparing or (self._at_work and (others or self._within())):
                raise EquidpError(BESIDE)
            self._thread, self._at_work, self._preparing = current_thread(), False, True
            try:
                yield
            finally:
                self._preparing = False

    @contextmanager
    def begun(self, catalog: object) -> Iterator[None]:
        """Enter this context for the checks before a run with this catalog. If they refuse the run, the turn is over.

        Raises:
            EquidpError: another thread has made a context since this thread did.
        """
        with self._lock:
            if self._thread is not current_thread():
                raise EquidpError(BESIDE)
            self._at_work, self._catalog = True, catalog
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the turn, after the run has finished or failed."""
        self._at_work, self._catalog = False, None

    def _within(self) -> bool:
        """Whether this is called from within the run at work: then some caller's frame holds its catalog."""
        frame = currentframe()
        while frame is not None:
            if any(one is self._catalog for one in frame.f_locals.values()):
                return True
            frame = frame.f_back
        return False

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
