"""Canaries in what is released of test and validation records: what is honest stays below its ε, planted faults do not.

Each canary is a record of an auditor's own, in the part or not by a fair coin, and alone in its group of every
grouping: the place where a histogram says most about one record. The auditor reads the released counts and guesses.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.stats import binom, norm

from equidp.accounting.trials import Trials
from equidp.audit.one_run import epsilon_lower_bound
from equidp.evaluation import histogram
from equidp.evaluation.histogram import figures_event, noised_histogram
from equidp.mechanism.noise import SeededRandom

CANARIES, GUESSES, DELTA, EPSILON = 20_000, 1_000, 1e-6, 2.0
LAW = Trials(law="geometric", mean=8.0)
NAMES = tuple(map(str, range(CANARIES)))


@cache
def noise_of(trials: Trials) -> float:
    return figures_event(EPSILON, DELTA, trials).noise_multiplier


def attacked(seed: int, *, noise: float, trials: int = 1) -> tuple[float, int]:
    """The lower bound on ε that the surest guesses reach, and how many of all guesses are right.

    Of several trials the best is released, by a score as an adversary would have it: how well the released counts agree
    with the coins of the first half. What is guessed about is the other half.
    """
    draw = np.random.default_rng(seed)
    coins = draw.random(CANARIES) < 0.5
    there, half = np.flatnonzero(coins), CANARIES // 2
    found = []
    for trial in range(trials):
        released = noised_histogram(
            np.tile([0.9, 0.1], (len(there), 1)),
            np.zeros(len(there), dtype=int),
            {"one": (there, NAMES), "other": (there, NAMES)},
            classes=("a", "b"),
            bins=2,
            noise_multiplier=noise,
            random=SeededRandom(1_000 * seed + trial, "cpu"),
        )
        one, other = (counts[:, 0, 0, 0] for counts in released.counts.values())
        found.append(one + other - 1.0)  # 2 if it is there, 0 if not
    best = max(found, key=lambda of: float((of[:half] * (2.0 * coins[:half] - 1)).sum()))[half:]
    right, surest = (best > 0) == coins[half:], np.argsort(-abs(best))[:GUESSES]
    return epsilon_lower_bound(half, GUESSES, int(right[surest].sum()), DELTA), int(right.sum())


def more_than_claimed(right: int) -> bool:
    """Whether so many are right in one of 10,000 audits, at most, if every canary has the noise that is charged.

    Of two Gaussians at a distance of 1/σ of their standard deviation the best guess is right with probability Φ(1/2σ).
    """
    chance = norm.cdf(0.5 / noise_of(Trials()))
    return bool(binom.sf(right - 1, CANARIES // 2, chance) < 1e-4)


def test_canaries_in_released_figures_show_no_more_than_is_charged() -> None:
    for seed in range(2):
        bound, right = attacked(seed, noise=noise_of(Trials()))
        assert 0.3 < bound <= EPSILON
        assert not more_than_claimed(right)


def test_canaries_in_the_histogram_of_a_chosen_trial_show_no_more_than_the_tuning_is_charged() -> None:
    count = LAW.draw(0.9)  # as many as one tuning in ten has
    assert count > 10
    assert attacked(0, noise=noise_of(LAW), trials=count)[0] <= EPSILON
    assert attacked(0, noise=noise_of(LAW) / 6, trials=count)[0] > EPSILON


def test_two_groupings_with_the_sensitivity_of_one_are_caught_by_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = noise_of(Trials())
    monkeypatch.setattr(histogram, "sensitivity", lambda groupings: 1.0)
    assert more_than_claimed(attacked(0, noise=honest)[1])


def test_a_third_of_the_noise_is_caught_by_canaries() -> None:
    bound, right = attacked(0, noise=noise_of(Trials()) / 3)
    assert bound > EPSILON
    assert more_than_claimed(right)
