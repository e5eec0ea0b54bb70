"""Convolutions: gradients of a kernel, without writing out the windows that it sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.grad import conv2d_weight

from equidp.gradients import compiled
from equidp.gradients.precision import as_precise_as_norms
from equidp.gradients.rounding import LOST, alike, gram_norms, gram_overstatement, norms_of, raised
from equidp.gradients.terms import (
    MANY,
    Term,
    along_positions,
    compiled_norms,
    silenced,
    some_of,
    summed,
    weighted,
    weighted_rows,
)  # fmt: skip
from equidp.gradients.windows import Costs, Kernel, Layout, cheapest
from equidp.gradients.workspace import Workspace

if TYPE_CHECKING:
    from equidp.gradients.kernels import Tiles

TYPICAL_RECORDS = 64  # assumed to choose how norms are formed, because a batch's own number of records is private


class Convolutions(Term):
    """Gradients of a convolution's weight `[o, c, kh, kw]`: outer products whose positions are the output's pixels.

    A window is the part of an image that an output pixel sees. Windows overlap, so they are never written out for the
    whole batch. Norms come from one of two sources:

    - Gradients, which are formed in registers, or for as many records at a time as a cache holds. If they fit, they are
      kept, and the weighted sum is one vector-matrix product.
    - Gram matrices of *pixels*: `⟨window p, window q⟩ = Σ_δ ⟨x[p+δ], x[q+δ]⟩` needs only the pixels' own products,
      shifted and added.

    If gradients are not kept, the weighted sum forms them again. If there are few positions and no compiled code, it is
    torch's own weight gradient instead.

    Args:
        kernel: the geometry.
        images: per call, inputs `[b, c, H, W]`, all of one shape.
        backprops: per call, `[b, o, oh, ow]`.
        workspace: where gradients are kept and windows are written.
        owner: key of the kept gradients in the workspace.
        zeros: the part of the padding that the images do not have yet, as an argument of `F.pad`.
    """

    def __init__(
        self,
        kernel: Kernel,
        images: Sequence[Tensor],
        backprops: Sequence[Tensor],
        workspace: Workspace,
        owner: object,
        zeros: Sequence[int] = (0, 0, 0, 0),
    ) -> None:
        self._outputs = kernel.channels[1]
        height, width = images[0].shape[2] + zeros[2] + zeros[3], images[0].shape[3] + zeros[0] + zeros[1]
        channels_last = ([x.permute(0, 2, 3, 1) for x in calls] for calls in (images, backprops))
        self._compiled = compiled.gradients_of(kernel, *channels_last)
        odd = self._outputs == 1 and math.prod(kernel.outputs(height, width)) % 4
        on_cpu = images[0].device.type == "cpu"
        if on_cpu and self._compiled is None and (odd or kernel.numel % 4):  # see `alike`
            spare = -self._outputs % 4
            kernel = replace(kernel, channels=(kernel.channels[0], self._outputs + spare))
            backprops = [F.pad(b, (0, 0, 0, 0, 0, spare)) for b in backprops]
        self._cut, self._copies = cheapest(kernel, height, width, tuple(map(Layout.of, images)), on_cpu=on_cpu)
        self._costs = Costs.on(images[0].device)
        self.kernel, self.bare, self.backprops = kernel, images, backprops
        self._zeros = list(zeros)
        self._workspace, self._owner = workspace, owner
        self._kept: Tensor | None = None
        self._factors: list[tuple[Tensor, Tensor]] = []
        self._records, self._positions = len(backprops[0]), len(images) * math.prod(self._cut.outputs)
        self._pixels = len(images) * height * width
        self._numel = kernel.numel

    @cached_property
    def images(self) -> Sequence[Tensor]:
        """The images with all of their padding."""
        return [F.pad(x, self._zeros) for x in self.bare] if any(self._zeros) else self.bare

    def tiles(self, kernels: ModuleType | None) -> Tiles | None:
        """Return how a GPU's kernels form the gradients; None if they do not."""
        if kernels is None or len(self.bare) > 1:
            return None
        left, _, top, _ = self._zeros
        tiles: Tiles = kernels.Tiles(self.kernel, self.bare[0], self.backprops[0], (top, left), any(self._zeros))
        return tiles if tiles.here else None

    def squared_norms(self) -> Tensor:
        if self.by_gram():
            return torch.cat([gram_norms(*pair, self.width) for pair in self.grams()])
        return self._materialised()

    @property
    def positions(self) -> int:
        """P, the number of output pixels of all calls."""
        return self._positions

    @property
    def width(self) -> int:
        """Number of products that are summed in an entry of either Gram matrix."""
        return self.kernel.fan_in + self.kernel.channels[1]

    @property
    def numel(self) -> int:
        """Number of entries of a gradient as it is formed, which may have outputs added for alignment."""
        return self._numel

    def form(self, out: Tensor) -> None:
        """Write all gradients to `out [b, numel]`."""
        for start, stop in self._workspace.chunks(self._records, self._cut.scratch()):
            self._form(start, stop, out[start:stop])
        self._factors = []

    def by_gram(self) -> bool:
        """Whether norms come from Gram matrices."""
        return self._positions <= MANY and self._gram_cost() < self._gradient_cost()

    def _keeps(self, records: int = TYPICAL_RECORDS) -> bool:
        """Whether to keep the gradients: whether forming them again costs more than a trip to main memory and back.

        The batch's own number of records may decide only whether they are kept, never how norms are formed.
        """
        return records * self._numel <= self._workspace.keep_floats and self._positions > self._costs.keep

    def _gram_cost(self) -> float:
        """Return the cost per record of norms from Gram matrices and of the sum, in multiplications (see `Costs`)."""
        c, o = self.kernel.channels
        shift = self._positions**2 / self._cut.outputs[1] * self._costs.run + self._positions**2 * self._costs.copy
        products = self._pixels**2 * c + self._positions**2 * o
        return products + math.prod(self.kernel.size) * shift + self._sum_cost() + self._costs.gram

    def _gradient_cost(self) -> float:
        copies = 0 if self._compiled is not None else self._copies + self._costs.copy * self._numel
        later = self._costs.keep * self._numel if self._keeps() else self._sum_cost()
        return copies + self._positions * self._numel + later

    def _sum_cost(self) -> float:
        """Return the cost per record of a weighted sum without kept gradients."""
        return self._positions * self._numel * (1 if self._compiled is not None else self._costs.weight)

    def _materialised(self) -> Tensor:
        # on a GPU all layers' kept gradients are in one matrix (`together.py`), which has no room for this layer
        if self.bare[0].device.type == "cpu" and self._keeps(self._records):
            self._kept = self._workspace.take(self._owner, self._records, self._numel, like=self.images[0])
        if self._compiled is not None:
            return compiled_norms(self._compiled, self._kept)
        sizes = self.sizes()  # first, because gradients will drive images and backprops out of the caches
        return raised(torch.cat([norms_of(found) for _, found in self._pieces()]), sizes)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Give some records at a time and their gradients `[m, numel]`, which are kept or soon overwritten."""
        for start, stop in self._workspace.chunks(self._records, self._cut.scratch() + self._numel):
            if self._kept is None:
                found = self._workspace.take("gradients", stop - start, self._numel, like=self.images[0])
            else:
                found = self._kept[start:stop]
            self._form(start, stop, found)
            yield slice(start, stop), found
        self._factors = []

    def sizes(self) -> Tensor:
        # an upper bound: Σ_p |window p|·|backprop p| ≤ √(Σ |window p|²·Σ |backprop p|²), and at most `seen` windows
        # see a pixel
        pairs = zip(self.images, self.backprops, strict=True)
        return summed([(self.kernel.seen * _squares(x) * _squares(b)).sqrt() for x, b in pairs])

    def overstatement(self) -> Tensor:
        if self._positions > MANY:
            return super().overstatement()
        inputs, backprops = (summed(list(map(_squares, part))) for part in (self.images, self.backprops))
        return gram_overstatement(self.kernel.seen * inputs, backprops, self.width)

    def _form(self, start: int, stop: int, out: Tensor) -> None:
        """Write the gradients of some records, summed over the calls, to `out [m, numel]`."""
        self._factors = self._factors or [
            (self._cut.view(x), b.flatten(2)) for x, b in zip(self.images, self.backprops, strict=True)
        ]
        for call, (view, backprops) in enumerate(self._factors):
            self._cut.multiply(view[start:stop], backprops[start:stop], out, call > 0, self._workspace)

    def grams(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the Gram matrices of windows and of backprops, for some records at a time."""
        for start, stop in self._workspace.chunks(self._records, self._pixels**2):
            pixels = along_positions([x[start:stop].flatten(2) for x in self.images], 2)
            backprops = along_positions([b[start:stop].flatten(2) for b in self.backprops], 2)
            left = self._window_products(alike(pixels.transpose(1, 2), pixels))
            yield left, alike(backprops.transpose(1, 2), backprops)

    def _window_products(self, products: Tensor) -> Tensor:
        """Return products of windows `[m, P, P]` from products of pixels `[m, LHW, LHW]`, for L calls of one shape."""
        if products.device.type != "cpu":
            return self._window_products_at_once(products)
        calls, (height, width) = len(self.images), self.images[0].shape[2:]
        shaped = products.unflatten(2, (calls, height, width)).unflatten(1, (calls, height, width))
        total: Tensor | None = None
        for rows, columns in self.kernel.offsets(height, width):
            part = shaped[:, :, rows, columns, :, rows, columns]
            total = part.clone(memory_format=torch.contiguous_format) if total is None else total.add_(part)
        assert total is not None
        return total.flatten(4).flatten(1, 3)

    def _window_products_at_once(self, products: Tensor) -> Tensor:
        """Return the same by one operation: a sum over a view that has an entry for every place of the kernel."""
        kernel, calls, (height, width) = self.kernel, len(self.images), self.images[0].shape[2:]
        side = products.shape[1]  # rows of one record's matrix
        if kernel.size == (1, 1) and kernel.stride == (1, 1):
            return products
        steps = [kernel.dilation[0] * width, kernel.dilation[1]]
        axes = [height * width, kernel.stride[0] * width, kernel.stride[1]]
        shape = (calls, *self._cut.outputs)
        view = products.contiguous().as_strided(
            (len(products), *kernel.size, *shape, *shape),
            (side * side, *(step * (side + 1) for step in steps), *(axis * side for axis in axes), *axes),
        )
        return view.sum((1, 2)).flatten(4).flatten(1, 3)

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        if self._kept is not None:
            return self._as_weight(weighted_rows(silenced(self._kept, silent), weights))
        if self._compiled is not None:
            return self._as_weight(self._compiled.weighted_sum(weights))
        if self._positions > MANY:
            pieces = ((silenced(found, some_of(silent, some)), weights[some]) for some, found in self._pieces())
            formed = (weighted_rows(found, shares) for found, shares in pieces)
            return self._as_weight(reduce(Tensor.add_, formed))
        parts = [self._weight_gradient(x, b, weights, silent) for x, b in zip(self.images, self.backprops, strict=True)]
        return summed(parts)[: self._outputs].flatten()

    def _as_weight(self, gradients: Tensor) -> Tensor:
        """Return gradients `[…, numel]` in the weight's own order, without outputs that were added."""
        source = self._compiled or self._cut
        return source.as_weight(gradients)[:, : self._outputs].reshape(*gradients.shape[:-1], -1)

    def _weight_gradient(self, images: Tensor, backprops: Tensor, weights: Tensor, silent: Tensor | None) -> Tensor:
        images, backprops = weighted(images, backprops, weights, silent)
        c, o = self.kernel.channels
        shape = (o, c, *self.kernel.size)
        with as_precise_as_norms():
            return conv2d_weight(images, shape, backprops, self.kernel.stride, 0, self.kernel.dilation)

    def gradients(self, start: int, stop: int) -> Tensor:
        if self._compiled is not None:
            return self._as_weight(self._compiled.gradients(start, stop))
        room = self.images[0].new_empty(stop - start, self._numel)  # no buffer, because the caller keeps it
        self._form(start, stop, room)
        return self._as_weight(room)


def _squares(images: Tensor) -> Tensor:
    """Return squared norms `[b]` of images `[b, c, H, W]`, in any memory layout."""
    return torch.linalg.vector_norm(images, dim=(1, 2, 3)).square() + images[0].numel() * LOST
