"""The trade-off curve against Gaussians, whose curve is known, against exact attacks, and against (ε, δ) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from equidp.accounting.epsilon import epsilon, epsilon_of, rdp_epsilon, rounded_away
from equidp.accounting.events import Event
from equidp.accounting.trade_off import TradeOff, delta_of, trade_off, trade_off_by

DELTA = 1e-5
ALPHAS = (1e-5, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9)


def curve_of(events: list[Event], delta: float = DELTA) -> TradeOff:
    found = trade_off(events, delta, epsilon(events, delta).value)
    assert found is not None
    return found


def gaussian(mu: float, alpha: float) -> float:
    return float(norm.cdf(norm.isf(alpha) - mu))


@pytest.mark.parametrize(("noise", "count"), [(4.0, 1), (10.0, 30), (0.7, 1)])
def test_without_sampling_it_is_the_gaussians_curve(noise: float, count: int) -> None:
    mu, curve = math.sqrt(count) / noise, curve_of([Event(1.0, noise, count)])
    for alpha in ALPHAS:
        assert gaussian(mu, alpha) - 2e-5 <= curve.misses(alpha) <= gaussian(mu, alpha) + 1e-12
    assert curve.mu is not None
    assert mu <= curve.mu <= mu + 5e-3


def test_the_curve_of_a_long_run_says_more_than_one_epsilon() -> None:
    events = [Event(512 / 60000, 1.0, 2340)]
    value, curve = epsilon(events, DELTA).value, curve_of(events)
    assert math.exp(value) * 0.01 + DELTA == pytest.approx(0.105, abs=1e-3)
    assert curve.recognised(0.01) == pytest.approx(0.0382, abs=1e-4)


def test_no_attack_on_one_sampled_step_beats_the_curve() -> None:
    """A threshold on the release is the best attack on one step, in either direction."""
    rate, noise = 0.3, 0.8
    curve = curve_of([Event(rate, noise)])
    for at in np.linspace(-4, 6, 60):
        without = norm.sf(at / noise)
        member = (1 - rate) * without + rate * norm.sf((at - 1) / noise)
        assert curve.misses(without) <= 1 - member + 1e-9
        assert curve.misses(1 - member) <= without + 1e-9  # absent ones are recognised by low values
    tight = [
        (norm.sf(at / noise), 1 - norm.sf(at / noise) * (1 - rate) - rate * norm.sf((at - 1) / noise)) for at in (1, 2)
    ]
    assert all(curve.misses(alpha) == pytest.approx(missed, abs=1e-3) for alpha, missed in tight)


def test_mu_is_the_smallest_whose_curve_lies_below() -> None:
    curve = curve_of([Event(0.05, 1.2, 200)])
    assert curve.mu is not None
    alphas = np.concatenate([np.geomspace(DELTA, 0.5, 4000), np.linspace(0.5, 1 - DELTA, 1000)])
    kept = [alpha for alpha in alphas if curve.misses(alpha) >= DELTA]
    assert all(gaussian(curve.mu, alpha) <= curve.misses(alpha) + 1e-12 for alpha in kept)
    assert any(gaussian(curve.mu - 2e-3, alpha) > curve.misses(alpha) for alpha in kept)


def test_the_curve_is_its_own_inverse_and_falls() -> None:
    curve = curve_of([Event(0.05, 1.2, 200)])
    values = [curve.misses(alpha) for alpha in ALPHAS]
    assert values == sorted(values, reverse=True)
    for alpha, missed in zip(ALPHAS, values, strict=True):
        assert curve.misses(missed) == pytest.approx(alpha, rel=1e-3, abs=1e-7)


def test_the_runs_own_epsilon_is_a_tangent_and_no_delta_leaves_out_what_rounding_may_take() -> None:
    events = [Event(1e-3, 5.0, 10_000)]
    curve = trade_off(events, DELTA, 7.0)
    assert curve is not None
    assert curve.bound == "pld"
    assert (curve.epsilons[-1], curve.deltas[-1]) == (7.0, DELTA)
    assert rounded_away(events) > 8e-12
    assert min(curve.deltas) >= rounded_away(events)


def test_mu_is_of_the_corner_that_needs_most_be_it_within_or_on_the_diagonal() -> None:
    """Pure ε = 1 needs most at c = 1/(1 + e); beside δ(0) = ½, ε = 3 does so where its two tangents meet."""
    pure, mixed = TradeOff((1.0,), (0.0,), DELTA, "pld"), TradeOff((0.0, 3.0), (0.5, 0.0), DELTA, "pld")
    meet = 0.5 / (math.exp(3) - 1)
    for curve, needed in (
        (pure, 2 * norm.isf(1 / (1 + math.e))),
        (mixed, norm.isf(meet) - norm.ppf(0.5 - meet)),
    ):
        assert curve.mu is not None
        assert 0 <= curve.mu - needed <= 1e-3


def test_no_mu_is_said_where_the_curve_is_at_0_for_a_rate_that_is_promised() -> None:
    """Each tangent of ε = 12 leaves 6e-6 of misses at as many false alarms, below δ."""
    assert TradeOff((0.0, 12.0), (1.0, DELTA), DELTA, "pld").mu is None
    assert TradeOff((0.0, 11.0), (1.0, DELTA), DELTA, "pld").mu is not None


@pytest.mark.slow
def test_no_curve_says_more_than_nothing_where_epsilon_is_large() -> None:
    assert curve_of([Event(1.0, 0.05)]).mu is None
    assert trade_off([Event(0.5, 1e-3, 100)], DELTA, 1e6) is None


def test_a_tangent_too_steep_for_a_float_is_one_of_no_use() -> None:
    curve = TradeOff((0.0, 1.0, 1500.0), (0.9, 0.4, DELTA), DELTA, "rdp")
    assert curve.to_dict()["misses"] == TradeOff((0.0, 1.0), (0.9, 0.4), DELTA, "rdp").to_dict()["misses"]
    assert curve.misses(0.0) == 1 - DELTA


def test_a_curve_by_renyi_divergence_lies_below_the_one_by_privacy_loss() -> None:
    events, order, total = [Event(1.0, 4.0)], 12, 12 / 32  # D_α = α/(2σ²)
    value = epsilon_of(total, order, DELTA)
    assert delta_of(total, order, value) == pytest.approx(DELTA)
    weaker, curve = trade_off_by(lambda at: delta_of(total, order, at), DELTA, value), curve_of(events)
    assert value >= rdp_epsilon(events, DELTA) - 1e-9
    assert weaker.bound == "rdp"
    assert all(weaker.misses(alpha) <= curve.misses(alpha) for alpha in ALPHAS)
    assert weaker.misses(0.01) > 0.9
    assert weaker.mu is not None
    assert weaker.mu > 0.25


def test_what_is_written_is_rounded_against_us() -> None:
    curve = curve_of([Event(0.05, 1.2, 200)])
    told = curve.to_dict()
    assert told["bound"] == "pld"
    assert all(0 <= curve.misses(a) - m < 2e-6 for a, m in zip(told["false_alarms"], told["misses"], strict=True))
    assert 0 <= told["recognised_at_1_percent"] - curve.recognised(0.01) < 2e-6
    assert told["false_alarms"] == sorted(told["false_alarms"])
