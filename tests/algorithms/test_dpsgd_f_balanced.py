"""DPSGD-F with weights for rare groups: its limits are its parents, and the noise covers what the weights allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equidp.algorithms import algorithm_settings
from equidp.mechanism.parts import StepFacts, per_record, sensitivity


def release_of(name: str, **options: float) -> Any:
    return algorithm_settings(name, options).build().side_release


def values(release: Any, plan: Any, released: torch.Tensor) -> dict[str, torch.Tensor]:
    """The public values at the last of the released counts `[T, 2K]`."""
    public, now = {"clip_norm": torch.tensor(1.0)}, {}
    facts = StepFacts(plan, 0, 1.0, torch.tensor(1.0), 21, plan.sampling_rate)
    for noised in released:
        later, now = release.consequences(noised, public, public, facts)
        public |= later
    return now


def test_without_balance_it_is_dpsgd_f_smooth(lab: Any) -> None:
    released = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)) * 9
    found = values(release_of("dpsgd_f_balanced", balance=0.0), lab.plan(), released)
    expected = values(release_of("dpsgd_f_smooth"), lab.plan(), released)
    assert torch.equal(found["clip_norm"], expected["clip_norm"])
    assert found["scale"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_weights_follow_the_remembered_sizes(lab: Any) -> None:
    """Noise of ±30 around sizes 4, 9 and 1 averages out; θ^k is the root of (10/3)/size."""
    plan = lab.plan()
    stream = torch.Generator().manual_seed(0)
    sizes = torch.tensor([4.0, 9.0, 1.5, 0.0, 0.0, 0.0])
    released = sizes + 30 * torch.randn(20_000, 6, generator=stream)
    found = values(release_of("dpsgd_f_balanced", memory=0.9999), plan, released)
    expected = (plan.batch_size / plan.groups / sizes[:3]) ** 0.5
    assert found["scale"].tolist() == pytest.approx(expected.tolist(), rel=0.2)


def test_a_group_that_is_never_seen_has_a_bounded_weight(lab: Any) -> None:
    plan = lab.plan()
    found = values(release_of("dpsgd_f_balanced"), plan, torch.tensor([[5.0, 5.0, -40.0, 0.0, 0.0, -2.0]]))
    assert found["scale"][2] == pytest.approx((plan.batch_size / plan.groups) ** 0.5)


def test_no_record_exceeds_the_sensitivity_whatever_is_released(lab: Any) -> None:
    plan, stream = lab.plan(), torch.Generator().manual_seed(1)
    algorithm = algorithm_settings("dpsgd_f_balanced", {"balance": 1.0}).build()
    norms = torch.logspace(-3, 3, 50).repeat(3)
    groups = torch.arange(3).repeat_interleave(50)
    for _ in range(200):
        noised = 20 * torch.randn(6, generator=stream)
        public = {"clip_norm": torch.tensor(1.0), "scale": torch.tensor(1.0)}
        public |= algorithm.side_release.consequences(noised, public, public, lab.facts(plan))[1]
        seen = per_record(public, groups)
        moved = norms * algorithm.weights.weights(norms, seen) * seen["scale"]
        assert moved.max() <= sensitivity(algorithm.weights, public) * (1 + 1e-6)


def test_dpsgd_f_balanced_costs_what_dpsgd_f_costs(lab: Any) -> None:
    events = [algorithm_settings(name).build().events(lab.plan()) for name in ("dpsgd_f", "dpsgd_f_balanced")]
    assert events[0] == events[1]


def test_bounds_and_weights_are_in_the_history_and_what_is_kept_is_not(lab: Any) -> None:
    last = lab.trained("dpsgd_f_balanced").history[-1]
    assert {"clip_norm/2", "scale/2"} <= set(last)
    assert not [name for name in last if "remembered" in name]
