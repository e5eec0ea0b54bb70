"""DPSGD-F with counts in the slack: their noise is the one its page says, and a little less of it is found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from equidp.algorithms import algorithm_settings
from equidp.algorithms.dpsgd_f_slack import SlackClipCounts
from equidp.errors import EquidpError
from equidp.mechanism.parts import FlatClip, per_record
from equidp.training.promises import refuse_broken_promises

BOUNDS = torch.tensor([1.0, 2.0, 4.0])


def release_of(**options: Any) -> SlackClipCounts:
    return algorithm_settings("dpsgd_f_slack", options).build().side_release


def charged_of(release: Any, plan: Any, norm: float, group: int) -> float:
    """What a record of this norm moves, squared, over R."""
    public = {"clip_norm": BOUNDS, "scale": torch.tensor(1.0)}
    alone, ids = torch.tensor([norm]), torch.tensor([group])
    moved = float(release.statistic(alone, ids, public, plan).norm()) / release.noise(plan)
    added = float(FlatClip().weights(alone, per_record(public, ids)) * norm) / 4 / plan.noise_multiplier
    return (moved**2 + added**2) * release.joint_noise(FlatClip(), plan, plan.noise_multiplier) ** 2


def test_noise_of_each_count_by_hand(lab: Any) -> None:
    # σ = 2, σ_m = 20, Δ = 4: R = 1/4 + 1/400; σ_o = (R − 1/64)^(−1/2) = 2.0547; m: the same, (R − 1/16)^(−1/2), 20
    plan = lab.plan(noise_multiplier=2.0)
    release = release_of()
    noises = release.noise(plan) / release.shares({"clip_norm": BOUNDS}, plan)
    expected = [(0.2525 - share / 4) ** -0.5 for share in (1 / 16, 1 / 4, 1, 1 / 16, 1 / 16, 1 / 16)]
    assert noises.tolist() == pytest.approx(expected, rel=1e-5)
    assert expected[2] == pytest.approx(20.0)
    assert expected[3] == pytest.approx(2.0547, abs=1e-4)


def test_a_record_at_each_edge_moves_exactly_what_is_charged(lab: Any) -> None:
    plan, release = lab.plan(noise_multiplier=0.8), release_of(count_noise_multiplier="3x")
    for group, bound in enumerate(BOUNDS.tolist()):
        assert charged_of(release, plan, 1.0, group) == pytest.approx(1.0, rel=1e-5)  # at C_0, not above
        assert charged_of(release, plan, max(bound, 1.0001), group) == pytest.approx(1.0, rel=1e-4)  # at C^k
        for norm in (0.0, 0.3, 0.999, 1.001, 1.5, 3.0, 1e9):
            assert charged_of(release, plan, norm, group) <= 1 + 1e-5


@pytest.mark.parametrize("entries", [slice(0, 3), slice(3, 6)], ids=["above", "not_above"])
def test_a_count_with_one_per_cent_less_noise_is_found_and_refused(
    lab: Any, entries: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault."""
    told = SlackClipCounts.shares

    def bolder(self: SlackClipCounts, public: Any, plan: Any) -> Tensor:
        shares = told(self, public, plan).clone()
        shares[entries] *= 1.01
        return shares

    plan, release = lab.plan(), release_of(count_noise_multiplier=1.0)
    norm = 2.0 if entries.start == 0 else 1.0
    assert charged_of(release, plan, norm, 1) <= 1 + 1e-5
    monkeypatch.setattr(SlackClipCounts, "shares", bolder)
    assert charged_of(release, plan, norm, 1) > 1.005
    with pytest.raises(EquidpError, match=r"SlackClipCounts lets a record .* move"):
        refuse_broken_promises(algorithm_settings("dpsgd_f_slack").build(), plan)


def test_bounds_follow_one_step_late_from_unscaled_counts(lab: Any) -> None:
    plan, release = lab.plan(), release_of(memory=0.0)
    public = {"clip_norm": torch.tensor(1.0)}
    counts = torch.tensor([1.0, 4, -2, 9, 1, 3])
    for _ in range(2):
        noised = counts * release.shares(public, plan)
        later, now = release.consequences(noised, public, public, lab.facts(plan))
        assert now == {}
        public |= later
        assert public["clip_norm"].tolist() == pytest.approx([1.2, 2.6, 1.0], rel=1e-5)


def test_costs_what_dpsgd_f_smooth_costs_and_most_counts_have_a_ninth_of_its_noise(lab: Any) -> None:
    plan = lab.plan()
    slack, smooth = (algorithm_settings(name).build() for name in ("dpsgd_f_slack", "dpsgd_f_smooth"))
    assert slack.events(plan) == smooth.events(plan)
    noises = slack.side_release.noise(plan) / slack.side_release.shares({"clip_norm": BOUNDS}, plan)
    assert sum(noise < smooth.side_release.noise(plan) / 8 for noise in noises.tolist()) == 5


def test_another_gradient_noise_than_the_plans_is_paid_for(lab: Any) -> None:
    plan, release = lab.plan(), release_of(count_noise_multiplier=1.0)
    charged = release.joint_noise(FlatClip(), plan, 0.5)
    assert charged == pytest.approx((1 + 1 + (4 - 1)) ** -0.5)
    assert release.joint_noise(FlatClip(), plan, 2.0) == pytest.approx(2**-0.5)


@pytest.mark.parametrize(("part", "reason"), [("weights", "flat clipping"), ("schedule", "must be constant")])
def test_is_refused_beside_a_rule_or_a_schedule_that_its_noise_is_not_made_for(part: str, reason: str) -> None:
    from dataclasses import replace

    from equidp.algorithms.dpsgd_decay import ExponentialDecay
    from equidp.algorithms.psasc import AdaptiveScaling

    other = {"weights": AdaptiveScaling(), "schedule": ExponentialDecay()}[part]
    with pytest.raises(EquidpError, match=reason):
        replace(algorithm_settings("dpsgd_f_slack").build(), **{part: other})


def test_a_huge_noise_of_the_one_count_leaves_numbers_finite(lab: Any) -> None:
    run = lab.trained("dpsgd_f_slack", {"count_noise_multiplier": "1000000x"})
    assert run.parameters.isfinite().all()
    assert all(math.isfinite(value) for value in run.history[-1].values())
