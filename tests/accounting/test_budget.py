"""Budgets: conversions between Rényi divergence and ε, and the search for the smallest noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from equidp.accounting.budget import Budget, orders_beside, renyi, smallest, total_for
from equidp.accounting.epsilon import epsilon_of, rdp_epsilon, renyi_curve
from equidp.accounting.events import Event


def test_a_plain_gaussian_costs_what_the_formula_says() -> None:
    # D_α = α/(2σ²)
    assert renyi([Event(1.0, 2.0)], 6) == pytest.approx(6 / 8)
    assert renyi([Event(1.0, 2.0, 3)], 6) == pytest.approx(3 * 6 / 8)


def test_a_sampled_gaussian_costs_what_the_sum_says() -> None:
    # order 2: ln(1 + q²(e^{1/σ²} − 1))
    assert renyi([Event(0.1, 1.5)], 2) == pytest.approx(math.log(1 + 0.01 * (math.exp(1 / 2.25) - 1)))


def test_events_add_up_at_every_order() -> None:
    a, b = Event(0.1, 1.0, 5), Event(1.0, 9.0)
    orders = (2, 5, 30)
    assert renyi_curve([a, b], orders) == pytest.approx(
        [x + y for x, y in zip(renyi_curve([a], orders), renyi_curve([b], orders), strict=True)]
    )


@given(epsilon=st.floats(0.01, 50), order=st.integers(2, 200), delta=st.floats(1e-12, 1e-2))
def test_the_two_conversions_are_inverse(epsilon: float, order: int, delta: float) -> None:
    assert epsilon_of(total_for(epsilon, order, delta), order, delta) == pytest.approx(epsilon, abs=1e-9)


def test_the_conversion_is_the_accountants() -> None:
    events = [Event(0.01, 1.0, 1000)]
    ours = min(epsilon_of(renyi(events, order), order, 1e-5) for order in range(2, 64))
    assert ours == pytest.approx(rdp_epsilon(events, 1e-5), rel=1e-2)
    assert ours >= rdp_epsilon(events, 1e-5) - 1e-9  # which may take fractional orders too


def test_holds_to_rounding_and_no_further() -> None:
    events = [Event(0.1, 1.0)] * 1000
    exact = Budget(8, renyi(events, 8), 1.0)
    assert exact.holds(events)
    assert exact.holds([Event(0.1, 1.0, 1000)])
    assert not exact.holds([*events, Event(0.1, 1.0)])


@given(edge=st.floats(0.02, 1e5))
def test_smallest_finds_the_edge_from_above(edge: float) -> None:
    found = smallest(lambda x: x >= edge)
    assert found is not None
    assert edge <= found <= edge * (1 + 2e-6)


def test_smallest_at_the_ends() -> None:
    assert smallest(lambda x: True, low=0.5) == 0.5
    assert smallest(lambda x: False) is None


def test_a_budget_allows_for_rounding_and_no_more() -> None:
    step = Event(0.01, 1.0, 1000)
    spent = renyi([step], 8)
    assert Budget(8, spent * (1 - 1e-12), 1.0).holds([step])
    assert not Budget(8, spent * (1 - 1e-6), 1.0).holds([step])


def integrated(event: Event, order: float, *, reverse: bool = False) -> float:
    """D_α of N(0, σ²) with its mean moved to 1 by a coin, from N(0, σ²), by adding up densities; or the other way."""
    q, sigma = event.sampling_rate, event.noise_multiplier
    z = np.linspace(-40 * sigma, 40 * sigma + order + 5, 400_001)
    plain = stats.norm.logpdf(z, scale=sigma)
    sampled = np.logaddexp(np.log1p(-q) + plain, np.log(q) + stats.norm.logpdf(z, loc=1, scale=sigma))
    p, other = (plain, sampled) if reverse else (sampled, plain)
    logs = order * p - (order - 1) * other
    return float((logs.max() + np.log(np.trapezoid(np.exp(logs - logs.max()), z))) / (order - 1))


@pytest.mark.parametrize("order", [1.3, 2.1, 2.5, 3.7, 6.2, 11.9])
@pytest.mark.parametrize("event", [Event(0.004, 0.7), Event(0.05, 1.0), Event(0.3, 2.5), Event(0.2, 0.6)])
def test_a_fractional_order_costs_no_less_than_the_integral_in_both_directions(event: Event, order: float) -> None:
    bound, exact = renyi([event], order), integrated(event, order)
    assert exact * (1 - 1e-8) <= bound <= renyi([event], math.ceil(order))
    assert integrated(event, order, reverse=True) <= bound * (1 + 1e-8)
    assert order < 2 or bound <= exact * 1.1


@given(rate=st.floats(1e-4, 0.5), noise=st.floats(0.5, 5), order=st.floats(1.05, 40))
def test_a_fractional_order_is_bounded_by_the_integers_beside_it(rate: float, noise: float, order: float) -> None:
    # (α−1)·D_α is convex: below its chord, also where dp_accounting's series does not converge
    event, n = Event(rate, noise), math.floor(order)
    low = (n - 1) * renyi([event], n) if n > 1 else 0.0
    chord = (n + 1 - order) * low + (order - n) * n * renyi([event], n + 1)
    assert 0 < (order - 1) * renyi([event], order) <= chord * (1 + 1e-9)


def test_a_fractional_order_of_a_plain_gaussian_is_exact() -> None:
    assert renyi([Event(1.0, 2.0)], 2.5) == pytest.approx(2.5 / 8)


@pytest.mark.parametrize(("order", "least", "most"), [(2, 2, 2.9), (3, 2.1, 3.9), (64, 63.1, 64.9)])
def test_no_order_below_2_is_tried_beside_an_integer(order: int, least: float, most: float) -> None:
    """There dp_accounting's series seldom converges, and the chord that takes its place is coarse."""
    orders = orders_beside(order)
    assert (orders[0], min(orders), max(orders)) == (order, pytest.approx(least), pytest.approx(most))
