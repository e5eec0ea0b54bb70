"""Figures of predicted numbers, overall and in every group, in the unit of the number itself.

Of errors (prediction minus truth): their mean absolute value (MAE), the root of their mean square (RMSE), and their
mean (the bias: positive where predictions are too high); and R², the share of the truth's variance that is predicted.
scikit-learn computes them inside Fairlearn's frame. A figure is None where a prediction is not finite, and R² where
there are fewer than two records or the truth does not vary.

Intervals are over test records, at 95 %: mean ± t·s/√n, of the absolute errors, and of their differences between two
models on the same records. Records of one unit are added up first, so that units are the independent observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics as sk

from equidp.evaluation.intervals import CONFIDENCE, Groups, Pair, per_group
from equidp.evaluation.live import live_row
from equidp.evaluation.metrics import by_group, figures_of

METRICS = ("mae", "rmse", "r2", "mean_error")

COUNT_METRICS = ("mae", "rmse", "r2", "mean_error", "deviance")
"""Of counts: the mean Poisson deviance too."""

MEASURES: dict[str, Callable[[NDArray, NDArray], float | None]] = {
    "mae": sk.mean_absolute_error,
    "rmse": sk.root_mean_squared_error,
    "r2": lambda truth, found: sk.r2_score(truth, found) if len(np.unique(truth)) > 1 else None,
    "mean_error": lambda truth, found: float(np.mean(found - truth)),
    "deviance": sk.mean_poisson_deviance,
}


def evaluate(
    predicted: NDArray,
    truth: NDArray,
    groups: Groups,
    *,
    metrics: tuple[str, ...] = METRICS,
    units: NDArray | None = None,
) -> dict[str, Any]:
    """Measure predicted numbers `[n]` by `METRICS`, or by `COUNT_METRICS` where predictions are above 0.

    As `Task.evaluate`; `worst[grouping]` is the `telling` group of largest MAE.
    """
    predicted, truth = np.asarray(predicted, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    figures = figures_of({name: MEASURES[name] for name in metrics}, truth, predicted)
    measured = by_group(figures, len(truth), groups, metrics, main="mae", worst=max)
    of_errors = partial(mean_interval, least=0.0)
    return measured | {"intervals": per_group(of_errors, groups, np.abs(predicted - truth), units=units)}


def cost_intervals(
    private: NDArray, baseline: NDArray, truth: NDArray, groups: Groups, *, units: NDArray | None = None
) -> dict[str, Any]:
    """Intervals of the MAE's cost of privacy; arguments `[n]`, else as for `evaluate`."""
    lost = np.abs(private.astype(np.float64) - truth) - np.abs(baseline.astype(np.float64) - truth)
    return per_group(mean_interval, groups, lost, units=units)


def live(predicted: NDArray, truth: NDArray, groups: Groups) -> dict[str, float]:
    """`test/mae` and `test/mae/<grouping>:<group>`; figures that are not finite are left out."""
    errors = np.abs(np.asarray(predicted, dtype=np.float64) - truth)
    return {name: value for name, value in live_row("mae", errors, groups).items() if math.isfinite(value)}


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
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * spread
    return [max(least, mean - half), min(most, mean + half)]
