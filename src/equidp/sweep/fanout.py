"""Which cell runs when, how far the sweep is, and what happens when it is stopped.

Records are encoded once per dataset, before any cell that needs them. A baseline is trained once too: of the cells that
share one, the first runs alone and stores it, and the others follow. Dask does the rest: it gives cells to workers, and
gives a cell to another worker when one dies.
"""

from __future__ import annotations

import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Future, as_completed

from equidp.errors import EquidpError, first_line
from equidp.sweep.cell import CellResult, Job, run_cell
from equidp.sweep.project import Cell, grouped

Update = Callable[[Sequence[CellResult], int], None]
"""A function that is called after every cell, with all results so far and the number of cells at work."""


def encode_for(cell: Cell) -> str | None:
    """Encode the cell's records unless they are stored; return why that failed, or None."""
    data = cell.settings["data"]
    if data["options"].get("catalog"):  # only the cell's own Kedro run has the catalog
        return None
    from equidp.data.encoding import encode  # late: workers that only hand cells on import nothing that trains

    try:
        encode(cell.dataset, data["source"], data["options"], raw_folder=cell.raw_folder, cache=cell.records_cache)
    except EquidpError as error:
        return error.message
    return None


@dataclass
class Sweep:
    """The cells still to be run, in an order that does shared work only once.

    Args:
        client: of the cluster.
        jobs: what a worker needs, by the cell's key.
        resources: what each cell asks of a worker.
        ingest: encodes one cell's records; a function that can be sent to a worker.
    """

    client: Client
    jobs: Mapping[str, Job]
    resources: dict[str, float] | None = None
    ingest: Callable[[Cell], str | None] = encode_for
    outcomes: list[CellResult] = field(default_factory=list)
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)

    def run(self, cells: Sequence[Cell], update: Update) -> list[CellResult]:
        """Run all cells, and return the result of each. After Ctrl-C, finished cells stay finished."""
        self._waiting: dict[str, deque[Cell]] = defaultdict(deque)
        self._open: dict[Future, tuple[str, list[Cell]]] = {}
        self._completed = as_completed([])
        for group in grouped(cells, lambda cell: cell.records):
            self._watch(self._task(self.ingest, group[0], "records", group[0]), "records", group)
        update(self.outcomes, 0)
        try:
            for future in self._completed:
                kind, concerned = self._open.pop(future)
                self._after_records(future, concerned) if kind == "records" else self._after_cell(future, concerned[0])
                update(self.outcomes, self._running())
        except BaseException:
            self.client.cancel(list(self._open), force=True)
            raise
        return self.outcomes

    def _after_records(self, future: Future, cells: list[Cell]) -> None:
        reason = _result(future)
        if isinstance(reason, str):
            self.outcomes += [CellResult(cell.key, f"records: {reason}") for cell in cells]
            return
        for first, *others in grouped(cells, lambda cell: cell.baseline):
            self._waiting[first.baseline].extend(others)
            self._submit(first)

    def _after_cell(self, future: Future, cell: Cell) -> None:
        result = _result(future)
        self.outcomes.append(result if isinstance(result, CellResult) else CellResult(cell.key, str(result)))
        # even if the cell failed, the cells that waited for its baseline go on: at worst they train it themselves
        for follower in self._waiting.pop(cell.baseline, ()):
            self._submit(follower)

    def _submit(self, cell: Cell) -> None:
        future = self._task(run_cell, self.jobs[cell.key], "cell", cell, resources=self.resources)
        self._watch(future, "cell", [cell])

    def _task(self, work: Callable[..., Any], argument: Any, kind: str, cell: Cell, **asked: Any) -> Future:
        """Submit a task under a name of this call alone: for a name that it knows, the cluster gives an old result."""
        return self.client.submit(work, argument, key=f"{kind}-{cell.key}-{self._mark}", pure=False, **asked)

    def _watch(self, future: Future, kind: str, cells: list[Cell]) -> None:
        self._open[future] = (kind, cells)
        self._completed.add(future)

    def _running(self) -> int:
        cells = sum(kind == "cell" for kind, _ in self._open.values())
        return min(cells, sum(self.client.nthreads().values()) or 1)


def _result(future: Future) -> Any:
    """The task's result; if it raised, the reason in words."""
    try:
        return future.result()
    except EquidpError as error:
        return error.message
    except Exception as error:  # also a worker that was killed too often
        return first_line(error)
