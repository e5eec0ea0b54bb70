"""Products: gradients of linear layers, as outer products summed over positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from equidp.gradients import compiled
from equidp.gradients.compiled import CompiledGradients
from equidp.gradients.rounding import alike, beside_lost, gram_norms, gram_overstatement, lost, norms_of
from equidp.gradients.terms import (
    MANY,
    Term,
    Vectors,
    added_in_order,
    adds_fused,
    along_positions,
    compiled_norms,
    formed_again,
    materialised_norms,
    weighted,
)
from equidp.gradients.windows import Kernel
from equidp.gradients.workspace import Workspace

WORTH_KEEPING = 1 << 17
"""If a record's gradient takes at least so many multiplications, it is kept for the weighted sum, if there is room."""


class Outer(Term):
    """Gradients `b aᵀ` of shape `[o, i]`, one position each: from `a [b, i]` and `b [b, o]`."""

    def __init__(self, inputs: Tensor, backprops: Vectors) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        # a norm may lose tiny squares, and the other norm, by which it is multiplied, may be huge: so `norms_of` adds
        # to each norm what it may have lost
        squared = norms_of(self.inputs) * self.backprops.squared_norms()
        return squared.add_(lost(1, squared.dtype))

    def overstatement(self) -> Tensor:
        return beside_lost(norms_of(self.inputs), self.backprops.squared_norms())

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        inputs, backprops = weighted(self.inputs, self.backprops.values, weights, silent)
        return (backprops.T @ inputs).view(-1)

    def gradients(self, start: int, stop: int) -> Tensor:
        products = Products([self.inputs.unsqueeze(1)], [self.backprops.values.unsqueeze(1)])
        return products.gradients(start, stop)


class Products(Term):
    """Gradients `B[b]ᵀ A[b]` of shape `[o, i]`, from `A [b, P, i]` and `B [b, P, o]`, the calls' positions in a row.

    Args:
        inputs: `A` of each call.
        backprops: `B` of each call.
        workspace: where gradients may be kept from their norms to the weighted sum; None: they are formed again for it.
        owner: the layer, key of the kept gradients in the workspace.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        backprops: Sequence[Tensor],
        workspace: Workspace | None = None,
        owner: object = None,
    ) -> None:
        self._calls, self._workspace, self._owner = (inputs, backprops), workspace, owner
        self._kept: Tensor | None = None
        self._records, self._widths = len(inputs[0]), (inputs[0].shape[2], backprops[0].shape[2])
        self._positions = sum(x.shape[1] for x in inputs)

    @cached_property
    def _compiled(self) -> CompiledGradients | None:
        """Compiled code, made only if gradients are formed: to compile takes longer than some runs' Gram matrices."""
        if len({x.shape[1] for x in self._calls[0]}) > 1:
            return None
        rows = ([x.unsqueeze(1) for x in calls] for calls in self._calls)  # images of one row, a pixel per position
        return compiled.gradients_of(Kernel((1, 1), (1, 1), (1, 1), self._widths), *rows)

    @cached_property
    def inputs(self) -> Tensor:
        """Inputs of all calls, `[b, P, i]`."""
        return along_positions(self._calls[0])

    @cached_property
    def backprops(self) -> Tensor:
        """Backprops of all calls, `[b, P, o]`."""
        return along_positions(self._calls[1])

    def squared_norms(self) -> Tensor:
        if self.by_gram():
            return gram_norms(*next(self.grams()), self.width)
        numel = math.prod(self._widths)
        # where the compiled code's sum would have other digits than that of kept gradients, none are kept
        formed_twice = self._positions > MANY if self._compiled is None else adds_fused()
        if self._workspace is not None and formed_twice and self._positions * numel >= WORTH_KEEPING:
            self._kept = self._workspace.take_if_roomy(self._owner, self._records, numel, like=self._calls[0][0])
        if self._compiled is not None:
            return compiled_norms(self._compiled, self._kept)
        return materialised_norms([self], self._records, numel, self._kept)

    def by_gram(self) -> bool:
        """Whether norms come from Gram matrices."""
        return self._positions <= MANY and self._positions * sum(self._widths) < math.prod(self._widths)

    def sizes(self) -> Tensor:
        return (norms_of(self.inputs).sqrt() * norms_of(self.backprops).sqrt()).sum(1)

    def overstatement(self) -> Tensor:
        return gram_overstatement(norms_of(self.inputs).sum(1), norms_of(self.backprops).sum(1), self.width)

    @property
    def width(self) -> int:
        """Number of products that are summed in an entry of either Gram matrix, i + o."""
        return sum(self._widths)

    def grams(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the Gram matrices of inputs and of backprops."""
        left, right = (alike(factor, factor.transpose(1, 2)) for factor in (self.inputs, self.backprops))
        yield left, right

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        if not self.by_gram() and self._compiled is not None:
            kept = self._kept
            # both sums are the same to the last bit, so it changes nothing whether there was room
            return self._turned(self._compiled.weighted_sum(weights) if kept is None else added_in_order(kept, weights))
        if self._positions > MANY:
            return formed_again([self], weights, silent, math.prod(self._widths), self._kept)
        inputs, backprops = weighted(self.inputs, self.backprops, weights, silent)
        return (backprops.flatten(0, 1).T @ inputs.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        if self._compiled is not None:
            return self._turned(self._compiled.gradients(start, stop))
        return alike(self.backprops[start:stop].transpose(1, 2), self.inputs[start:stop]).flatten(1)

    def _turned(self, gradients: Tensor) -> Tensor:
        """Return `[…, i·o]` as `[…, o·i]`."""
        return gradients.unflatten(-1, self._widths).transpose(-1, -2).flatten(-2)
