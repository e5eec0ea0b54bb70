"""Noised: figures of a noised histogram, with 95 % intervals that include sampling and noise.

Everything here is post-processing of `histogram.Noised`. Sums of noised counts are used as they are: if negative counts
were raised to 0, sums would be too large in every small group. Only results are cut, to the range that they can have. A
figure is None if noise alone could explain its denominator; its interval still holds.

*Intervals.* Each figure θ has a statistic T(θ), linear in θ, with mean 0 if θ is the true value. The interval is where
T(θ)² ≤ z²·V(θ), with V the variance of T (Fieller's method; without noise it is Wilson's interval). For a share R/N of
records let k_R be the number of cells among the hits, k_W the number of other cells, s the noise of a count and
n = max(N, 0). Then

    T = R − θN,    V = n·θ(1−θ) + s²·(k_R·(1−θ)² + k_W·θ²).

For a mean over pairs of a record of the second class (counts P) and one of the first (counts N), with h the value of a
pair of cells,

    T = Σ_ji P_j N_i (h_ji − θ),    A = h − θ,
    V = s²(‖A N‖² + ‖Aᵀ P‖²) − s⁴‖A‖² + Σ_j P_j ((A N)_j² − s²‖A_j‖²) + Σ_i N_i ((Aᵀ P)_i² − s²‖A^i‖²),

The first part of V is noise, the second part sampling (DeLong et al. 1988). From each part the expected contribution of
the noise in P and N themselves is subtracted. Each part is raised to its least possible value, s⁴‖A‖² and 0. With h = 1
if the first score is higher and ½ for a tie this is AUROC.

A mean θ of K recalls r_k is in the interval if min Σ_k T_k(r_k)²/V_k(r_k) ≤ z², over all recalls with mean θ. So the
known recall of one class still counts if noise hides another class. Of h hidden classes maybe only their range [0, 1]
is known. At a corner of that range nothing is left to minimise over. Then the minimum is a sum of h squares, and in
half of the cases of one more square for the known classes together. Differences between groups are combined from their
intervals (MOVER, Zou and Donner 2008).

AUROC and calibration are those of the binned score; a bin's confidence is its middle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

from equidp.data.products import within_classes
from equidp.data.records import MIN_TEST_RECORDS
from equidp.evaluation.histogram import EVERYONE, Noised
from equidp.evaluation.intervals import CONFIDENCE, Pair
from equidp.evaluation.metrics import unique_slugs

FIGURES = ("records", "accuracy", "balanced_accuracy", "auroc", "overconfidence")
"""Released overall and for every group. `overconfidence` is the mean confidence minus the accuracy."""

PARITY = ("selection_rate", "true_positive_rate", "false_positive_rate")
"""Rates of the second of two classes, whose differences between groups are released."""

WIDEST_BIN = 0.1
"""The widest bin of confidence for which calibration is computed."""

STEPS = 100
"""Number of steps into which the widest interval of a recall is divided, to search a mean of recalls."""

GRID = 1001
"""Number of values of θ at which an interval over pairs is searched."""


@dataclass(frozen=True)
class Estimate:
    """A figure, or None if noise hides it, and its interval."""

    value: float | None
    interval: Pair

    def distances(self) -> tuple[float, float]:
        """Return how far the interval reaches below and above the value; a hidden value is taken as the middle."""
        value = sum(self.interval) / 2 if self.value is None else self.value
        return max(value - self.interval[0], 0.0), max(self.interval[1] - value, 0.0)


@dataclass(frozen=True)
class Cells:
    """Noised counts `[labels, predicted, confidence bins]` of some records, and the noise `sd` of each."""

    counts: NDArray
    sd: float

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.counts.shape[1]

    @property
    def right(self) -> NDArray:
        """Mask of the cells with right predictions, `[labels, predicted, bins]` bool."""
        return np.broadcast_to(np.eye(self.classes, dtype=bool)[:, :, None], self.counts.shape)

    def size(self, z: float | None = None) -> Estimate:
        """Return the number of records, at least 0."""
        z = _z() if z is None else z
        found, half = float(self.counts.sum()), z * self.sd * math.sqrt(self.counts.size)
        return Estimate(max(found, 0.0), [max(found - half, 0.0), max(found + half, 0.0)])

    def share(
        self, hits: NDArray, among: NDArray, z: float | None = None, ends: tuple[float, float] = (0.0, 1.0)
    ) -> Estimate:
        """Return the share of `hits` among `among`, both masks of cells; its interval is cut to `ends`."""
        z = _z() if z is None else z
        hits = hits & among
        found, total, noise = float(self.counts[hits].sum()), float(self.counts[among].sum()), (z * self.sd) ** 2
        inside, cells, n = int(hits.sum()), int(among.sum()), max(total, 0.0)
        interval = _hull(
            total**2 + z**2 * n - noise * cells,
            -2 * found * total - z**2 * n + 2 * noise * inside,
            found**2 - noise * inside,
            ends,
        )
        return Estimate(self._quotient(found, total, cells, (0.0, 1.0)), interval)

    def overconfidence(self) -> Estimate | None:
        """Return the mean confidence minus the accuracy; None if the bins are too wide."""
        bins = self.counts.shape[2]
        width = (1 - 1 / self.classes) / bins
        if width > WIDEST_BIN + 1e-9:
            return None
        values = middles(bins, self.classes) - self.right
        found, total = float((values * self.counts).sum()), float(self.counts.sum())
        best = found / total if total > 0 else 0.0
        spread = max(float(((values - best) ** 2 * self.counts).sum()), 0.0)
        z, noise = _z(), (_z() * self.sd) ** 2
        interval = _hull(
            total**2 - noise * values.size,
            -2 * found * total + 2 * noise * float(values.sum()),
            found**2 - z**2 * spread - noise * float((values**2).sum()),
            (-1.0, 1.0),
        )
        return Estimate(self._quotient(found, total, values.size, (-1.0, 1.0)), interval)

    def balanced_accuracy(self) -> Estimate:
        """Return the mean of the classes' recalls. A class without records makes the interval wide."""
        recalls = [self.share(self.right, self.of(k)) for k in range(self.classes)]
        known = [of.value for of in recalls if of.value is not None]
        hidden = len(recalls) - len(known)
        # in the minimum a known recall may be outside [0, 1]: else it could not balance another one at a corner
        ends = [(0.0, 1.0) if of.value is None else (-1.0, 2.0) for of in recalls]
        bound = _bound(hidden, len(known))
        wide = [self.share(self.right, self.of(k), math.sqrt(bound), of).interval for k, of in enumerate(ends)]
        theta, least = self._least_misfits(wide, ends)
        inside = least - bound
        interval = _zeros(inside, np.clip(theta, 0.0, 1.0)) if (inside <= 0).any() else [0.0, 1.0]
        return Estimate(sum(known) / len(known) if not hidden else None, interval)

    def _least_misfits(self, wide: Sequence[Pair], ends: Sequence[tuple[float, float]]) -> tuple[NDArray, NDArray]:
        """Return means of the classes' recalls, and for each mean the least sum of misfits over recalls with this mean.

        Each recall is searched in its wide interval. All grids have the same step, so sums of recalls are on a grid,
        too. Then each further class is a minimum over a sliding window.
        """
        step = max(high - low for low, high in wide) / STEPS
        middle, first, least = 0.0, 0, np.zeros(1)
        for k, (low, high) in enumerate(wide):
            at, reach = (low + high) / 2, math.ceil((high - low) / 2 / step - 1e-9)
            misfit = self._misfit(k, np.clip(at + step * np.arange(-reach, reach + 1), *ends[k]))
            padded = np.pad(least, len(misfit) - 1, constant_values=np.inf)
            least = (sliding_window_view(padded, len(misfit)) + misfit[::-1]).min(axis=1)
            middle, first = middle + at, first - reach
        return (middle + step * (first + np.arange(len(least)))) / len(wide), least

    def _misfit(self, label: int, recall: NDArray) -> NDArray:
        """Return T²/V of a class at each of these recalls."""
        among = self.counts[label]
        t = float(among[label].sum()) - recall * float(among.sum())
        hits, n = among[label].size, max(float(among.sum()), 0.0)
        noise = self.sd**2 * (hits * (1 - recall) ** 2 + (among.size - hits) * recall**2)
        v = n * np.maximum(recall * (1 - recall), 0.0) + noise
        return np.divide(t**2, v, out=np.where(t == 0, 0.0, np.inf), where=v > 0)

    def auroc(self) -> Estimate | None:
        """Return the area under the ROC curve of two classes' binned scores; None for more classes."""
        if self.classes > 2:
            return None
        bins = self.counts.shape[2]
        place = np.concatenate([bins - 1 - np.arange(bins), bins + np.arange(bins)])  # by the second class's score
        return self._pairs((np.sign(place[:, None] - place[None, :]) + 1) / 2)

    def rates(self, z: float | None = None) -> dict[str, Estimate]:
        """Return the rates of `PARITY`, for two classes."""
        given = self.of(1).swapaxes(0, 1)
        among = (self.of(), self.of(1), self.of(0))
        return {name: self.share(given, of, z) for name, of in zip(PARITY, among, strict=True)}

    def accuracy(self, z: float | None = None) -> Estimate:
        """Return the share of right predictions."""
        return self.share(self.right, self.of(), z)

    def reliability(self) -> list[dict[str, Any]]:
        """Return the accuracy in each bin of confidence."""
        bins = self.counts.shape[2]
        rows = []
        for k, middle in enumerate(middles(bins, self.classes)):
            among = np.zeros(self.counts.shape, dtype=bool)
            among[:, :, k] = True
            found = self.share(self.right, among)
            rows.append({"confidence": float(middle), "accuracy": found.value, "interval": found.interval})
        return rows

    def of(self, label: int | None = None) -> NDArray:
        """Return the mask of the cells of a label, or of all cells."""
        mask = np.full(self.counts.shape, label is None)
        if label is not None:
            mask[label] = True
        return mask

    def rough(self, among: NDArray) -> float:
        """Return the share of right predictions among these cells, in [0, 1], even if it is mostly noise."""
        total = max(float(self.counts[among].sum()), 1.0)
        return min(max(float(self.counts[self.right & among].sum()) / total, 0.0), 1.0)

    def _quotient(self, found: float, total: float, cells: int, ends: tuple[float, float]) -> float | None:
        """Return the figure, or None if noise alone could explain its denominator."""
        if total <= max(_z() * self.sd * math.sqrt(cells), 0.5):
            return None
        return float(np.clip(found / total, *ends))

    def _pairs(self, values: NDArray) -> Estimate:
        """Return the mean of `values[j, i]` over pairs of records, in cells j of the second class and i of the first.

        Within a label the cells are numbered by predicted class, then by bin.
        """
        p, n, noise = self.counts[1].ravel(), self.counts[0].ravel(), self.sd**2
        theta = np.linspace(0.0, 1.0, GRID)[:, None]
        by_p, by_n = values @ n - theta * n.sum(), p @ values - theta * p.sum()
        rows, columns = ((values**2).sum(axis=k) - 2 * theta * values.sum(axis=k) + theta**2 * len(p) for k in (1, 0))
        whole = rows.sum(axis=1)
        noised = noise * ((by_p**2).sum(axis=1) + (by_n**2).sum(axis=1)) - noise**2 * whole
        sampled = (by_p**2 - noise * rows) @ p + (by_n**2 - noise * columns) @ n
        spread = np.maximum(noised, noise**2 * whole) + np.maximum(sampled, 0.0)
        inside = (by_p @ p) ** 2 - _z() ** 2 * spread
        total, found = p.sum() * n.sum(), float(p @ values @ n)
        least = _z() * self.sd * math.sqrt(len(p))
        known = min(p.sum(), n.sum()) > max(least, 0.5)
        value = float(np.clip(found / total, 0.0, 1.0)) if known else None
        return Estimate(value, _zeros(inside, theta.ravel()))


def middles(bins: int, classes: int) -> NDArray:
    """Return the middle confidence of each bin, `[bins]`."""
    return 1 / classes + (np.arange(bins) + 0.5) * (1 - 1 / classes) / bins


def released_figures(noised: Noised) -> dict[str, Any]:
    """Return all figures that follow from a released histogram, in JSON types.

    Returns:
        `overall` and `groups[grouping][group]` with `FIGURES`, and their 95 % intervals as `intervals`, of the same
        shape. `worst[grouping]`, `gap[grouping]` (of accuracy) and `disparity[grouping]` (of `PARITY`, for two classes
        only) are over the groups that are known to have ten records or more. This is known by intervals of the groups'
        sizes that hold for all groups together. The intervals of these three figures are wide enough for all compared
        groups. `left_out[grouping]` names the other groups. `reliability` is the accuracy by confidence. Figures that
        noise hides are None.
    """
    whole = overall(noised)
    every = _figures(whole)
    groups = {
        grouping: {name: Cells(table[k], noised.sd) for k, name in enumerate(noised.names[grouping])}
        for grouping, table in noised.counts.items()
        if grouping != EVERYONE
    }
    figures = {grouping: {name: _figures(of) for name, of in cells.items()} for grouping, cells in groups.items()}
    figures["class"] = {name: _class_figures(whole, k) for k, name in enumerate(noised.classes)}
    return {
        "overall": _values(every),
        "groups": _nested(figures, _values),
        "intervals": {"overall": _intervals(every), "groups": _nested(figures, _intervals)},
        **_compared(groups),
        "reliability": whole.reliability(),
    }


def flat_released(document: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of `metrics_release.json` under names that MLflow accepts, without hidden ones.

    For example `released/accuracy/sex:Female`, `released/worst_group_accuracy/sex`, `released/gap/sex`.
    """
    flat: dict[str, float | None] = {f"released/{name}": value for name, value in document["overall"].items()}
    slugs = unique_slugs(list(document["groups"]))
    for grouping, groups in document["groups"].items():
        names = unique_slugs(list(groups))
        for group, figures in groups.items():
            flat |= {f"released/{name}/{slugs[grouping]}:{names[group]}": value for name, value in figures.items()}
    for grouping, worst in document["worst"].items():
        flat[f"released/worst_group_accuracy/{slugs[grouping]}"] = worst["accuracy"]
        flat[f"released/gap/{slugs[grouping]}"] = document["gap"][grouping]["difference"]
        for name, of in document["disparity"].get(grouping, {}).items():
            flat[f"released/{name}_difference/{slugs[grouping]}"] = of["difference"]
    flat |= {"released/epsilon": document["epsilon"], "released/delta": document["delta"]}
    return {name: float(value) for name, value in flat.items() if value is not None}


def overall(noised: Noised) -> Cells:
    """Return the counts of all records: the mean of the tables' sums, weighted by their inverse noise variance."""
    worth = {grouping: 1 / len(table) for grouping, table in noised.counts.items()}
    total = sum(worth.values())
    counts = sum(worth[grouping] / total * table.sum(axis=0) for grouping, table in noised.counts.items())
    return Cells(np.asarray(counts), noised.sd / math.sqrt(total))


def known_large(groups: Mapping[str, Cells]) -> dict[str, Cells]:
    """Return the groups known to have ten records or more, by intervals of sizes that hold for all groups together."""
    every = _z(len(groups))  # otherwise one of many small groups would count as large by chance
    return {name: of for name, of in groups.items() if of.size(every).interval[0] >= MIN_TEST_RECORDS}


def lowest(found: Mapping[str, Estimate], wide: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return the group of lowest value, and an interval of the lowest true value.

    The lowest true value is below the upper ends of all groups' intervals, which are wide enough for all groups
    together (`wide`). It is not below all of the lower ends.
    """
    known = {name: of.value for name, of in found.items() if of.value is not None}
    if not known:
        return {"group": None, "accuracy": None, "interval": None}
    group = min(known, key=known.__getitem__)
    ends = [min(of.interval[0] for of in found.values()), min(of.interval[1] for of in wide.values())]
    return {"group": group, "accuracy": known[group], "interval": [min(ends), ends[1]]}


def spread(found: Sequence[Estimate]) -> dict[str, Any]:
    """Return the largest minus the smallest value, and its interval, from the differences of all pairs.

    The given intervals must be wide enough for all pairs together.
    """
    values = [of.value for of in found if of.value is not None]
    if len(found) < 2 or len(values) < len(found):
        return {"difference": None, "interval": None}
    ends = [0.0, 0.0]
    for one, other in combinations(found, 2):
        low, high = _difference(one, other)
        ends = [max(ends[0], low, -high), max(ends[1], high, -low)]
    return {"difference": max(values) - min(values), "interval": [ends[0], min(ends[1], 1.0)]}


def _compared(groups: Mapping[str, Mapping[str, Cells]]) -> dict[str, Any]:
    """Return `worst`, `gap`, `disparity` and `left_out`."""
    document: dict[str, dict] = {"worst": {}, "gap": {}, "disparity": {}, "left_out": {}}
    for grouping, cells in groups.items():
        sure = known_large(cells)
        document["left_out"][grouping] = [name for name in cells if name not in sure]
        found = {name: of.accuracy() for name, of in sure.items()}
        wide = {name: of.accuracy(_z(len(sure))) for name, of in sure.items()}
        document["worst"][grouping] = lowest(found, wide)
        pairs = _z(max(1, len(sure) * (len(sure) - 1) // 2))
        document["gap"][grouping] = spread([of.accuracy(pairs) for of in sure.values()])
        if sure and next(iter(sure.values())).classes == 2 and not within_classes(grouping):
            rates = [of.rates(pairs) for of in sure.values()]
            document["disparity"][grouping] = {name: spread([one[name] for one in rates]) for name in PARITY}
    return document


def _figures(cells: Cells) -> dict[str, Estimate | None]:
    found = (cells.size(), cells.accuracy(), cells.balanced_accuracy(), cells.auroc(), cells.overconfidence())
    return dict(zip(FIGURES, found, strict=True))


def _class_figures(cells: Cells, label: int) -> dict[str, Estimate | None]:
    """Return the figures of one class's records, from its row of cells."""
    of = Cells(cells.counts[label : label + 1], cells.sd)
    right = np.zeros(of.counts.shape, dtype=bool)
    right[0, label] = True
    recall = of.share(right, of.of())
    return {**dict.fromkeys(FIGURES), "records": of.size(), "accuracy": recall}


def _values(figures: Mapping[str, Estimate | None]) -> dict[str, float | None]:
    return {name: None if of is None else of.value for name, of in figures.items()}


def _intervals(figures: Mapping[str, Estimate | None]) -> dict[str, Pair | None]:
    return {name: None if of is None else of.interval for name, of in figures.items()}


def _nested(figures: Mapping[str, Mapping[str, Any]], take: Any) -> dict[str, dict[str, Any]]:
    return {grouping: {name: take(of) for name, of in groups.items()} for grouping, groups in figures.items()}


def _z(at_once: int = 1) -> float:
    """Return how many standard deviations a two-sided interval reaches if so many must hold together (Bonferroni)."""
    return float(stats.norm.ppf(1 - (1 - CONFIDENCE) / 2 / at_once))


def _bound(hidden: int, known: int) -> float:
    """Return the 95 % bound of the least misfit of so many recalls, at a corner of the hidden ones' range."""
    if not (hidden and known):
        return float(stats.chi2.ppf(CONFIDENCE, max(hidden, 1)))

    def beyond(bound: float) -> float:
        return float(stats.chi2.sf(bound, [hidden, hidden + 1]).mean()) - (1 - CONFIDENCE)

    return float(brentq(beyond, 0.0, stats.chi2.ppf(CONFIDENCE, hidden + 1)))


def _hull(a: float, b: float, c: float, ends: tuple[float, float]) -> Pair:
    """Return the smallest interval that holds every θ in `ends` with aθ² + bθ + c ≤ 0; `ends` itself if there is none.

    If there is no such θ, the noise was larger than in 95 % of cases, and nothing is known.
    """
    low, high = ends
    if a == 0.0 and b == 0.0:
        return [low, high]
    roots = np.roots([a, b, c]) if a else np.array([-c / b])
    found = sorted(float(root.real) for root in roots if abs(root.imag) < 1e-12 and low <= root.real <= high)
    inside = [theta for theta in (low, *found, high) if a * theta**2 + b * theta + c <= 1e-9 * max(abs(c), abs(b), 1.0)]
    inside += found
    return [min(inside), max(inside)] if inside else [low, high]


def _zeros(values: NDArray, theta: NDArray) -> Pair:
    """Return the smallest interval that holds every θ at which the values are at most 0, interpolated at its ends.

    If there is no such θ, it is the whole range.
    """
    inside = np.flatnonzero(values <= 0)
    if not len(inside):
        return [float(theta[0]), float(theta[-1])]
    ends = []
    for at, beside in ((inside[0], inside[0] - 1), (inside[-1], inside[-1] + 1)):
        if 0 <= beside < len(theta):
            share = values[at] / (values[at] - values[beside])
            ends.append(float(theta[at] + share * (theta[beside] - theta[at])))
        else:
            ends.append(float(theta[at]))
    return ends


def _difference(one: Estimate, other: Estimate) -> tuple[float, float]:
    """Return the interval of the first figure minus the second; the two are independent."""
    assert one.value is not None
    assert other.value is not None
    (below, above), (other_below, other_above) = one.distances(), other.distances()
    middle = one.value - other.value
    return middle - math.hypot(below, other_above), middle + math.hypot(above, other_below)
