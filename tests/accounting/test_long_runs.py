"""Accounting of very long runs and of many different events: bounded in time, and never below the exact figure."""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import pytest
from dp_accounting import pld

from equidp.accounting import calibration
from equidp.accounting.accounted import Accounted
from equidp.accounting.calibration import calibrate
from equidp.accounting.epsilon import PLD_STEPS, POINTS, epsilon, epsilon_path, live_epsilon, renyi_curve
from equidp.accounting.events import LEVELS, MOST_DIFFERENT, Event, canonical, lowered, merged
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings

FALLING = [Event(0.01, 2 - 0.8 * step / 120, 3) for step in range(120)]
WIDTH = (2 / FALLING[-1].noise_multiplier) ** (1 / LEVELS)
LONG = Event(0.01, 44.8, PLD_STEPS + 1)


@pytest.fixture
def no_pld(monkeypatch: pytest.MonkeyPatch) -> None:
    """Privacy loss distributions that end the test where they are asked for."""
    for name in ("from_gaussian_mechanism", "identity"):
        monkeypatch.setattr(pld.privacy_loss_distribution, name, lambda *given, **named: pytest.fail("PLD was asked"))


def test_many_different_events_lose_no_noise_unseen_and_are_few() -> None:
    seen = lowered(FALLING)
    assert len(canonical(FALLING)) <= LEVELS + 1
    assert sum(event.count for event in canonical(FALLING)) == sum(event.count for event in FALLING)
    for true, charged in zip(FALLING, seen, strict=True):
        assert true.noise_multiplier / (WIDTH + 1e-9) <= charged.noise_multiplier <= true.noise_multiplier


def test_divergences_of_many_different_events_lie_between_the_exact_ones_and_those_of_a_little_less_noise() -> None:
    less = [Event(event.sampling_rate, event.noise_multiplier / WIDTH, event.count) for event in FALLING]
    exact, charged, most = (renyi_curve(events, (2, 5, 16)) for events in (FALLING, canonical(FALLING), less))
    assert all(a < b < c for a, b, c in zip(exact, charged, most, strict=True))


def test_every_figure_sees_the_lowered_events() -> None:
    few = [Event(1.0, 300 + step) for step in range(MOST_DIFFERENT + 1)]
    assert epsilon(few, 1e-5) == epsilon(lowered(few), 1e-5)
    assert live_epsilon(few, 1e-5) == live_epsilon(lowered(few), 1e-5)


def test_few_different_events_are_charged_as_they_are() -> None:
    few = FALLING[:MOST_DIFFERENT]
    assert lowered(few) is few
    assert len(canonical(few)) == MOST_DIFFERENT


def test_every_sampling_rate_is_lowered_apart() -> None:
    both = [*FALLING, *(Event(0.5, 30.0, 2) for _ in range(3))]
    assert Event(0.5, 30.0, 6) in canonical(both)


@pytest.mark.usefixtures("no_pld")
def test_a_run_of_very_many_steps_is_accounted_by_renyi_divergences_alone() -> None:
    found = epsilon([LONG], 1e-5)
    assert math.isinf(found.pld or 0)
    assert found.value == found.rdp
    noise = calibrate(lambda sigma: [Event(0.01, sigma, 10_000_000)], 3.0, 1e-5)
    assert 2.97 <= epsilon([Event(0.01, noise, 10_000_000)], 1e-5).value <= 3.0


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize(("rate", "delta"), [(1e-7, 1e-5), (1e-6, 1e-3), (1e-7, 0.5)])
def test_a_run_of_very_many_steps_that_show_next_to_nothing_has_a_finite_epsilon(rate: float, delta: float) -> None:
    """dp_accounting answers 0 for Rényi divergences that are nearly 0, and PLD, which would know, is not asked."""
    found = epsilon([Event(rate, 10.0, 1_000_000)], delta)
    # what the conversion leaves of no divergence at the largest order, 1,024
    assert found.value == pytest.approx(max(0.0, math.log(1023 / 1024) - math.log(1024 * delta) / 1023), abs=1e-5)


@pytest.mark.usefixtures("no_pld")
def test_a_run_of_very_many_steps_has_a_trade_off_curve_and_an_epsilon_of_replacement() -> None:
    plan = Plan(records=1000, batch_size=10, epochs=1, groups=2, delta=1e-5, noise_multiplier=44.8)
    accounted = Accounted(plan, (LONG,), (LONG,), None)
    curve, value = accounted.trade_off(), accounted.epsilon().value
    assert curve is not None
    assert curve.bound == "rdp"
    assert curve.misses(0.01) >= 1 - 1e-5 - math.exp(value) * 0.01
    replaced = accounted.replace_one()
    assert replaced is not None
    assert replaced > value


def test_a_curve_over_thousands_of_epochs_has_bounds_at_its_epochs_and_ends_in_the_whole() -> None:
    epochs = [[Event(1.0, 300.0)] for _ in range(3 * POINTS)]
    path = [point.value for point in epsilon_path(epochs, 1e-5)]
    assert len(path) == len(epochs)
    assert len(set(path)) <= POINTS
    assert all(a <= b for a, b in pairwise(path))
    assert path[-1] == epsilon([event for events in epochs for event in events], 1e-5).value
    for at in (0, 1, 700):
        assert path[at] >= epsilon([Event(1.0, 300.0, at + 1)], 1e-5).value * (1 - 1e-9)


def test_a_schedule_of_thousands_of_epochs_is_charged_epoch_by_epoch() -> None:
    algorithm = algorithm_settings("auto_dpsgd_l", {}).build()
    plan = Plan(records=1000, batch_size=100, epochs=4_000, groups=2, delta=1e-5, noise_multiplier=1.0)
    events = algorithm.events(plan)
    assert sum(event.count for event in events) == plan.steps
    assert [event.noise_multiplier for event in events] == [1 - 0.4 * epoch / 4_000 for epoch in range(4_000)]


@pytest.mark.slow
def test_where_no_terminal_shows_it_a_log_says_that_solving_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "SAID_AFTER", 0.0)
    with caplog.at_level(logging.INFO, logger=calibration.__name__):
        calibrate(lambda sigma: [Event(0.02, sigma, 400)], 2.0, 1e-5)
    assert "Solving for the noise that ε = 2 needs, with 1 different events" in caplog.text
    assert 1 <= len(caplog.records) <= 12, "each after twice the time"


@pytest.mark.parametrize("name", ["dpsgd", "auto_dpsgd_s", "dpsgd_f", "sa_dpsgd", "dpis"])
def test_the_events_of_a_run_are_those_of_its_epochs_one_after_the_other(name: str) -> None:
    algorithm = algorithm_settings(name, {}).build()
    plan = Plan(records=1000, batch_size=130, epochs=7, groups=2, delta=1e-5, noise_multiplier=3.0)
    assert algorithm.events(plan) == merged(event for epoch in algorithm.events_by_epoch(plan) for event in epoch)
