"""Whether batches look as if independent coins had drawn them, which every ε here is computed for.

A sampler of another package is watched as it draws. What chance cannot explain is reported. The opposite is not shown:
batches that look like chance may come from something else.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

ALIKE, SAME = 20, 15
"""So many batches are compared, and so many of them may not have the same size: coins give that less than once in a
million runs. A sampler that cuts an epoch into slices gives slices of one size, except the last one.
"""

APART = 10
"""Batches between two looks at how often each unit was drawn."""

FEWEST = 20
"""How often units were drawn is compared once the number of units, times the variance of how often one unit is drawn,
has come to this."""

EVENLY, UNEVENLY = -7, 10
"""How far the spread of these numbers may be below and above its mean, in standard deviations; coins exceed that less
than once in 10 billion."""


class Coins:
    """The batches of one run so far.

    Args:
        size: how many units there are.
    """

    def __init__(self, size: int) -> None:
        self._size, self._sizes, self._drawn = size, Counter[int](), torch.zeros(size, dtype=torch.int64)
        self._found = 0
        self._expected = self._variance = 0.0  # of the number of times that a unit is drawn

    def unlike(self, units: Tensor, rate: float | None) -> str:
        """Return what coins do not give, in this batch or with earlier ones; empty for batches that they may give.

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
