"""Whether batches are such as independent coins give, which every ε here is computed for.

A sampler of one's own is watched as it draws. What no chance explains is told; what looks like chance may be none.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

ALIKE, SAME = 20, 15
"""Batches whose sizes are compared, and how many of them may not be of one size; by coins, less than one in a million.

Of an epoch's slices all but the last are.
"""

APART = 10
"""Batches between two looks at how often each unit was drawn."""

FEWEST = 20
"""Units times the variance of how often one is drawn, from which on the spread of these numbers says something."""

EVENLY, UNEVENLY = -7, 10
"""Standard deviations of that spread, below and above; by coins, less than one in 10 billion."""


class Coins:
    """The batches of one run so far.

    Args:
        size: how many units there are.
    """

    def __init__(self, size: int) -> None:
        self._size, self._sizes, self._drawn = size, Counter[int](), torch.zeros(size, dtype=torch.int64)
        self._found = 0
        self._expected = self._variance = 0.0  # of how often a unit is drawn

    def unlike(self, units: Tensor, rate: float | None) -> str:
        """What coins do not give, of these and earlier batches; empty for what they may.

        Args:
            units: `[u]` int64, the batch.
            rate: the charged probability of every unit; None where each has its own.
        """
        units = units.cpu()
        if bool((units[1:] <= units[:-1]).any()):
            return "units that are not distinct and in ascending order: one that is drawn twice adds twice its bound"
        if len(units) and not 0 <= int(units[0]) <= int(units[-1]) < self._size:
            return f"units from {units[0]} to {units[-1]}, of {self._size} from 0 on"
        if rate is None:
            return ""
        self._sizes[len(units)] += 1
        self._drawn[units] += 1
        self._found += len(units)
        self._expected += rate
        self._variance += rate * (1 - rate)
        batches, most = self._sizes.total(), self._expected * self._size
        if self._found > most + 10 * most**0.5 + 20:
            return f"{self._found} units by step {batches}, more than its `sampling_rate` gives"
        if batches == ALIKE and self._sizes.most_common(1)[0][1] >= SAME and self._size * rate * (1 - rate) > 4:
            return "batches of one size, where the sizes of independent coins differ: ε is computed for such coins"
        return "" if batches % APART else self._unlike_in_turn(batches)

    def _unlike_in_turn(self, batches: int) -> str:
        expected, variance = self._expected, self._variance
        most = int(self._drawn.max()) if self._size else 0
        if most > expected + 10 * expected**0.5 + 20:
            return f"one unit in {most} of {batches} batches, more often than its `sampling_rate` gives"
        if self._size * variance < FEWEST:
            return ""
        spread = float((self._drawn - expected).square().sum()) - self._size * variance
        spread /= (self._size * variance * (2 * variance + 1)) ** 0.5
        if spread < EVENLY:
            return (
                "every unit about as often as every other, as where each has its turn in an epoch: ε is computed for "
                "coins that know of no other batch"
            )
        if spread > UNEVENLY:
            return "some units more often than others: the ε of all is that of one rate"
        return ""
