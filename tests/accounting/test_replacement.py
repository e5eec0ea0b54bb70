"""Replacing a record: the worst pair against random pairs in several dimensions, and against what doubling costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from equidp.accounting.epsilon import epsilon, rdp_epsilon
from equidp.accounting.events import Event
from equidp.accounting.replacement import replace_one_epsilon, twice

DELTA = 1e-5


def gaussian_delta(distance: float, at: float) -> float:
    """δ of two Gaussians so far apart (Balle and Wang 2018)."""
    return norm.cdf(distance / 2 - at / distance) - math.exp(at) * norm.cdf(-distance / 2 - at / distance)


@pytest.mark.parametrize(("noise", "count"), [(4.0, 1), (10.0, 9)])
def test_without_sampling_it_is_the_gaussian_at_twice_the_distance(noise: float, count: int) -> None:
    found = replace_one_epsilon([Event(1.0, noise, count)], DELTA)
    assert found is not None
    assert gaussian_delta(2 * math.sqrt(count) / noise, found) == pytest.approx(DELTA, rel=1e-3)
    assert found == pytest.approx(epsilon([Event(1.0, noise / 2, count)], DELTA).value, rel=1e-4)


def test_with_sampling_it_lies_between_one_emptied_slot_and_twice_the_noise_distance() -> None:
    events, doubled = [Event(0.05, 1.2, 200)], [Event(0.05, 0.6, 200)]
    found = replace_one_epsilon(events, DELTA)
    assert found is not None
    assert epsilon(events, DELTA).value < found < epsilon(doubled, DELTA).value


@pytest.mark.parametrize("seed", range(3))
def test_no_pair_of_records_exceeds_the_worst_pair(seed: int) -> None:
    """Two records' gradients of random length and direction; δ at the claimed ε by drawing from importance weights."""
    rng = np.random.default_rng(seed)
    rate, noise, at = rng.uniform(0.05, 0.9), rng.uniform(0.5, 2.0), rng.uniform(0.1, 2.0)
    worst = one_step_delta(rate, np.array([1.0, 0.0]), np.array([-1.0, 0.0]), noise, at)
    for _ in range(4):
        u, v = (one / max(1.0, float(np.linalg.norm(one))) for one in rng.normal(size=(2, 2)))
        assert one_step_delta(rate, u, v, noise, at) <= worst + 1e-5
    found = replace_one_epsilon([Event(rate, noise)], worst)
    assert found is not None
    assert found == pytest.approx(at, abs=5e-3)
    assert found >= at - 1e-3  # the planes' integral is of a grid


def one_step_delta(rate: float, u: np.ndarray, v: np.ndarray, noise: float, at: float) -> float:
    """The hockey-stick divergence of two mixtures in the plane, by a sum over a grid."""
    axis = np.linspace(-8 * noise - 1, 8 * noise + 1, 401)
    x, y = np.meshgrid(axis, axis)

    def density(mean: np.ndarray) -> np.ndarray:
        return norm.pdf(x, mean[0], noise) * norm.pdf(y, mean[1], noise)

    nobody = (1 - rate) * density(np.zeros(2))
    gain = nobody + rate * density(u) - math.exp(at) * (nobody + rate * density(v))
    return float(gain.clip(0.0).sum() * (axis[1] - axis[0]) ** 2)


def test_two_steps_bound_what_a_gaussian_at_twice_the_distance_costs() -> None:
    events = [Event(1.0, 4.0)]
    found = twice(lambda delta: rdp_epsilon(events, delta), DELTA)
    exact = replace_one_epsilon(events, DELTA)
    assert found is not None
    assert exact is not None
    assert exact < found < 4 * exact


def test_two_steps_keep_to_delta_and_nothing_is_claimed_where_none_does() -> None:
    # ε' = 1 at every δ': then (1 + e)·δ' ≤ δ
    kept = []
    assert twice(lambda delta: kept.append(delta) or 1.0, DELTA) == 2.0
    assert kept[-1] * (1 + math.e) == pytest.approx(DELTA, rel=2e-3)
    assert kept[-1] * (1 + math.e) <= DELTA
    assert twice(lambda delta: 1e4, DELTA) is None


def test_beyond_the_limit_of_its_grid_nothing_is_said() -> None:
    assert replace_one_epsilon([Event(0.5, 1e-2, 100)], DELTA) is None
