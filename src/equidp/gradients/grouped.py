"""Grouped: gradients of convolutions whose windows are written out, for a few records at a time.

They are those in groups of several channels, transposed ones, and those of volumes, as far as no other form is cheaper
(`layers.py`, `volumes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from equidp.gradients.rounding import alike, norms_of, raised
from equidp.gradients.terms import MANY, Term, along_positions, formed_again, pieces, some_of, summed, weighted
from equidp.gradients.workspace import Workspace

Windows = Callable[[slice], Tensor]
"""Gives the windows of some records as a view `[m, g, places…, c, kernel…]`: c are the channels of a group."""


class GroupedProducts(Term):
    """One product per group of channels: windows `A [b, g, P, i]`, backprops `B [b, g, P, o]`, gradients `[g, o, i]`.

    Windows overlap. With a kernel of 3 pixels a side they take 9 times the memory of images, and 27 times that of
    volumes. So they are written into scratch memory when norms or sums are asked for, for a few records at a time, and
    if these are still too large, for some of the positions at a time. From norms to sum the term holds inputs and
    backprops. If there is room, it also keeps what a sum is taken of: gradients, or windows if positions are few.

    Counted on torch's meta device for a GPU of 16 GiB: norms of ResNeXt-50 with GroupNorm, 64 images of 224×224, took
    18.9 GiB at the most while the windows of all layers were held, and take 13.2 GiB; those of a 3-D U-Net of 13
    convolutions and 4 volumes of 64³ took 11.7 GiB, and take 1.6 GiB.

    Args:
        windows: of each call.
        backprops: of each call, `[b, c, …]` at the places of its windows.
        layer: whose weight has these gradients, `[…, c, kernel…]`; key of what is kept in the workspace.
        workspace: where windows are written, and where they or gradients are kept.
    """

    def __init__(
        self, windows: Sequence[Windows], backprops: Sequence[Tensor], layer: Any, workspace: Workspace
    ) -> None:
        self._windows, self._workspace, self._layer = windows, workspace, layer
        self._backprops = [b.flatten(2).unflatten(1, (layer.groups, -1)).transpose(2, 3) for b in backprops]
        self._records, groups, _, outputs = self._backprops[0].shape
        self._numel = layer.weight.numel()
        self._bare = math.prod(layer.kernel_size) == 1  # then a window is a pixel of the image
        self._shape = (groups, sum(b.shape[2] for b in self._backprops), self._numel // (groups * outputs))
        self._many = self._shape[1] > MANY
        self._kept: Tensor | None = None
        self._sizes: Tensor | None = None
        self._found: dict[int, Tensor] = {}  # sizes of records whose gradients were formed, by the first of them

    def squared_norms(self) -> Tensor:
        like = self._backprops[0]
        # windows only if their sum is not cut, so that it has the same digits whether there was room or not
        uncut = not self._bare and self._records * math.prod(self._shape) <= self._workspace.window_floats
        if self._many or uncut:
            kept = (self._numel,) if self._many else self._shape
            self._kept = self._workspace.take_if_roomy(self._layer, self._records, *kept, like=like)
        found = list[tuple[Tensor, Tensor]]()
        for some in pieces(self._records, self._numel, like.device):  # the same as in `formed_again`
            rows, sizes = self._formed(some.start, some.stop)
            found.append((norms_of(rows), sizes))
            if self._many and self._kept is not None:
                self._kept[some].copy_(rows)
        squared, self._sizes = _joined(found)
        return raised(squared, self._sizes)

    def sizes(self) -> Tensor:
        known, start = list[Tensor](), 0
        while self._sizes is None and start in self._found:
            known.append(self._found[start])
            start += len(known[-1])
        if start == self._records:
            self._sizes = torch.cat(known)
        if self._sizes is None:
            chunks = self._chunks(0, self._records)
            self._sizes = torch.cat([summed([_sizes(*part) for part in self._parts(some)]) for some in chunks])
        return self._sizes

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        if self._many:
            return formed_again([self], weights, silent, self._numel, self._kept)
        starts = range(0, self._records, max(1, self._workspace.window_floats // math.prod(self._shape)))
        some = (slice(start, start + starts.step) for start in starts)
        return reduce(Tensor.add_, (self._sum_at_once(one, weights[one], some_of(silent, one)) for one in some))

    def _sum_at_once(self, some: slice, weights: Tensor, silent: Tensor | None) -> Tensor:
        """Return the weighted sum of some records by one product for each group."""
        inputs, backprops = self._kept, along_positions([b[some] for b in self._backprops], 2)
        if inputs is None:
            groups, *shape = self._shape
            room = backprops.new_empty(groups, len(backprops), *shape).transpose(0, 1)  # in the order of the product
            inputs = _written([of(some) for of in self._windows], room)
        inputs, backprops = weighted(inputs, backprops, weights, silent)
        inputs, backprops = inputs.transpose(0, 1).flatten(1, 2), backprops.transpose(0, 1).flatten(1, 2)
        return (backprops.transpose(1, 2) @ inputs).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        found, self._found[start] = self._formed(start, stop)
        return found

    def _formed(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return some records' gradients `[m, numel]` and sizes `[m]`, both from the same windows."""
        found = list[tuple[Tensor, Tensor]]()
        for some in self._chunks(start, stop):
            parts = ((alike(b.transpose(2, 3), a).flatten(1), _sizes(a, b)) for a, b in self._parts(some))
            found.append(reduce(lambda one, other: (one[0].add_(other[0]), one[1].add_(other[1])), parts))
        return _joined(found)

    def _chunks(self, start: int, stop: int) -> Iterator[slice]:
        chunks = self._workspace.chunks(stop - start, math.prod(self._shape))
        return (slice(start + first, start + last) for first, last in chunks)

    def _parts(self, some: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Give windows `[m, g, p, i]` and backprops `[m, g, p, o]` of some records, for as many positions as fit.

        The next windows may overwrite the last ones.
        """
        views, backprops = [of(some) for of in self._windows], [b[some] for b in self._backprops]
        groups, positions, fan_in = self._shape
        most = self._workspace.window_floats // (len(backprops[0]) * groups * fan_in)
        if positions <= most or (self._kept is not None and not self._many):
            yield self._windows_of(views, some), along_positions(backprops, 2)
            return
        for view, of_call in zip(views, backprops, strict=True):
            row = of_call.shape[2] // view.shape[2]  # positions at each place of the first axis
            rows = max(1, most // row)
            for first in range(0, view.shape[2], rows):
                part = of_call[:, :, first * row : (first + rows) * row]
                room = self._workspace.take("windows", *part.shape[:3], fan_in, like=view)
                yield _written([view[:, :, first : first + rows]], room), part

    def _windows_of(self, views: Sequence[Tensor], some: slice) -> Tensor:
        """Return some records' windows at all positions `[m, g, P, i]`."""
        if self._bare and len(views) == 1:
            axes = (views[0].dim() - 3) // 2
            return views[0].flatten(2 + axes).flatten(2, 1 + axes)
        if self._kept is not None and not self._many:
            return _written(views, self._kept[some])
        return _written(views, self._workspace.take("windows", len(views[0]), *self._shape, like=views[0]))


def _written(views: Sequence[Tensor], room: Tensor) -> Tensor:
    """Write windows `[m, g, places…, c, kernel…]` of several calls to `room [m, g, P, i]`."""
    first = 0
    for view in views:
        axes = (view.dim() - 3) // 2
        places, seen = view.shape[2 : 2 + axes], view.shape[2 + axes :]
        last = first + math.prod(places)
        room[:, :, first:last].unflatten(3, seen).unflatten(2, places).copy_(view)
        first = last
    return room


def _sizes(windows: Tensor, backprops: Tensor) -> Tensor:
    return (norms_of(windows).sqrt() * norms_of(backprops).sqrt()).sum((1, 2))


def _joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    one, other = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
    return one, other
