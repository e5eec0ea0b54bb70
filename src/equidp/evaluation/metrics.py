"""Per-group metrics of a trained model, and what privacy cost each group.

scikit-learn and Fairlearn compute the metrics; this module decides which, for which groups, and what counts as
undefined. An undefined value is None, never NaN and never left out: a group without test records has count
0. The one metric written here is the calibration error, which neither library offers.
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
"""Row numbers of some records to their count and metrics."""

METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "mcc", "auroc", "loss", "calibration_error")
"""Measured overall and in every group, in the order they are shown."""

CALIBRATION_BINS = 15
ROUNDING = 1e-6
"""So far below 0 a probability may be: what is left of 1 beside the others."""
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
        scores: `[n, classes]` softmax probabilities. A row with a non-finite entry counts as a wrong prediction, and
            the loss, AUROC and calibration error of every group that holds one are None.
        labels: `[n]` class indices.
        groups: per grouping, group ids `[n]` and group names. In the grouping `class` accuracy is the class's recall.
        classes: class names, in label order.
        units: `[n]` numbers, equal for records of one unit; None where each is a unit's only one.
        positive: name of the class whose rates are told; of two classes the second unless given.

    Returns:
        `overall` and `groups[grouping][group]` with `count` and the `METRICS`; `worst[grouping]`, the group of lowest
        accuracy; `disparity[grouping]` from Fairlearn for every grouping without the classes. Both are over the groups
        that `telling` names. `intervals` has the accuracies' intervals over test records (`intervals.py`). Where there
        is a positive class, `positive_class` and its `rates`, with intervals among these (`rates.py`).

    Raises:
        ValueError: if the arrays do not fit each other, or scores are below 0.
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
    """`overall`, `groups`, `worst` and `spread` of so many records."""
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
    """The count and these measures of (truth, found) at row numbers; None where something found is not finite."""

    def measure(rows: NDArray) -> dict[str, float | None]:
        true, given = truth[rows], found[rows]
        finite = np.isfinite(given).all()
        return {"count": len(rows), **{name: of(true, given) if finite else None for name, of in measures.items()}}

    return measure


def cost_intervals(
    private: NDArray, baseline: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
) -> dict:
    """Intervals over test records of the cost of privacy in accuracy, overall and in every group.

    Args:
        private: `[n, classes]` scores.
        baseline: the same of the same records.
        labels: `[n]` class indices.
        groups: as for `evaluate`.
        units: as for `evaluate`.
    """
    # as `evaluate` takes them: an interval is of the very predictions that the accuracies beside it count
    right = [_predicted(_as_probabilities(of, np.shape(of)[1])) == labels for of in (baseline, private)]
    return per_group(difference_interval, groups, *right, units=units)


def cost_of_privacy(private: Mapping, baseline: Mapping) -> dict:
    """The cost of each metric, overall and in every group, and its spread over the groups.

    A cost is what is lost (`Task.cost`): positive where the private model is worse. Both are results of `evaluate`, for
    one seed, split and model. A value is None where either side has none, and all values are None if the baseline has
    diverged or guesses: compared with a model that learnt nothing, privacy would seem to be free.
    `gap[grouping]` is max − min over the `telling` groups that have a cost, and None where fewer than two have.
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
    """The content of `metrics.json`: the private model's figures, the baseline's, and the cost of privacy between them.

    Without a baseline (the `sgd` run itself) the keys `baseline` and `cost_of_privacy` are left out.
    """
    document = dict(private)
    if baseline is not None:
        document["baseline"] = dict(baseline)
        document["cost_of_privacy"] = cost_of_privacy(private, baseline)
    return document


def flat_metrics(document: Mapping) -> dict[str, float]:
    """The figures of a `metrics_document` under the names that MLflow takes; undefined ones are left out.

    For example `test/accuracy`, `test/accuracy/sex:Female`, `test/worst_group_accuracy/sex`,
    `test/demographic_parity_difference/sex`, `baseline/accuracy`, `cost_of_privacy/accuracy/sex:Female`,
    `cost_of_privacy/gap/sex` (of accuracy) and `cost_of_privacy/gap/sex/excess_loss`. Other tasks have their own main
    metric in the place of accuracy.
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
    """Groups that are compared for a worst group, a gap or a disparity: those with enough records that chance alone
    does not decide. All of them, if fewer than two have enough.
    """
    large = [group for group, of in figures.items() if of["count"] >= MIN_TEST_RECORDS]
    return large if len(large) > 1 else list(figures)


def worst_group(figures: Mapping[str, Mapping], main: str = "accuracy", worst: Callable[..., str | None] = min) -> dict:
    """The `telling` group of lowest accuracy; `{"group": None, "accuracy": None}` if none has any.

    Of another task by its main metric, of which `worst` (`min` or `max`) says which end is bad.
    """
    known = {group: figures[group][main] for group in telling(figures)}
    known = {group: value for group, value in known.items() if value is not None}
    group = worst(known, key=known.__getitem__, default=None)
    return {"group": group, main: None if group is None else known[group]}


def spread(figures: Mapping[str, Mapping], main: str = "accuracy") -> float | None:
    """Largest minus smallest main metric of the `telling` groups; None where fewer than two have one.

    Unlike the gap in cost it needs no baseline: it falls where the worst group comes closer to the best.
    """
    known = [figures[group][main] for group in telling(figures) if figures[group][main] is not None]
    return max(known) - min(known) if len(known) > 1 else None


_WORDS = {"<=": "le ", ">=": "ge ", "≤": "le ", "≥": "ge ", "<": "lt ", ">": "gt ", "*": " x ", "+": " plus", "–": "-"}


LONGEST_SLUG = 100
"""Letters of a slug: a metric of MLflow's has the names of a grouping and of a group, and 250 in all."""


def slug(name: str) -> str:
    """A grouping's or group's name within MLflow's alphabet: letters, digits, `_ - .` and space; long ones are cut."""
    for sign, word in _WORDS.items():
        name = name.replace(sign, word)
    name = re.sub(r"[^A-Za-z0-9_\-. ]", "_", re.sub(r"\s+", " ", name).strip())[:LONGEST_SLUG]
    return name if name.strip(".") else "_"  # MLflow takes names for paths, and refuses those that lead elsewhere


def unique_slugs(names: Sequence[str]) -> dict[str, str]:
    """One slug per name, so that no group's figures replace another's."""
    return numbered(names, slug)


def numbered(things: Iterable[Thing], name: Callable[[Thing], str], sign: str = "_") -> dict[Thing, str]:
    """Distinct names: equal ones are numbered from 2."""
    taken: dict[Thing, str] = {}
    for thing in things:
        candidate, n = name(thing), 2
        while candidate in taken.values():
            candidate, n = f"{name(thing)}{sign}{n}", n + 1
        taken[thing] = candidate
    return taken


def calibration_error(labels: NDArray, scores: NDArray, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: mean |accuracy − confidence| over equal-width bins of confidence, by bin size.

    Args:
        labels: `[n]` class indices.
        scores: `[n, classes]` probabilities; the confidence is the largest of a row.
        bins: number of equal-width bins (0, 1/bins], …

    Source: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3.
    """
    confidence, hit = scores.max(axis=1), scores.argmax(axis=1) == labels
    bin_of = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    surplus = np.bincount(bin_of, weights=hit - confidence, minlength=bins)
    return float(np.abs(surplus).sum() / len(labels))


def _as_probabilities(scores: NDArray, classes: int) -> NDArray:
    """Scores in float64 with rows that sum to 1: with float32 softmax the error is larger than scikit-learn accepts."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or scores.shape[1] != classes:
        raise ValueError(f"scores have shape {scores.shape}, expected [n, {classes}].")
    below = np.isfinite(scores).all(axis=1, keepdims=True) & (scores < 0)
    # divided by a negative sum, outputs of a model would even change places
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
    """Figures of every named group, those without a record included."""
    if not len(rows):
        return {name: _nothing(metrics) for name in names}
    # MetricFrame copies its columns record by record in Python for every metric, and hands over one column of
    # predictions, where AUROC needs all the scores: so there is one metric, of row numbers, which returns all figures
    one = lambda _, chosen: figures(np.asarray(chosen))  # noqa: E731
    frame = MetricFrame(metrics=one, y_true=rows, y_pred=rows, sensitive_features={"group": np.asarray(ids)})
    measured = frame.by_group.to_dict()
    return {name: _tidy(measured[k]) if k in measured else _nothing(metrics) for k, name in enumerate(names)}


def _nothing(metrics: Sequence[str]) -> dict:
    """Figures of no record."""
    return {"count": 0, **dict.fromkeys(metrics)}


def _tidy(figures: Mapping[str, float | None]) -> dict:
    """Plain Python numbers, and None for what is not finite."""
    tidy: dict = {k: float(v) if v is not None and math.isfinite(v) else None for k, v in figures.items()}
    return {**tidy, "count": int(figures["count"] or 0)}


def _figures(scores: NDArray, predicted: NDArray, labels: NDArray) -> Figures:
    """The count and all `METRICS` of row numbers."""
    metrics = _metrics(scores, predicted)
    return lambda rows: {"count": len(rows), **{name: of(labels[rows], rows) for name, of in metrics.items()}}


def _metrics(scores: NDArray, predicted: NDArray) -> dict[str, Callable[[NDArray, NDArray], float | None]]:
    """Metrics of (labels, row numbers)."""

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
    """Mean recall of the classes that occur: `balanced_accuracy_score` without its warning about the others.

    Undefined for one class only, of which it would be the accuracy.
    """
    present = np.unique(labels)
    return sk.recall_score(labels, predicted, labels=present, average="macro") if len(present) > 1 else None


def _macro_f1(labels: NDArray, predicted: NDArray) -> float | None:
    """Mean F1 of the classes that occur among labels or predictions; undefined in a group of one class."""
    if len(np.unique(labels)) < 2:
        return None
    occurring = np.setdiff1d(np.union1d(labels, predicted), [UNPREDICTED])  # which is no class, with an F1 of 0
    return sk.f1_score(labels, predicted, labels=occurring, average="macro", zero_division=0)


def _mcc(labels: NDArray, predicted: NDArray) -> float | None:
    """Undefined for one class only, where scikit-learn would say 0."""
    return sk.matthews_corrcoef(labels, predicted) if len(np.unique(labels)) > 1 else None


def _auroc(labels: NDArray, scores: NDArray) -> float | None:
    """Area under the ROC curve; one-versus-rest, averaged over the classes that occur, for more than two classes."""
    present = np.unique(labels)
    if len(present) < 2:
        return None
    if scores.shape[1] == 2:
        return sk.roc_auc_score(labels, scores[:, 1])
    return sk.roc_auc_score(labels[:, None] == present, scores[:, present], average="macro")


def _loss(labels: NDArray, scores: NDArray) -> float:
    """Mean cross-entropy in nats."""
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
