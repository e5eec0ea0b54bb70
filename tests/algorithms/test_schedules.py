"""Schedules: SAD-DPSGD's phases and their report, and the falling noise of its baselines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equidp.accounting.epsilon import epsilon, rdp_epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.algorithms.auto_dpsgd import LinearFall, OwnThreshold, StepFall
from equidp.algorithms.dpsgd_decay import ExponentialDecay
from equidp.algorithms.sad_dpsgd import DecayingPhases, schedule_report
from equidp.errors import EquidpError
from equidp.mechanism.parts import Constant, Schedule, tensors

SCHEDULES = [
    Constant(),
    ExponentialDecay(),
    LinearFall(),
    StepFall(),
    DecayingPhases(),
    DecayingPhases(phases=7, phase_decay=1.3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@given(records=st.integers(1, 3000), batch_size=st.integers(1, 3000), epochs=st.integers(1, 40))
def test_segments_cover_every_step_once(schedule: Schedule, records: int, batch_size: int, epochs: int) -> None:
    plan = Plan(records, min(batch_size, records), epochs, 2, 1e-5, 1.0)
    segments = schedule.segments(plan)
    assert sum(s.steps for s in segments) == plan.steps
    assert all(s.steps > 0 and s.noise > 0 and s.clip > 0 for s in segments)


class TestSAD:
    """Phases of SAD-DPSGD."""

    def test_noise_rises_and_the_bound_falls(self, lab: Any) -> None:
        plan = lab.plan(epochs=50)
        run = lab.trained("sad_dpsgd", plan=plan)
        noise = [row["noise_multiplier"] for row in run.history]
        bound = [row["sensitivity"] for row in run.history]
        assert noise == sorted(noise)
        assert bound == sorted(bound, reverse=True)
        assert (noise[0], noise[-1]) == (pytest.approx(0.64), 1.0)
        assert (bound[0], bound[-1]) == (pytest.approx(25 / 9), 1.0)

    @pytest.mark.slow
    def test_what_is_calibrated_is_what_is_trained(self, lab: Any) -> None:
        algorithm = algorithm_settings("sad_dpsgd").build()
        plan = algorithm.calibrated(lab.plan(records=2000, batch_size=20), 1.0)
        run = lab.trained("sad_dpsgd", plan=plan)
        assert run.trainer.ledger.events == algorithm.events(plan)
        assert 0.99 < epsilon(run.trainer.ledger.events, plan.delta).value <= 1.0

    def test_the_reversed_schedule_is_another_one(self, lab: Any) -> None:
        # the authors' code calibrates one order of lengths and trains the other
        plan = lab.plan(epochs=50)
        forward = DecayingPhases(phase_decay=0.5).segments(plan)
        lengths = [s.steps for s in forward]
        noise = [s.noise for s in forward]
        trained = [Event(0.25, n, k) for n, k in zip(noise, reversed(lengths), strict=True)]
        promised = [Event(0.25, n, k) for n, k in zip(noise, lengths, strict=True)]
        assert rdp_epsilon(trained, 1e-5) > rdp_epsilon(promised, 1e-5)

    def test_the_report(self) -> None:
        # T = 70, γ = 0.5: 10, 20, 40; σ = 0.5, 1, 2: μ = (5 + 20 + 80)/70 = 1.5, var = (10·1 + 20·0.25 + 40·0.25)/70
        plan = Plan(100, 10, 7, 2, 1e-5, 2.0)
        report = schedule_report(DecayingPhases(phase_decay=0.5, noise_decay=0.5, clip_decay=3.0), plan, clip_norm=0.1)
        assert report.lengths == (10, 20, 40)
        assert report.noise == pytest.approx((0.5, 1.0, 2.0))
        assert report.clip_norms == pytest.approx((0.9, 0.3, 0.1))
        assert report.mean_noise == pytest.approx(1.5)
        assert report.noise_variance == pytest.approx(25 / 70)

    def test_more_phases_than_steps_is_no_error(self) -> None:
        plan = Plan(10, 10, 2, 2, 1e-5, 1.0)
        assert sum(s.steps for s in DecayingPhases(phases=9).segments(plan)) == 2

    @pytest.mark.parametrize(
        "given", [{"noise_decay": 1e10}, {"phase_decay": 1e-10}, {"clip_decay": 10, "phases": 40}, {"phases": 500}]
    )
    def test_factors_that_overflow_over_the_phases_are_refused(self, given: dict[str, float]) -> None:
        with pytest.raises(EquidpError, match=r"phases are too far apart; set \w+_decay nearer to 1"):
            algorithm_settings("sad_dpsgd", given).build()

    def test_a_falling_bound_needs_a_rule_that_reads_it(self) -> None:
        with pytest.raises(EquidpError, match="set clip_decay to 1"):
            algorithm_settings("custom", {"weights": "normalise", "schedule": "phases"}).build()
        algorithm_settings("custom", {"weights": "normalise", "schedule": {"name": "phases", "clip_decay": 1}}).build()


class TestAutoDPSGD:
    """Why Δ is C_hi."""

    def test_the_last_samples_threshold_is_no_bound(self) -> None:
        # the published code sets the noise from the threshold of whichever record came last
        rule, public = OwnThreshold(norm_fraction=0.5), tensors({"clip_norm": 40.0, "min_clip_norm": 20.0}, "cpu")
        norms = torch.tensor([500.0, 10.0])  # the last one is short: its own threshold is clamp(5, 20, 40) = 20
        added = rule.weights(norms, public) * norms
        last_threshold = float((0.5 * norms[-1]).clamp(20.0, 40.0))
        assert added.tolist() == [40.0, 10.0]
        assert added.max() > last_threshold
        assert added.max() <= rule.bound(public)

    def test_refuses_bounds_the_wrong_way_round(self) -> None:
        with pytest.raises(EquidpError, match="must not be below"):
            algorithm_settings("auto_dpsgd_l", {"min_clip_norm": 2.0, "max_clip_norm": 1.0})

    def test_noise_falls_linearly_and_by_steps(self) -> None:
        plan = Plan(100, 10, 4, 2, 1e-5, 1.0)
        linear = [s.noise for s in LinearFall(noise_drop=0.4).segments(plan)]
        assert linear == pytest.approx([1.0, 0.9, 0.8, 0.7])
        steps = [s.noise for s in StepFall(phases=2, noise_decay=0.5).segments(plan)]
        assert steps == pytest.approx([1.0, 1.0, 0.5, 0.5])
