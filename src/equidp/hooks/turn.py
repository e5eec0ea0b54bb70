"""One run at a time in a process: Kedro's sessions share their hooks, which hold the settings and the MLflow run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, Thread, current_thread

from equidp.errors import EquidpError

BESIDE = (
    "Another run of this process is at work or begins, and the two would be told, named and logged by each other's "
    "settings: wait for it, or start this one by `kedro run` in a process of its own."
)
"""For notebooks' threads, and for requests to `kedro server`, which answers each in a thread."""


class Turn:
    """Which thread's run the hooks belong to, from its context on.

    Kedro makes the context and runs the pipeline in one thread; nodes and datasets may have others.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._thread: Thread | None = None
        self._at_work = False

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Around all that hooks keep of a new context.

        Raises:
            EquidpError: while another thread's run is at work.
        """
        with self._lock:
            # Ctrl-C in a notebook ends a run without telling hooks: the next one has its thread
            if self._at_work and self._thread is not current_thread() and self._alive():
                raise EquidpError(BESIDE)
            self._thread, self._at_work = current_thread(), False
            yield

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around what is asked before a run; where it is refused, the turn is over.

        Raises:
            EquidpError: where another thread has made a context since this one's.
        """
        with self._lock:
            if self._thread is not current_thread():
                raise EquidpError(BESIDE)
            self._at_work = True
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The run has finished or failed."""
        self._at_work = False

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
