"""Needed: the ε at which a run's curve reaches a given test figure, with an interval over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from equidp.errors import EquidpError
from equidp.evaluation.seeds import Interval, mean_interval


@dataclass(frozen=True)
class Needed:
    """The ε that seeds needed.

    Attributes:
        target: the figure to be reached.
        by_seed: ε at which each seed reached it; seeds that did not are left out.
        seeds: number of seeds that were tried.
        interval: mean and 95 % interval over the seeds; None if a seed has not reached the target, because a mean over
            the others would be too small.
    """

    target: float
    by_seed: Mapping[int, float]
    seeds: int
    interval: Interval | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"reached by {len(self.by_seed)} of {self.seeds} seeds"
        half = self.interval.half_width
        return f"{self.interval.mean:.2f}" + ("" if half is None else f" ± {half:.2f}")


def epsilon_needed(histories: Mapping[int, pd.DataFrame], target: float, metric: str = "accuracy") -> Needed:
    """Return the ε spent at the first evaluated epoch after which `test/<metric>` is at least `target`.

    This only describes a curve: to stop there would be a choice by test records. The ε is exact up to the distance of
    two evaluated epochs (`training.evaluate_every`).

    Args:
        histories: `history.parquet` of one setting's runs, by seed: columns `epsilon` and `test/<metric>`.
        target: such as 0.96.
        metric: a metric that grows as a model improves.

    Raises:
        EquidpError: there is no history, or a history lacks such a column.
    """
    if not histories:
        raise EquidpError("No history is among those given: make the runs first.")
    column, found = f"test/{metric}", {}
    for seed, history in sorted(histories.items()):
        if missing := {"epsilon", column} - set(history.columns):
            raise EquidpError(f"The history of seed {seed} has no column {min(missing)}: give one of a private run.")
        reached = history.loc[history[column] >= target, "epsilon"]
        if len(reached):
            found[seed] = float(reached.iloc[0])
    whole = len(found) == len(histories)
    return Needed(target, found, len(histories), mean_interval(list(found.values())) if whole else None)
