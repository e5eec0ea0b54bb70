"""Canaries in what is released of test and validation records: honest figures stay below their ε, planted faults do not.

Each canary is a record of an auditor's own, in the part or not by a fair coin, and alone in its group of every
grouping: the place where a histogram says most about one record. The auditor reads the released counts and guesses.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from equidp.accounting.trials import Trials
from equidp.audit.one_run import epsilon_lower_bound
from equidp.evaluation import histogram
from equidp.evaluation.histogram import figures_event, noised_histogram
from equidp.mechanism.noise import SeededRandom

CANARIES, GUESSES, DELTA, EPSILON = 20_000, 1_000, 1e-6, 1.0
LAW = Trials(law="geometric", mean=8.0)
NAMES = tuple(map(str, range(CANARIES)))


@cache
def noise_of(trials: Trials) -> float:
    return figures_event(EPSILON, DELTA, trials).noise_multiplier


def shown(seed: int, *, noise: float, trials: int = 1) -> float:
    """The lower bound on ε that the auditor reaches, of the best of so many releases of one part.

    Scores are as an adversary would have them: the released counts' agreement with the coins of the first half. What is
    guessed about is the other half.
    """
    draw = np.random.default_rng(seed)
    coins = draw.random(CANARIES) < 0.5
    there = np.flatnonzero(coins)
    groups = {"one": (there, NAMES), "other": (there, NAMES)}
    found = []
    for trial in range(trials):
        released = noised_histogram(
            np.tile([0.9, 0.1], (len(there), 1)),
            np.zeros(len(there), dtype=int),
            groups,
            classes=("a", "b"),
            bins=2,
            noise_multiplier=noise,
            random=SeededRandom(1_000 * seed + trial, "cpu"),
        )
        evidence = sum(counts[:, 0, 0, 0] for counts in released.counts.values())
        found.append(np.asarray(evidence) - 1.0)  # 2 if it is there, 0 if not
    half = CANARIES // 2
    best = max(found, key=lambda of: float((of[:half] * (2.0 * coins[:half] - 1)).sum()))[half:]
    surest = np.argsort(-abs(best))[:GUESSES]
    right = int(((best > 0) == coins[half:])[surest].sum())
    return epsilon_lower_bound(half, GUESSES, right, DELTA)


def test_canaries_in_released_figures_show_no_more_than_their_epsilon() -> None:
    bounds = [shown(seed, noise=noise_of(Trials())) for seed in range(3)]
    assert 0.2 < max(bounds) <= EPSILON


def test_canaries_in_the_histogram_of_a_chosen_trial_show_no_more_than_the_tunings_epsilon() -> None:
    count = LAW.draw(0.9)  # as many as one tuning in ten has
    assert count > 10
    bounds = [shown(seed, noise=noise_of(LAW), trials=count) for seed in range(2)]
    assert max(bounds) <= EPSILON


def test_half_the_noise_of_released_figures_is_caught_by_canaries() -> None:
    assert shown(0, noise=noise_of(Trials()) / 3) > EPSILON


def test_two_groupings_with_the_sensitivity_of_one_are_caught_by_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = noise_of(Trials())
    monkeypatch.setattr(histogram, "sensitivity", lambda groupings: 1.0)
    bounds = [shown(seed, noise=honest) for seed in range(2)]
    assert max(bounds) > 0
    print(bounds)
