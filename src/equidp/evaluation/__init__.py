"""Evaluation: per-group metrics, the cost of privacy, intervals over seeds. Plain functions on arrays and dicts."""

from equidp.evaluation.metrics import cost_of_privacy, evaluate, flat_metrics, metrics_document
from equidp.evaluation.seeds import Interval, mean_interval, over_seeds, paired_difference

__all__ = [
    "Interval",
    "cost_of_privacy",
    "evaluate",
    "flat_metrics",
    "mean_interval",
    "metrics_document",
    "over_seeds",
    "paired_difference",
]
