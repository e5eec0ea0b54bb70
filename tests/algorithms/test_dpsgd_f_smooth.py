"""DPSGD-F with remembered counts: the average is the one its page says, it calms the bounds, and it costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equidp.algorithms import algorithm_settings
from equidp.mechanism.parts import StepFacts

COUNTS = torch.tensor([[2.0, 4.0, -3.0, 10.0, 1.0, 3.0], [0.5, 4.0, -1.5, 8.5, 1.0, 3.0]])


def release_of(memory: float) -> Any:
    return algorithm_settings("dpsgd_f_smooth", {"memory": memory}).build().side_release


def bounds(release: Any, plan: Any, released: torch.Tensor) -> torch.Tensor:
    """C^k `[T, K]` of released counts `[T, 2K]`."""
    public = {"clip_norm": torch.tensor(1.0)}
    seen = []
    facts = StepFacts(plan, 0, 1.0, torch.tensor(1.0), 21, plan.sampling_rate)
    for noised in released:
        later, now = release.consequences(noised, public, public, facts)
        seen.append(now["clip_norm"])
        public |= later
    return torch.stack(seen)


def test_the_second_step_averages_both(lab: Any) -> None:
    """β = ½ weighs the two steps 1 : 2, so the average is (1, 4, −2, 9, 1, 3): DPSGD-F's golden numbers."""
    found = bounds(release_of(0.5), lab.plan(), COUNTS)
    assert found[1].tolist() == pytest.approx([1.2, 2.6, 1.0])


def test_clamping_comes_after_averaging(lab: Any) -> None:
    """Noise of both signs around 0 averages out; clamped first, group 1 would seem to have gradients above C_0.

    Without memory every other step sees m̃ = (5, 4, 0), õ = 10 each: ρ^1 = 4/14, ρ = 9/10, C^1 = 1 + 0.3175.
    """
    signs = torch.tensor([1.0, -1.0] * 200)[:, None]
    released = torch.cat(
        [signs * torch.tensor([0.0, 4.0, 0.0]) + torch.tensor([5.0, 0, 0]), torch.full((400, 3), 10.0)], 1
    )
    smooth, plain = bounds(release_of(0.99), lab.plan(), released), bounds(release_of(0.0), lab.plan(), released)
    assert smooth[-1, 1] == pytest.approx(1.0, abs=0.05)
    assert plain[:, 1].mean() == pytest.approx(1 + 0.3175 / 2, abs=1e-3)


def test_no_memory_is_dpsgd_f(lab: Any) -> None:
    plan, release = lab.plan(), algorithm_settings("dpsgd_f").build().side_release
    expected = torch.stack(
        [release.now(c, {"clip_norm": torch.tensor(1.0)}, lab.facts(plan))["clip_norm"] for c in COUNTS]
    )
    assert torch.equal(bounds(release_of(0.0), plan, COUNTS), expected)


def test_the_bounds_are_calmer_and_the_cost_is_the_same(lab: Any) -> None:
    stream = torch.Generator().manual_seed(0)
    released = torch.tensor([4.0, 4, 4, 4, 4, 4]) + 5 * torch.randn(2000, 6, generator=stream)
    smooth, plain = bounds(release_of(0.99), lab.plan(), released), bounds(release_of(0.0), lab.plan(), released)
    assert smooth[500:].std(0).max() < plain[500:].std(0).min() / 5
    assert smooth[500:].amax(1).mean() < plain[500:].amax(1).mean()
    events = [algorithm_settings(name).build().events(lab.plan()) for name in ("dpsgd_f", "dpsgd_f_smooth")]
    assert events[0] == events[1]


def test_what_it_keeps_is_not_in_the_history(lab: Any) -> None:
    history = lab.trained("dpsgd_f_smooth").history
    assert "clip_norm/2" in history[-1]
    assert not [name for name in history[-1] if "remembered" in name]
