"""Histogram: one noised histogram of an evaluated part, from which all of its released figures are computed.

For every declared grouping there is a table of counts over (group, label, score bin). A record adds 1 to one cell of
each table, so it moves the histogram by an L2 distance of √(number of tables), which is the sensitivity. If a unit has
m records, each adds 1/m. Then the unit moves a table by a mean of unit vectors, and so by no more than 1. One Gaussian
release covers all cells. Groups, labels and bins are declared, so it reveals nothing which cells there are.

The grouping `class` has no table of its own, because every other table has the labels. If `class` is the only grouping,
there is one table with one group, `everyone`.

A score bin is the predicted class and, within it, a bin of the confidence (the largest probability); these bins have
equal widths. With two classes they are bins of equal width of the second class's score, with an edge at one half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equidp.accounting.events import Event
from equidp.accounting.trials import Trials
from equidp.errors import EquidpError
from equidp.evaluation.intervals import Groups
from equidp.mechanism.noise import RandomSource

EVERYONE = "everyone"
"""The grouping and its only group, if no grouping but `class` is declared."""


@dataclass(frozen=True)
class Noised:
    """A released histogram. Its ε covers everything that is computed from it.

    Attributes:
        counts: per grouping, float64 `[groups, classes, classes, confidence bins]` noised counts: group, label,
            predicted class, bin of confidence. A count may be negative.
        names: per grouping, the groups' names.
        classes: class names, in label order.
        sd: standard deviation of the noise of one count.
    """

    counts: Mapping[str, NDArray]
    names: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...]
    sd: float

    def to_dict(self) -> dict[str, Any]:
        """Return the histogram in JSON types."""
        counts = {grouping: values.tolist() for grouping, values in self.counts.items()}
        return {"counts": counts, "groups": dict(self.names), "classes": self.classes, "sd": self.sd}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Noised:
        """Read a result of `to_dict`."""
        return cls(
            {grouping: np.array(values, dtype=np.float64) for grouping, values in facts["counts"].items()},
            {grouping: tuple(names) for grouping, names in facts["groups"].items()},
            tuple(facts["classes"]),
            facts["sd"],
        )


def tables(groupings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the groupings that have a table of their own."""
    return tuple(name for name in groupings if name != "class") or (EVERYONE,)


def sensitivity(groupings: tuple[str, ...]) -> float:
    """Return the most that one record, or one unit, moves the histogram, in L2."""
    return math.sqrt(len(tables(groupings)))


@lru_cache(maxsize=64)
def figures_event(epsilon: float, delta: float, trials: Trials, setting: str = "privacy.evaluation.epsilon") -> Event:
    """Return the Gaussian release that has this ε at δ, over all declared trials.

    Args:
        epsilon: ε of the figures.
        delta: δ.
        trials: declared number of trainings.
        setting: name of the setting that gives this ε, for messages.

    Raises:
        EquidpError: no noise meets this ε, or it needs none.
    """
    try:
        return Event(1.0, trials.calibrate(lambda noise: (Event(1.0, noise),), epsilon, delta))
    except EquidpError as error:  # its message names the model's ε, which is another setting
        less = trials.epsilon((Event(1.0, 1.0),), delta).value < epsilon
        how = "so large that no noise would be needed: lower it" if less else "met by no noise: raise it"
        raise EquidpError(f"{setting}={epsilon:g} is, at δ = {delta:g}, {how}.") from error


def cell_numbers(scores: NDArray, labels: NDArray, bins: int) -> tuple[NDArray, NDArray]:
    """Return each record's predicted class and its bin of confidence, int64 `[n]` each.

    A record whose scores are not finite counts as a wrong prediction of the lowest confidence.

    Args:
        scores: `[n, classes]` probabilities.
        labels: `[n]` class indices.
        bins: number of bins of confidence.
    """
    classes = scores.shape[1]
    finite = np.isfinite(scores).all(axis=1)
    kept = np.where(finite[:, None], scores, 0.0)
    predicted = np.where(finite, kept.argmax(axis=1), (labels + 1) % classes)
    share = (kept.max(axis=1, initial=0.0) - 1 / classes) / (1 - 1 / classes)
    return predicted, np.clip(np.ceil(share * bins).astype(np.int64) - 1, 0, bins - 1)


def noised_histogram(
    scores: NDArray,
    labels: NDArray,
    groups: Groups,
    *,
    classes: tuple[str, ...],
    bins: int,
    noise_multiplier: float,
    random: RandomSource,
    units: NDArray | None = None,
) -> Noised:
    """Count, and add noise to every count before anything leaves this function.

    Args:
        scores: `[n, classes]` probabilities.
        labels: `[n]` class indices.
        groups: per declared grouping, group ids `[n]` and group names.
        classes: class names, in label order.
        bins: number of score bins over all predicted classes.
        noise_multiplier: standard deviation of the noise divided by the sensitivity.
        random: source of the noise.
        units: `[n]` numbers, equal for records of one unit, if a unit is protected as a whole; else None.
    """
    names = {name: tuple(groups[name][1]) if name in groups else (EVERYONE,) for name in tables(tuple(groups))}
    per = max(1, bins // len(classes))  # bins of confidence within each predicted class
    predicted, confidence = cell_numbers(scores, labels, per)
    weights = np.ones(len(labels))
    if units is not None:
        _, owners, sizes = np.unique(units, return_inverse=True, return_counts=True)
        weights = 1.0 / sizes[owners]
    exact = []
    for name, of in names.items():
        ids = groups[name][0] if name in groups else np.zeros(len(labels), dtype=np.int64)
        shape = (len(of), len(classes), len(classes), per)
        cells = np.ravel_multi_index((np.asarray(ids), labels, predicted, confidence), shape)
        exact.append(np.bincount(cells, weights=weights, minlength=math.prod(shape)).reshape(shape))
    moved = sensitivity(tuple(groups))
    flat = torch.from_numpy(np.concatenate([table.ravel() for table in exact]))
    released = random.perturb(flat, sensitivity=moved, noise_multiplier=noise_multiplier).numpy()
    ends = np.cumsum([table.size for table in exact])[:-1]
    parts = (part.reshape(table.shape) for part, table in zip(np.split(released, ends), exact, strict=True))
    return Noised(dict(zip(names, parts, strict=True)), names, classes, noise_multiplier * moved * (1 + random.margin))
