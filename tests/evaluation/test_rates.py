"""Rates of the positive class are Fairlearn's and scikit-learn's, with intervals; the spread is of the figures."""

from __future__ import annotations

import numpy as np
import pytest
from fairlearn.metrics import false_positive_rate, selection_rate, true_positive_rate
from sklearn.metrics import precision_score

from equidp.errors import EquidpError
from equidp.evaluation.intervals import accuracy_interval
from equidp.evaluation.metrics import evaluate
from equidp.evaluation.seeds import over_seeds
from equidp.reporting.rates import rates_tables
from equidp.sweep.summary import means

BY_HAND = {
    "selection_rate": selection_rate,
    "true_positive_rate": true_positive_rate,
    "false_positive_rate": false_positive_rate,
    "predictive_value": precision_score,
}


@pytest.fixture
def case() -> tuple[np.ndarray, np.ndarray, dict]:
    rng = np.random.default_rng(0)
    scores, labels, ids = rng.random(90), rng.integers(0, 2, 90), rng.integers(0, 2, 90)
    groups = {"class": (labels, ("no", "yes")), "sex": (np.where(np.arange(90) < 80, ids, 2), ("f", "m", "x", "none"))}
    return np.stack([1 - scores, scores], axis=1), labels, groups


@pytest.mark.parametrize("positive", ["", "yes", "no"])
def test_rates_of_every_group_are_the_libraries(case, positive: str) -> None:
    scores, labels, groups = case
    found = evaluate(scores, labels, groups, classes=("no", "yes"), positive=positive)
    label = int(positive != "no")
    assert found["positive_class"] == ("no", "yes")[label]
    assert set(found["rates"]) == {"sex"}
    for k, name in enumerate(("f", "m", "x")):
        mine = groups["sex"][0] == k
        true, given = labels[mine] == label, scores[mine].argmax(1) == label
        expected = {rate: float(of(true, given)) for rate, of in BY_HAND.items()}
        assert found["rates"]["sex"][name] == pytest.approx(expected)
        ends = found["intervals"]["rates"]["sex"][name]
        assert ends["true_positive_rate"] == accuracy_interval(given[true], np.arange(true.sum()))
        assert ends["predictive_value"] == accuracy_interval(true[given], np.arange(given.sum()))
    assert found["rates"]["sex"]["none"] == dict.fromkeys(BY_HAND)
    selected = [found["rates"]["sex"][name]["selection_rate"] for name in ("f", "m", "x")]
    assert found["disparity"]["sex"]["demographic_parity_difference"] == pytest.approx(max(selected) - min(selected))


def test_groups_within_one_class_are_compared_in_no_rate(case) -> None:
    """Of f*no and f*yes the share that is taken for yes must differ: parity would be a model that tells nothing."""
    scores, labels, groups = case
    sex, names = groups["sex"]
    both = {"sex*class": (sex * 2 + labels, tuple(f"{name}*{of}" for name in names for of in ("no", "yes")))}
    found = evaluate(scores, labels, both, classes=("no", "yes"))
    assert found["disparity"] == {}
    assert "rates" not in found
    assert "worst" in found
    three = np.concatenate([scores, np.zeros((90, 1))], axis=1)
    assert evaluate(three, labels, both, classes=("a", "b", "c"))["disparity"] == {}


def test_of_several_classes_only_a_declared_one_has_rates(case) -> None:
    scores, labels, groups = case
    three = np.concatenate([scores, np.zeros((90, 1))], axis=1)
    groups = {"sex": groups["sex"]}
    assert "rates" not in evaluate(three, labels, groups, classes=("a", "b", "c"))
    assert evaluate(three, labels, groups, classes=("a", "b", "c"), positive="b")["positive_class"] == "b"
    with pytest.raises(EquidpError, match=r"Unknown data\.positive_class 'B'"):
        evaluate(three, labels, groups, classes=("a", "b", "c"), positive="B")


def test_the_spread_falls_where_the_worst_group_comes_closer_whatever_the_baseline_did() -> None:
    labels, ids = np.zeros(40, dtype=int), np.repeat([0, 1], 20)

    def spread(wrong: tuple[int, int]) -> float:
        given = np.concatenate([np.arange(20) < many for many in wrong]).astype(int)
        return evaluate(np.eye(2)[given], labels, {"ward": (ids, ("A", "B"))}, classes=("n", "y"))["spread"]["ward"]

    assert spread((16, 0)) == pytest.approx(0.8)
    assert spread((9, 10)) == pytest.approx(0.05)


def test_means_over_seeds_keep_the_rates_and_the_page_shows_them(case) -> None:
    scores, labels, groups = case
    one = evaluate(scores, labels, groups, classes=("no", "yes"))
    other = evaluate(scores[::-1], labels, groups, classes=("no", "yes"))
    mean = means(over_seeds({0: one, 1: other}))
    assert mean["positive_class"] == "yes"
    expected = (one["rates"]["sex"]["f"]["selection_rate"] + other["rates"]["sex"]["f"]["selection_rate"]) / 2
    assert mean["rates"]["sex"]["f"]["selection_rate"] == pytest.approx(expected)
    ((caption, frame),) = rates_tables({"dpsgd": one})
    assert caption == "Rates by sex"
    assert list(frame["group"]) == ["f", "m", "x", "none †"]
    low, high = one["intervals"]["rates"]["sex"]["m"]["false_positive_rate"]
    assert frame["95 % of false positive rate"][1] == f"{low:.3f} to {high:.3f}".replace(" ", "\N{NO-BREAK SPACE}")
