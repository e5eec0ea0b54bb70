"""A lower bound on ε from one training run (Steinke, Nasr, Jagielski 2023, "Privacy Auditing with One Training Run").

Each of m canaries was in the training data or not, by a fair coin of its own. From the run's output the auditor
guesses r of the coins, which the auditor chooses, and v guesses are right. If the run were (ε, δ)-private, how
surprising would v be?

*δ = 0.* Condition on the output and reveal the coins one after the other. Given all earlier coins, the output's
likelihoods for the two values of the next coin differ by a factor of e^ε at most, and the coin was fair. So a guess is
right with probability at most q = e^ε/(1 + e^ε), whatever came before. So the number of right guesses is stochastically
smaller than W ~ Binomial(r, q), and P[right ≥ v] ≤ β = P[W ≥ v].

*δ > 0.* The output obeys the factor e^ε for every coin, except for coins that the δ reveals. Their number F has mean
at most 2mδ (each coin is revealed with probability δ under either of its two values). But the mechanism may choose
*when* to reveal coins. If it reveals i coins at once, with probability 2mδ/i, this makes a difference exactly if
v − i ≤ W < v. So (their Theorem 5.2)

    P[right ≥ v] ≤ β + 2mδ · max over i = 1…v of P[v − i ≤ W < v]/i.

The reported bound is the smallest ε that the observation does not refute at the given level: with probability
`confidence` over the run, the true ε is not below it. It says nothing about how large ε may be.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom

CONFIDENCE = 0.95
"""Level of every audit."""

LARGEST = 50.0
"""No audit with a feasible number of canaries shows more than this ε."""


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of `correct` or more right guesses, if the run were (ε, δ)-private.

    Args:
        canaries: m, each in or out by a fair coin.
        guesses: r ≤ m; the auditor does not guess the others.
        correct: v ≤ r.
        epsilon: of the claim.
        delta: of the claim.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} right of {guesses} guesses about {canaries} canaries is impossible.")
    chance = 1.0 / (1.0 + math.exp(-epsilon))
    by_luck = float(binom.sf(correct - 1, guesses, chance))
    if delta == 0 or correct == 0:
        return min(1.0, by_luck)
    given = np.arange(1, correct + 1)
    near = np.cumsum(binom.pmf(correct - given, guesses, chance))  # P[v − i ≤ W < v]
    return min(1.0, by_luck + 2.0 * canaries * delta * float((near / given).max()))


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, *, confidence: float = CONFIDENCE
) -> float:
    """Return the smallest ε ≥ 0 that `correct` right guesses do not refute at `confidence`.

    The number of guesses must have been fixed before the scores were seen.

    Examples:
        >>> round(epsilon_lower_bound(canaries=1000, guesses=100, correct=95, delta=1e-5), 1)
        2.2
    """
    level = 1.0 - confidence
    low, high = 0.0, 1.0
    if p_value(canaries, guesses, correct, low, delta) >= level:
        return 0.0
    while high < LARGEST and p_value(canaries, guesses, correct, high, delta) < level:
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = p_value(canaries, guesses, correct, middle, delta) < level
        low, high = (middle, high) if refuted else (low, middle)
    return low
