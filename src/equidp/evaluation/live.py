"""The few figures that are worth following while training: accuracy and loss on the test part."""

from __future__ import annotations

import numpy as np
from fairlearn.metrics import MetricFrame
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, log_loss

from equidp.evaluation.metrics import Groups, unique_slugs


def live_metrics(scores: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
    """`test/accuracy`, `test/loss` and `test/accuracy/<grouping>:<group>`; groups without a record are left out.

    Args:
        scores: `[n, classes]` probabilities.
        labels: `[n]` class indices.
        groups: per grouping, group ids `[n]` and names.
    """
    predicted = scores.argmax(axis=1)
    row = {"test/accuracy": float(accuracy_score(labels, predicted))}
    if np.isfinite(scores).all():
        row["test/loss"] = float(log_loss(labels, scores, labels=np.arange(scores.shape[1])))
    for grouping, (ids, names) in groups.items():
        slugs = unique_slugs(names)
        by_group = MetricFrame(metrics=accuracy_score, y_true=labels, y_pred=predicted, sensitive_features=ids).by_group
        row |= {f"test/accuracy/{grouping}:{slugs[names[int(k)]]}": float(v) for k, v in by_group.items()}
    return row
