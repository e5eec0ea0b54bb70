"""Together: on a GPU, norms and weighted sums of all parameters are taken at once, in few operations.

On a GPU an operation on a small batch takes less time than its launch. So the tensors of all layers are put side by
side in two matrices with a row for each record:

- one has as columns the factors of outer products, and gradients that are in memory already;
- the other one has as columns the gradients of convolutions.

All norms are rows of one matrix, on which squares, products and their bounds are taken once. A weighted sum is one
product with each of the two matrices, and one for each linear layer. If kernels form the gradients of convolutions in
tiles (`kernels.Tiles`), those of few positions are not kept, and are formed again for the sum.

Terms of another kind are asked one by one. The formulas and bounds are those of the terms: a norm may be overstated,
never understated. Shapes alone decide how norms are formed.

A record whose norm is not finite is silenced in both matrices as soon as that is known: it adds 0 to every sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equidp.gradients import fused
from equidp.gradients.convolutions import Convolutions
from equidp.gradients.products import Outer, Products
from equidp.gradients.rounding import LOST, SLACK, all_parts, gram_parts, gram_raised, gram_slack, row_squares
from equidp.gradients.terms import MANY, Gradients, Vectors
from equidp.gradients.workspace import Workspace

if TYPE_CHECKING:
    from equidp.gradients.kernels import Tiles

WORTH_KEEPING = MANY
"""If there are more positions, a gradient that was formed in tiles is kept for the weighted sum. With fewer positions
it takes less time to form it again than to write and read it, and there are not too many for a sum in another order."""


class Together:
    """The gradients of a batch's records.

    Args:
        kept: the gradients of each parameter, in order; None if the losses do not depend on a parameter.
        sizes: number of entries of each parameter.
        records: b, at least 1.
        like: a tensor of the norms' dtype and device.
        workspace: where the matrices are.
    """

    def __init__(
        self, kept: Sequence[Gradients | None], sizes: Sequence[int], records: int, like: Tensor, workspace: Workspace
    ) -> None:
        self._kept, self._sizes, self._records, self._like, self._workspace = kept, sizes, records, like, workspace
        self._outer = [term for term in kept if isinstance(term, Outer)]
        self._vectors = [term for term in kept if isinstance(term, Vectors)]
        self._formed, self._gram, self._alone = list[Convolutions](), list[Convolutions | Products](), list[Gradients]()
        self._kernels = fused.kernels_for(like)
        self._tiles: dict[int, Tiles] = {}
        self._again = list[Convolutions]()  # formed in tiles for norms, and again for a sum
        room = workspace.keep_floats // records
        for term in kept:
            tiles = term.tiles(self._kernels) if isinstance(term, Convolutions) else None
            if isinstance(term, Convolutions) and tiles is not None:
                self._tiles[id(term)] = tiles
                kept_here = term.positions > WORTH_KEEPING and term.numel <= room
                (self._formed if kept_here else self._again).append(term)
                room -= term.numel if kept_here else 0
            elif isinstance(term, Convolutions | Products) and term.by_gram():
                self._gram.append(term)
            elif isinstance(term, Convolutions) and len(term.bare) == 1 and term.numel <= room:
                self._formed.append(term)
                room -= term.numel
            elif term is not None and not isinstance(term, Outer | Vectors):
                self._alone.append(term)
        self._columns, self._gradients = like.new_empty(0), like.new_empty(0)
        self._silent: Tensor | None = None
        self._finite: Tensor | None = None

    @torch.inference_mode()
    def squared_norms(self) -> Tensor:
        """Return squared norms `[b]`, and silence the records whose norm is not finite."""
        found = [term.squared_norms().float() for term in self._alone]
        if self._outer or self._vectors or self._formed or self._again:
            found.append(self._of_rows())
        if self._gram:
            found.append(self._of_gram())
        if not found:  # these losses depend on no trained parameter
            found.append(self._like.new_zeros(self._records))
        total = found[0] if len(found) == 1 else torch.stack(found).sum(0)
        finite = total < torch.inf
        for values in (self._columns, self._gradients):
            if not values.numel():
                continue
            if self._kernels is None:
                zero = self._workspace.constant((0.0,), total)[0]
                torch.where(finite.unsqueeze(1), values, zero, out=values)
            else:
                self._kernels.silence(values, finite)
        self._silent = ~finite if self._alone or self._gram else None
        self._finite = finite
        return total

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """Return Σ w_i g_i, a tensor `[numel]` for each parameter."""
        weights = weights.to(self._like.dtype)  # a rule may give float64, or truth values
        found: dict[int, Tensor] = {}
        if self._vectors:
            first = self._places[id(self._vectors[0])][0]
            sums = weights @ self._columns[:, first:]
            for term in self._vectors:
                start, stop = self._places[id(term)]
                found[id(term)] = sums[start - first : stop - first]
        if self._outer:
            first = self._places[id(self._outer[-1])][1]  # behind the inputs
            scaled = self._columns[:, first:] * weights.unsqueeze(1)
            for outer in self._outer:
                start, stop = self._places[id(outer.backprops)]
                found[id(outer)] = (scaled[:, start - first : stop - first].T @ self._column_of(outer)).view(-1)
        if self._formed:
            parts = (weights @ self._gradients).split([term.numel for term in self._formed])
            found |= {id(formed): part for formed, part in zip(self._formed, parts, strict=True)}
        if self._again and self._finite is not None:
            known = torch.where(self._finite, weights, 0.0)
            found |= {id(term): self._tiles[id(term)].weighted_sum(known) for term in self._again}
        return [self._sum_of(*one, found, weights) for one in zip(self._kept, self._sizes, strict=True)]

    def _sum_of(self, term: Gradients | None, size: int, found: dict[int, Tensor], weights: Tensor) -> Tensor:
        if term is None:
            return weights.new_zeros(size)
        return found[id(term)] if id(term) in found else term.weighted_sum(weights, self._silent).float()

    def _of_rows(self) -> Tensor:
        """Return squared norms `[b]` of the gradients in the two matrices and of those formed in tiles."""
        convolutions = [*self._formed, *self._again]
        outer, pairs = len(self._outer), len(self._outer) + len(convolutions)
        rows: list[Tensor] = []  # right factors, left factors, vectors, formed gradients
        if outer or self._vectors:
            self._lay_out()
            rows += [self._column_of(term.backprops) for term in self._outer]
        rows += [term.backprops[0] for term in convolutions]
        rows += [self._column_of(term) for term in self._outer] + [term.bare[0] for term in convolutions]
        if self._vectors:
            rows.append(self._columns[:, self._places[id(self._vectors[0])][0] :])
        own = len(rows)
        tiles, written = [self._tiles[id(term)] for term in convolutions if id(term) in self._tiles], self._form()
        rows += written
        entries = [row[0].numel() for row in rows]
        if self._vectors:
            entries[own - 1] += outer  # each product of two factors may lose one more square
        if self._kernels is None:
            squares, parts = row_squares(rows, entries, self._workspace)
        else:
            squares, parts = self._kernels.row_squares(rows, entries, [one.count for one in tiles])
            if tiles:
                for term, part in zip(convolutions, squares.split(parts)[len(rows) :], strict=True):
                    self._tiles[id(term)].form(part, self._parts.get(id(term)))
        if len(squares) > len(parts):
            squares = self._workspace.segments(parts, squares) @ squares
        left = squares[pairs : 2 * pairs].mul_(squares[:pairs])
        if convolutions:  # a norm is at least a share of the size of its summands (`rounding.raised`)
            least = left[outer:].mul_(self._constants([SLACK * term.kernel.seen for term in convolutions]))
            torch.maximum(least, squares[own:], out=least)
        total = squares[pairs:own].sum(0)
        return total if self._vectors else total.add_(outer * LOST)

    def _lay_out(self) -> None:
        """Fill the first matrix: inputs of linear layers; their backprops that are no bias's gradients; vectors."""
        known = {id(term) for term in self._vectors}
        others = [term.backprops for term in self._outer if id(term.backprops) not in known]
        owners: list[Outer | Vectors] = [*self._outer, *others, *self._vectors]
        parts = [owner.inputs if isinstance(owner, Outer) else owner.values for owner in owners]
        ends = list(accumulate((part.shape[1] for part in parts), initial=0))
        self._places = {id(owner): (start, stop) for owner, start, stop in zip(owners, ends, ends[1:], strict=False)}
        self._columns = self._workspace.take("columns", self._records, ends[-1], like=self._like)
        torch.cat(parts, 1, out=self._columns)

    def _column_of(self, owner: Outer | Vectors) -> Tensor:
        return self._columns[:, slice(*self._places[id(owner)])]

    def _form(self) -> Sequence[Tensor]:
        """Make room for kept gradients of convolutions, side by side, and form them `[b, numel]`.

        If there are tiles, nothing is formed yet, and nothing is returned.
        """
        sizes = [term.numel for term in self._formed]
        self._gradients = self._workspace.take("kept", self._records, sum(sizes), like=self._like)
        parts = self._gradients.split(sizes, 1) if sizes else ()
        self._parts = dict(zip(map(id, self._formed), parts, strict=True))
        if self._tiles:
            return ()
        for term, part in zip(self._formed, parts, strict=True):
            term.form(part)
        return parts

    def _of_gram(self) -> Tensor:
        """Return squared norms `[b]` from Gram matrices."""
        slack = self._constants([gram_slack(term.width) for term in self._gram])
        if self._kernels is None:
            found = [part for term in self._gram for part in all_parts(gram_parts(*pair) for pair in term.grams())]
            sums, left, right = torch.stack(found).unflatten(0, (-1, 3)).unbind(1)
        else:
            pairs = [list(term.grams()) for term in self._gram]
            sums, left, right = self._kernels.gram_parts(pairs, self._records).unbind(0)
        return gram_raised(sums, left, right, slack).sum(0)

    def _constants(self, numbers: Sequence[float]) -> Tensor:
        return self._workspace.constant(tuple(numbers), self._like).unsqueeze(1)
