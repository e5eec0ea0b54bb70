"""The ledger: an append-only record of the events of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from equidp.accounting.events import Event, merged

SHOWN = 3
"""Kinds of events in a ledger's `repr`."""


class Ledger:
    """Append-only record of the events of one run.

    The trainer appends a step's event *before* the step's result becomes visible to anything else. So every visible
    result has been charged, whenever the run stops.

    Args:
        events: events already spent, when a run resumes.
        journal: is called with every event before it enters the ledger; a durable journal survives a crash.
    """

    def __init__(self, events: Iterable[Event] = (), *, journal: Callable[[Event], None] | None = None) -> None:
        self._events = list(merged(events))
        self._journal = journal

    def __repr__(self) -> str:
        first = [f"{e.count} at q={e.sampling_rate:.4g}, σ={e.noise_multiplier:.4g}" for e in self._events[:SHOWN]]
        rest = ["…"] if len(self._events) > SHOWN else []
        return f"<{type(self).__name__} of {self.count} events: {'; '.join(first + rest) or 'none'}>"

    def append(self, event: Event) -> None:
        """Charge an event."""
        if self._journal is not None:
            self._journal(event)
        self._events[-1:] = merged((*self._events[-1:], event))

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything charged so far, in order, run-length encoded."""
        return tuple(self._events)

    @property
    def count(self) -> int:
        """Number of releases that were charged so far."""
        return sum(event.count for event in self.events)

    @property
    def done(self) -> tuple[Event, ...]:
        """The events of steps that will not be repeated; a durable ledger may also hold charges of later steps."""
        return tuple(self._events)
