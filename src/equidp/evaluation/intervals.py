"""Intervals of one run's figures: how much they depend on which records happen to be in the test part.

In a group of 73 test records a single one changes an accuracy by more than a per cent. The interval shows this: 95 %
over test parts of that size drawn from the same people, for the model as it is. It does not include that another seed
would train another model; `seeds.py` does. Each interval holds at 95 % by itself: of twenty, one is expected to miss.

Of an accuracy it is Wilson's score interval. Of a difference of two models' accuracies on the same records, where they
are right and wrong together most of the time, it is Newcombe's (Statistics in Medicine 17, 1998, pages 2635 to 2650,
method 10), made of the two Wilson intervals and the correlation. Of a mean of errors, or of their differences, it is
mean ± t·s/√n with records of one unit added up first, so that units are the independent observations.

Several records of one unit (a patient's visits) carry less information than the same number of units. As in survey
sampling (Kish 1965) they count as n/D records, D being the variance of the share over whole units divided by that over
records. D is estimated, and (z/t)² of the records are left for that, with Student's t (Korn and Graubard, Survey
Methodology 24, 1998, pages 193 to 201). Its degrees of freedom are those of the units that tell D, less one: where each
unit has c records of the rarer kind, right or wrong, these are (Σc)²/Σc², the number of units if all that have such a
record have as many. Few units tell little: another one may be wrong throughout. So D is, by steps of that number up to
`TELLING`, a geometric mean of what was found and of what it is where a unit's records are always equal. With none of
the rarer kind they count as that: as many as there are units, fewer if some units have more records than others. The
correlation is that of the units' sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95

TELLING = 20
"""So many units with a record of the rarer kind tell how alike the records of a unit are."""

Groups = Mapping[str, tuple[NDArray, tuple[str, ...]]]
"""Per grouping: group ids `[n]` and the names of all groups, in id order."""

Pair = list[float]
"""Lower and upper end."""


def accuracy_interval(right: NDArray[np.bool_], units: NDArray) -> Pair | None:
    """Interval of the share of True in `[n]`; None if n is 0. `units`: the unit of each record, any numbers `[n]`."""
    return list(_Share(right, units).interval()) if len(right) else None


def difference_interval(right: NDArray[np.bool_], right_before: NDArray[np.bool_], units: NDArray) -> Pair | None:
    """Interval of the share of True in the first minus that in the second, both `[n]` of the same records."""
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
    """Interval of the mean of `[n]` values; None with fewer than two units, or with a value that is not finite.

    It is cut to where a mean can be, from `least` to `most`.

    None, too, where all values agree but for rounding, as errors in ranks often do: they have no spread, and an
    interval without a width would say that other records agree as well.

    Of units of several records the mean is a ratio of sums, and its variance that of the units' residual sums.
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
    """An interval overall and in every group: `{"overall": …, "groups": {grouping: {group: …}}}`.

    `units` as for the intervals; None where each record is a unit's only one.
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
    """A share of records, and the number of independent records they count as.

    Attributes:
        share: of True.
        sums: `[units]`, each unit's number of right records minus its number of records times the share.
        worth: number of independent records; n where every unit has one.
    """

    def __init__(self, right: NDArray[np.bool_], units: NDArray) -> None:
        _, owners = np.unique(units, return_inverse=True)
        n, self.share = len(right), int(right.sum()) / len(right)
        self.sums = np.bincount(owners, weights=right - self.share)
        count, spread = len(self.sums), n * self.share * (1 - self.share)
        design = float((np.bincount(owners) ** 2).sum()) / n  # 1 where every unit has one record
        if design > 1 and spread:
            rarer = np.bincount(owners, weights=right == (self.share <= 0.5))
            telling = float(rarer.sum() ** 2 / (rarer**2).sum())
            if telling > 1:
                found = (self.sums**2).sum() / spread * count / (count - 1) * (n - 1) / n
                found = min(max(found * (_student(telling - 1) / _normal()) ** 2, 1.0), design)
                design *= (found / design) ** min((telling - 1) / (TELLING - 1), 1.0)
        self.worth = n / max(design, 1.0)

    def interval(self) -> tuple[float, float]:
        """Wilson's."""
        z, n, p = _normal(), self.worth, self.share
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        return max(0.0, (middle - half) / (1 + z**2 / n)), min(1.0, (middle + half) / (1 + z**2 / n))

    def distances(self) -> tuple[float, float]:
        """How far the interval reaches below and above the share."""
        low, high = self.interval()
        return self.share - low, high - self.share

    def correlation(self, other: _Share) -> float:
        """Pearson's, a positive one lessened for continuity as Newcombe has it; 0 where it is undefined."""
        size = math.sqrt((self.sums**2).sum() * (other.sums**2).sum())
        if not size:
            return 0.0
        found = float((self.sums * other.sums).sum()) / size
        spread = math.sqrt(self.share * (1 - self.share) * other.share * (1 - other.share))
        return max(found - 1 / (2 * min(self.worth, other.worth) * spread), 0.0) if found > 0 else found


def _normal() -> float:
    """1.96."""
    return float(stats.norm.ppf((1 + CONFIDENCE) / 2))


def _student(freedom: float) -> float:
    """The same of Student's t with so many degrees of freedom."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
