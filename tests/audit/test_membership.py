"""Membership inference: figures checked by hand, scores by formula, and a model that leaks against one that cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from equidp.audit.membership import alike, at_most, exposure, exposure_per_group, halves, reference_scores

HOW = {"resamples": 100, "confidence": 0.95, "seed": 0}


def test_figures_by_hand() -> None:
    # 600 non-members at 0…599; members above all of them (250), at 594.5 (125: five non-members are above them) and at
    # 593.5 (125: six are)
    member = np.array([900.0] * 250 + [594.5] * 125 + [593.5] * 125)
    found = exposure(member, np.arange(600.0), **HOW)
    assert (found["members"], found["non_members"]) == (500, 600)
    # AUC = P(member > non-member) = (250·600 + 125·595 + 125·594)/(500·600)
    assert found["auc"] == pytest.approx((250 * 600 + 125 * 595 + 125 * 594) / 300_000)
    # the sixth largest of 600, 594, is exceeded by another non-member with probability 6/601; the seventh with more
    assert found["tpr_at_1_percent_fpr"] == pytest.approx(0.75)


def test_where_nothing_leaks_one_in_a_hundred_is_recognised() -> None:
    # counted on the non-members that chose the threshold, the false positives seem fewer than they will be
    generator = np.random.default_rng(6)
    how = HOW | {"resamples": 1}
    found = [exposure(generator.normal(size=1000), generator.normal(size=500), **how) for _ in range(300)]
    rates = [one["tpr_at_1_percent_fpr"] for one in found]
    assert np.mean(rates) == pytest.approx(5 / 501, abs=3 * np.std(rates) / 300**0.5)


def test_intervals_cover_the_truth_and_are_no_wider_than_they_should_be() -> None:
    # scores N(1,1) against N(0,1): AUC = Φ(1/√2) = 0.760
    generator = np.random.default_rng(3)
    low, high = exposure(generator.normal(1, 1, 1000), generator.normal(0, 1, 1000), **HOW)["auc_interval"]
    assert low < 0.760 < high
    assert 0.02 < high - low < 0.07


def test_nothing_to_tell_apart() -> None:
    generator = np.random.default_rng(4)
    found = exposure(generator.normal(size=800), generator.normal(size=800), **HOW)
    assert found["auc_interval"][0] < 0.5 < found["auc_interval"][1]
    assert found["tpr_at_1_percent_fpr"] < 0.04


def test_too_few_records_give_no_figure() -> None:
    few = exposure(np.ones(500), np.zeros(499), **HOW)
    assert few["auc"] == 1.0
    assert few["tpr_at_1_percent_fpr"] is few["tpr_at_1_percent_fpr_interval"] is None
    # of one member above one non-member, resampling would make an interval from 1 to 1
    for counts in ((1, 1), (9, 500), (500, 9), (0, 200)):
        none = exposure(np.ones(counts[0]), np.zeros(counts[1]), **HOW)
        assert none["auc"] is none["auc_interval"] is None
        assert (none["members"], none["non_members"]) == counts
    visits = exposure(np.ones(500), np.zeros(500), (np.arange(500) % 9, np.arange(500)), **HOW)
    assert visits["auc"] is None  # nine patients


def test_a_model_that_has_diverged_has_no_figure() -> None:
    # the audit's bounds have been found by then: one model's losses must not end it
    lost = exposure(np.full(500, np.nan), np.append(np.zeros(499), np.inf), **HOW)
    assert lost["auc"] is lost["auc_interval"] is lost["tpr_at_1_percent_fpr"] is None


def test_records_of_one_unit_leak_together() -> None:
    generator = np.random.default_rng(7)
    sides, owners = generator.normal(size=(2, 40)), np.repeat(np.arange(40), 16)

    def width(*how: Any) -> float:
        low, high = exposure(*how, **HOW)["auc_interval"]
        return high - low

    # sixteen copies tell nothing new; taken for independent they would make the interval four times as narrow
    alone = width(*sides)
    assert width(*sides[:, owners], (owners, owners)) == pytest.approx(alone, rel=0.3)
    assert width(*sides[:, owners]) < alone / 3


def test_groups_are_told_apart() -> None:
    member_groups, other_groups = torch.tensor([0, 1] * 10), torch.tensor([0] * 10 + [1] * 20)
    names = ["exposed", "hidden", "absent"]
    scores = torch.tensor([2.0, 0.0] * 10), torch.ones(30)
    found = exposure_per_group(*scores, member_groups, other_groups, names, **HOW)
    assert found["exposed"]["auc"] == 1.0
    assert found["hidden"]["auc"] == 0.0
    assert found["absent"]["auc"] is None
    assert (found["hidden"]["members"], found["hidden"]["non_members"]) == (10, 20)


def test_reference_scores_by_hand() -> None:
    # record 0 is unseen by the first model only, record 1 by the second only, record 2 by both: (2 + 6)/2 − 1 = 3
    scores = reference_scores(
        torch.tensor([0.5, 3.0, 1.0]),
        [torch.tensor([1.5, 9.0, 2.0]), torch.tensor([9.0, 4.0, 6.0])],
        [torch.tensor([False, True, False]), torch.tensor([True, False, False])],
    )
    assert scores.tolist() == [1.0, 1.0, 3.0]


def test_a_record_seen_by_every_reference_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="has not seen it"):
        reference_scores(torch.zeros(1), [torch.zeros(1)], [torch.tensor([True])])


def test_every_record_is_unseen_by_half_of_the_models() -> None:
    masks = torch.stack(halves(101, 3, seed=1))
    assert masks.shape == (6, 101)
    assert (masks.sum(0) == 3).all()
    assert not torch.equal(masks[0], masks[2])


def test_sides_are_made_alike_in_every_group() -> None:
    sides = torch.tensor([0] * 50 + [1] * 3 + [3] * 4), torch.tensor([0] * 5 + [1] * 9 + [2] * 7)
    kept = alike(*sides, seed=5)
    assert [ids[rows].tolist() for ids, rows in zip(sides, kept, strict=True)] == [[0] * 5 + [1] * 3] * 2
    assert all(rows.tolist() == sorted(set(rows.tolist())) for rows in kept)
    assert [len(rows) for rows in alike(sides[0][:0], sides[1], seed=5)] == [0, 0]


def test_at_most_so_many_of_each_group() -> None:
    groups = torch.tensor([0] * 50 + [1] * 3 + [2] * 10)
    kept = at_most(groups, 10, seed=5)
    assert torch.bincount(groups[kept]).tolist() == [10, 3, 10]
    assert torch.equal(kept, kept.sort().values)
    assert torch.equal(kept, at_most(groups, 10, seed=5))
