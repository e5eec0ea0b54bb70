"""Intervals of one run's figures: how much they depend on which records happen to be in the test part.

In a group of 73 test records a single record changes an accuracy by more than one per cent. The interval shows this: it
covers 95 % of test parts of that size drawn from the same people, for the given model. It does not include that another
seed would train another model; `seeds.py` does. Each interval holds at 95 % by itself: of twenty intervals one is
expected to miss.

- For an accuracy it is Wilson's score interval.
- For a difference of two models' accuracies it is Newcombe's interval (Statistics in Medicine 17, 1998, pages 2635 to
  2650, method 10). Both models predict the same records, and are mostly right or wrong together. So the interval is
  made of the two Wilson intervals and the correlation.
- For a mean of errors, or of differences of errors, it is mean ± t·s/√n. The records of one unit are added up first, so
  that units are the independent observations.

*Units with several records* (a patient's visits). Several records of one unit carry less information than the same
number of units. As in survey sampling (Kish 1965) n records count as n/D, where D is the variance of the share over
whole units divided by its variance over records. D is estimated, so only (z/t)² of these records are counted, with
Student's t (Korn and Graubard, Survey Methodology 24, 1998, pages 193 to 201). Its degrees of freedom are the number of
units that inform about D, less one. This number is (Σc)²/Σc², if the units have c records each of the rarer kind, right
or wrong. If all units with such records have equally many, it is the number of these units.

Few units say little about D, because the next unit may be wrong in all of its records. So D is a geometric mean of the
estimate and of its value if the records of each unit were always equal. The estimate's share grows with the number of
informing units, up to `TELLING`. Without any record of the rarer kind, D has that other value: the records count as
many as there are units, or fewer if some units have more records than others. The correlation is that of the units'
sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95

TELLING = 20
"""Number of units with a record of the rarer kind that suffice to estimate how alike the records of a unit are."""

Groups = Mapping[str, tuple[NDArray, tuple[str, ...]]]
"""Per grouping: group ids `[n]` and the names of all groups, in id order."""

Pair = list[float]
"""Lower and upper end."""


def accuracy_interval(right: NDArray[np.bool_], units: NDArray) -> Pair | None:
    """Return the interval of the share of True in `[n]`; None if n is 0. `units` `[n]` has each record's unit."""
    return list(_Share(right, units).interval()) if len(right) else None


def difference_interval(right: NDArray[np.bool_], right_before: NDArray[np.bool_], units: NDArray) -> Pair | None:
    """Return the interval of the share of True in `right` minus that in `right_before`, `[n]` of the same records."""
    if not len(right):
        return None
    now, before = _Share(right, units), _Share(right_before, units)
    below, above = zip(now.distances(), before.distances(), strict=True)
    correlation = now.correlation(before)
    difference = now.share - before.share
    low = below[0] ** 2 - 2 * correlation * below[0] * above[1] + above[1] ** 2
    high = above[0] ** 2 - 2 * correlation * above[0] * below[1] + below[1] ** 2
    return [difference - math.sqrt(low), difference + math.sqrt(high)]


def mean_interval(values: NDArray, units: NDArray, *, least: float = -math.inf, most: float = math.inf) -> Pair | None:
    """Return the interval of the mean of `[n]` values, cut to the range that a mean can have, `least` to `most`.

    None if there are fewer than two units, or if a value is not finite. None, too, if all values agree up to rounding,
    as errors in ranks often do. Then they have no spread, and an interval of width 0 would claim that other records
    agree as well.

    If units have several records, the mean is a ratio of sums. Its variance is that of the units' residual sums.
    """
    _, owners = np.unique(units, return_inverse=True)
    if not len(values) or not np.isfinite(values).all() or np.ptp(values) <= 1e-9 * np.abs(values).max():
        return None
    mean = float(values.mean())
    sums = np.bincount(owners, weights=values - mean)
    if (count := len(sums)) < 2:
        return None
    spread = math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)
    half = _student(count - 1) * spread
    return [max(least, mean - half), min(most, mean + half)]


def per_group(
    interval: Callable[..., Pair | None], groups: Groups, *right: NDArray[np.bool_], units: NDArray | None = None
) -> dict:
    """Return an interval overall and in every group: `{"overall": …, "groups": {grouping: {group: …}}}`.

    `units` as for the intervals; None if each unit has one record.
    """
    arrays = (*right, np.arange(len(right[0])) if units is None else np.asarray(units))
    return {
        "overall": interval(*arrays),
        "groups": {
            grouping: {name: interval(*(of[ids == k] for of in arrays)) for k, name in enumerate(names)}
            for grouping, (ids, names) in groups.items()
        },
    }


class _Share:
    """A share of records, and the number of independent records that they are worth.

    Attributes:
        share: the share of True.
        sums: `[units]`, each unit's number of right records minus its number of records times the share.
        worth: number of independent records; n if every unit has one record.
    """

    def __init__(self, right: NDArray[np.bool_], units: NDArray) -> None:
        _, owners = np.unique(units, return_inverse=True)
        n, self.share = len(right), int(right.sum()) / len(right)
        self.sums = np.bincount(owners, weights=right - self.share)
        count, spread = len(self.sums), n * self.share * (1 - self.share)
        design = float((np.bincount(owners) ** 2).sum()) / n  # D if a unit's records are equal; 1 if units have one
        if design > 1 and spread:
            rarer = np.bincount(owners, weights=right == (self.share <= 0.5))
            telling = float(rarer.sum() ** 2 / (rarer**2).sum())
            if telling > 1:
                found = (self.sums**2).sum() / spread * count / (count - 1) * (n - 1) / n
                found = min(max(found * (_student(telling - 1) / _normal()) ** 2, 1.0), design)
                design *= (found / design) ** min((telling - 1) / (TELLING - 1), 1.0)
        self.worth = n / max(design, 1.0)

    def interval(self) -> tuple[float, float]:
        """Return Wilson's interval."""
        z, n, p = _normal(), self.worth, self.share
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        return max(0.0, (middle - half) / (1 + z**2 / n)), min(1.0, (middle + half) / (1 + z**2 / n))

    def distances(self) -> tuple[float, float]:
        """Return how far the interval reaches below and above the share."""
        low, high = self.interval()
        return self.share - low, high - self.share

    def correlation(self, other: _Share) -> float:
        """Return Pearson's correlation; 0 if undefined. A positive one has Newcombe's continuity correction."""
        size = math.sqrt((self.sums**2).sum() * (other.sums**2).sum())
        if not size:
            return 0.0
        found = float((self.sums * other.sums).sum()) / size
        spread = math.sqrt(self.share * (1 - self.share) * other.share * (1 - other.share))
        return max(found - 1 / (2 * min(self.worth, other.worth) * spread), 0.0) if found > 0 else found


def _normal() -> float:
    """Return 1.96, the quantile of the normal distribution for the confidence."""
    return float(stats.norm.ppf((1 + CONFIDENCE) / 2))


def _student(freedom: float) -> float:
    """Return the same quantile of Student's t with so many degrees of freedom."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
