"""The noised histogram: its sensitivity, its noise, and that figures and intervals say what the records say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from equidp.accounting.trials import Trials
from equidp.errors import EquidpError
from equidp.evaluation import histogram
from equidp.evaluation.histogram import Noised, cell_numbers, figures_event, noised_histogram
from equidp.evaluation.intervals import accuracy_interval
from equidp.evaluation.noised import (
    Cells,
    Estimate,
    _bound,
    flat_released,
    known_large,
    lowest,
    overall,
    released_figures,
    spread,
)
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.secure import SecureRandom

CLASSES = ("no", "yes")


class Listening:
    """Stands for the source of noise: it keeps what it is to protect, and gives `answer` in its place."""

    margin = 0.0

    def __init__(self, answer: float | None = None) -> None:
        self.answer = answer

    def perturb(self, values: torch.Tensor, *, sensitivity: float, noise_multiplier: float) -> torch.Tensor:
        self.exact, self.sensitivity = values.clone(), float(sensitivity)
        return values if self.answer is None else torch.full_like(values, self.answer)


def made(n: int, seed: int = 0, classes: int = 2) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, n)
    scores = draw.dirichlet(np.ones(classes), n) + 0.4 * np.eye(classes)[labels]
    sex, race = draw.integers(0, 2, n), draw.integers(0, 3, n)
    groups = {"sex": (sex, ("f", "m")), "race": (race, ("a", "b", "c")), "class": (labels, CLASSES)}
    return {"scores": scores / scores.sum(axis=1, keepdims=True), "labels": labels, "groups": groups}


def taken(records: dict[str, Any], rows: Any) -> dict[str, Any]:
    groups = {name: (ids[rows], names) for name, (ids, names) in records["groups"].items()}
    return {"scores": records["scores"][rows], "labels": records["labels"][rows], "groups": groups}


def release(records: dict[str, Any], random: Any, units: Any = None, noise: float = 1.0, bins: int = 10) -> Noised:
    classes = tuple(map(str, range(records["scores"].shape[1])))
    return noised_histogram(**records, classes=classes, bins=bins, noise_multiplier=noise, random=random, units=units)


def most_that_one_moves(units: np.ndarray | None = None) -> float:
    """The largest distance of a histogram without one record, or unit, over the sensitivity that its noise is for."""
    records, moved = made(12), []
    whole, part = Listening(), Listening()
    release(records, whole, units)
    for one in range(12) if units is None else np.unique(units):
        rows = np.arange(12) != one if units is None else units != one
        release(taken(records, rows), part, None if units is None else units[rows])
        moved.append(float((whole.exact - part.exact).norm()) / part.sensitivity)
    return max(moved)


def test_one_record_moves_the_histogram_by_its_sensitivity() -> None:
    assert most_that_one_moves() == pytest.approx(1.0)


def test_one_unit_of_many_records_moves_it_by_no_more() -> None:
    assert most_that_one_moves(np.arange(12) % 3) <= 1.0
    alike = {name: part[np.zeros(4, int)] for name, part in made(1).items() if name != "groups"}  # of one cell
    alike["groups"] = {"class": (alike["labels"], CLASSES)}
    listening = Listening()
    noised = release(alike, listening, np.zeros(4, int))
    assert listening.exact.sum() == listening.exact.max() == listening.sensitivity == noised.sd == 1.0
    assert most_that_one_moves(np.arange(12)) == pytest.approx(1.0)


def test_a_histogram_of_two_groupings_with_the_sensitivity_of_one_is_caught(monkeypatch: Any) -> None:
    monkeypatch.setattr(histogram, "sensitivity", lambda groupings: 1.0)
    assert most_that_one_moves() == pytest.approx(math.sqrt(2))


def test_nothing_leaves_but_what_was_noised() -> None:
    documents = [release(made(40, seed), Listening(answer=3.0)).to_dict() for seed in (0, 1)]
    assert documents[0] == documents[1]


def test_the_lowest_group_is_as_low_as_any_may_be_and_no_higher_than_all_together_allow() -> None:
    found = {"a": Estimate(0.8, [0.7, 0.9]), "b": Estimate(0.6, [0.5, 0.7])}
    wide = {"a": Estimate(0.8, [0.6, 0.95]), "b": Estimate(0.6, [0.4, 0.75])}
    assert lowest(found, wide) == {"group": "b", "accuracy": 0.6, "interval": [0.5, 0.75]}


def test_a_spread_reaches_as_far_as_the_difference_of_two_may() -> None:
    """By hand: 0.2 and √(0.1² + 0.05²), what the lower one may be less and the higher one more."""
    told = spread([Estimate(0.6, [0.5, 0.8]), Estimate(0.8, [0.7, 0.85])])
    assert told["difference"] == pytest.approx(0.2)
    assert told["interval"] == pytest.approx([0.0, 0.2 + math.hypot(0.1, 0.05)])


def test_the_rates_of_the_second_class_are_shares_of_everybody_of_it_and_of_the_other() -> None:
    found = Cells(np.array([[[30.0], [10.0]], [[5.0], [55.0]]]), 0.0).rates()
    assert [of.value for of in found.values()] == pytest.approx([0.65, 55 / 60, 10 / 40])


def test_intervals_over_several_groups_are_wider_than_each_groups_own() -> None:
    noised = release(made(3000), Listening(), noise=1.0)
    told, race = released_figures(noised), dict(zip("abc", noised.counts["race"], strict=True))
    own = {name: Cells(counts, noised.sd).accuracy() for name, counts in race.items()}
    assert told["worst"]["race"]["interval"][1] > min(of.interval[1] for of in own.values())
    assert told["gap"]["race"]["interval"][1] > spread(list(own.values()))["interval"][1]
    # by tables of two and of three groups: the mean of two sums, each weighed by how little noise it has
    assert overall(noised).sd == pytest.approx(noised.sd / math.sqrt(1 / 2 + 1 / 3))


def test_the_noise_that_figures_reckon_with_is_the_one_of_each_count() -> None:
    """Two groupings have tables of their own, so that one record moves the whole by √2."""
    assert release(made(12), Listening(), noise=3.0).sd == pytest.approx(3.0 * math.sqrt(2))
    wider = release(made(12), SecureRandom("cpu"), noise=3.0).sd
    assert wider == pytest.approx(3.0 * math.sqrt(2) * (1 + SecureRandom.margin))


def test_scores_at_the_ends_of_what_there_can_be_are_in_the_first_and_the_last_bin() -> None:
    predicted, confidence = cell_numbers(np.array([[0.5, 0.5], [0.0, 1.0 + 1e-7]]), np.array([0, 1]), 5)
    assert (predicted.tolist(), confidence.tolist()) == ([0, 1], [0, 4])


def test_the_noise_is_that_of_the_analytic_gaussian_mechanism() -> None:
    """Balle and Wang 2018, theorem 8; the noise that it gives for ε = 1 and δ = 1e-5 is 3.7306."""
    sigma = figures_event(1.0, 1e-5, Trials()).noise_multiplier
    assert norm.cdf(0.5 / sigma - sigma) - math.e * norm.cdf(-0.5 / sigma - sigma) == pytest.approx(1e-5, rel=0.02)
    assert sigma == pytest.approx(3.7306, rel=2e-3)


def test_figures_of_several_declared_trials_meet_their_target_together() -> None:
    """Four releases of one Gaussian are one with half the noise."""
    alone, four = (figures_event(1.0, 1e-5, Trials(cap=cap)).noise_multiplier for cap in (1, 4))
    assert four == pytest.approx(2 * alone, rel=5e-3)


@pytest.mark.parametrize(
    ("epsilon", "words"), [(1e-4, "met by no noise: raise it"), (1e6, "so large that no noise would be needed: lower")]
)
def test_an_epsilon_of_figures_that_cannot_be_met_is_refused_by_its_own_name(epsilon: float, words: str) -> None:
    """Not by the name of the model's ε, which would be raised in vain."""
    for setting in ("privacy.evaluation.epsilon", "tune.epsilon"):
        with pytest.raises(EquidpError, match=words) as refused:
            figures_event(epsilon, 1e-5, Trials(), setting)
        assert refused.value.message.startswith(f"{setting}={epsilon:g} is, at δ = 1e-05, ")
        assert "privacy.epsilon" not in refused.value.message


def test_without_noise_figures_are_those_of_the_records() -> None:
    records = made(600)
    found = released_figures(release(records, Listening(), noise=0.0))
    labels, right = records["labels"], records["scores"].argmax(axis=1) == records["labels"]
    assert found["overall"]["records"] == 600
    assert found["overall"]["accuracy"] == pytest.approx(right.mean())
    assert found["intervals"]["overall"]["accuracy"] == pytest.approx(accuracy_interval(right, np.arange(600)))
    given = records["scores"].argmax(axis=1)
    assert found["overall"]["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, given))
    binned = np.ceil(records["scores"][:, 1] * 10)
    assert found["overall"]["auroc"] == pytest.approx(roc_auc_score(labels, binned))
    women = records["groups"]["sex"][0] == 0
    assert found["groups"]["sex"]["f"]["accuracy"] == pytest.approx(right[women].mean())
    assert found["groups"]["class"]["1"]["accuracy"] == pytest.approx(right[labels == 1].mean())
    rates = [given[women].mean(), given[~women].mean()]
    assert found["disparity"]["sex"]["selection_rate"]["difference"] == pytest.approx(abs(rates[0] - rates[1]))
    assert found["worst"]["sex"]["accuracy"] == pytest.approx(min(right[women].mean(), right[~women].mean()))


def test_groups_within_one_class_are_compared_in_accuracy_alone() -> None:
    records = made(600)
    sex, names = records["groups"]["sex"]
    both = (sex * 2 + records["labels"], tuple(f"{name}*{of}" for name in names for of in ("0", "1")))
    found = released_figures(release(records | {"groups": {"sex*class": both}}, Listening(), noise=0.0))
    assert found["gap"].keys() == {"sex*class"}
    assert found["disparity"] == {}


def test_more_than_two_classes_have_no_auroc_and_the_mean_of_their_recalls() -> None:
    records = made(900, classes=3)
    found = released_figures(release(records, Listening(), noise=0.0))
    given = records["scores"].argmax(axis=1)
    assert found["overall"]["auroc"] is None
    expected = balanced_accuracy_score(records["labels"], given)
    assert found["overall"]["balanced_accuracy"] == pytest.approx(expected)
    low, high = found["intervals"]["overall"]["balanced_accuracy"]
    assert low < expected < high < low + 0.1


def test_scores_that_are_no_numbers_count_as_wrong() -> None:
    labels = np.array([0, 1])
    predicted, _ = cell_numbers(np.full((2, 2), np.nan), labels, 5)
    assert list(predicted) == [1, 0]


def test_what_noise_hides_is_none_and_its_interval_wide() -> None:
    found = released_figures(release(made(30), SeededRandom(0, "cpu"), noise=20.0))
    assert found["overall"]["accuracy"] is None
    low, high = found["intervals"]["overall"]["accuracy"]
    assert high - low > 0.5
    assert found["left_out"]["sex"]
    assert "released/accuracy" not in flat_released({**found, "epsilon": 1.0, "delta": 1e-5})


def test_of_many_empty_groups_none_is_among_those_known_to_have_records() -> None:
    """By an interval of 95 % for each, one of these 60 would be in every other release, and often the worst one."""
    draw, names, strays = np.random.default_rng(0), tuple(f"group {k}" for k in range(62)), 0
    true = np.zeros((62, 2, 2, 1))
    true[:2] = 500.0
    for _ in range(30):
        noised = true + draw.normal(0.0, 20.0, true.shape)
        large = known_large({name: Cells(of, 20.0) for name, of in zip(names, noised, strict=True)})
        assert names[0] in large
        strays += len(large) > 2
    assert strays <= 2
    figures = released_figures(Noised({"group": noised}, {"group": names}, ("a", "b"), 20.0))
    assert figures["left_out"]["group"] == [name for name in names if name not in large]


@pytest.mark.parametrize(("size", "sd"), [(40.0, 2.0), (40.0, 20.0), (400.0, 9.0)])
def test_intervals_end_where_the_statistic_is_as_far_from_0_as_noise_and_sampling_may_take_it(
    size: float, sd: float
) -> None:
    """By the formulas of `noised`, added up cell by cell: T(θ)² = z²·V(θ) at both ends."""
    draw = np.random.default_rng(7)
    counts = size * draw.uniform(0.5, 1.5, (2, 2, 5)) * np.array([[3, 1], [1, 2]])[:, :, None]
    cells, right = Cells(counts + sd * draw.normal(size=counts.shape), sd), np.eye(2)[:, :, None]
    values = [[[0.55, 0.65, 0.75, 0.85, 0.95]]] * 2 - right  # confidence less being right
    flat, total = cells.counts.ravel(), cells.counts.sum()

    def share(theta: float) -> tuple[float, float]:
        t = (cells.counts * (right - theta)).sum()
        return t, total * theta * (1 - theta) + sd**2 * (10 * (1 - theta) ** 2 + 10 * theta**2)

    def overconfidence(theta: float) -> tuple[float, float]:
        best = (cells.counts * values).sum() / total
        noise, sampling = sd**2 * ((values - theta) ** 2).sum(), (cells.counts * (values - best) ** 2).sum()
        return (cells.counts * (values - theta)).sum(), noise + sampling

    def auroc(theta: float) -> tuple[float, float]:
        negative, positive = flat[:10], flat[10:]
        score = [-value for value in (1, 2, 3, 4, 5)] + [1, 2, 3, 4, 5]  # predicted first, then second
        a = np.array([[(x > y) + (x == y) / 2 - theta for y in score] for x in score])
        by_p, by_n, least = a @ negative, a.T @ positive, sd**4 * (a**2).sum()
        noise = sd**2 * ((by_p**2).sum() + (by_n**2).sum()) - least
        sampling = (positive * (by_p**2 - sd**2 * (a**2).sum(1))).sum()
        sampling += (negative * (by_n**2 - sd**2 * (a**2).sum(0))).sum()
        return positive @ a @ negative, max(noise, least) + max(sampling, 0.0)

    for figure, of in (("accuracy", share), ("overconfidence", overconfidence), ("auroc", auroc)):
        found = getattr(cells, figure)()
        for end in found.interval:
            t, v = of(end)
            assert t**2 == pytest.approx(norm.ppf(0.975) ** 2 * v, rel=5e-3 if figure == "auroc" else 1e-6), figure
        assert found.interval[0] < found.value < found.interval[1]


def test_what_noise_hides_is_no_figure_and_leaves_no_spread() -> None:
    """A gap between the groups that are left would not be the gap."""
    known, hidden = Estimate(0.6, [0.5, 0.8]), Estimate(None, [0.0, 1.0])
    assert spread([known, known, hidden]) == {"difference": None, "interval": None}
    assert Cells(np.array([[[900.0], [300.0]], [[2.0], [14.0]]]), 9.0).auroc().value is None


def test_the_least_misfit_at_a_corner_is_beyond_its_bound_in_5_per_cent() -> None:
    """By hand: with h hidden recalls a sum of h squares, and half of the time of one more for the known ones."""
    assert chi2.sf(_bound(2, 1), [2, 3]).mean() == pytest.approx(0.05)
    assert chi2.sf(_bound(0, 3), 1) == pytest.approx(0.05)
    assert chi2.sf(_bound(3, 0), 3) == pytest.approx(0.05)


@pytest.mark.parametrize("size", [20, *(pytest.param(size, marks=pytest.mark.slow) for size in (300, 20_000))])
@pytest.mark.parametrize("figure", ["accuracy", "auroc", "balanced_accuracy"])
def test_intervals_of_95_per_cent_cover_so_often(size: int, figure: str) -> None:
    """A cheap version of benchmarks/coverage.py: 300 parts, so 95 % stand for 0.915 to 0.985."""
    draw = np.random.default_rng(size)
    shares = np.array([[[0.3, 0.2], [0.1, 0.05]], [[0.05, 0.05], [0.1, 0.15]]])  # label, predicted, confidence
    true = getattr(Cells(shares * 1e9, 0.0), figure)().value
    held = 0
    for _ in range(300):
        counts = draw.multinomial(size, shares.ravel()).reshape(shares.shape) + 3.0 * draw.normal(size=shares.shape)
        low, high = getattr(Cells(counts, 3.0), figure)().interval
        held += low <= true <= high
    assert held / 300 >= 0.915
    assert held / 300 <= 0.985 or size == 20  # there noise hides one of the classes


def test_a_mean_of_recalls_keeps_what_one_class_tells_where_noise_hides_the_other() -> None:
    counts = np.array([[[1600.0], [400.0]], [[2.0], [1.0]]])
    found = Cells(counts, 5.0).balanced_accuracy()
    assert found.value is None
    assert found.interval == pytest.approx([0.4, 0.9], abs=0.03)  # half of 0.8, and of anything between 0 and 1


def test_the_interval_of_a_model_that_is_nearly_always_right_in_three_classes_covers() -> None:
    """All recalls lie at an end of their range; 150 parts, so 95 % stand for 0.90 to 1."""
    draw, recalls, shares = np.random.default_rng(0), np.array([0.99, 0.99, 0.98]), np.array([0.5, 0.3, 0.2])
    law = shares[:, None] * (1 - recalls[:, None]) / 2 * np.ones((3, 3))
    np.fill_diagonal(law, shares * recalls)
    held = 0
    for _ in range(150):
        counts = draw.multinomial(100, law.ravel()).reshape(3, 3, 1) + 5.0 * draw.normal(size=(3, 3, 1))
        low, high = Cells(counts, 5.0).balanced_accuracy().interval
        held += low <= recalls.mean() <= high
    assert held / 150 >= 0.9
