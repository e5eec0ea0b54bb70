"""Live: the figures that are shown during training, accuracy and loss on the test part.

They are computed after every epoch, so they use plain counts to be fast. The figures of a finished run come from
`metrics.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import log_loss

from equidp.evaluation.metrics import Groups, unique_slugs


def live_metrics(scores: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
    """Return `test/accuracy`, `test/loss` and `test/accuracy/<grouping>:<group>`, without groups that have no record.

    Scores are `[n, classes]` probabilities. The loss is left out if a score is not finite.
    """
    right = (scores.argmax(axis=1) == labels).astype(float)
    row = {"test/accuracy": float(right.mean())}
    if np.isfinite(scores).all():
        row["test/loss"] = float(log_loss(labels, scores, labels=np.arange(scores.shape[1])))
    return row | live_row("accuracy", right, groups)


def live_row(metric: str, values: NDArray, groups: Groups) -> dict[str, float]:
    """Return a metric that is a mean of `[n]` values, overall and in every group with a record."""
    row = {f"test/{metric}": float(values.mean())}
    groupings = unique_slugs(list(groups))
    for grouping, (ids, names) in groups.items():
        prefix, slugs = f"test/{metric}/{groupings[grouping]}", unique_slugs(names)
        counts = np.bincount(ids, minlength=len(names))
        sums = np.bincount(ids, weights=values, minlength=len(names))
        row |= {f"{prefix}:{slugs[names[k]]}": sums[k] / counts[k] for k in counts.nonzero()[0]}
    return row
