"""Nodes of evaluation."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from equidp.algorithms import BASELINE
from equidp.data.records import Records
from equidp.data.sources import source, unit_noun
from equidp.errors import EquidpError, listed_names
from equidp.evaluation.histogram import Noised, noised_histogram
from equidp.evaluation.metrics import metrics_document
from equidp.evaluation.noised import released_figures
from equidp.mechanism.noise import derived_seed
from equidp.models.weights import Weights
from equidp.parameters import Settings
from equidp.pipelines.training.nodes import group_arrays
from equidp.system.files import write_private
from equidp.tasks import task_of
from equidp.tasks.base import TOO_LONG, Task
from equidp.training.conclusion import HISTOGRAM
from equidp.training.digests import content, fingerprint
from equidp.training.preparation import random_source
from equidp.training.statement import figures_entry

DISJOINT = ("hash", "provider")
"""Ways of splitting in which the part of a record does not depend on other records."""

EXCHANGED = (
    "The parts were drawn from all records at once: one record more in the table exchanges records between them, and "
    "neither the training's ε nor this one holds for tables that differ in one record."
)

ALIKE = (
    "These intervals take records for independent. Records of one {unit} are often right or wrong together, and where "
    "a {unit} has several, intervals are too short. With privacy.unit={word} each {unit} counts once."
)

logger = logging.getLogger(__name__)


def evaluate_groups(scores: np.ndarray, test: Records, settings: Settings, *, algorithm: str) -> dict[str, Any]:
    """Metrics overall and in every group of the test part."""
    part = settings.data.evaluate_on
    groups = group_arrays(test, settings.data.groups)
    task, classes = task_of(test.schema), len(test.schema.classes)
    positive = {"positive": settings.data.positive_class} if settings.data.positive_class else {}
    figures = task.evaluate(scores, test.labels.numpy(), groups, units=_units(test), **positive)
    if said := task.guessing(figures):  # here, so that the baseline is reported once, not once for each private model
        _tell_of_guessing(algorithm, said, task)
    elif said := task.hardly(figures) or task.flawless(figures):
        logger.warning("%s: the model %s.", algorithm, said)
    elif algorithm == BASELINE and (said := task.overshot(figures, classes)):
        logger.warning(
            "The non-private baseline %s: costs of privacy beside it are too small. Give it a smaller learning rate of "
            "its own, by --params=sgd.options.learning_rate=…, or fewer training.epochs.",
            said,
        )
    if algorithm != BASELINE and (said := task.overshot(figures, classes)):
        logger.warning("%s: the model %s. %s.", algorithm, said, TOO_LONG)
    # only once: every run has the baseline, and the test part is the same for all algorithms of a run
    if algorithm == BASELINE and test.schema.classes:
        _tell_of_absent_classes(test, part)
    return figures | ({"evaluated_on": part} if part != "test" else {})


def cost_against_baseline(
    evaluation: dict[str, Any],
    baseline: dict[str, Any],
    scores: np.ndarray,
    baseline_scores: np.ndarray,
    test: Records,
    settings: Settings,
    *,
    algorithm: str,
) -> dict[str, Any]:
    """metrics.json of a private run: its figures, the baseline's, and the difference in every group."""
    task = task_of(test.schema)
    if task.diverged(baseline):
        logger.warning(
            "The non-private baseline diverged, so no cost of privacy is stated: give it a learning rate of its own, "
            "smaller than the one it had, by --params=sgd.options.learning_rate=…"
        )
    if task.diverged(evaluation):
        logger.warning("The model of %s diverged, %s: lower training.learning_rate.", algorithm, task.diverged_means)
    document = metrics_document(evaluation, baseline)
    if task.measures(baseline):
        groups = group_arrays(test, settings.data.groups)
        document["cost_of_privacy"]["intervals"] = task.cost_intervals(
            scores, baseline_scores, test.labels.numpy(), groups, units=_units(test)
        )
    overshot = task.overshot(baseline, len(test.schema.classes))
    explained = task.guessing(baseline) or overshot or task.guessing(evaluation)
    if (said := task.outdone(document)) and not explained:
        logger.warning("%s %s.", algorithm, said)
    return document


def release_figures(
    scores: np.ndarray,
    weights: Weights,
    test: Records,
    train: Records,
    workplace: Path,
    settings: Settings,
    *,
    algorithm: str,
) -> dict[str, Any]:
    """metrics_release.json of a private run: figures of the evaluated part with noise; empty where none are asked for.

    The noised histogram is on disk before anything is computed from it. A run that goes on after a crash takes this
    histogram, and so releases nothing more.

    Raises:
        EquidpError: in a secure run whose parts depend on more than each record itself.
    """
    entry = figures_entry(settings.privacy, settings.data).get("evaluation")
    if entry is None:
        return {}
    how = None if train.membership is None else train.membership.how
    if how not in DISJOINT and settings.privacy.secure:
        raise EquidpError(
            "privacy.evaluation.epsilon: the parts were not drawn by hash, so one record more in the table exchanges "
            "records between them: take data.membership=hash."
        )
    noised = _released_once(workplace / HISTOGRAM, scores, weights, test, settings, entry, algorithm)
    return {
        "algorithm": algorithm,
        "secure": settings.privacy.secure,
        **entry,
        **released_figures(noised),
        "histogram": noised.to_dict(),
        "notes": [*([] if how in DISJOINT else [EXCHANGED]), *_alike(test, settings)],
    }


def _alike(test: Records, settings: Settings) -> list[str]:
    """Return a note that intervals ignore units, if single records are protected but the data have units.

    The histogram does not know which of its records belong to one unit.
    """
    if test.unit is None or settings.privacy.by_unit:
        return []
    word = source(settings.data.source, settings.data.options).words()[1]
    return [ALIKE.format(unit=unit_noun(word), word=word)]


def _released_once(
    path: Path,
    scores: np.ndarray,
    weights: Weights,
    test: Records,
    settings: Settings,
    entry: dict[str, Any],
    algorithm: str,
) -> Noised:
    """Return the histogram of exactly this model and these records from `path`, or a new one that is kept there.

    Scores are not compared, because on another processor their last digits differ, and the model decides the figures.
    """
    groups = group_arrays(test, settings.data.groups)
    found = hashlib.sha256(repr((entry, settings.privacy.secure, settings.seed)).encode())
    found.update(fingerprint(test).encode())
    for _, tensor in sorted(weights.tensors.items()):
        found.update(content(tensor))
    for ids, _ in groups.values():
        found.update(np.ascontiguousarray(ids).tobytes())
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["of"] == found.hexdigest():
            return Noised.from_dict(kept["histogram"])
        if settings.privacy.secure and settings.resume:
            raise EquidpError(
                f"{path}: noised figures of another model or of other records were released before this run was "
                "interrupted; further ones would cost their ε again. Begin anew with resume=false, and count both."
            )
    noised = noised_histogram(
        scores,
        test.labels.numpy(),
        groups,
        classes=test.schema.classes,
        bins=entry["bins"],
        noise_multiplier=entry["mechanism"]["noise_multiplier"],
        random=random_source(settings.privacy, derived_seed(settings.seed, f"figures/{algorithm}")),
        units=_units(test) if settings.privacy.by_unit else None,
    )
    write_private(path, json.dumps({"of": found.hexdigest(), "histogram": noised.to_dict()}).encode())
    return noised


def _units(records: Records) -> np.ndarray | None:
    return None if records.unit is None else records.unit.numpy()


def _tell_of_guessing(algorithm: str, said: str, task: Task) -> None:
    if algorithm == BASELINE:
        logger.warning(
            "The non-private baseline %s. So no cost of privacy is stated: give it more training.epochs, a "
            "learning rate of its own, smaller or larger, by --params=sgd.options.learning_rate=…%s.",
            said,
            ", or training.class_weights where a class is rare" if task.schema.classes else "",
        )
    else:
        logger.warning("%s: the model %s. %s and says nothing.", algorithm, said, task.guessed_means)


def _tell_of_absent_classes(test: Records, part: str) -> None:
    counts = np.bincount(test.labels.numpy(), minlength=len(test.schema.classes))
    if absent := [name for name, count in zip(test.schema.classes, counts, strict=True) if not count]:
        logger.warning(
            "The %s part has no record of class %s: the figures say nothing about it%s.",
            part,
            listed_names(absent),
            ", and of one class alone any model looks perfect" if np.count_nonzero(counts) == 1 else "",
        )
