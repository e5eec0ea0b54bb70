"""The ε that a given test figure needs: where the curve of one run reaches it, with an interval over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from equidp.errors import EquidpError
from equidp.evaluation.seeds import Interval, mean_interval


@dataclass(frozen=True)
class Needed:
    """What seeds needed.

    Attributes:
        target: the figure to be reached.
        by_seed: ε at which each seed that reached it did so.
        seeds: how many were tried.
        interval: mean and 95 % interval over the seeds; None where one has not reached it: a mean over the others would
            be too small.
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
    """ε spent by the first evaluated epoch after which `test/<metric>` is at least `target`.

    It describes a curve. Stopping there would be a choice by test records, and the ε is exact to the distance of two
    evaluated epochs (`training.evaluate_every`).

    Args:
        histories: `history.parquet` of one setting's runs, by seed: columns `epsilon` and `test/<metric>`.
        target: such as 0.96.
        metric: one that grows as a model improves.

    Raises:
        EquidpError: without a history, or where one has no such column.
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
