"""The one-run bound: the published figures, an independent computation, and its error rate on mechanisms of known ε."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from equidp.audit.one_run import LARGEST, epsilon_lower_bound, p_value


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "bound"),
    [(1000, 1000, 600, 0.0, 0.2975), (1000, 200, 150, 1e-5, 0.8200), (1000, 100, 95, 1e-5, 2.1652)],
)
def test_published_figures(canaries: int, guesses: int, correct: int, delta: float, bound: float) -> None:
    assert epsilon_lower_bound(canaries, guesses, correct, delta) == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize("case", [(50, 20, 15, 0.7, 1e-3), (10, 10, 10, 2.0, 1e-2), (30, 8, 1, 0.1, 1e-4)])
def test_p_value_by_its_definition(case: tuple[int, int, int, float, float]) -> None:
    canaries, guesses, correct, epsilon, delta = case
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]
    by_luck = sum(mass[correct:])
    given_away = max(sum(mass[correct - i : correct]) / i for i in range(1, correct + 1))
    assert p_value(*case) == pytest.approx(min(1.0, by_luck + 2 * canaries * delta * given_away))


def test_without_delta_it_is_a_binomial_test() -> None:
    # one guess in a hundred wrong at ε = ln 9, where a guess is right with probability 0.9
    assert p_value(100, 100, 99, math.log(9), 0.0) == pytest.approx(float(binom.sf(98, 100, 0.9)))


@settings(max_examples=60)
@given(st.integers(1, 400), st.data(), st.sampled_from([0.0, 1e-6, 1e-4]))
def test_more_right_guesses_never_lower_the_bound(guesses: int, data: st.DataObject, delta: float) -> None:
    correct = data.draw(st.integers(0, guesses - 1))
    lower, higher = (epsilon_lower_bound(1000, guesses, c, delta) for c in (correct, correct + 1))
    assert 0 <= lower <= higher + 1e-5 <= LARGEST


def test_delta_only_weakens() -> None:
    bounds = [epsilon_lower_bound(1000, 200, 160, delta) for delta in (0.0, 1e-6, 1e-5, 1e-4, 1e-2)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == 0.0


def test_no_better_than_coins_shows_nothing() -> None:
    assert epsilon_lower_bound(1000, 100, 50, 1e-5) == 0.0
    assert epsilon_lower_bound(1000, 100, 0, 1e-5) == 0.0


def test_the_search_ends_where_the_p_value_crosses() -> None:
    bound = epsilon_lower_bound(5000, 300, 240, 1e-6, confidence=0.9)
    assert p_value(5000, 300, 240, bound - 1e-4, 1e-6) < 0.1 < p_value(5000, 300, 240, bound + 1e-4, 1e-6)
    assert p_value(5000, 300, 240, bound, 1e-6) < 0.1  # the bound itself is refuted: it is rounded down


@pytest.mark.parametrize("counts", [(10, 20, 5), (10, 5, 6), (10, 5, -1)])
def test_impossible_counts(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        p_value(*counts, 1.0, 0.0)


def test_randomised_response_is_seldom_accused() -> None:
    # Each of 200 coins is told truthfully with probability e/(1+e): exactly ε = 1. The bound may exceed 1 in 5 % of
    # runs; 2,000 runs at a fixed seed
    generator = np.random.default_rng(11)
    right = generator.binomial(200, math.e / (1 + math.e), size=2000)
    bounds = {int(v): epsilon_lower_bound(200, 200, int(v), 0.0) for v in np.unique(right)}
    above = np.mean([bounds[int(v)] > 1.0 for v in right])
    assert 0.02 < above <= 0.05  # not only sound but nearly tight
