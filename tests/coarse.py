"""Privacy losses on a ten times coarser grid, where tests ask what follows of ε and not for its last digit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from equidp.accounting import epsilon
from equidp.accounting.events import Event


@contextmanager
def coarsely() -> Iterator[None]:
    """Within, a reported ε is computed as those of a search are, which is half a per cent larger and as sound.

    The grid of a report is half the time of tests that train. What is known of an ε is forgotten on both sides.
    """
    finely = epsilon._pld_epsilon

    def found(events: tuple[Event, ...], delta: float, interval: float) -> float:
        return finely(events, delta, max(interval, epsilon.SEARCH_INTERVAL))

    _forget()
    with mock.patch.object(epsilon, "_pld_epsilon", found):
        yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("equidp.accounting")]:
        for known in vars(sys.modules[name]).values():
            if hasattr(known, "cache_clear"):
                known.cache_clear()
