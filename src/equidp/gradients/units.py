"""Units: the gradient of a unit of privacy is the mean of its records' gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.products import Outer
from equidp.gradients.rounding import SLACK, alike, norms_of, raised
from equidp.gradients.terms import Gradients, Term, Vectors, formed_at_once, rows_of, sizes_of, some_of

KEPT_SUMS = 1 << 22  # floats of a parameter's sums over units that are kept for the weighted sum (16 MiB)


@dataclass(frozen=True)
class Units:
    """Which records belong to which unit of privacy."""

    owners: Tensor  # [b] int64, record to unit, ascending
    counts: Tensor  # [U] records per unit

    @classmethod
    def of(cls, owners: Tensor) -> Units:
        """Count the records of each unit.

        Raises:
            EquidpError: the owners do not ascend.
        """
        if (owners[1:] < owners[:-1]).any():
            raise EquidpError("A unit's records must stand together in a batch, units in ascending order.")
        return cls(owners, torch.bincount(owners))

    def share(self) -> Tensor:
        """Return each record's share in its unit's mean, `[b]`."""
        return 1 / self.counts[self.owners].to(torch.float32)

    def ranges(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Give ranges of `size` units, each with the range of their records. Reads the counts back from the device."""
        starts = [0, *itertools.accumulate(self.counts.tolist())]
        for first in range(0, len(self.counts), size):
            last = min(first + size, len(self.counts))
            yield slice(first, last), slice(starts[first], starts[last])


class UnitSums(Gradients):
    """The gradients of units with respect to one parameter: means of their records' gradients, formed in memory.

    Gram matrices over a unit's positions would be cheaper. But they would be as wide as the batch's widest unit, so one
    more unit could change how all others are rounded. The gradients of a unit's records may cancel, too. So the norm of
    their sum is `raised` as a record's norm is, and the weighted sum adds these same sums: a sum over all records of
    the batch would be rounded differently. If layers share the parameter, each has a term, and the terms are added.
    """

    def __init__(self, terms: Sequence[Term], units: Units, numel: int) -> None:
        self._terms, self._units, self._numel = terms, units, numel
        # this term gives norms and sums without forming gradients, so units of one record need none
        self._single = terms[0] if len(terms) == 1 and isinstance(terms[0], Outer) else None
        self._kept: list[tuple[slice | Tensor, Tensor]] | None = None

    def squared_norms(self) -> Tensor:
        counts = self._units.counts
        squared = torch.zeros_like(counts, dtype=torch.float32)
        if self._single is not None:
            squared = self._single.squared_norms()[counts.cumsum(0) - 1]
        self._kept = list(self._formed()) if len(counts) * self._numel <= KEPT_SUMS else None
        for some, sums in self._kept or self._formed():
            squared[some] = norms_of(sums)
        return raised(squared, self._sizes()) / counts.square()  # sizes last: some terms know them from gradients

    def _sizes(self) -> Tensor:
        room = torch.zeros_like(self._units.counts, dtype=torch.float32)
        return room.index_add_(0, self._units.owners, sizes_of(self._terms).float())

    def overstatement(self) -> Tensor:
        counts, larger = self._units.counts, SLACK * self._sizes().square()
        if self._single is not None:
            larger += self._single.overstatement()[counts.cumsum(0) - 1]
        return larger / counts.square()

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        counts = self._units.counts
        if self._single is not None:
            alone = (weights * (counts == 1))[self._units.owners]
            total = self._single.weighted_sum(alone, None if silent is None else alone == 0)
        else:
            total = torch.zeros(self._numel, device=weights.device)
        for some, sums in self._kept or self._formed():
            total += Vectors(sums).weighted_sum((weights / counts)[some], some_of(silent, some))
        return total

    def _formed(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Give some units at a time, by number, and the sums of their records' gradients `[m, numel]`.

        If `_single` is set, units with one record are left out, and units with equally many records come together.
        """
        units, chunk = self._units, formed_at_once(self._numel, self._units.counts.device)
        if (single := self._single) is not None:
            starts = units.counts.cumsum(0) - units.counts
            for count in units.counts.unique().tolist():
                for some in (units.counts == count).nonzero().squeeze(1).split(chunk) if count > 1 else ():
                    rows = starts[some, None] + torch.arange(count, device=starts.device)
                    yield some, alike(single.backprops.values[rows].transpose(1, 2), single.inputs[rows]).flatten(1)
            return
        for some, records in units.ranges(chunk):
            sums = torch.zeros(some.stop - some.start, self._numel, device=units.counts.device)
            for start in range(records.start, records.stop, chunk):
                part = slice(start, min(start + chunk, records.stop))
                sums.index_add_(0, units.owners[part] - some.start, rows_of(self._terms, part).float())
            yield some, sums
