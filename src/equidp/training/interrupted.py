"""What is charged for interrupted trials of a tuning. It tells neither which trials these were nor how many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from equidp.accounting.calibration import divergences
from equidp.accounting.events import Event, beyond, merged
from equidp.accounting.plan import Plan
from equidp.parameters import Settings
from equidp.training.journal import block_of
from equidp.training.tuning import Point, Tuning

EVERY = 1
"""Epochs between two checkpoints of a trial, unless `training.checkpoint_every` says otherwise."""


def beyond_plan(plan: Plan, settings: Settings, algorithm: str, ledger: Sequence[Event]) -> tuple[Event, ...]:
    """What a trial was charged beyond its plan."""
    return beyond(ledger, settings.algorithm(algorithm).events(plan))


def of_any_trial(more: Iterable[Sequence[Event]], tuning: Tuning, algorithm: str) -> list[Event]:
    """Return events that cost at least as much as what any single trial was charged beyond its plan.

    Neither their noise and rate nor their number follow from a single trial, because these would tell the settings of a
    trial that was interrupted. Whoever knows when it was interrupted, and so its number, would learn whether it was the
    chosen one. A sum over all trials would tell how many were at work. An exact choice hides nothing: then all events
    are returned as they are.

    Args:
        more: for each trial, what it was charged beyond its plan.
        tuning: the grid, and the reference.
        algorithm: its name.
    """
    found = [of for of in more if of]
    if tuning.score_event is None or not found:
        return [event for of in found for event in of]
    each = {merged(of.settings.algorithm(algorithm).events(of.plan)) for of in tuning.points}
    least: dict[float, float] = {}  # the least noise of each rate: less noise never costs less
    for event in (event for of in (*each, *found) for event in of):
        least[event.sampling_rate] = min(event.noise_multiplier, least.get(event.sampling_rate, math.inf))
    costs = {one: divergences([Event(*one)], tuning.plan.trials.orders) for one in least.items()}
    most = tuple(map(max, zip(*costs.values(), strict=True)))  # at the orders that ε follows from
    costliest = next((one for one in sorted(costs) if costs[one] == most), (max(least), min(least.values())))
    once = max(_of_one_break(of, algorithm) for of in tuning.points)
    breaks = math.ceil(max(sum(event.count for event in of) for of in found) / once)
    return [Event(*costliest, breaks * once)]


def _of_one_break(point: Point, algorithm: str) -> int:
    """The most events between two checkpoints of a trial, with those that are charged ahead."""
    epochs = point.settings.algorithm(algorithm).events_by_epoch(point.plan)
    every = point.settings.operation.checkpoint_every or EVERY
    counts = [sum(event.count for event in epoch) for epoch in epochs]
    return max(sum(counts[start : start + every]) for start in range(len(counts))) + block_of(point.plan.steps)
