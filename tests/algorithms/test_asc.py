"""ASC: rates and bounds by hand, and that no group's own event costs more than what is charged for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equidp.accounting.budget import ORDERS, renyi
from equidp.accounting.epsilon import renyi_curve
from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.mechanism.noise import SeededRandom


class Noised(SeededRandom):
    """Releases these values in turn, then its own."""

    def __init__(self, *values: list[float]) -> None:
        super().__init__(0, "cpu")
        self.values = list(values)

    def perturb(self, values: torch.Tensor, **how: Any) -> torch.Tensor:
        if self.values:
            return torch.tensor(self.values.pop(0), dtype=values.dtype)
        return super().perturb(values, **how)


def begun(lab: Any, options: dict[str, Any], *released: list[float], epochs: int = 1, algorithm: Any = None) -> Any:
    """A trainer at the beginning of its last epoch, after these releases."""
    trainer = lab.trainer("asc", options, plan=lab.plan(epochs=epochs), random=Noised(*released), algorithm=algorithm)
    for epoch in range(epochs):
        trainer.begin_epoch(epoch)
    return trainer


def costs_at_most_what_is_charged(trainer: Any) -> None:
    """The event of each group's records, at every order that a budget may have."""
    rates = trainer.sampling.group_rates.tolist()
    bounds = trainer.public_values(trainer.segments[0])["clip_norm"].tolist()
    sigma = trainer.sampling.noise(trainer.segments[0])
    charged = renyi_curve([trainer.algorithm.step_event(trainer.plan, trainer.sampling.rate, sigma)], ORDERS)
    for rate, bound in zip(rates, bounds, strict=True):
        own = renyi_curve([Event(rate, sigma * max(bounds) / bound)], ORDERS)
        assert all(a <= b * (1 + 1e-6) + 1e-12 for a, b in zip(own, charged, strict=True))


def test_rates_and_bounds_by_hand(lab: Any) -> None:
    # Ñ = (20, 10, 10), ℓ̃ = (0, ln 2, ln 8), η = 1: e = (1, 2, 8), Σ Ñ·e = 120: q = 10·e/120; ρB/N = 1/2
    trainer = begun(lab, {}, [20.0, 10.0, 10.0], [-4.0, 6.9314718, 20.7944154])
    assert trainer.sampling.group_rates.tolist() == pytest.approx([1 / 12, 1 / 6, 2 / 3])
    public = trainer.public_values(trainer.segments[0])
    assert public["clip_norm"].tolist() == pytest.approx([1.0, 1.0, 0.75])
    assert trainer.ledger.events == (Event(1.0, 0.4), Event(1.0, 0.8))
    assert trainer.sampling.shown()["sampling_rate/2"] == pytest.approx(2 / 3)


def test_losses_are_averaged_over_the_epochs_and_sizes_released_once(lab: Any) -> None:
    # ℓ̃ = (0, 0, 3 of 4) and (0, 0, 1): the mean is 2; sizes (-5 → 1.4, 20, 20), scaled to 40
    trainer = begun(lab, {"steepness": 0.5}, [-5.0, 20.0, 20.0], [0.0, 0.0, 80.0], [0.0, 0.0, 400 / 20.7], epochs=2)
    sizes = torch.tensor([1.4, 20, 20]).double() * 40 / 41.4
    assert trainer.sampling.sizes.tolist() == pytest.approx(sizes.tolist())
    tilted = torch.tensor([1, 1, 2.718281828]).double()
    assert trainer.sampling.group_rates.tolist() == pytest.approx((10 * tilted / (sizes @ tilted)).tolist(), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.floats(-50, 200), min_size=3, max_size=3),
    losses=st.lists(st.floats(-100, 500), min_size=3, max_size=3),
    limit=st.sampled_from([1.0, 1.3, 2.0, 8.0]),
    sigma=st.sampled_from([0.4, 1.0, 5.0]),
)
def test_no_group_costs_more_than_is_charged(
    lab: Any, sizes: list[float], losses: list[float], limit: float, sigma: float
) -> None:
    plan = lab.plan(noise_multiplier=sigma)
    trainer = lab.trainer("asc", {"rate_limit": limit, "steepness": 4.0}, plan=plan, random=Noised(sizes, losses))
    trainer.begin_epoch(0)
    assert float(trainer.public_values(trainer.segments[0])["clip_norm"].max()) == pytest.approx(1.0)
    costs_at_most_what_is_charged(trainer)


def test_a_resumed_life_ends_where_the_budget_does(lab: Any) -> None:
    trainer = lab.trainer("asc", plan=lab.plan(epochs=2))
    spent = Ledger(trainer.algorithm.events(trainer.plan))
    again = lab.trainer("asc", plan=lab.plan(epochs=2), ledger=spent)
    again.begin_epoch(0)
    assert again.finished
    assert again.ledger.events == spent.events


@pytest.mark.parametrize("target", [1.0, 8.0, None])
def test_its_budget_is_of_an_integer_order_as_its_bound_holds_at_no_other(lab: Any, target: float | None) -> None:
    algorithm = algorithm_settings("asc", {"rate_limit": 1.5}).build()
    plan = lab.plan(records=4000, batch_size=100, epochs=5, noise_multiplier=2.0)
    plan = plan if target is None else algorithm.calibrated(plan, target)
    budget = algorithm.budget(plan)
    assert budget is not None
    assert float(budget.order).is_integer()
    assert budget.holds(algorithm.events(plan))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "psasc"}, "the weight rule flat"),
        ({"side_release": "quantile"}, "does not pay for a side release"),
        ({"acceptance": {"name": "annealing", "energy": "private"}}, "does not pay for a private acceptance"),
        ({"schedule": "phases"}, "the schedule must be constant"),
    ],
)
def test_what_its_budget_does_not_cover_is_refused(lab: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(EquidpError, match=reason):
        lab.trainer("custom", {"sampler": "groups", **options})


class Seeing(SeededRandom):
    """Keeps the exact values that it is given."""

    def perturb(self, values: torch.Tensor, **how: Any) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), values.clone()]
        return super().perturb(values, **how)


def test_the_sizes_of_very_large_groups_are_counted_to_the_last_record(lab: Any, monkeypatch: Any) -> None:
    """In float32 the record after 2²⁴ would not count, and the next one as two."""
    trainer, size = lab.trainer("asc", random=Seeing(0, "cpu")), 2**24 + 1
    monkeypatch.setattr(trainer.population, "size", size)
    monkeypatch.setattr(trainer.population, "groups", torch.zeros((), dtype=torch.int64).expand(size))
    monkeypatch.setattr(trainer, "losses", lambda units: torch.zeros(()).expand(len(units)))
    trainer.begin_epoch(0)
    assert trainer.random.seen[0].tolist() == [size, 0, 0]


def test_rates_and_bounds_follow_from_what_was_released_and_declared_alone(lab: Any) -> None:
    """Of 40 declared records one is not there: the same releases lead to the same rates and bounds."""
    found = []
    for records in (lab.records(40), lab.records(40).take(torch.arange(39))):
        trainer = lab.trainer(
            "asc", plan=lab.plan(), records=records, random=Noised([20.0, 10.0, 10.0], [-4.0, 6.9, 20.8])
        )
        trainer.begin_epoch(0)
        public = trainer.public_values(trainer.segments[0])
        found.append((trainer.sampling.group_rates.tolist(), public["clip_norm"].tolist(), trainer.sampling.shown()))
    assert found[0] == found[1]


class Listening(SeededRandom):
    """Keeps the exact values that it is given, and how they are noised."""

    def __init__(self) -> None:
        super().__init__(0, "cpu")
        self.heard: list[tuple[torch.Tensor, float, float]] = []

    def perturb(self, values: torch.Tensor, *, sensitivity: Any, noise_multiplier: float) -> torch.Tensor:
        self.heard.append((values.clone(), float(sensitivity), noise_multiplier))
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)


@pytest.mark.parametrize("spoil", [0.0, 1e6, -1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("less", [0.0, 1e6])
def test_a_record_moves_sizes_and_losses_by_no_more_than_they_are_noised_for(
    lab: Any, spoil: float, less: float
) -> None:
    """A loss of one's own may be below 0, too."""
    records = lab.records(40)
    records.features[3] = spoil
    others = [k for k in range(40) if k != 3]
    heard = []
    for part in (records, records.take(torch.tensor(others))):
        random = Listening()
        trainer = lab.trainer(
            "asc",
            {"loss_limit": 2.5, "size_noise_fraction": 0.05, "loss_noise_fraction": 0.1},
            plan=lab.plan(),
            records=part,
            random=random,
            loss=lambda outputs, labels: lab.cross_entropy(outputs, labels) - less,
        )
        trainer.begin_epoch(0)
        heard.append(random.heard)
        assert trainer.ledger.events == (Event(1.0, 0.05 * 40), Event(1.0, 0.1 * 40))
    for (with_it, sensitivity, noise), (without, *_), expected in zip(*heard, ((1.0, 2.0), (2.5, 4.0)), strict=True):
        assert (sensitivity, noise) == pytest.approx(expected)
        assert float((with_it - without).norm()) <= sensitivity * (1 + 1e-9)
    assert float(heard[0][0][0].sum()) == 40
    if spoil == 0.0:
        assert float((heard[0][1][0] - heard[1][1][0]).norm()) == pytest.approx(0.0 if less else 1.0, abs=0.7)


@pytest.mark.parametrize("room", [-0.5, 0.5])
def test_an_epoch_whose_beginning_leaves_no_room_for_a_step_releases_nothing(lab: Any, room: float) -> None:
    trainer = lab.trainer("asc", plan=lab.plan(epochs=2))
    trainer.run_steps(4)
    ledger, budget, plan = trainer.ledger, trainer.sampling.budget, trainer.plan
    losses, step = trainer.algorithm.sampler.releases(plan)[1], Event(trainer.sampling.rate, plan.noise_multiplier)
    needed = renyi([Event(1.0, losses.noise_multiplier), step], budget.order)
    left = budget.total - renyi(ledger.events, budget.order) - needed
    most = left - room * renyi([step], budget.order)  # of which a Gaussian, α/(2σ²), takes all
    ledger.append(Event(1.0, (budget.order / (2 * most)) ** 0.5))
    owed = ledger.events
    trainer.run_steps(4)
    assert trainer.finished
    assert budget.holds(ledger.events)
    assert trainer.steps_done == (4 if room < 0 else 5)
    if room < 0:
        assert ledger.events == owed
    again = lab.trainer("asc", plan=plan, ledger=ledger)
    again.load_state_dict(trainer.state_dict())
    assert again.finished


@pytest.mark.parametrize("room", [0.5, 1.5, 2.5])
def test_the_budget_is_kept_where_a_crash_leaves_room_for_part_of_an_epoch(lab: Any, room: float) -> None:
    trainer = lab.trainer("asc", plan=lab.plan(epochs=2))
    trainer.begin_epoch(0)
    ledger, budget = trainer.ledger, trainer.sampling.budget
    cost = renyi([Event(trainer.sampling.rate, trainer.plan.noise_multiplier)], budget.order)
    left = budget.total - renyi(ledger.events, budget.order) - room * cost  # of which a Gaussian, α/(2σ²), takes all
    ledger.append(Event(1.0, (budget.order / (2 * left)) ** 0.5))
    trainer.sampling.load_state_dict(trainer.sampling.state_dict())
    trainer.run_steps(4)
    assert trainer.finished
    assert trainer.steps_done == int(room)
    assert budget.holds(ledger.events)
