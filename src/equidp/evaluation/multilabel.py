"""Multilabel: figures of several labels of 0 or 1 each, overall, in every group and for every label.

A label is predicted as 1 if its probability is above one half.

- Label accuracy: the share of right labels, over all records and labels.
- Exact match: the share of records with all labels right.
- Macro AUROC: the mean over the labels that occur with both values among the records.
- Loss: the mean binary cross-entropy in nats.

scikit-learn computes them inside Fairlearn's frame. All are None if a probability is not finite. Intervals of label
accuracy are over test records (`mean_interval`), of each record's share of right labels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics as sk

from equidp.evaluation.intervals import Groups, mean_interval, per_group
from equidp.evaluation.live import live_row
from equidp.evaluation.metrics import by_group, figures_of

METRICS = ("label_accuracy", "macro_auroc", "exact_match", "loss")
LABEL_METRICS = ("accuracy", "auroc")
"""Figures of each label."""


def evaluate(
    scores: NDArray, truth: NDArray, groups: Groups, *, names: tuple[str, ...], units: NDArray | None = None
) -> dict[str, Any]:
    """Measure predicted labels: `[n, labels]` probabilities; the truth `[n, labels]` is 0 or 1.

    Returns:
        As `Task.evaluate`, and `labels[name]` with `overall`, `groups` and `worst` of `LABEL_METRICS`. `usual` is the
        label accuracy of predicting each label's more frequent value for all records; None without records.
    """
    scores, truth = np.asarray(scores, dtype=np.float64), np.asarray(truth).astype(np.int64)
    of_all: dict[str, Callable[[NDArray, NDArray], float | None]] = {
        "label_accuracy": lambda truth, scores: 1.0 - sk.hamming_loss(truth, scores > 0.5),
        "macro_auroc": _macro_auroc,
        "exact_match": lambda truth, scores: sk.accuracy_score(truth, scores > 0.5),
        "loss": lambda truth, scores: float(np.mean([_loss(*pair) for pair in zip(truth.T, scores.T, strict=True)])),
    }
    of_one: dict[str, Callable[[NDArray, NDArray], float | None]] = {
        "accuracy": lambda truth, scores: sk.accuracy_score(truth, scores > 0.5),
        "auroc": lambda truth, scores: sk.roc_auc_score(truth, scores) if len(np.unique(truth)) > 1 else None,
    }
    return {
        **by_group(figures_of(of_all, truth, scores), len(truth), groups, METRICS, main="label_accuracy"),
        "labels": {
            name: by_group(figures_of(of_one, truth[:, k], scores[:, k]), len(truth), groups, LABEL_METRICS)
            for k, name in enumerate(names)
        },
        "usual": float(np.maximum(truth.mean(axis=0), 1 - truth.mean(axis=0)).mean()) if len(truth) else None,
        "intervals": per_group(partial(mean_interval, least=0.0, most=1.0), groups, shares(scores, truth), units=units),
    }


def cost_intervals(
    private: NDArray, baseline: NDArray, truth: NDArray, groups: Groups, *, units: NDArray | None = None
) -> dict[str, Any]:
    """Return intervals of the cost of privacy in label accuracy; probabilities `[n, labels]` of two models."""
    return per_group(mean_interval, groups, shares(baseline, truth) - shares(private, truth), units=units)


def live(scores: NDArray, truth: NDArray, groups: Groups) -> dict[str, float]:
    """Return `test/label_accuracy`, `test/label_accuracy/<grouping>:<group>` and `test/loss`.

    They are all left out if a probability is not finite.
    """
    if not np.isfinite(scores).all():
        return {}
    losses = [_loss(*pair) for pair in zip(truth.T, np.asarray(scores, dtype=np.float64).T, strict=True)]
    return {**live_row("label_accuracy", shares(scores, truth), groups), "test/loss": float(np.mean(losses))}


def shares(scores: NDArray, truth: NDArray) -> NDArray:
    """Return each record's share of right labels, float64 `[n]`; NaN if one of its probabilities is not finite."""
    right = ((scores > 0.5) == (truth > 0.5)).mean(axis=1)
    return np.where(np.isfinite(scores).all(axis=1), right, np.nan)


def _macro_auroc(truth: NDArray, scores: NDArray) -> float | None:
    both = truth.any(axis=0) & ~truth.all(axis=0)
    return sk.roc_auc_score(truth[:, both], scores[:, both], average="macro") if both.any() else None


def _loss(truth: NDArray, scores: NDArray) -> float:
    return sk.log_loss(truth, scores, labels=[0, 1])
