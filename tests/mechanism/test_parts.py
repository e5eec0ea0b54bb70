"""Plans, parts and public values: facts that everything else leans on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equidp.accounting.plan import Plan, Segment, by_epoch, segment_at
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import (
    Draw,
    FlatClip,
    Public,
    noise_level,
    per_record,
    scheduled,
    sensitivity,
    tensors,
)

pytestmark = pytest.mark.usefixtures("coarse")


class TestPlan:
    """Public facts of a run."""

    def test_rates_and_steps(self) -> None:
        plan = Plan(records=54649, batch_size=256, epochs=60, groups=10, delta=1e-6, noise_multiplier=0.8)
        assert plan.sampling_rate == 256 / 54649
        assert plan.steps == round(60 * 54649 / 256)
        assert Plan(7, 4, 1, 1, 1e-5, 1.0).steps == 2  # of 1.75: the nearest whole number

    def test_a_tiny_run_has_one_step(self) -> None:
        assert Plan(10, 10, 1, 1, 1e-5, 1.0).steps == 1

    def test_refuses_a_batch_beyond_the_data(self) -> None:
        with pytest.raises(EquidpError, match=r"training\.batch_size=11 exceeds the 10"):
            Plan(10, 11, 1, 1, 1e-5, 1.0)

    @given(records=st.integers(1, 5000), batch_size=st.integers(1, 5000), epochs=st.integers(1, 60))
    def test_epochs_partition_the_steps(self, records: int, batch_size: int, epochs: int) -> None:
        plan = Plan(records, min(batch_size, records), epochs, 1, 1e-5, 1.0)
        lengths = plan.epoch_lengths()
        assert len(lengths) == epochs
        assert sum(lengths) == plan.steps
        seen = [plan.epoch(step) for step in range(plan.steps)]
        assert [seen.count(e) for e in range(epochs)] == lengths


class TestSegments:
    """Runs of steps with one noise."""

    def test_segment_at(self) -> None:
        segments = (Segment(2, noise=1.0), Segment(3, noise=0.5))
        assert [segment_at(segments, t).noise for t in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.5]
        with pytest.raises(IndexError):
            segment_at(segments, 5)

    def test_by_epoch_has_a_segment_for_every_epoch(self) -> None:
        for batch_size, steps in ((10, [1, 1, 1]), (9, [1, 1, 1]), (7, [2, 1, 1])):  # the least that an epoch can have
            plan = Plan(10, batch_size, 3, 1, 1e-5, 1.0)
            factors = [1.0, 0.9, 0.8]
            assert by_epoch(plan, factors) == tuple(Segment(*one) for one in zip(steps, factors, strict=True))
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            by_epoch(plan, factors[:2])


class TestPublicValues:
    """What a weight rule may know."""

    def test_the_sensitivity_is_over_all_groups(self) -> None:
        public = tensors({"clip_norm": 1.0}, "cpu") | {"clip_norm": torch.tensor([1.0, 7.0, 2.0])}
        assert float(sensitivity(FlatClip(), public)) == 7.0
        assert per_record(public, torch.tensor([0, 2]))["clip_norm"].tolist() == [1.0, 2.0]

    def test_bounds_and_scales_meet_per_group(self) -> None:
        public = {"clip_norm": torch.tensor([1.0, 7.0]), "scale": torch.tensor([10.0, 0.1])}
        assert float(sensitivity(FlatClip(), public)) == 10.0

    def test_of_a_group_whose_bound_noise_has_led_below_0_nothing_is_added(self) -> None:
        """Δ is the largest bound, so it would not be one for a group that adds its own, below 0, in full."""
        bounds = torch.tensor([-5.0, 1.0])
        seen = per_record({"clip_norm": bounds}, torch.tensor([0, 0, 1]))
        assert FlatClip().weights(torch.tensor([10.0, 0.0, 10.0]), seen).tolist() == [0.0, 0.0, pytest.approx(0.1)]

    def test_a_schedule_moves_a_copy(self) -> None:
        carried = tensors({"clip_norm": 2.0}, "cpu")
        assert float(scheduled(carried, Segment(1, clip=3.0))["clip_norm"]) == 6.0
        assert float(carried["clip_norm"]) == 2.0

    @pytest.mark.parametrize(("level", "value"), [(3.0, 3.0), ("10x", 5.0), ("0.5x", 0.25)])
    def test_noise_levels(self, level: float | str, value: float) -> None:
        assert noise_level(level, Plan(10, 5, 1, 1, 1e-5, 0.5)) == value


class TestDraw:
    """Chunks of a batch."""

    def test_splits_coins_along(self) -> None:
        draw = Draw(torch.arange(5), torch.linspace(0, 1, 5))
        parts = draw.split(2)
        assert [p.units.tolist() for p in parts] == [[0, 1], [2, 3], [4]]
        assert torch.equal(torch.cat([p.coins for p in parts if p.coins is not None]), draw.coins)

    @pytest.mark.parametrize("size", [None, 5, 99])
    def test_one_chunk_where_it_fits(self, size: int | None) -> None:
        assert len(Draw(torch.arange(5)).split(size)) == 1

    def test_nobody_is_one_empty_chunk(self) -> None:
        assert [len(d.units) for d in Draw(torch.arange(0)).split(3)] == [0]


class TestAlgorithm:
    """What an algorithm promises of a whole run."""

    def test_paths_end_in_the_whole(self) -> None:
        plan = Plan(400, 20, 4, 2, 1e-5, 1.0)
        algorithm = algorithm_settings("dpsgd_decay").build()
        path = algorithm.epsilon_path(plan)
        assert len(path) == 4
        assert path == sorted(path)
        assert path[-1] == pytest.approx(algorithm.epsilon(plan).value, rel=5e-3)

    def test_what_a_side_release_moves_needs_a_start_value(self) -> None:
        release = algorithm_settings("dpsgd_global_adapt").build().side_release
        with pytest.raises(EquidpError, match=r"StrictBoundCount moves strict_clip_norm.*`initial`"):
            Algorithm(name="mine", weights=FlatClip(), initial={"clip_norm": 1.0}, side_release=release)

    def test_a_weight_rule_names_what_it_looks_up(self) -> None:
        class Doubled(FlatClip):
            def weights(self, norms: Tensor, public: Public) -> Tensor:
                return super().weights(norms, public) * public["factor"]

        with pytest.raises(EquidpError, match=r"mine: .* Doubled looks up 'factor'.*`reads`.*`initial`"):
            Algorithm(name="mine", weights=Doubled(), initial={"clip_norm": 1.0})

    def test_values_to_start_from_are_one_number_for_all_groups(self) -> None:
        bounds: Any = [0.5, 1.0]
        with pytest.raises(EquidpError, match=r"mine: `initial` holds numbers.*differs by group.*side release"):
            Algorithm(name="mine", weights=FlatClip(), initial={"clip_norm": bounds})

    def test_sgd_has_no_events_and_no_figure(self) -> None:
        plan = Plan(400, 20, 4, 2, 1e-5, 0.0)
        algorithm = algorithm_settings("sgd").build()
        assert algorithm.events(plan) == ()
        assert algorithm.published_epsilon(plan) is None
        assert not algorithm.private
        assert algorithm.epsilon(plan).value == algorithm.epsilon_path(plan)[-1] == float("inf")

    def test_events_by_epoch_are_the_events(self) -> None:
        plan = Plan(400, 20, 4, 2, 1e-5, 1.0)
        algorithm = algorithm_settings("sad_dpsgd").build()
        apart = [event for epoch in algorithm.events_by_epoch(plan) for event in epoch]
        assert sum(e.count for e in apart) == plan.steps
        assert {e.noise_multiplier for e in apart} == {e.noise_multiplier for e in algorithm.events(plan)}

    def test_another_ledger_is_not_covered(self) -> None:
        plan = Plan(400, 20, 4, 2, 1e-5, 1.0)
        algorithm = algorithm_settings("dpsgd").build()
        (event,) = algorithm.events(plan)
        assert algorithm.covers(plan, [event])
        assert not algorithm.covers(plan, [])
        assert not algorithm.covers(plan, [event, event])
