"""Nodes of evaluation."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from equidp.data.records import Records
from equidp.errors import listed_names
from equidp.evaluation.metrics import cost_intervals, diverged, evaluate, guessing, metrics_document, outdone
from equidp.parameters import Settings
from equidp.pipelines.training.nodes import group_arrays
from equidp.reporting.tables import BASELINE

logger = logging.getLogger(__name__)


def evaluate_groups(scores: np.ndarray, test: Records, settings: Settings, *, algorithm: str) -> dict[str, Any]:
    """Metrics overall and in every group of the test part."""
    part = settings.data.evaluate_on
    groups = group_arrays(test, settings.data.groups)
    figures = evaluate(scores, test.labels.numpy(), groups, classes=test.schema.classes, units=_units(test))
    if said := guessing(figures):  # here, of each model once, however many are compared with the baseline
        _tell_of_guessing(algorithm, said)
    if algorithm == BASELINE:  # part of every run, and the part is the same for all its algorithms
        _tell_of_absent_classes(test, part)
    return figures | ({"evaluated_on": part} if part != "test" else {})


def cost_against_baseline(
    evaluation: dict[str, Any],
    baseline: dict[str, Any],
    scores: np.ndarray,
    baseline_scores: np.ndarray,
    test: Records,
    settings: Settings,
) -> dict[str, Any]:
    """metrics.json of a private run: its figures, the baseline's, and the difference in every group."""
    if diverged(baseline):
        logger.warning(
            "The non-private baseline diverged, so no cost of privacy is stated: give it a learning rate of its own, "
            "smaller than training.learning_rate, by --params=sgd.options.learning_rate=0.1."
        )
    if diverged(evaluation):
        logger.warning("The private model diverged, every prediction counts as wrong: lower training.learning_rate.")
    document = metrics_document(evaluation, baseline)
    if not diverged(baseline):
        groups = group_arrays(test, settings.data.groups)
        document["cost_of_privacy"]["intervals"] = cost_intervals(
            scores, baseline_scores, test.labels.numpy(), groups, units=_units(test)
        )
    if outdone(document) and not guessing(baseline):
        logger.warning(
            "The private model is more accurate than its non-private baseline, by more than chance: costs and gaps say "
            "nothing while the baseline can do better. Give it a learning rate of its own, by "
            "--params=sgd.options.learning_rate=1, or more training.epochs."
        )
    return document


def _units(records: Records) -> np.ndarray | None:
    return None if records.unit is None else records.unit.numpy()


def _tell_of_guessing(algorithm: str, said: str) -> None:
    if algorithm == BASELINE:
        logger.warning(
            "The non-private baseline %s. Privacy looks free beside it: give it more training.epochs, a learning rate "
            "of its own, smaller or larger, by --params=sgd.options.learning_rate=1, or training.class_weights where a "
            "class is rare.",
            said,
        )
    else:
        logger.warning(
            "%s: the model %s. Its accuracy is then that of the most frequent class and says nothing.", algorithm, said
        )


def _tell_of_absent_classes(test: Records, part: str) -> None:
    counts = np.bincount(test.labels.numpy(), minlength=len(test.schema.classes))
    if absent := [name for name, count in zip(test.schema.classes, counts, strict=True) if not count]:
        logger.warning(
            "The %s part has no record of class %s: the figures say nothing about it%s.",
            part,
            listed_names(absent),
            ", and of one class alone any model looks perfect" if np.count_nonzero(counts) == 1 else "",
        )
