"""The figures shown during training: accuracy and loss on the test part.

Computed after every epoch, so plain counts are used; the figures of a finished run come from `metrics.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import log_loss

from equidp.evaluation.metrics import Groups, unique_slugs


def live_metrics(scores: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
    """`test/accuracy`, `test/loss` and `test/accuracy/<grouping>:<group>`; groups without a record are left out.

    Scores are `[n, classes]` probabilities; the loss is left out where one is not finite.
    """
    right = (scores.argmax(axis=1) == labels).astype(float)
    row = {"test/accuracy": float(right.mean())}
    if np.isfinite(scores).all():
        row["test/loss"] = float(log_loss(labels, scores, labels=np.arange(scores.shape[1])))
    return row | live_row("accuracy", right, groups)


def live_row(metric: str, values: NDArray, groups: Groups) -> dict[str, float]:
    """A metric that is a mean of `[n]` values, overall and in every group with a record."""
    row = {f"test/{metric}": float(values.mean())}
    groupings = unique_slugs(list(groups))
    for grouping, (ids, names) in groups.items():
        prefix, slugs = f"test/{metric}/{groupings[grouping]}", unique_slugs(names)
        counts = np.bincount(ids, minlength=len(names))
        sums = np.bincount(ids, weights=values, minlength=len(names))
        row |= {f"{prefix}:{slugs[names[k]]}": sums[k] / counts[k] for k in counts.nonzero()[0]}
    return row
