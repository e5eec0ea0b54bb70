"""Membership inference: figures checked by hand, scores by formula, and a model that leaks against one that cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equidp.audit.membership import at_most, exposure, exposure_per_group, halves, reference_scores

HOW = {"resamples": 100, "confidence": 0.95, "seed": 0}


def test_figures_by_hand() -> None:
    # 200 non-members at 0…199; members above all of them (10), at 198.5 (5: one non-member is above them) and at 196.5
    # (5: three are)
    member = np.array([500.0] * 10 + [198.5] * 5 + [196.5] * 5)
    found = exposure(member, np.arange(200.0), **HOW)
    assert (found["members"], found["non_members"]) == (20, 200)
    # AUC = P(member > non-member) = (10·200 + 5·199 + 5·197)/(20·200)
    assert found["auc"] == pytest.approx((2000 + 995 + 985) / 4000)
    # 1 % of 200 allows two false positives: the threshold may fall to 198.5, which catches 15 of 20, and no further
    assert found["tpr_at_1_percent_fpr"] == pytest.approx(0.75)


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
    few = exposure(np.ones(5), np.zeros(99), **HOW)
    assert few["auc"] == 1.0
    assert few["tpr_at_1_percent_fpr"] is None
    assert few["tpr_at_1_percent_fpr_interval"] is None
    none = exposure(np.ones(0), np.zeros(200), **HOW)
    assert none["auc"] is None
    assert none["auc_interval"] is None


def test_groups_are_told_apart() -> None:
    member_groups, other_groups = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1])
    found = exposure_per_group(
        torch.tensor([2.0, 2.0, 0.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0]),
        member_groups,
        other_groups,
        ["exposed", "hidden", "absent"],
        **HOW,
    )
    assert found["exposed"]["auc"] == 1.0
    assert found["hidden"]["auc"] == 0.0
    assert found["absent"]["auc"] is None
    assert (found["exposed"]["members"], found["hidden"]["non_members"]) == (2, 2)


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


def test_at_most_so_many_of_each_group() -> None:
    groups = torch.tensor([0] * 50 + [1] * 3 + [2] * 10)
    kept = at_most(groups, 10, seed=5)
    assert torch.bincount(groups[kept]).tolist() == [10, 3, 10]
    assert torch.equal(kept, kept.sort().values)
    assert torch.equal(kept, at_most(groups, 10, seed=5))
