"""Metrics of a trained model in every group, and the cost of privacy for each group.

scikit-learn and Fairlearn compute the metrics. This module decides which metrics, for which groups, and when a value is
undefined. An undefined value is None, never NaN and never left out. A group without test records has count 0. Only the
calibration error is computed here, because neither library has it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from fairlearn.metrics import MetricFrame
from numpy.typing import NDArray
from sklearn import metrics as sk

from equidp.data.products import within_classes
from equidp.data.records import MIN_TEST_RECORDS
from equidp.evaluation.intervals import Groups, accuracy_interval, difference_interval, per_group
from equidp.evaluation.rates import disparity, group_rates, positive_label
from equidp.tasks import kind_of

Thing = TypeVar("Thing", bound=Hashable)

Figures = Callable[[NDArray], dict[str, float | None]]
"""Gives the count and metrics of the records with these row numbers."""

METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "mcc", "auroc", "loss", "calibration_error")
"""Measured overall and in every group; shown in this order."""

CALIBRATION_BINS = 15
ROUNDING = 1e-6
"""A probability may be below 0 by this much, because it may be computed as 1 minus the others."""
UNPREDICTED = -1
"""The predicted class of a record whose scores are not finite: it equals no label."""


def evaluate(
    scores: NDArray,
    labels: NDArray,
    groups: Groups,
    *,
    classes: tuple[str, ...],
    units: NDArray | None = None,
    positive: str = "",
) -> dict:
    """Measure a classifier overall and in every group.

    Args:
        scores: `[n, classes]` softmax probabilities. A row with a non-finite entry counts as a wrong prediction. The
            loss, AUROC and calibration error of every group that holds such a row are None.
        labels: `[n]` class indices.
        groups: per grouping, group ids `[n]` and group names. In the grouping `class` accuracy is the class's recall.
        classes: class names, in label order.
        units: `[n]` numbers, equal for records of one unit; None if each unit has one record.
        positive: name of the class whose rates are reported; if not given, the second of two classes.

    Returns:
        `overall` and `groups[grouping][group]` have `count` and the `METRICS`. `worst[grouping]` is the group of lowest
        accuracy. `spread[grouping]` is the largest minus the smallest accuracy. `disparity[grouping]` is Fairlearn's,
        for every grouping that does not include the classes. These three are over the groups that `telling` names.
        `intervals` has the accuracies' intervals over test records (`intervals.py`). If there is a positive class,
        `positive_class` is its name and `rates` has its rates; their intervals are in `intervals` (`rates.py`).

    Raises:
        ValueError: the arrays do not fit each other, or scores are below 0.
        EquidpError: `positive` is none of the classes.
    """
    scores, labels = _as_probabilities(scores, len(classes)), np.asarray(labels)
    groups = {grouping: (np.asarray(ids), tuple(names)) for grouping, (ids, names) in groups.items()}
    _check_shapes(scores, labels, groups)
    predicted = _predicted(scores)
    measured = by_group(_figures(scores, predicted, labels), len(labels), groups, METRICS)
    label = positive_label(classes, positive)
    rates, ends = ({}, {}) if label is None else group_rates(predicted, labels, groups, label, units=units)
    positives, by_grouping = range(len(classes)) if label is None else [label], measured["groups"]
    return {
        **measured,
        "disparity": {
            grouping: disparity(predicted, labels, ids, positives, _numbers(telling(by_grouping[grouping]), names))
            for grouping, (ids, names) in groups.items()
            if not within_classes(grouping)
        },
        "intervals": per_group(accuracy_interval, groups, predicted == labels, units=units)
        | ({"rates": ends} if rates else {}),
        **({"positive_class": classes[label], "rates": rates} if label is not None and rates else {}),
    }


def by_group(
    figures: Figures, count: int, groups: Groups, metrics: Sequence[str], main: str = "accuracy", worst: Callable = min
) -> dict:
    """Return `overall`, `groups`, `worst` and `spread` of `count` records.

    Args:
        figures: gives the figures of some rows.
        count: number of records.
        groups: as for `evaluate`.
        metrics: names of the figures.
        main: the figure by which groups are compared.
        worst: `min` or `max`, which end of the main figure is bad.
    """
    rows = np.arange(count)
    found = {grouping: _per_group(figures, rows, ids, names, metrics) for grouping, (ids, names) in groups.items()}
    return {
        "overall": _tidy(figures(rows)) if count else _nothing(metrics),
        "groups": found,
        "worst": {grouping: worst_group(of, main, worst) for grouping, of in found.items()},
        "spread": {grouping: spread(of, main) for grouping, of in found.items()},
    }


def figures_of(
    measures: Mapping[str, Callable[[NDArray, NDArray], float | None]], truth: NDArray, found: NDArray
) -> Figures:
    """Return a function that gives, for row numbers, the count and the measures of (truth, found) in these rows.

    The measures are None if a found value is not finite.
    """

    def measure(rows: NDArray) -> dict[str, float | None]:
        true, given = truth[rows], found[rows]
        finite = np.isfinite(given).all()
        return {"count": len(rows), **{name: of(true, given) if finite else None for name, of in measures.items()}}

    return measure


def cost_intervals(
    private: NDArray, baseline: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
) -> dict:
    """Return intervals over test records of the cost of privacy in accuracy, overall and in every group.

    Args:
        private: `[n, classes]` scores.
        baseline: scores of the same records.
        labels: `[n]` class indices.
        groups: as for `evaluate`.
        units: as for `evaluate`.
    """
    # as in `evaluate`: the interval must be of the same predictions as the accuracies beside it
    right = [_predicted(_as_probabilities(of, np.shape(of)[1])) == labels for of in (baseline, private)]
    return per_group(difference_interval, groups, *right, units=units)


def cost_of_privacy(private: Mapping, baseline: Mapping) -> dict:
    """Return the cost of privacy in each metric, overall and in every group, and its gap between groups.

    A cost is the loss in a metric (`Task.cost`), positive if the private model is worse. Both arguments are results of
    `evaluate` for the same seed, split and model. A cost is None if either side has no value. All costs are None if the
    baseline has diverged or guesses: compared with a model that learnt nothing, privacy would seem to be free.
    `gap[grouping]` is the largest minus the smallest cost over the `telling` groups with a cost; None if fewer than two
    have one.
    """
    task = kind_of(private)
    if not task.measures(baseline):
        baseline = {"overall": {}, "groups": {}}
    groups = {
        grouping: {
            group: task.cost(figures, baseline["groups"].get(grouping, {}).get(group, {}))
            for group, figures in of.items()
        }
        for grouping, of in private["groups"].items()
    }
    return {
        "overall": task.cost(private["overall"], baseline["overall"]),
        "groups": groups,
        "gap": {
            grouping: _gaps([of[group] for group in telling(private["groups"][grouping])])
            for grouping, of in groups.items()
        },
    }


def metrics_document(private: Mapping, baseline: Mapping | None) -> dict:
    """Return the content of `metrics.json`: the private model's figures, the baseline's, and the cost of privacy.

    Without a baseline (in a run of `sgd` itself) the keys `baseline` and `cost_of_privacy` are left out.
    """
    document = dict(private)
    if baseline is not None:
        document["baseline"] = dict(baseline)
        document["cost_of_privacy"] = cost_of_privacy(private, baseline)
    return document


def flat_metrics(document: Mapping) -> dict[str, float]:
    """Return the figures of a `metrics_document` under names that MLflow accepts; undefined ones are left out.

    For example `test/accuracy`, `test/accuracy/sex:Female`, `test/worst_group_accuracy/sex`,
    `test/demographic_parity_difference/sex`, `baseline/accuracy`, `cost_of_privacy/accuracy/sex:Female`,
    `cost_of_privacy/gap/sex` (of accuracy) and `cost_of_privacy/gap/sex/excess_loss`. Other tasks have their own main
    metric instead of accuracy.
    """
    main = kind_of(document).main
    flat = dict(_flat_figures("test", document))
    flat |= dict(_flat_figures("baseline", document.get("baseline", {})))
    cost = document.get("cost_of_privacy", {})
    flat |= dict(_flat_figures("cost_of_privacy", cost))
    slugs = unique_slugs(list(document.get("groups", {})))
    for grouping, gaps in cost.get("gap", {}).items():
        for metric, gap in gaps.items():
            name = f"cost_of_privacy/gap/{slugs[grouping]}"
            flat[name if metric == main else f"{name}/{metric}"] = gap
    return {name: float(value) for name, value in flat.items() if value is not None}


def telling(figures: Mapping[str, Mapping]) -> list[str]:
    """Return the groups that are compared for a worst group, a gap or a disparity.

    These are the groups with at least `MIN_TEST_RECORDS` records, so that chance alone does not decide. If fewer than
    two groups have so many, all groups are compared.
    """
    large = [group for group, of in figures.items() if of["count"] >= MIN_TEST_RECORDS]
    return large if len(large) > 1 else list(figures)


def worst_group(figures: Mapping[str, Mapping], main: str = "accuracy", worst: Callable[..., str | None] = min) -> dict:
    """Return the `telling` group of lowest accuracy; `{"group": None, "accuracy": None}` if no group has one.

    Other tasks have another main metric; `worst` (`min` or `max`) says which end of it is bad.
    """
    known = {group: figures[group][main] for group in telling(figures)}
    known = {group: value for group, value in known.items() if value is not None}
    group = worst(known, key=known.__getitem__, default=None)
    return {"group": group, main: None if group is None else known[group]}


def spread(figures: Mapping[str, Mapping], main: str = "accuracy") -> float | None:
    """Return the largest minus the smallest main metric of the `telling` groups; None if fewer than two have one.

    Unlike the gap in cost it needs no baseline: it is smaller if the worst group is closer to the best one.
    """
    known = [figures[group][main] for group in telling(figures) if figures[group][main] is not None]
    return max(known) - min(known) if len(known) > 1 else None


_WORDS = {"<=": "le ", ">=": "ge ", "≤": "le ", "≥": "ge ", "<": "lt ", ">": "gt ", "*": " x ", "+": " plus", "–": "-"}


LONGEST_SLUG = 100
"""The most letters of a slug: a name of an MLflow metric holds a grouping and a group, and may have 250 letters."""


def slug(name: str) -> str:
    """Return a grouping's or group's name in MLflow's alphabet: letters, digits, `_ - .` and space; cut if long."""
    for sign, word in _WORDS.items():
        name = name.replace(sign, word)
    name = re.sub(r"[^A-Za-z0-9_\-. ]", "_", re.sub(r"\s+", " ", name).strip())[:LONGEST_SLUG]
    return name if name.strip(".") else "_"  # MLflow reads names as paths, and refuses those that lead elsewhere


def unique_slugs(names: Sequence[str]) -> dict[str, str]:
    """Return a different slug for each name, so that no group's figures replace another's."""
    return numbered(names, slug)


def numbered(things: Iterable[Thing], name: Callable[[Thing], str], sign: str = "_") -> dict[Thing, str]:
    """Return a different name for each thing: equal names are numbered from 2."""
    taken: dict[Thing, str] = {}
    for thing in things:
        candidate, n = name(thing), 2
        while candidate in taken.values():
            candidate, n = f"{name(thing)}{sign}{n}", n + 1
        taken[thing] = candidate
    return taken


def calibration_error(labels: NDArray, scores: NDArray, bins: int = CALIBRATION_BINS) -> float:
    """Return the expected calibration error: the mean |accuracy − confidence| over bins, weighted by their records.

    Args:
        labels: `[n]` class indices.
        scores: `[n, classes]` probabilities; the confidence is the largest of a row.
        bins: number of bins of equal width, (0, 1/bins], …

    Source: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3.
    """
    confidence, hit = scores.max(axis=1), scores.argmax(axis=1) == labels
    bin_of = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    surplus = np.bincount(bin_of, weights=hit - confidence, minlength=bins)
    return float(np.abs(surplus).sum() / len(labels))


def _as_probabilities(scores: NDArray, classes: int) -> NDArray:
    """Return scores in float64 with rows that sum to 1: a float32 softmax is less exact than scikit-learn requires."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or scores.shape[1] != classes:
        raise ValueError(f"scores have shape {scores.shape}, expected [n, {classes}].")
    below = np.isfinite(scores).all(axis=1, keepdims=True) & (scores < 0)
    # outputs that are no probabilities may have a negative sum, and divided by it they would change their order
    if (below & (scores < -ROUNDING)).any():
        raise ValueError("scores are no probabilities: give softmax of a model's outputs, as `predict` does.")
    scores = np.where(below, 0.0, scores)
    with np.errstate(invalid="ignore", divide="ignore"):
        return scores / scores.sum(axis=1, keepdims=True)


def _check_shapes(scores: NDArray, labels: NDArray, groups: Groups) -> None:
    if labels.shape != scores.shape[:1]:
        raise ValueError(f"labels have shape {labels.shape} where scores have {len(scores)} rows.")
    for grouping, (ids, names) in groups.items():
        if ids.shape != labels.shape:
            raise ValueError(f"groups[{grouping!r}] has shape {ids.shape} where labels have {labels.shape}.")
        if len(ids) and (ids.min() < 0 or ids.max() >= len(names)):
            raise ValueError(f"groups[{grouping!r}] has ids outside 0..{len(names) - 1}.")


def _predicted(scores: NDArray) -> NDArray:
    finite = np.isfinite(scores).all(axis=1)
    return np.where(finite, np.where(finite[:, None], scores, 0).argmax(axis=1), UNPREDICTED)


def _per_group(figures: Figures, rows: NDArray, ids: NDArray, names: tuple[str, ...], metrics: Sequence[str]) -> dict:
    """Return the figures of every named group, also of groups without a record."""
    if not len(rows):
        return {name: _nothing(metrics) for name in names}
    # MetricFrame copies its columns record by record in Python for every metric, and passes one column of predictions,
    # but AUROC needs all scores. So MetricFrame gets a single metric of row numbers, which returns all figures.
    one = lambda _, chosen: figures(np.asarray(chosen))  # noqa: E731
    frame = MetricFrame(metrics=one, y_true=rows, y_pred=rows, sensitive_features={"group": np.asarray(ids)})
    measured = frame.by_group.to_dict()
    return {name: _tidy(measured[k]) if k in measured else _nothing(metrics) for k, name in enumerate(names)}


def _nothing(metrics: Sequence[str]) -> dict:
    """Return the figures of a group without a record."""
    return {"count": 0, **dict.fromkeys(metrics)}


def _tidy(figures: Mapping[str, float | None]) -> dict:
    """Return figures as plain Python numbers, with None for those that are not finite."""
    tidy: dict = {k: float(v) if v is not None and math.isfinite(v) else None for k, v in figures.items()}
    return {**tidy, "count": int(figures["count"] or 0)}


def _figures(scores: NDArray, predicted: NDArray, labels: NDArray) -> Figures:
    """Return a function that gives the count and all `METRICS` of row numbers."""
    metrics = _metrics(scores, predicted)
    return lambda rows: {"count": len(rows), **{name: of(labels[rows], rows) for name, of in metrics.items()}}


def _metrics(scores: NDArray, predicted: NDArray) -> dict[str, Callable[[NDArray, NDArray], float | None]]:
    """Return the metrics as functions of (labels, row numbers)."""

    def on_predictions(metric: Callable) -> Callable:
        return lambda labels, rows: metric(labels, predicted[rows])

    def on_scores(metric: Callable) -> Callable:
        def measure(labels: NDArray, rows: NDArray) -> float | None:
            of_group = scores[rows]
            return metric(labels, of_group) if np.isfinite(of_group).all() else None

        return measure

    return {
        "accuracy": on_predictions(sk.accuracy_score),
        "balanced_accuracy": on_predictions(_balanced_accuracy),
        "macro_f1": on_predictions(_macro_f1),
        "mcc": on_predictions(_mcc),
        "auroc": on_scores(_auroc),
        "loss": on_scores(_loss),
        "calibration_error": on_scores(calibration_error),
    }


def _balanced_accuracy(labels: NDArray, predicted: NDArray) -> float | None:
    """Return the mean recall of the classes that occur: `balanced_accuracy_score` without its warning about the others.

    Undefined if only one class occurs, for which it would be the accuracy.
    """
    present = np.unique(labels)
    return sk.recall_score(labels, predicted, labels=present, average="macro") if len(present) > 1 else None


def _macro_f1(labels: NDArray, predicted: NDArray) -> float | None:
    """Return the mean F1 of the classes among labels or predictions; undefined if all labels are of one class."""
    if len(np.unique(labels)) < 2:
        return None
    occurring = np.setdiff1d(np.union1d(labels, predicted), [UNPREDICTED])  # UNPREDICTED is no class, but has F1 0
    return sk.f1_score(labels, predicted, labels=occurring, average="macro", zero_division=0)


def _mcc(labels: NDArray, predicted: NDArray) -> float | None:
    """Return Matthews' correlation; undefined if only one class occurs, where scikit-learn returns 0."""
    return sk.matthews_corrcoef(labels, predicted) if len(np.unique(labels)) > 1 else None


def _auroc(labels: NDArray, scores: NDArray) -> float | None:
    """Return the area under the ROC curve; for several classes the mean of one-versus-rest over those that occur."""
    present = np.unique(labels)
    if len(present) < 2:
        return None
    if scores.shape[1] == 2:
        return sk.roc_auc_score(labels, scores[:, 1])
    return sk.roc_auc_score(labels[:, None] == present, scores[:, present], average="macro")


def _loss(labels: NDArray, scores: NDArray) -> float:
    """Return the mean cross-entropy in nats."""
    return sk.log_loss(labels, scores, labels=np.arange(scores.shape[1]))


def _numbers(chosen: Sequence[str], names: Sequence[str]) -> list[int]:
    return [k for k, name in enumerate(names) if name in chosen]


def _gaps(costs: Sequence[Mapping]) -> dict:
    gaps: dict[str, float | None] = {}
    for metric in costs[0] if costs else ():
        known = [cost[metric] for cost in costs if cost[metric] is not None]
        gaps[metric] = max(known) - min(known) if len(known) > 1 else None
    return gaps


def _flat_figures(prefix: str, figures: Mapping) -> Iterator[tuple[str, float | None]]:
    yield from ((f"{prefix}/{metric}", value) for metric, value in figures.get("overall", {}).items())
    slugs = unique_slugs(list(figures.get("groups", {})))
    for grouping, groups in figures.get("groups", {}).items():
        names = unique_slugs(list(groups))
        for group, values in groups.items():
            yield from ((f"{prefix}/{m}/{slugs[grouping]}:{names[group]}", v) for m, v in values.items())
    labels = unique_slugs(list(figures.get("labels", {})))
    for label, of in figures.get("labels", {}).items():
        yield from ((f"{prefix}/label/{labels[label]}/{m}", v) for m, v in of["overall"].items() if m != "count")
    for grouping, worst in figures.get("worst", {}).items():
        yield from ((f"{prefix}/worst_group_{m}/{slugs[grouping]}", v) for m, v in worst.items() if m != "group")
    yield from ((f"{prefix}/spread/{slugs[grouping]}", value) for grouping, value in figures.get("spread", {}).items())
    for grouping, disparities in figures.get("disparity", {}).items():
        yield from ((f"{prefix}/{measure}/{slugs[grouping]}", value) for measure, value in disparities.items())
