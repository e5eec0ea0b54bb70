"""Intervals over seeds: right against tables, right in coverage, narrower when paired."""

from __future__ import annotations

import numpy as np
import pytest

from equidp.evaluation.seeds import mean_interval, over_seeds, paired_difference


def test_interval_of_three_values_by_the_t_table():
    # mean 2, s = 1, t(0.975; 2) = 4.302653, half width 4.302653/√3 = 2.484138
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.seeds) == (2.0, 3)
    assert interval.half_width == pytest.approx(2.484138, abs=1e-6)
    assert interval.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert str(interval) == "2.0000 ± 2.4841"
    # 90 %: t(0.95; 2) = 2.919986
    assert mean_interval([1.0, 2.0, 3.0], confidence=0.9).half_width == pytest.approx(2.919986 / 3**0.5, abs=1e-6)


def test_a_single_seed_has_no_interval():
    interval = mean_interval([0.5])
    assert (interval.mean, interval.low, interval.high, interval.half_width) == (0.5, None, None, None)
    assert str(interval) == "0.5000"


def test_seeds_that_agree_have_no_interval():
    """Its width of 0 covered the truth in as little as half of the cases where figures are shares of few records."""
    interval = mean_interval([0.1 + 0.2, 0.3, 0.3])
    assert (interval.mean, interval.half_width, interval.seeds) == (pytest.approx(0.3), None, 3)
    assert paired_difference({0: 0.5, 1: 0.7}, {0: 0.4, 1: 0.6}).half_width is None
    assert mean_interval([0.3, 0.3, 0.3001]).half_width is not None


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_nothing_and_nan_are_refused(values):
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval(values)


def test_95_percent_intervals_cover_the_truth_95_times_in_100():
    rng = np.random.default_rng(0)
    samples = rng.normal(0.8, 0.02, (4000, 5))
    covered = np.mean([i.low <= 0.8 <= i.high for i in map(mean_interval, samples.tolist())])
    # standard error of the share: √(.95·.05/4000) = .0034; four of them
    assert abs(covered - 0.95) < 0.014


def test_pairing_by_seed_removes_what_seeds_share():
    rng = np.random.default_rng(1)
    shared, own = rng.normal(0, 0.1, 5), rng.normal(0, 0.001, 5)
    baseline = {seed: 0.9 + shared[seed] for seed in range(5)}
    private = {seed: 0.8 + shared[seed] + own[seed] for seed in range(5)} | {7: 0.1}
    paired = paired_difference(private, baseline)
    assert paired.seeds == 5  # seed 7 has no baseline
    assert paired.mean == pytest.approx(-0.1 + own.mean())
    assert paired.half_width == pytest.approx(mean_interval(own.tolist()).half_width)
    assert paired.half_width < 0.05 * mean_interval(list(baseline.values())).half_width


def test_paired_intervals_cover_a_known_difference():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(1000):
        shared = rng.normal(0, 1, 4)
        first = dict(enumerate(shared - 0.3 + rng.normal(0, 0.1, 4)))
        interval = paired_difference(first, dict(enumerate(shared)))
        hits += interval.low <= -0.3 <= interval.high
    assert abs(hits / 1000 - 0.95) < 0.028


def test_documents_of_several_seeds_become_one_of_the_same_shape():
    def document(accuracy: float, auroc: float | None, worst: str) -> dict:
        return {
            "overall": {"count": 10, "accuracy": accuracy, "auroc": auroc},
            "worst": {"sex": {"group": worst, "accuracy": accuracy}},
        }

    merged = over_seeds({2: document(0.7, None, "M"), 0: document(0.5, 0.9, "F"), 1: document(0.6, None, "F")})
    assert merged["overall"]["accuracy"]["mean"] == pytest.approx(0.6)
    assert merged["overall"]["accuracy"]["seeds"] == 3
    # s = 0.1, so the half width is a tenth of that of 1, 2, 3
    assert merged["overall"]["accuracy"]["high"] == pytest.approx(0.6 + 0.2484138, abs=1e-6)
    assert merged["overall"]["auroc"] == {"mean": 0.9, "low": None, "high": None, "seeds": 1}
    assert merged["worst"]["sex"]["group"] == ["F", "M"]
    assert over_seeds({0: {"a": None}, 1: {"a": None}}) == {"a": None}


def test_intervals_over_test_records_are_left_out_and_a_class_of_that_name_is_not():
    figures = {"groups": {"class": {"intervals": {"accuracy": 0.5}}}}
    document = figures | {"intervals": {"overall": [0, 1]}}
    merged = over_seeds({0: document | {"baseline": document, "cost_of_privacy": document}})
    for part in (merged, merged["baseline"], merged["cost_of_privacy"]):
        assert "intervals" not in part
        assert part["groups"]["class"]["intervals"]["accuracy"]["mean"] == 0.5
