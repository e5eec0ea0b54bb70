"""Several trials: bounds against the exact law of the best of them, the theorems by hand, and declarations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import yaml
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.stats import norm

from equidp.accounting.calibration import smallest_noise, smallest_noise_of_few
from equidp.accounting.epsilon import Epsilon, epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.accounting.trials import Trials, selected
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.parameters import PrivacySettings

DELTA, SIGMA = 1e-5, 4.0
RUN = [Event(1.0, SIGMA)]
"""One Gaussian release: its Rényi divergence is α/(2σ²), so that the theorems can be evaluated by hand."""

Function = Callable[[Any], Any]
GAMMA = 0.1


def poisson(rate: float) -> tuple[Trials, Function, Function]:
    """The law of at least one, its generating function and that one's derivative."""
    at_least_one = 1 - math.exp(-rate)
    return (
        Trials(law="poisson", mean=rate / at_least_one),
        lambda x: (np.exp(rate * (x - 1)) - math.exp(-rate)) / at_least_one,
        lambda x: rate * np.exp(rate * (x - 1)) / at_least_one,
    )


def negative_binomial(shape: float, gamma: float) -> tuple[Trials, Function, Function]:
    norming = gamma**-shape - 1
    slope: Function = lambda x: shape * (1 - gamma) * (1 - (1 - gamma) * x) ** (-shape - 1) / norming  # noqa: E731
    return (
        Trials(law="negative_binomial", mean=slope(1.0), shape=shape),
        lambda x: ((1 - (1 - gamma) * x) ** -shape - 1) / norming,
        slope,
    )


def geometric(gamma: float) -> tuple[Trials, Function, Function]:
    _, whole, slope = negative_binomial(1.0, gamma)
    return Trials(law="geometric", mean=1 / gamma), whole, slope


LAWS = [poisson(0.5), poisson(10.0), geometric(GAMMA), geometric(0.7), negative_binomial(0.5, 0.02)]


def divergence(first: Sequence[float], second: Sequence[float], order: float) -> float:
    return math.log(sum(p**order * q ** (1 - order) for p, q in zip(first, second, strict=True))) / (order - 1)


@pytest.mark.parametrize(("trials", "whole", "slope"), LAWS)
@pytest.mark.parametrize("noise", [0.1, 0.5, 0.9])
def test_the_best_of_randomised_responses_stays_within_the_bound(
    trials: Trials, whole: Function, slope: Function, noise: float
) -> None:
    """Of two outputs the second has the better score. The law of the best is known exactly, both ways round."""
    event = dp.RandomizedResponseDpEvent(noise, 2)
    bound = selected(event, trials, dp.NeighboringRelation.REPLACE_ONE)
    low, high = noise / 2, 1 - noise / 2
    best = [[whole(p), 1 - whole(p)] for p in (low, high)]
    for order, claimed in zip(bound.orders, bound.rdp, strict=True):
        if 1 < order <= 64:
            exact = max(divergence(best[0], best[1], order), divergence(best[1], best[0], order))
            assert exact <= claimed + 1e-12


@pytest.mark.parametrize(("trials", "whole", "slope"), LAWS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_of_gaussians_by_value_stays_within_the_bound(
    trials: Trials, whole: Function, slope: Function, sign: int
) -> None:
    """The score is the release itself. Its density is q(y)·f'(Q(≤ y)); both directions are integrated."""
    sigma, grid = 1.5, np.linspace(-14, 20, 20_001)
    bound = selected(dp.GaussianDpEvent(sigma), trials)

    def density(mean: float) -> np.ndarray:
        return norm.pdf(grid, mean, sigma) * slope(norm.cdf(grid, mean, sigma))

    for order in (2.0, 4.0, 8.0):
        claimed = float(bound.rdp[np.argmin(abs(bound.orders - order))])
        total = float((density(sign) ** order * density(0) ** (1 - order)).sum()) * (grid[1] - grid[0])
        assert math.log(total) / (order - 1) <= claimed + 1e-9


ORDERS = np.linspace(1.01, 400, 40_000)


def converted(curve: np.ndarray) -> float:
    """The smallest ε over orders by the improved conversion (docs/privacy.md)."""
    a = ORDERS
    return float(np.min(curve + np.log((a - 1) / a) - (math.log(DELTA) + np.log(a)) / (a - 1)))


def by_hand(mean: float, shape: float, gamma: float) -> float:
    """R(α) + ln E[K]/(α−1) + (1+η)·min_β[(1 − 1/β)R(β) + ln(1/γ)/β]."""
    own = ORDERS / (2 * SIGMA**2)
    chosen = np.min((1 - 1 / ORDERS) * own + math.log(1 / gamma) / ORDERS)
    return converted(own + math.log(mean) / (ORDERS - 1) + (1 + shape) * chosen)


@pytest.mark.parametrize(
    ("trials", "shape", "gamma"),
    [
        (Trials(law="geometric", mean=10), 1.0, 0.1),
        (Trials(law="negative_binomial", mean=99 / math.log(100), shape=0.0), 0.0, 0.01),  # the logarithmic law
        (Trials(law="negative_binomial", mean=0.5 * 0.9 / (0.1 * (1 - 0.1**0.5))), 0.5, 0.1),
    ],
)
def test_the_negative_binomial_laws_by_hand(trials: Trials, shape: float, gamma: float) -> None:
    assert trials.epsilon(RUN, DELTA).value == pytest.approx(by_hand(float(trials.mean or 0), shape, gamma), rel=0.01)


def test_where_trials_differ_no_other_order_than_theirs_counts() -> None:
    """By hand, at the one order 8: R(8) + ln 3/7 + 2·[(1 − 1/8)·R(8) + ln(3)/8]."""
    own = 8 / (2 * SIGMA**2)
    bound = own + math.log(3) / 7 + 2 * (7 / 8 * own + math.log(3) / 8)
    expected = bound + math.log(7 / 8) - (math.log(DELTA) + math.log(8)) / 7
    assert Trials(law="geometric", mean=3.0, orders=(8.0,)).epsilon(RUN, DELTA).value == pytest.approx(expected)


def test_the_poisson_law_by_hand() -> None:
    """R(λ) + E[K]·δ̂ + ln E[K]/(λ−1), δ̂ at ln(λ/(λ−1)) by the improved conversion of all orders."""
    mean, a, own = 20.0, ORDERS[::40], ORDERS[::40] / (2 * SIGMA**2)
    at = np.log1p(1 / (ORDERS - 1))[::40, None]
    excess = ((a - 1) * (own - at + np.log1p(-1 / a)) - np.log(a)).min(axis=1)
    bound = own + mean * np.exp(np.minimum(excess, 0.0)) + math.log(mean) / (a - 1)
    value = np.min(bound + np.log((a - 1) / a) - (math.log(DELTA) + np.log(a)) / (a - 1))
    assert Trials(law="poisson", mean=mean).epsilon(RUN, DELTA).value == pytest.approx(value, rel=0.02)


def test_trials_of_which_rounding_leaves_no_divergence_still_cost_the_choice() -> None:
    """At noise 1e6 a divergence is below 1e-16, and ln(1 − e^−R) was no number."""
    law = Trials(law="poisson", mean=10.0)
    assert law.epsilon([Event(1e-4, 1e6, 1000)], 1e-6).value > 0
    with pytest.raises(EquidpError, match="cannot be reached with any noise"):
        law.calibrate(lambda noise: [Event(1e-4, noise, 1000)], 1e-3, 1e-6)


def test_a_cap_is_charged_in_full() -> None:
    capped = Trials(cap=20).epsilon(RUN, DELTA)
    assert capped.value == epsilon([Event(1.0, SIGMA, 20)], DELTA).value
    assert epsilon(RUN, DELTA).value < Trials(law="poisson", mean=20).epsilon(RUN, DELTA).value < capped.value


def test_of_a_run_that_charged_more_the_other_trials_are_as_planned() -> None:
    more = [Event(1.0, SIGMA, 3)]
    assert Trials(cap=4).charged(more, RUN) == (Event(1.0, SIGMA, 6),)
    assert Trials().charged(more, RUN) == tuple(more)


@pytest.mark.parametrize("law", [{}, {"law": "geometric"}, {"law": "poisson"}, {"law": "negative_binomial"}])
def test_more_trials_never_cost_less_and_none_is_free(law: dict[str, Any]) -> None:
    costs = [Trials(**(law | {"mean": k} if law else {"cap": k})).epsilon(RUN, DELTA).value for k in (2, 5, 25)]
    assert epsilon(RUN, DELTA).value < costs[0] < costs[1] < costs[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_trials": 3, "trials_law": "poisson", "trials_mean": 4}, "two ways to declare"),
        ({"trials_law": "poisson"}, "belong together"),
        ({"trials_mean": 4}, "belong together"),
        ({"trials_law": "geometric", "trials_mean": 4, "trials_shape": 2}, "trials_shape belongs to"),
        ({"max_trials": 0}, "greater than or equal to 1"),
        ({"trials_law": "poisson", "trials_mean": 0.5}, "greater than or equal to 1"),
    ],
)
def test_a_declaration_that_does_not_hold_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        PrivacySettings(noise_multiplier=1.0, **settings)


PLAN = Plan(1437, 128, 2, 10, DELTA, 1.5)


def planned(**trials: Any) -> Plan:
    return Plan(1437, 128, 2, 10, DELTA, 1.5, trials=Trials(**trials))


@pytest.mark.parametrize(
    "trials", [pytest.param({"cap": 3}, marks=pytest.mark.slow), {"law": "geometric", "mean": 3.0}]
)
def test_noise_is_calibrated_for_all_trials_and_the_path_ends_in_their_epsilon(trials: dict[str, Any]) -> None:
    algorithm, plan = algorithm_settings("dpsgd").build(), planned(**trials)
    plan = algorithm.calibrated(plan, 3.0)
    single = algorithm.epsilon(dataclasses.replace(plan, trials=Trials())).value
    assert single < 2.5
    assert 0.98 * 3.0 < algorithm.epsilon(plan).value <= 3.0
    path = algorithm.epsilon_path(plan)
    assert path == sorted(path)
    assert path[-1] == pytest.approx(algorithm.epsilon(plan).value, rel=1e-9)


def test_a_run_under_a_law_is_told_after_each_epoch_what_all_of_them_cost() -> None:
    law = Trials(law="geometric", mean=3.0)
    path = law.epsilon_path([RUN] * 3, DELTA)
    for epochs, told in enumerate(path, start=1):
        spent = law.epsilon([Event(1.0, SIGMA, epochs)], DELTA).value
        assert spent * (1 - 1e-9) <= told <= spent * 1.2


@pytest.mark.parametrize("trials", [Trials(3), Trials(law="geometric", mean=10)])
def test_epsilon_is_a_plain_number_as_a_cards_header_takes_no_other(trials: Trials) -> None:
    assert yaml.safe_load(yaml.safe_dump(trials.epsilon([Event(0.05, 1.0, 100)], 1e-5).value)) > 1


def test_budgets_of_several_trials_add_up_at_one_order() -> None:
    algorithm = algorithm_settings("dpis").build()
    plan = planned(cap=3)
    budget = algorithm.budget(plan)
    assert budget is not None
    whole = 3 * budget.total + math.log((budget.order - 1) / budget.order)
    assert budget.epsilon == pytest.approx(whole - (math.log(DELTA) + math.log(budget.order)) / (budget.order - 1))
    meant = algorithm.calibrated(plan, 4.0)
    asked = algorithm.budget(meant)
    assert asked is not None
    assert asked.epsilon == algorithm.epsilon(meant).value == 4.0
    assert asked.total < 4.0 / 3
    assert meant.noise_multiplier > algorithm.calibrated(PLAN, 4.0).noise_multiplier


def test_a_budget_knows_no_law_of_trials() -> None:
    with pytest.raises(EquidpError, match=r"does not go with dpis.*privacy.max_trials"):
        algorithm_settings("dpis").build().epsilon(planned(law="geometric", mean=3.0))


def test_a_capped_run_of_several_trials_composes_by_privacy_loss() -> None:
    options = {"stop_on": "published_epsilon", "published_epsilon": 2.0}
    algorithm = algorithm_settings("sa_dpsgd", options).build()
    found = algorithm.epsilon(planned(cap=3))
    (cap,) = algorithm.events(PLAN)
    assert found == epsilon([Event(cap.sampling_rate, cap.noise_multiplier, 3 * cap.count)], DELTA)
    assert found.value == found.pld


@pytest.mark.parametrize("solve", [smallest_noise, smallest_noise_of_few])
def test_a_cost_that_is_no_number_meets_no_target(solve: Any) -> None:
    with pytest.raises(EquidpError, match="cannot be reached"):
        solve(lambda noise: math.nan, 1.0)
    assert solve(lambda noise: math.nan if noise < 3 else 1.0, 1.0) == pytest.approx(3.0, rel=2e-5)
    for found in (Epsilon(math.nan, None), Epsilon(1.0, math.nan)):
        with pytest.raises(ValueError, match="bounds nothing"):
            found.value  # noqa: B018


@pytest.mark.parametrize(
    ("cost", "tries"),
    [
        (lambda s: 3 / s**1.7, 6),
        (lambda s: 1 / s**2 + 0.2, 12),
        (lambda s: max(0.0, 2 - s), 6),
        (lambda s: 2.0 * (s < 1.2345), 24),
    ],
    ids=["a power", "a power and a floor", "down to nothing", "a step"],
)
def test_the_smallest_noise_meets_its_target_after_few_tries(cost: Any, tries: int) -> None:
    """One try under a law of trials takes 80 ms for each distinct event: halving alone needs 18."""
    asked = list[float]()

    def counted(noise: float) -> float:
        asked.append(noise)
        return float(cost(noise))

    found = smallest_noise_of_few(counted, 1.0)
    assert cost(found) <= 1.0
    assert cost(found / (1 + 1.01e-5)) > 1.0
    assert len(asked) <= tries


@pytest.mark.slow
def test_trials_of_other_events_may_cost_more_together_than_each_states() -> None:
    """Why a cap is for trials of the same events: each of two meets its target as one of two that are alike."""

    def planned(rate: float, steps: int) -> Event:
        noise = Trials(cap=2).calibrate(lambda sigma: (Event(rate, sigma, steps),), 3.0, 1e-5)
        return Event(rate, noise, steps)

    few, one = planned(0.01, 100), planned(1.0, 1)
    assert all(Trials(cap=2).epsilon((event,), 1e-5).value <= 3.0 for event in (few, one))
    below = {"value_discretization_interval": 1e-4, "pessimistic_estimate": False, "use_connect_dots": False}
    sampled = from_gaussian_mechanism(few.noise_multiplier, sampling_prob=few.sampling_rate, **below)
    both = sampled.self_compose(few.count).compose(from_gaussian_mechanism(one.noise_multiplier, **below))
    assert 3.09 < both.get_epsilon_for_delta(1e-5) <= epsilon((few, one), 1e-5).value < 3.11


def test_a_list_of_settings_that_is_gone_through_in_order_has_no_bound() -> None:
    """Why a law is for settings drawn at random: those that are chosen would tell how many trials were no better.

    By hand: of randomised responses of ε 1, each of its own setting, the first good one is chosen and told.
    """
    mean, good = 20, 1 / (1 + math.e)  # of the two tables the one has good responses with this chance, the other else
    goes_on = 1 - 1 / mean
    chances = ([(goes_on * (1 - p)) ** k * p for k in range(2000)] for p in (good, 1 - good))
    delta = sum(max(0.0, one - math.exp(3.0) * other) for one, other in zip(*chances, strict=True))
    assert 0.12 < delta < 0.13  # for settings drawn at random it is 0: (2 + η)·ε
