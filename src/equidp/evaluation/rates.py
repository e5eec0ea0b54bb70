"""Rates of the positive class in every group, which rules on fair treatment are about.

    selection rate              share of all records that are predicted positive
    true positive rate          share of the positive records that are predicted positive   (equal opportunity)
    false positive rate         share of the other records that are predicted positive      (both: equalized odds)
    predictive value            share of the records predicted positive that are positive

The first three are Fairlearn's `selection_rate`, `true_positive_rate` and `false_positive_rate`, the last is
scikit-learn's precision. Each is a share of some records, so each has Wilson's interval over test records
(`intervals.py`). A rate over no records is None, where those libraries return 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
from numpy.typing import NDArray

from equidp.data.products import within_classes
from equidp.errors import unknown_name
from equidp.evaluation.intervals import Groups, accuracy_interval

RATES = ("selection_rate", "true_positive_rate", "false_positive_rate", "predictive_value")

COMPARED = {rate.__name__: rate for rate in (selection_rate, true_positive_rate, false_positive_rate)}
"""Fairlearn's rates, which demographic parity and equalised odds compare."""


def positive_label(classes: tuple[str, ...], declared: str = "") -> int | None:
    """Return the label of the positive class: the declared one, or the second of two classes; None if there are more.

    Raises:
        EquidpError: the declared class is none of the classes.
    """
    if declared and declared not in classes:
        raise unknown_name("data.positive_class", declared, classes)
    return classes.index(declared) if declared else 1 if len(classes) == 2 else None


def group_rates(
    predicted: NDArray, labels: NDArray, groups: Groups, positive: int, *, units: NDArray | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each rate and its interval, both as `[grouping][group][rate]`.

    Groupings whose groups lie within the classes are left out. Predicted and true labels are class indices `[n]`;
    `positive` is the positive class's index.
    """
    owners = np.arange(len(labels)) if units is None else np.asarray(units)
    given, true = predicted == positive, labels == positive
    among = {
        "selection_rate": (given, np.ones_like(true)),
        "true_positive_rate": (given, true),
        "false_positive_rate": (given, ~true),
        "predictive_value": (true, given),
    }
    rates: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for grouping, (ids, names) in groups.items():
        if within_classes(grouping):
            continue
        rates[grouping], intervals[grouping] = {}, {}
        for k, name in enumerate(names):
            chosen = {rate: (of, own & (ids == k)) for rate, (of, own) in among.items()}
            rates[grouping][name] = {
                rate: float(of[own].mean()) if own.any() else None for rate, (of, own) in chosen.items()
            }
            intervals[grouping][name] = {
                rate: accuracy_interval(of[own], owners[own]) for rate, (of, own) in chosen.items()
            }
    return rates, intervals


def disparity(
    predicted: NDArray, labels: NDArray, ids: NDArray, positives: Sequence[int], among: Sequence[int]
) -> dict:
    """Return Fairlearn's demographic parity and equalised odds.

    For several positive classes it is the mean over one-versus-rest. Equalised odds compare true and false positive
    rates. So a class counts only if every group has records inside and outside it, because Fairlearn would count a
    missing rate as 0.
    """
    kept = np.isin(ids, among)
    predicted, labels, ids = predicted[kept], labels[kept], ids[kept]
    parity: list[tuple[float, float]] = []
    odds: list[float] = []
    # equal records are passed once, weighted by their number: Fairlearn takes a microsecond per record and metric
    kinds, numbers = np.unique(np.stack([ids, labels, predicted]), axis=1, return_counts=True)
    present = np.unique(kinds[0])
    for k in positives if len(present) > 1 else ():
        true, given = (kinds[1] == k).astype(int), (kinds[2] == k).astype(int)
        # the rates that demographic_parity_* and equalized_odds_difference need, in a single frame
        frame = MetricFrame(
            metrics=COMPARED,
            y_true=true,
            y_pred=given,
            sensitive_features=kinds[0],
            sample_params={rate: {"sample_weight": numbers} for rate in COMPARED},
        )
        difference = frame.difference()
        parity.append((difference["selection_rate"], frame.ratio()["selection_rate"]))
        if all(len(np.unique(true[kinds[0] == group])) == 2 for group in present):
            odds.append(max(difference["true_positive_rate"], difference["false_positive_rate"]))
    return {
        "demographic_parity_difference": _mean([difference for difference, _ in parity]),
        "demographic_parity_ratio": _mean([ratio for _, ratio in parity]),
        "equalized_odds_difference": _mean(odds),
    }


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of the finite values (a ratio is NaN if no record is predicted to be of the class)."""
    finite = [float(v) for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None
