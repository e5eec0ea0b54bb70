"""Intervals over test records are those in print, and hold the truth as often as they say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from equidp.evaluation.intervals import accuracy_interval, difference_interval, per_group
from equidp.evaluation.metrics import cost_intervals, evaluate


def fourfold(both: int, first: int, second: int, neither: int) -> tuple[NDArray, NDArray]:
    """Two models' hits: so many records right by both, by the first alone, by the second alone, by neither."""
    one = np.repeat([True, True, False, False], [both, first, second, neither])
    other = np.repeat([True, False, True, False], [both, first, second, neither])
    return one, other


def alone(right: NDArray) -> NDArray:
    """Every record a unit of its own."""
    return np.arange(len(right))


def test_an_accuracys_is_wilsons() -> None:
    # 81 of 263, Newcombe 1998 (Statistics in Medicine 17, pages 857 to 872), method 3
    assert accuracy_interval(np.arange(263) < 81, np.arange(263)) == pytest.approx([0.2553, 0.3662], abs=1e-4)
    assert accuracy_interval(np.ones(20, bool), np.arange(20)) == pytest.approx(
        [0.8389, 1.0], abs=1e-4
    )  # n / (n + 1.96²)
    assert accuracy_interval(np.zeros(0, bool), np.arange(0)) is None


@pytest.mark.parametrize(
    ("table", "printed"),
    [
        ((36, 12, 2, 0), (0.0569, 0.3404)),  # Newcombe 1998, table II, method 10
        ((14, 5, 0, 22), (0.011, 0.226)),  # Altman et al., Statistics with Confidence, table 6.2
    ],
)
def test_a_differences_is_newcombes(table: tuple[int, ...], printed: tuple[float, float]) -> None:
    one, other = fourfold(*table)
    low, high = difference_interval(one, other, alone(one)) or [0, 0]
    assert (low, high) == pytest.approx(printed, abs=6e-4)
    assert difference_interval(other, one, alone(other)) == pytest.approx([-high, -low])
    rng = np.random.default_rng(0)
    order = rng.permutation(len(one))
    assert difference_interval(one[order], other[order], alone(one[order])) == pytest.approx([low, high])


def test_models_that_never_differ_are_not_known_to_be_equal() -> None:
    right = np.arange(40) < 30
    low, high = difference_interval(right, right, alone(right)) or [0, 0]
    assert low == pytest.approx(-high)
    assert 0 < high < 0.1
    fewer = difference_interval(right[:5], right[:5], alone(right[:5])) or [0, 0]
    assert fewer[1] > high  # fewer records tell less
    assert difference_interval(right[:0], right[:0], alone(right[:0])) is None


@pytest.mark.parametrize("records", [25, 400])
def test_an_interval_holds_the_true_difference_as_often_as_it_says(records: int) -> None:
    rng = np.random.default_rng(1)
    shares = np.array([0.70, 0.05, 0.13, 0.12])  # accuracies 0.75 and 0.83
    held = 0
    for _ in range(1_000):
        one, other = fourfold(*rng.multinomial(records, shares))
        low, high = difference_interval(one, other, alone(one)) or [0, 0]
        held += low <= -0.08 <= high
    assert 0.93 <= held / 1_000 <= 0.995


@pytest.mark.parametrize("alike", [0.3, pytest.param(0.9, marks=pytest.mark.slow)])
def test_an_interval_holds_where_units_have_several_records(alike: float) -> None:
    """A unit's records are right or wrong together, mostly; taken for independent, intervals miss far too often."""
    rng = np.random.default_rng(3)
    held = dict.fromkeys(("accuracy", "difference", "as if independent"), 0)
    trials, shares = 1_000, (0.75, 0.83)
    for _ in range(trials):
        sizes = rng.integers(1, 12, 80)
        owners = np.repeat(np.arange(80), sizes)
        luck = rng.random((2, 80))
        own = rng.random((2, len(owners)))
        # one number decides for both models, or they would not be right together; a unit's for all its records, mostly
        draws = np.where(own[0] < alike, luck[0][owners], own[1])
        one, other = draws < shares[0], draws < shares[1]
        flips = np.where(own[0] < alike, luck[1][owners], rng.random(len(owners))) < 0.1
        one = one ^ flips
        true = 0.9 * shares[0] + 0.1 * (1 - shares[0])
        found = {
            "accuracy": (accuracy_interval(other, owners), shares[1]),
            "difference": (difference_interval(one, other, owners), true - shares[1]),
            "as if independent": (accuracy_interval(other, alone(other)), shares[1]),
        }
        for name, (interval, truth) in found.items():
            assert interval is not None
            held[name] += interval[0] <= truth <= interval[1]
    assert 0.92 <= held["accuracy"] / trials <= 0.99
    assert 0.92 <= held["difference"] / trials <= 0.99
    assert held["as if independent"] / trials < (0.92 if alike < 0.5 else 0.7)


@pytest.mark.parametrize(("units", "most", "truth"), [(20, 20, 0.95), (20, 12, 0.9), (40, 12, 0.95), (20, 12, 0.7)])
def test_an_interval_holds_where_few_units_have_a_wrong_record(units: int, most: int, truth: float) -> None:
    """How alike records are is told by units that have some of both: five of twenty patients with all the errors do not
    tell it, and an interval held in 0.84 of cases."""
    rng = np.random.default_rng(5)
    held, trials, alike = 0, 1_000, 1 / 0.6 - 1
    for _ in range(trials):
        owners = np.repeat(np.arange(units), most if most == 20 else rng.integers(1, most + 1, units))
        right = rng.random(len(owners)) < rng.beta(truth * alike, (1 - truth) * alike, units)[owners]
        low, high = accuracy_interval(right, owners) or [0, 0]
        held += low <= truth <= high
    assert held / trials >= 0.93


def test_an_interval_holds_where_few_units_are_wrong_throughout() -> None:
    """Twelve of twenty patients with a wrong record or two do not tell that one in twenty is misjudged throughout: with
    as many taken to tell how alike records are, it held in 0.68 of cases."""
    rng = np.random.default_rng(5)
    owners, truth = np.repeat(np.arange(20), 30), 0.95 * 0.97 + 0.05 * 0.1
    held, trials = 0, 1_000
    for _ in range(trials):
        right = rng.random(len(owners)) < np.where(rng.random(20) < 0.05, 0.1, 0.97)[owners]
        low, high = accuracy_interval(right, owners) or [0, 0]
        held += low <= truth <= high
    assert held / trials >= 0.93


@pytest.mark.parametrize(("units", "each"), [(100, 30), (20, 30), (12, 12)])
def test_one_unit_more_with_a_wrong_record_changes_a_width_little(units: int, each: int) -> None:
    """With the tenth a width fell to a tenth."""
    right, owners = np.ones(units * each, bool), np.repeat(np.arange(units), each)
    widths = list[float]()
    for unit in range(units):
        right[unit * each] = False
        low, high = accuracy_interval(right, owners) or [0, 0]
        widths.append(high - low)
    assert all(0.85 < later / earlier < 1.15 for earlier, later in pairwise(widths))


def test_where_all_are_right_there_are_as_many_as_units() -> None:
    right, owners = np.ones(40, bool), np.repeat(np.arange(8), 5)
    assert accuracy_interval(right, owners) == accuracy_interval(right[:8], alone(right[:8]))
    assert accuracy_interval(right[:5], owners[:5]) == accuracy_interval(right[:1], alone(right[:1]))  # one unit


@pytest.mark.parametrize("sizes", [[10, 10, 10, 10, 10], [40, 1, 1, 1, 1]])
def test_an_interval_holds_where_units_are_few(sizes: list[int]) -> None:
    """Five units do not tell how alike their records are: mostly right by luck, they would seem independent."""
    rng = np.random.default_rng(4)
    owners = np.repeat(np.arange(5), sizes)
    held, trials = 0, 500
    for _ in range(trials):
        draws = np.where(rng.random(len(owners)) < 0.9, rng.random(5)[owners], rng.random(len(owners)))
        low, high = accuracy_interval(draws < 0.75, owners) or [0, 0]
        held += low <= 0.75 <= high
    assert held / trials >= 0.92


def test_every_group_has_its_own_and_an_empty_one_has_none() -> None:
    rng = np.random.default_rng(2)
    labels, ids = rng.integers(0, 2, 300), rng.integers(0, 2, 300)
    ours, theirs = (np.stack([1 - p, p], axis=1) for p in rng.random((2, 300)))
    theirs[5] = np.nan  # counts as wrong
    groups = {"sex": (ids, ("Female", "Male", "Absent"))}
    mine, before = ours.argmax(axis=1) == labels, theirs.argmax(axis=1) == labels
    before[5] = False

    evaluated = evaluate(ours, labels, groups, classes=("no", "yes"))["intervals"]
    cost = cost_intervals(ours, theirs, labels, groups)

    assert evaluated["overall"] == accuracy_interval(mine, alone(mine))
    assert cost["overall"] == difference_interval(before, mine, alone(mine))
    for k, name in enumerate(("Female", "Male")):
        of = ids == k
        assert evaluated["groups"]["sex"][name] == accuracy_interval(mine[of], alone(mine[of]))
        assert cost["groups"]["sex"][name] == difference_interval(before[of], mine[of], alone(mine[of]))
    assert evaluated["groups"]["sex"]["Absent"] is cost["groups"]["sex"]["Absent"] is None


def test_without_records_there_is_none() -> None:
    nothing = np.zeros(0, bool)
    groups = {"sex": (np.zeros(0, int), ("Female",))}
    assert per_group(accuracy_interval, groups, nothing) == {"overall": None, "groups": {"sex": {"Female": None}}}


def test_what_many_units_tell_of_their_records_likeness_counts_as_in_survey_sampling() -> None:
    """Kish 1965, Korn and Graubard 1998: 25 of 60 units of 4 records have 3 wrong ones, so t has 24 degrees."""
    right = np.repeat([[True, True, True, True], [True, False, False, False]], [35, 25], axis=0)
    n, p = right.size, right.mean()
    effect = right.mean(axis=1).var(ddof=1) / 60 / (p * (1 - p) / (n - 1))
    worth, z = n / (effect * (stats.t.ppf(0.975, 24) / stats.norm.ppf(0.975)) ** 2), stats.norm.ppf(0.975)
    found = accuracy_interval(right.ravel(), np.repeat(np.arange(60), 4))
    assert found is not None
    for end in found:  # Wilson's ends: as far from p as z standard deviations at the end itself
        assert (p - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / worth)
