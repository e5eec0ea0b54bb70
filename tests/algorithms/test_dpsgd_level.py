"""One bound and a loss for rare and hard classes: what the released counts say of a class, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from equidp.algorithms import algorithm_settings


def shares(lab: Any, released: Tensor, **options: Any) -> list[float]:
    """What the loss is adjusted by after the last of the released counts `[T, 2K]`; the noise multiplier is 1."""
    release, public = algorithm_settings("dpsgd_level", options).build().side_release, dict[str, Tensor]()
    for noised in released:
        public |= release.later(noised, public, lab.facts())
    return public["group_shares"].tolist()


def test_of_classes_of_one_size_the_hard_one_is_shifted_by_margin_times_its_share_of_long_gradients(lab: Any) -> None:
    found = shares(lab, torch.tensor([[9.0, 0.0, 6.0, 3.0, 12.0, 6.0]]), count_noise_multiplier=0.01, margin=4.0)
    assert math.log(found[1] / found[0]) == pytest.approx(4.0 * 9 / 12, rel=1e-5)
    assert found[2] / found[0] == pytest.approx(math.exp(4.0 * (9 - 6) / 12), rel=1e-5)
    assert sum(found) == pytest.approx(1.0)  # the history tells them as shares


def test_counts_that_are_all_noise_shift_no_class_by_more_than_the_margin(lab: Any) -> None:
    found = shares(lab, torch.tensor([[900.0, -70.0, 3.0, -800.0, 60.0, 2.0]]), count_noise_multiplier=1e4, margin=2.0)
    assert max(found) / min(found) <= math.exp(2.0)
    # more long gradients than records, and fewer than none, of classes of one size
    found = shares(lab, torch.tensor([[30.0, -20.0, 5.0, -20.0, 30.0, 5.0]]), count_noise_multiplier=0.01, margin=2.0)
    assert math.log(found[1] / found[0]) == pytest.approx(2.0, rel=1e-5)


def test_long_gradients_of_long_ago_are_forgotten_while_sizes_are_not(lab: Any) -> None:
    """Early in training every gradient is long; class 1 has learnt since, class 0 has not."""
    early, late = [10.0, 10.0, 10.0, 0.0, 0.0, 0.0], [10.0, 0.0, 5.0, 0.0, 10.0, 5.0]
    found = shares(lab, torch.tensor([early] * 5 + [late] * 20), count_noise_multiplier=0.01, margin=1.0, memory=0.5)
    assert math.log(found[1] / found[0]) == pytest.approx(1.0, abs=1e-4)


def test_its_bound_is_one_number_that_stays(lab: Any) -> None:
    run = lab.trained("dpsgd_level", {"clip_norm": 0.7})
    assert run.trainer.public["clip_norm"].tolist() == pytest.approx(0.7)
    assert {"group_shares/2"} <= set(run.history[-1])
