"""Intervals of one run's accuracies: how far they are decided by who happens to be among the test records.

A group of 73 test records moves by more than a per cent with a single one of them. The interval says so: 95 % over test
parts of that size drawn from the same people, for the model as it is. That another seed would have trained another
model is not in it; `seeds.py` is for that. Nor is it that one person may have several test records, which tell less
than as many people's. Each interval holds at 95 % for itself: of twenty, one is expected to miss.

Of an accuracy it is Wilson's score interval. Of a difference of two models' accuracies on the same records, where they
are right and wrong together most of the time, it is Newcombe's (Statistics in Medicine 17, 1998, pages 2635 to 2650,
method 10), made of the two Wilson intervals and the correlation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95

Groups = Mapping[str, tuple[NDArray, tuple[str, ...]]]
"""Per grouping: group ids `[n]` and the names of all groups, in id order."""

Pair = list[float]
"""Lower and upper end."""


def accuracy_interval(right: NDArray[np.bool_]) -> Pair | None:
    """Interval of the share of True among `[n]`; None of nothing."""
    return list(_wilson(int(right.sum()), len(right))) if len(right) else None


def difference_interval(right: NDArray[np.bool_], right_before: NDArray[np.bool_]) -> Pair | None:
    """Interval of the share of True in the first minus that in the second, both `[n]` of the same records."""
    n = len(right)
    if not n:
        return None
    shares, below, above = zip(*(_distances(int(of.sum()), n) for of in (right, right_before)), strict=True)
    correlation = _correlation(right, right_before)
    difference = shares[0] - shares[1]
    low = below[0] ** 2 - 2 * correlation * below[0] * above[1] + above[1] ** 2
    high = above[0] ** 2 - 2 * correlation * above[0] * below[1] + below[1] ** 2
    return [difference - math.sqrt(low), difference + math.sqrt(high)]


def per_group(interval: Callable[..., Pair | None], groups: Groups, *right: NDArray[np.bool_]) -> dict:
    """An interval overall and in every group: `{"overall": …, "groups": {grouping: {group: …}}}`."""
    return {
        "overall": interval(*right),
        "groups": {
            grouping: {name: interval(*(of[ids == k] for of in right)) for k, name in enumerate(names)}
            for grouping, (ids, names) in groups.items()
        },
    }


def _wilson(count: int, n: int) -> tuple[float, float]:
    ends = stats.binomtest(count, n).proportion_ci(CONFIDENCE, "wilson")
    return float(ends.low), float(ends.high)


def _distances(count: int, n: int) -> tuple[float, float, float]:
    """A share, and how far its interval reaches below and above it."""
    low, high = _wilson(count, n)
    return count / n, count / n - low, high - count / n


def _correlation(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Pearson's φ, a positive one lessened for continuity as Newcombe has it; 0 where it is undefined."""
    n, first, second = len(one), int(one.sum()), int(other.sum())
    spread = first * (n - first) * second * (n - second)
    if not spread:
        return 0.0
    excess = int((one & other).sum()) * n - first * second  # the fourfold table's ad − bc
    return (max(excess - n / 2, 0.0) if excess > 0 else excess) / math.sqrt(spread)
