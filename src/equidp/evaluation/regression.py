"""Regression: figures of predicted numbers, overall and in every group, in the unit of the number itself.

An error is prediction minus truth. The figures are the errors' mean absolute value (MAE), the root of their mean square
(RMSE), and their mean (the bias, positive if predictions are too high). R² is the share of the truth's variance that is
predicted. scikit-learn computes them inside Fairlearn's frame. A figure is None if a prediction is not finite. R² is
also None if there are fewer than two records or the truth does not vary.

Intervals are over test records (`mean_interval`), of the absolute errors, and of their differences between two models
on the same records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics as sk

from equidp.evaluation.intervals import Groups, mean_interval, per_group
from equidp.evaluation.live import live_row
from equidp.evaluation.metrics import by_group, figures_of

METRICS = ("mae", "rmse", "r2", "mean_error")

COUNT_METRICS = ("mae", "rmse", "r2", "mean_error", "deviance")
"""Figures of counts, with the mean Poisson deviance."""

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
    """Measure predicted numbers `[n]` by `METRICS`, or by `COUNT_METRICS` if predictions are above 0.

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
    """Return intervals of the cost of privacy in MAE; arguments are `[n]`, the rest as for `evaluate`."""
    lost = np.abs(private.astype(np.float64) - truth) - np.abs(baseline.astype(np.float64) - truth)
    return per_group(mean_interval, groups, lost, units=units)


def live(predicted: NDArray, truth: NDArray, groups: Groups) -> dict[str, float]:
    """Return `test/mae` and `test/mae/<grouping>:<group>`, without figures that are not finite."""
    errors = np.abs(np.asarray(predicted, dtype=np.float64) - truth)
    return {name: value for name, value in live_row("mae", errors, groups).items() if math.isfinite(value)}
