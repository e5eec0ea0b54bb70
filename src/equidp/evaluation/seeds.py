"""Seeds: means over several seeds, 95 % intervals, and differences paired by seed.

A cost of privacy is a difference between two runs with the same seed (same split, same initial weights). So its
interval is that of the differences by seed; an interval of two separate means would be too wide. With n seeds the
interval is mean ± t(n − 1)·s/√n, Student's t. A single seed has no interval. Seeds that agree exactly have none either:
shares of a few test records often agree because they are coarse, and a width of 0 would look like certainty.

The interval says what other seeds would give on these test records, or on this table if each seed draws its own test
records. It does not include that other people would give other figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from scipy import stats

ROUNDING = 1e-12
"""Values that differ by no more count as equal. A difference of shares, computed in another order, differs by less."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; `low` and `high` are None for a single value and if all values are equal.

    Attributes:
        mean: arithmetic mean over seeds.
        low, high: ends of the interval.
        seeds: number of values.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def half_width(self) -> float | None:
        """The number after ±, or None without an interval."""
        return None if self.high is None else self.high - self.mean

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.half_width is None else f"{self.mean:.4f} ± {self.half_width:.4f}"


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return mean and Student-t interval of independent values; no interval if they are equal up to rounding.

    Raises:
        ValueError: there is no value, or a value is not finite.
    """
    n = len(values)
    if n == 0 or not all(math.isfinite(v) for v in values):
        raise ValueError(f"A mean needs at least one value and finite ones only, got {list(values)}.")
    mean = math.fsum(values) / n
    if max(values) - min(values) <= ROUNDING:
        return Interval(mean, None, None, n)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Interval:
    """Return mean and interval of first − second over the seeds that both have.

    Args:
        first: value by seed.
        second: value by seed.

    Raises:
        ValueError: no seed is in both.

    Examples:
        >>> round(paired_difference({0: 0.60, 1: 0.70, 2: 0.80}, {0: 0.59, 1: 0.68, 2: 0.77}).mean, 3)
        0.02
    """
    return mean_interval([first[s] - second[s] for s in sorted(first.keys() & second.keys())])


def over_seeds(documents: Mapping[int, Mapping]) -> dict:
    """Summarise the `metrics_document`s of several seeds into one document of the same shape.

    Every number becomes `{"mean", "low", "high", "seeds"}`, or None if no seed has it. Costs of privacy and gaps were
    computed within each seed, so their intervals are paired. Words (the worst group's name) become the list of distinct
    words. The seeds' own intervals, over test records, are left out.
    """
    return _merge([_without_intervals(documents[seed]) for seed in sorted(documents)])


def _without_intervals(document: Mapping) -> dict:
    """Return a document without its `intervals`, where `metrics_document` has them: a class may have the same name."""
    parts = {name: _without_intervals(document[name]) for name in ("baseline", "cost_of_privacy") if name in document}
    return {name: value for name, value in document.items() if name != "intervals"} | parts


def _merge(values: Sequence):
    known = [v for v in values if v is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        keys = list(dict.fromkeys(key for value in known for key in value))
        return {key: _merge([value.get(key) for value in known]) for key in keys}
    if isinstance(known[0], str):
        return list(dict.fromkeys(known))
    return asdict(mean_interval(known))
