"""Ordinal: figures of ordered classes, overall and in every group.

The predicted class is the median of a record's probabilities: its index is the number of classes above which more than
half of the probability lies. An error is counted in ranks: by how many classes prediction and truth are apart.

- MAE: the mean error. Within one: the share of records at most one rank apart.
- Kappa: Cohen's with quadratic weights; 0 at chance and 1 if all predictions are right.
- Loss: the mean binary cross-entropy, in nats, of "is above this class", for every class but the last.

scikit-learn computes them inside Fairlearn's frame. All are None if a probability is not finite. Kappa is also None if
all records are of one class. Intervals are over test records (`mean_interval`), of the errors in ranks and of their
differences.
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
from equidp.evaluation.metrics import Figures, by_group, figures_of

METRICS = ("mae", "accuracy", "within_one", "kappa", "loss")


def evaluate(scores: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None) -> dict[str, Any]:
    """Measure predicted classes: `[n, classes]` probabilities, in the classes' order.

    As `Task.evaluate`; `worst[grouping]` is the `telling` group of largest MAE.
    """
    figures = by_group(_figures(above(scores), labels), len(labels), groups, METRICS, main="mae", worst=max)
    of_errors = partial(mean_interval, least=0.0)
    return figures | {"intervals": per_group(of_errors, groups, errors(scores, labels), units=units)}


def cost_intervals(
    private: NDArray, baseline: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
) -> dict[str, Any]:
    """Return intervals of the cost of privacy in MAE; probabilities `[n, classes]` of two models."""
    return per_group(mean_interval, groups, errors(private, labels) - errors(baseline, labels), units=units)


def live(scores: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
    """Return `test/mae`, `test/mae/<grouping>:<group>` and `test/loss`, without figures that are not finite."""
    row = live_row("mae", errors(scores, labels), groups)
    if np.isfinite(scores).all():
        row["test/loss"] = _loss(labels, above(scores))
    return {name: value for name, value in row.items() if math.isfinite(value)}


def above(scores: NDArray) -> NDArray:
    """Return the probabilities that a record's class is above each class but the last, float64 `[n, classes − 1]`."""
    summed = np.asarray(scores, dtype=np.float64)[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.clip(summed[:, 1:], 0.0, 1.0)


def errors(scores: NDArray, labels: NDArray) -> NDArray:
    """Return by how many ranks each record's prediction is wrong, float64 `[n]`; NaN if it has no prediction."""
    apart = np.abs(_median(above(scores)) - labels).astype(np.float64)
    return np.where(np.isfinite(scores).all(axis=1), apart, np.nan)


def _median(above: NDArray) -> NDArray:
    return (above > 0.5).sum(axis=1)


def _figures(above: NDArray, labels: NDArray) -> Figures:
    measures: dict[str, Callable[[NDArray, NDArray], float | None]] = {
        "mae": lambda truth, found: sk.mean_absolute_error(truth, _median(found)),
        "accuracy": lambda truth, found: sk.accuracy_score(truth, _median(found)),
        "within_one": lambda truth, found: float((np.abs(_median(found) - truth) <= 1).mean()),
        "kappa": _kappa,
        "loss": _loss,
    }
    return figures_of(measures, labels, above)


def _kappa(truth: NDArray, above: NDArray) -> float | None:
    ranks, several = np.arange(above.shape[1] + 1), len(np.unique(truth)) > 1
    return sk.cohen_kappa_score(truth, _median(above), labels=ranks, weights="quadratic") if several else None


def _loss(labels: NDArray, above: NDArray) -> float:
    truth = labels[:, None] > np.arange(above.shape[1])
    return float(sk.log_loss(truth.ravel(), above.ravel(), labels=[False, True]))
