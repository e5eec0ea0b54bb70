"""Lookups: gradients of a table (an embedding), of which each record reads a few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.rounding import alike, gram_norms, gram_overstatement, norms_of, raised
from equidp.gradients.terms import MANY, Term, pieces, scaled, silenced


class Lookups(Term):
    """Gradients of a table `[rows, D]` read at `ids [b, P]`: row r gets `Σ_{p: ids[p]=r} B[p]`, `B [b, P, D]`."""

    def __init__(self, ids: Tensor, backprops: Tensor, rows: int) -> None:
        self.ids, self.backprops, self.rows = ids, backprops, rows

    def squared_norms(self) -> Tensor:
        if self.ids.shape[1] > MANY:
            some = pieces(len(self.ids), self.backprops[0].numel(), self.ids.device)
            found = [norms_of(self._read_rows(part)) for part in some]
            return raised(torch.cat(found), self.sizes())
        products = alike(self.backprops, self.backprops.transpose(1, 2))
        same = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(products.dtype)
        return gram_norms(products, same, self.backprops.shape[2])

    def sizes(self) -> Tensor:
        return norms_of(self.backprops).sqrt().sum(1)

    def overstatement(self) -> Tensor:
        if self.ids.shape[1] > MANY:
            return super().overstatement()
        backprops = norms_of(self.backprops).sum(1)
        return gram_overstatement(torch.full_like(backprops, self.ids.shape[1]), backprops, self.backprops.shape[2])

    def _read_rows(self, some: slice) -> Tensor:
        """Return the gradients of the rows that a record reads, without the table's other rows, `[m, P·D]`.

        With many positions they are added up in float64.
        """
        ids, order = self.ids[some].sort(1)
        row = F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))  # number of the row among the record's own rows
        backprops = self._exact(self.backprops[some])
        row = torch.empty_like(row).scatter_(1, order, row).unsqueeze(2).expand_as(backprops)
        return torch.zeros_like(backprops).scatter_add_(1, row, backprops).flatten(1).to(self.backprops.dtype)

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        backprops = silenced(scaled(self._exact(self.backprops), weights), silent)
        table = backprops.new_zeros(self.rows, backprops.shape[2])
        return table.index_add_(0, self.ids.flatten(), backprops.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        backprops, ids = self._exact(self.backprops[start:stop]), self.ids[start:stop]
        tables = backprops.new_zeros(len(ids), self.rows, backprops.shape[2])
        tables.scatter_add_(1, ids.unsqueeze(2).expand_as(backprops), backprops)
        return tables.flatten(1).to(self.backprops.dtype)

    def _exact(self, backprops: Tensor) -> Tensor:
        """Return float64 if there are many positions. A row's positions are added one after the other, and to form the
        tables again, as other terms do for many positions, would cost much.
        """
        return backprops.double() if self.ids.shape[1] > MANY else backprops
