"""Tuning costs what the theorems say: recomputed here from Rényi curves of plain Gaussians."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.errors import EquidpError
from equidp.reporting.tuning import tuning_epsilon

DELTA = 1e-5
SIGMA = 4.0
LEDGER = [Event(1.0, SIGMA).to_dict()]
"""One Gaussian release: its Rényi curve is α/(2σ²), so that the theorems can be evaluated by hand."""

ORDERS = np.linspace(1.01, 400, 40_000)


def converted(curve: np.ndarray) -> float:
    """The smallest ε over orders by the improved conversion (docs/privacy.md)."""
    a = ORDERS
    return float(np.min(curve + np.log((a - 1) / a) - (math.log(DELTA) + np.log(a)) / (a - 1)))


def theorem_2(mean: float, shape: float, gamma: float) -> float:
    """R(α) + ln E[K]/(α−1) + (1+η)·min_β[(1 − 1/β)R(β) + ln(1/γ)/β]."""
    own = ORDERS / (2 * SIGMA**2)
    chosen = np.min((1 - 1 / ORDERS) * own + math.log(1 / gamma) / ORDERS)
    return converted(own + math.log(mean) / (ORDERS - 1) + (1 + shape) * chosen)


def test_geometric_number_of_trials_by_theorem_2():
    # the geometric law with mean 10 has γ = 1/10
    assert tuning_epsilon(LEDGER, DELTA, 10, distribution="geometric") == pytest.approx(theorem_2(10, 1, 0.1), rel=0.01)


def test_logarithmic_number_of_trials_by_theorem_2():
    # the logarithmic law has mean (1/γ − 1)/ln(1/γ): γ = .01 gives 99/ln 100
    gamma = 0.01
    mean = (1 / gamma - 1) / math.log(1 / gamma)
    measured = tuning_epsilon(LEDGER, DELTA, mean, distribution="logarithmic")
    assert measured == pytest.approx(theorem_2(mean, 0, gamma), rel=0.01)


def test_poisson_number_of_trials_costs_less_than_composing_them():
    composed = epsilon([Event(1.0, SIGMA, 20)], DELTA).value
    poisson = tuning_epsilon(LEDGER, DELTA, 20, distribution="poisson")
    assert tuning_epsilon(LEDGER, DELTA, 20) == pytest.approx(composed)
    assert epsilon([Event(1.0, SIGMA)], DELTA).value < poisson < composed


@pytest.mark.parametrize("law", ["fixed", "poisson", "geometric", "logarithmic"])
def test_more_trials_never_cost_less_and_none_is_free(law):
    single = epsilon([Event(1.0, SIGMA)], DELTA).value
    costs = [tuning_epsilon(LEDGER, DELTA, k, distribution=law) for k in (2, 5, 25)]
    assert single < costs[0] < costs[1] < costs[2]


def test_a_single_trial_costs_the_run_itself():
    assert tuning_epsilon(LEDGER, DELTA, 1) == epsilon([Event(1.0, SIGMA)], DELTA).value


@pytest.mark.parametrize(
    ("trials", "law", "message"),
    [
        (0, "fixed", "at least 1"),
        (math.inf, "poisson", "at least 1"),
        (2.5, "fixed", "whole"),
        (3, "geometrical", "Did you mean 'geometric'"),
    ],
)
def test_impossible_numbers_and_laws_are_refused(trials, law, message):
    with pytest.raises(EquidpError, match=message):
        tuning_epsilon(LEDGER, DELTA, trials, distribution=law)
