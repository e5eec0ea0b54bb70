"""Poisson samples: every unit enters on its own, with one probability.

There are two ways to draw one, and both have the same law. *Coins*: one per unit, N of them in every step. *Count, then
choose*: the number of heads among N coins is binomial, and given that number all sets of so many units are equally
likely. So draw the number, then that many different units. That is O(B) work instead of O(N): a step on ten million
records costs as much as one on a hundred thousand. Small populations keep the coins, so that what was published with a
seed can be repeated.

The count is the inverse of the binomial distribution function at a random 128-bit integer. It is looked up in a table
of ⌈2¹²⁸·P(X ≤ k)⌉, computed with 60 digits. No count's probability is off by more than 2⁻¹²⁸. As the table is rounded
up, no integer gives a larger count than the exact table would. The law of a step is thus within η = k_max·2⁻¹²⁸ of
Poisson sampling in total variation, k_max about B + 14√B, which adds (1 + e^ε)·η to δ: at B = 256, a million steps and
ε = 3 some 3·10⁻²⁹ in all. The lower 64 bits are drawn where the upper ones do not decide, once in 10¹⁶ steps or so.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import MIN_EMIN, ROUND_CEILING, Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from equidp.mechanism.noise import RandomSource, brought

MANY = 100_000
"""The least number of units for which counting is used; no result published with a seed has as many."""

SPARSE = 0.01
"""Highest rate at which counting is used. It takes a third of the coins' time there; from about 0.02 on it would take
longer than coins."""

DENSE = 0.5
"""Highest rate at which counting is used for a GPU. Above it, most positions that are still drawn were drawn before."""

WORDS = 1 << 64
DIGITS = 60

Words = Callable[[int], np.ndarray]
"""`n` to `[n]` independent uniform uint64."""


def poisson_sample(random: RandomSource, probability: float, size: int, device: torch.device) -> Tensor:
    """`[u]` int64 positions below `size`, ascending, on `device`; each is there independently, with `probability`."""
    if device.type != "cpu":
        return brought(sample_on_host(random, probability, size), device)
    if size < MANY or probability > SPARSE:
        return positions(random.bernoulli(probability, size))
    return torch.from_numpy(counted_sample(random.words, probability, size))


def sample_on_host(random: RandomSource, probability: float, size: int) -> Tensor:
    """Draw a sample for a GPU on the CPU: its size is known before anything is launched, without waiting for the GPU.

    The sample is counted where the table is not long. Otherwise a 64-bit integer is a coin. Its probability may be too
    small by less than 2⁻⁶⁴, and is never too large.
    """
    if probability <= DENSE and probability * size <= MANY:
        return torch.from_numpy(counted_sample(random.words, probability, size))
    if probability >= 1.0:
        return torch.arange(size, device="cpu")
    return torch.from_numpy(np.flatnonzero(random.words(size) < np.uint64(int(probability * WORDS))))


def positions(coins: Tensor) -> Tensor:
    """Positions at which `[n]` bool coins are true, ascending."""
    if coins.device.type != "cpu":
        return coins.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(coins.numpy()))  # a quarter of the time that torch takes


def counted_sample(words: Words, probability: float, size: int) -> np.ndarray:
    """`[u]` int64, ascending: a binomial number of different positions.

    Positions are drawn until there are enough *different* ones. No position is ever preferred, so no set is either.
    """
    upper, lower = count_table(size, probability)
    word = words(1)[0]
    count, known = (int(np.searchsorted(upper, word, side=side)) for side in ("left", "right"))
    if known > count:  # the lower bits decide
        count += int(np.searchsorted(lower[count:known], words(1)[0]))
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        found = np.sort(np.concatenate([found, below(words(count - len(found)), size)]))
        found = found[np.diff(found, prepend=-1) > 0]  # a quarter of the time that np.unique takes
    return found


def below(words: np.ndarray, size: int) -> np.ndarray:
    """Uniform int64 below `size`, without bias: words beyond the last multiple of `size` are dropped."""
    fair = words[words <= np.uint64(WORDS - WORDS % size - 1)]
    return (fair % np.uint64(size)).astype(np.int64)


@lru_cache(maxsize=64)
def count_table(size: int, probability: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ⌈2¹²⁸·P(X ≤ k)⌉ − 1 for X ~ Binomial(size, probability): upper and lower 64 bits, `[k_max]` uint64 each.

    Entries ascend, and end where no 128-bit integer is larger. To draw X, count the entries that are smaller than a
    uniform 128-bit integer.

    Raises:
        ValueError: for a rate that is not at least 0 and below 1.
    """
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"A sampling rate of {probability} has no table: it must be at least 0 and below 1.")
    with localcontext() as context:
        context.prec, context.Emin = DIGITS, MIN_EMIN
        heads, tails = Decimal(probability), 1 - Decimal(probability)
        mass = total = tails**size
        table: list[int] = []
        while (entry := int((total * WORDS**2).to_integral_value(ROUND_CEILING))) < WORDS**2:
            k = len(table) + 1
            table.append(entry - 1)
            mass *= Decimal(size - k + 1) / k * (heads / tails)
            total += mass
    upper, lower = np.array([divmod(entry, WORDS) for entry in table], dtype=np.uint64).reshape(-1, 2).T.copy()
    return upper, lower
