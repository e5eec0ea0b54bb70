"""Metrics in words, and the task that documents belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from equidp.errors import EquidpError
from equidp.tasks import CLASSIFICATION, TASKS, kind_of
from equidp.tasks.base import Task

METRIC_TITLES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "mcc": "MCC",
    "auroc": "AUROC",
    "loss": "loss",
    "excess_loss": "excess loss",
    "calibration_error": "calibration error",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
    "mean_error": "mean error",
    "deviance": "deviance",
    "label_accuracy": "label accuracy",
    "macro_auroc": "macro AUROC",
    "exact_match": "exact match",
    "within_one": "within one rank",
    "kappa": "weighted kappa",
}


def task_in(documents: Mapping[str, Mapping]) -> type[Task]:
    """Return the task that all of these documents belong to.

    Raises:
        EquidpError: they belong to several tasks, whose figures cannot be compared.
    """
    kinds = list(dict.fromkeys(kind_of(document) for document in documents.values())) or [TASKS[CLASSIFICATION]]
    if len(kinds) > 1:
        raise EquidpError(
            f"These runs are of {' and of '.join(kind.name for kind in kinds)}, whose figures cannot be compared: take "
            "those of one data set (report.dataset)."
        )
    return kinds[0]


SAME_TABLE = (
    "All seeds are evaluated on the same records, or on parts of one table: an interval over seeds leaves out how much "
    "other people would change a figure."
)
"""What an interval over seeds leaves out."""

COST_MEANS = "how much worse the {} is than the non-private baseline's, negative where it is better"
"""What a cost of privacy is; the metric's title is filled in."""


def cost_title(metric: str) -> str:
    """A cost of privacy in a heading."""
    title = METRIC_TITLES[metric]
    return title if metric == "excess_loss" else f"cost in {title}"


def figure_text(value: float, places: int, form: str = "", *, beside: float = 0.0) -> str:
    """A figure with so many decimal places. From 10 on it has fewer, because it has more digits before the point.

    `form` is a sign or a separator as Python writes them. `beside` is half of the figure's interval, or the figure
    beside such a half: both get the same number of places.
    """
    size = max(abs(value), abs(beside))
    fewer = math.floor(math.log10(size)) if math.isfinite(size) and size >= 10 else 0
    return f"{value:{form}.{max(0, places - fewer)}f}"


def interval_text(ends: Sequence[float], least: float, most: float, form: str = "") -> str:
    """An interval from end to end, cut at the possible values: over few seeds it can go beyond them."""
    return " to ".join(figure_text(min(max(end, least), most), 3, form) for end in ends)
