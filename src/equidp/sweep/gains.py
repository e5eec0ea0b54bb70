"""How much better the private runs of a sweep are than those of the reference, paired by seed.

Runs of one seed have the same test part and initial weights, and mostly the same batches. So their difference varies
less over seeds than the two runs do, and the interval is made from the differences within each seed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from equidp.evaluation.seeds import Interval, mean_interval
from equidp.tasks.base import Task

if TYPE_CHECKING:
    from equidp.sweep.summary import Row

ALIKE = 1.05
"""Runs with the same target ε miss it by less than this factor. Two ε that differ by more are not equal."""


def gain(task: type[Task], run: Mapping[int, float | None], reference: Mapping[int, float | None]) -> Interval | None:
    """Return how much better a run's main metric is than the reference's, negative if it is worse; figures are by seed.

    None if no seed has both. Seeds in which one of the two has no figure do not count.

    Examples:
        >>> from equidp.tasks import TASKS
        >>> round(gain(TASKS["regression"], {0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.1, 2: 9.0}).mean, 3)  # a smaller MAE
        0.3
    """
    # by how much the reference is worse than the run: the task knows the sign
    lost = [task.lost(task.main, reference[seed], run[seed]) for seed in sorted(run.keys() & reference.keys())]
    known = [value for value in lost if value is not None]
    return mean_interval(known) if known else None


def gains_of(rows: Sequence[Row], against: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Return, by a row's key, its columns: `reference`, and mean, seeds and half interval of `gain` and `worst_gain`.

    `against` is the result of `counterparts` for all cells. Without a finished counterpart, or with several, there is
    no gain.
    """
    bases = dict(_pairs(rows, against))
    return {row.key: _columns(row, bases.get(row.key)) for row in rows}


def _pairs(rows: Sequence[Row], against: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Row]]:
    known = {row.key: row for row in rows}
    for key, bases in against.items():
        if key in known and len(bases) == 1 and bases[0] in known:
            yield key, known[bases[0]]


def _columns(row: Row, base: Row | None) -> dict[str, Any]:
    if base is None:
        return {"reference": None, **columns_of("gain", None), **columns_of("worst_gain", None)}
    overall, worst = gain(row.task, row.overall(), base.overall()), gain(row.task, row.worst(), base.worst())
    return {"reference": base.label, **columns_of("gain", overall), **columns_of("worst_gain", worst)}


def columns_of(name: str, figure: Interval | None) -> dict[str, Any]:
    """A figure in the columns of a table: its mean, the number of seeds and half of the interval."""
    if figure is None:
        return {name: None, f"{name}_seeds": 0, f"{name}±": None}
    return {name: figure.mean, f"{name}_seeds": figure.seeds, f"{name}±": figure.half_width}


def remarks(rows: Sequence[Row], against: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return sentences by data set: which rows are not compared, and which at another guarantee or in fewer seeds."""
    bases, found = dict(_pairs(rows, against)), defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for row in rows:
        if row.key not in against:
            continue
        if base := bases.get(row.key):
            if words := list(_unequal(row.privacy, base.privacy)):
                found[row.dataset][UNEQUAL].append(f"{row.label} and {base.label} in {' and '.join(words)}")
            for label, seeds in _without_figure(row, base):
                found[row.dataset][DIVERGED].append(f"{label} in {seeds} of its seeds")
        elif len(of := against[row.key]) == 1:
            found[row.dataset][UNFINISHED].append(row.label)
        else:
            found[row.dataset][SEVERAL if of else NONE].append(row.label)
    return {
        name: [start.format("; ".join(dict.fromkeys(labels))) for start, labels in of.items()]
        for name, of in found.items()
    }


UNEQUAL = "The privacy statements differ of {}: these gains are not at equal privacy."
DIVERGED = "Seeds in which a model has no figure, as after divergence, do not count, which favours that model: {}."
UNFINISHED = "Not compared, as the reference's run at their settings is not finished: {}."
SEVERAL = "Not compared, as the reference has several runs at their settings, with other options of its own: {}."
NONE = "Not compared, as the reference has no run at their settings: {}."


def _without_figure(row: Row, base: Row) -> Iterator[tuple[str, int]]:
    """Yield each of two runs that has no figure in some seeds that both have, with the number of these seeds."""
    for of, figures, other in ((row, row.overall(), base.metrics), (base, base.overall(), row.metrics)):
        if gone := sum(figures[seed] is None for seed in figures.keys() & other.keys()):
            yield of.label, gone


def _unequal(privacy: Mapping[str, Any], of_reference: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a guarantee in which two runs' statements differ."""
    least, most = sorted(one.get("epsilon") or math.inf for one in (privacy, of_reference))
    if most > ALIKE * least:
        yield "ε"
    named = {"delta": "δ", "adjacency": "adjacency", "unit": "unit"}
    yield from (word for name, word in named.items() if privacy.get(name) != of_reference.get(name))
