"""Terms: the per-record gradients of one parameter, in whatever form is cheap to keep.

A term knows three things about the b gradients it stands for: their squared norms, their weighted sum and, only where
nothing cheaper exists, the gradients themselves. Most gradients are sums of outer products over *positions* p of a
record (time steps, pixels, repeated calls of a layer): `Σ_p B[p]ᵀ A[p]`, `A [b, P, i]` what went in, `B [b, P, o]` what
came back. Such a norm can be had from the gradient, `P·i·o` multiplications, or from two Gram matrices, `P²·(i+o)`.

The tricks are those of Goodfellow (2015, norms from activations and backprops), Li et al. (2022, Gram matrices) and
Bu et al. (2023, book-keeping). Which of them a term uses is decided by shapes alone, never by timing the machine, so
that a resumed run repeats every rounding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CANCELLATION = 1e-3  # a Gram sum below this share of its terms' size has lost digits
SLACK = 1e-6  # and is raised by this share: a norm may be overstated, never understated (Δ depends on it)
CHUNK_FLOATS = 1 << 20  # floats of gradients formed at a time only to take their norms (4 MiB)
# What things cost on a CPU, in multiplications of a matrix product (measured, docs/performance.md):
COPY_COST = 8  # a float copied, or summed, in cache
RUN_COST = 330  # starting another run of contiguous floats
TURN_COST = 50  # a float moved between channels-first and channels-last
KEEP_COST = 30  # a float written to main memory and read again
WEIGHT_COST = 1.3  # a multiplication in torch's own weight gradient


@dataclass(frozen=True)
class Units:
    """Which records belong to which unit of privacy; a unit's gradient is the mean of its records' gradients.

    Attributes:
        owners: `[b]` int64, record to unit.
        counts: `[U]` records per unit.
        slots: `[U, R]` record numbers, `b` where a unit has fewer than R records.
    """

    owners: Tensor
    counts: Tensor
    slots: Tensor

    @classmethod
    def of(cls, owners: Tensor) -> Units:
        """Index the records of each unit. Reads the largest count back from the device."""
        counts = torch.bincount(owners)
        order = torch.argsort(owners, stable=True)
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(owners), device=owners.device) - starts[owners[order]]
        widest = int(counts.max()) if len(counts) else 0
        slots = torch.full((len(counts), widest), len(owners), device=owners.device)
        slots[owners[order], rank] = order
        return cls(owners, counts, slots)

    def share(self) -> Tensor:
        """`[b]`: a record's share in its unit's mean."""
        return 1 / self.counts[self.owners].to(torch.float32)

    def gather(self, values: Tensor) -> Tensor:
        """`[b, P, …]` to `[U, R·P, …]`: the positions of a unit's records side by side, zeros where there are none."""
        filled = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
        return filled[self.slots].flatten(1, 2)

    def spread(self, values: Tensor) -> Tensor:
        """`[b, …]` values, each scaled by its record's share."""
        return scaled(values, self.share())


class Workspace:
    """Buffers that live from step to step: fresh memory of this size would cost a page fault every 4 KiB.

    Args:
        device: decides how much scratch is worth having at a time: a core's cache, or a large share of a GPU's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch_floats = 1 << 20 if device.type == "cpu" else 1 << 27
        self.keep_floats = 1 << 25 if device.type == "cpu" else 1 << 30
        self._buffers: dict[object, Tensor] = {}

    def take(self, owner: object, *shape: int, like: Tensor) -> Tensor:
        """A tensor of unknown content that only the next `take` of the same owner overwrites."""
        numel = math.prod(shape)
        buffer = self._buffers.get(owner)
        if buffer is None or buffer.numel() < numel or buffer.dtype != like.dtype or buffer.device != like.device:
            # Poisson batches vary in size: a little more spares the next reallocation
            buffer = self._buffers[owner] = like.new_empty(numel + numel // 8)
        return buffer[:numel].view(shape)

    def chunks(self, records: int, floats: int) -> Iterator[tuple[int, int]]:
        """Ranges of records so that `floats` of scratch per record stay within bounds."""
        size = max(2, self.scratch_floats // max(floats, 1))
        return ((start, min(start + size, records)) for start in range(0, records, size))


class Term(ABC):
    """The b per-record gradients of one parameter."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """`[b]` squared l2 norms."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        """`[numel]`: Σ w_i g_i. With `clean` false a zero weight must silence even a gradient that is not finite."""

    @abstractmethod
    def gradients(self, start: int, stop: int) -> Tensor:
        """`[stop − start, numel]`: the gradients of some records, materialised."""

    @abstractmethod
    def grouped(self, units: Units) -> Term:
        """The same for units: each the mean of its records' gradients."""


@dataclass(frozen=True)
class Vectors(Term):
    """Gradients that are there already: `[b, numel]`."""

    values: Tensor

    def squared_norms(self) -> Tensor:
        return norms_of(self.values)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        return weights.to(self.values.dtype) @ (self.values if clean else silenced(self.values, weights))

    def gradients(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]

    def grouped(self, units: Units) -> Term:
        sums = self.values.new_zeros(len(units.counts), self.values.shape[1])
        return Vectors(sums.index_add_(0, units.owners, units.spread(self.values)))


class Products(Term):
    """Gradients `B[b]ᵀ A[b]` of shape `[o, i]`, from `A [b, P, i]` and `B [b, P, o]`."""

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        b, positions, i = self.inputs.shape
        o = self.backprops.shape[2]
        if positions == 1:
            return norms_of(self.inputs.flatten(1)) * norms_of(self.backprops.flatten(1))
        if positions * (i + o) < i * o:
            return self._gram()
        return materialised_norms([self], b, i * o)

    def _gram(self) -> Tensor:
        left = self.inputs @ self.inputs.transpose(1, 2)
        right = self.backprops @ self.backprops.transpose(1, 2)
        return gram_norms(left, right)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        inputs, backprops = weighted(self.inputs, self.backprops, weights, clean)
        return (backprops.flatten(0, 1).T @ inputs.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        return (self.backprops[start:stop].transpose(1, 2) @ self.inputs[start:stop]).flatten(1)

    def grouped(self, units: Units) -> Term:
        return Products(units.gather(self.inputs), units.gather(units.spread(self.backprops)))


class GroupedProducts(Term):
    """One product per group of channels: `A [b, g, P, i]`, `B [b, g, P, o]`, gradients `[g, o, i]`."""

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        b, groups, _, i = self.inputs.shape
        return materialised_norms([self], b, groups * i * self.backprops.shape[3])

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        inputs, backprops = weighted(self.inputs, self.backprops, weights, clean)
        inputs, backprops = inputs.transpose(0, 1).flatten(1, 2), backprops.transpose(0, 1).flatten(1, 2)
        return (backprops.transpose(1, 2) @ inputs).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        return (self.backprops[start:stop].transpose(2, 3) @ self.inputs[start:stop]).flatten(1)

    def grouped(self, units: Units) -> Term:
        inputs = units.gather(self.inputs.transpose(1, 2)).transpose(1, 2)
        backprops = units.gather(units.spread(self.backprops).transpose(1, 2)).transpose(1, 2)
        return GroupedProducts(inputs, backprops)


class Lookups(Term):
    """Gradients of a table `[rows, D]` read at `ids [b, P]`: row r gets `Σ_{p: ids[p]=r} B[p]`, `B [b, P, D]`."""

    def __init__(self, ids: Tensor, backprops: Tensor, rows: int) -> None:
        self.ids, self.backprops, self.rows = ids, backprops, rows

    def squared_norms(self) -> Tensor:
        products = self.backprops @ self.backprops.transpose(1, 2)
        same = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(products.dtype)
        return gram_norms(products, same)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        backprops = scaled(self.backprops, weights)
        backprops = backprops if clean else silenced(backprops, weights)
        table = backprops.new_zeros(self.rows, backprops.shape[2])
        return table.index_add_(0, self.ids.flatten(), backprops.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        backprops, ids = self.backprops[start:stop], self.ids[start:stop]
        tables = backprops.new_zeros(len(ids), self.rows, backprops.shape[2])
        return tables.scatter_add_(1, ids.unsqueeze(2).expand_as(backprops), backprops).flatten(1)

    def grouped(self, units: Units) -> Term:
        return Lookups(units.gather(self.ids), units.gather(units.spread(self.backprops)), self.rows)


@dataclass(frozen=True)
class Kernel:
    """Geometry of a convolution without groups, padding already applied.

    Attributes:
        size, stride, dilation: per axis (height, width).
        channels: in and out.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    channels: tuple[int, int]

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output."""
        return (height - self.reach(0)) // self.stride[0] + 1, (width - self.reach(1)) // self.stride[1] + 1

    def reach(self, axis: int) -> int:
        """Pixels from one end of the kernel to the other."""
        return self.dilation[axis] * (self.size[axis] - 1) + 1

    def windows(self, images: Tensor) -> Tensor:
        """`[b, c, H, W]` in channels-last memory to a view `[b, oh, ow, kh, kw, c]`: what each output pixel sees."""
        b, channels, height, width = images.shape
        image, row, column = width * height * channels, width * channels, channels
        shape = (b, *self.outputs(height, width), *self.size, channels)
        steps = (row * self.stride[0], column * self.stride[1], row * self.dilation[0], column * self.dilation[1])
        return images.as_strided(shape, (image, *steps, 1), images.storage_offset())

    def planes(self, images: Tensor) -> Tensor:
        """`[b, c, H, W]` to `[b, c, s, H, W/s]`: every s-th column together, so that a row of outputs is one run."""
        stride = self.stride[1]
        if stride == 1:
            return images.contiguous().unsqueeze(2)
        return (
            F.pad(images, (0, -images.shape[3] % stride)).unflatten(3, (-1, stride)).permute(0, 1, 4, 2, 3).contiguous()
        )

    def rows(self, planes: Tensor, outputs: tuple[int, int]) -> Tensor:
        """Planes to a view `[b, c, kh, kw/s, s, oh, ow]`: the same windows as `windows`, output pixels last."""
        b, channels, stride = planes.shape[:3]
        image, channel, plane, row, column = planes.stride()
        shape = (b, channels, self.size[0], self.size[1] // stride, stride, *outputs)
        steps = (row * self.dilation[0], self.dilation[1], plane, row * self.stride[0], column)
        return planes.as_strided(shape, (image, channel, *steps), planes.storage_offset())

    def prefers_rows(self, images: Tensor) -> bool:
        """Whether `rows` copies faster than `windows`: longer runs, or images that lie the right way already."""
        stride, size, channels = self.stride[1], self.size, self.channels[0]
        if stride > 1 and (self.dilation[1] > 1 or size[1] % stride):
            return False
        oh, ow = self.outputs(*images.shape[2:])
        turned = images[0].numel() * TURN_COST
        windows = oh * ow * size[0] * RUN_COST
        rows = channels * math.prod(size) * oh * RUN_COST
        windows += 0 if images.is_contiguous(memory_format=torch.channels_last) else turned
        rows += 0 if images.is_contiguous() and stride == 1 else turned
        return rows < windows

    def offsets(self, height: int, width: int) -> Iterator[tuple[slice, slice]]:
        """For every place of the kernel: which rows and columns of the image it meets over all output pixels."""
        oh, ow = self.outputs(height, width)
        for i in range(self.size[0]):
            for j in range(self.size[1]):
                top, left = i * self.dilation[0], j * self.dilation[1]
                yield (
                    slice(top, top + self.stride[0] * (oh - 1) + 1, self.stride[0]),
                    slice(left, left + self.stride[1] * (ow - 1) + 1, self.stride[1]),
                )


class Convolutions(Term):
    """Gradients of a convolution's weight `[o, c, kh, kw]`: outer products whose positions are the output's pixels.

    The windows that the pixels see overlap, so they are never written out for the whole batch. Norms come either from
    gradients formed a cache-full of records at a time (and kept, if they fit, so that the weighted sum is one
    vector-matrix product), or from Gram matrices of *pixels*: `⟨window p, window q⟩ = Σ_δ ⟨x[p+δ], x[q+δ]⟩` needs only
    the pixels' own products, shifted and added. Without kept gradients the weighted sum is torch's own weight gradient.

    Args:
        kernel: the geometry.
        images: per call, padded inputs `[b, c, H, W]`, all of one shape.
        backprops: per call, `[b, o, oh, ow]`.
        workspace: where gradients are kept and windows written.
    """

    def __init__(
        self, kernel: Kernel, images: Sequence[Tensor], backprops: Sequence[Tensor], workspace: Workspace, owner: object
    ) -> None:
        self.kernel, self.images, self.backprops = kernel, images, backprops
        self._workspace, self._owner = workspace, owner
        self._kept: Tensor | None = None
        self._records, self._positions = len(backprops[0]), backprops[0][0, 0].numel()
        self._i = math.prod(kernel.size) * kernel.channels[0]
        self._numel = self._i * kernel.channels[1]
        self._outputs = kernel.outputs(*images[0].shape[2:])
        self._by_rows = kernel.prefers_rows(images[0])
        self._sources: list[Tensor] = []

    def squared_norms(self) -> Tensor:
        if self._gram_is_cheaper():
            pixels = len(self.images) * math.prod(self.images[0].shape[2:])
            return torch.cat([self._gram(*chunk) for chunk in self._workspace.chunks(self._records, pixels**2)])
        return self._materialised()

    def _keeps(self) -> bool:
        """Whether to keep the gradients: where forming them again costs more than a trip to main memory and back."""
        fits = self._records * self._numel <= self._workspace.keep_floats
        return fits and len(self.images) * self._positions > KEEP_COST

    def _gram_is_cheaper(self) -> bool:
        """Compare costs per record."""
        return self._gram_cost() < self._gradient_cost()

    def _gram_cost(self) -> float:
        (c, o), (height, width) = self.kernel.channels, self.images[0].shape[2:]
        pixels, positions = len(self.images) * height * width, len(self.images) * self._positions
        runs = positions**2 / self._outputs[1]
        shifts = math.prod(self.kernel.size) * (runs * RUN_COST + positions**2 * COPY_COST)
        return pixels**2 * c + positions**2 * o + shifts + WEIGHT_COST * positions * self._numel

    def _gradient_cost(self) -> float:
        positions = len(self.images) * self._positions
        runs = (
            positions * self._i / (self._outputs[1] if self._by_rows else self.kernel.size[1] * self.kernel.channels[0])
        )
        windows = runs * RUN_COST + positions * self._i * COPY_COST
        later = KEEP_COST if self._keeps() else WEIGHT_COST * positions
        return windows + (positions + COPY_COST + later) * self._numel

    def _materialised(self) -> Tensor:
        like = self.images[0]
        kept = self._workspace.take(self._owner, self._records, self._numel, like=like) if self._keeps() else None
        norms = []
        self._prepare()
        for start, stop in self._workspace.chunks(self._records, self._positions * self._i + self._numel):
            brief = self._workspace.take("gradients", stop - start, self._numel, like=like) if kept is None else kept
            found = self._products(start, stop, brief if kept is None else kept[start:stop])
            norms.append(norms_of(found))
        self._kept, self._sources = kept, []
        return torch.cat(norms)

    def _prepare(self) -> None:
        """Turn the images, if need be, into what windows are cut from; once for the whole batch."""
        turn = self.kernel.planes if self._by_rows else _channels_last
        self._sources = [turn(images) for images in self.images]

    def _products(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """`[m, numel]` gradients of some records, summed over the calls, in the order that was cheap to form."""
        o = self.kernel.channels[1]
        shape = (self._i, o) if self._by_rows else (o, self._i)
        found = self.images[0].new_empty(stop - start, *shape) if out is None else out.view(-1, *shape)
        for call, (images, backprops) in enumerate(zip(self._sources, self.backprops, strict=True)):
            windows, places = self._unfolded(images[start:stop]), backprops[start:stop].flatten(2)
            left, right = (windows, places.transpose(1, 2)) if self._by_rows else (places, windows)
            torch.baddbmm(found, left, right, out=found) if call else torch.bmm(left, right, out=found)
        return found.flatten(1)

    def _unfolded(self, images: Tensor) -> Tensor:
        """Windows written out: `[m, P, i]`, or `[m, i, P]` by rows."""
        view = self.kernel.rows(images, self._outputs) if self._by_rows else self.kernel.windows(images)
        written = self._workspace.take("windows", *view.shape, like=images).copy_(view)
        return written.view(len(images), *((self._i, -1) if self._by_rows else (-1, self._i)))

    def _gram(self, start: int, stop: int) -> Tensor:
        pixels = torch.cat([x[start:stop].flatten(2) for x in self.images], 2)
        backprops = torch.cat([b[start:stop].flatten(2) for b in self.backprops], 2)
        return gram_norms(self._window_products(pixels.transpose(1, 2) @ pixels), backprops.transpose(1, 2) @ backprops)

    def _window_products(self, products: Tensor) -> Tensor:
        """Products of pixels `[m, LHW, LHW]` to products of windows `[m, P, P]`; L calls of one shape."""
        calls, (height, width) = len(self.images), self.images[0].shape[2:]
        shaped = products.view(-1, calls, height, width, calls, height, width)
        total: Tensor | None = None
        for rows, columns in self.kernel.offsets(height, width):
            part = shaped[:, :, rows, columns, :, rows, columns]
            total = part.clone(memory_format=torch.contiguous_format) if total is None else total.add_(part)
        assert total is not None
        return total.flatten(4).flatten(1, 3)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        if self._kept is not None:
            kept = self._kept if clean else silenced(self._kept, weights)
            return self._as_weight((weights.to(kept.dtype) @ kept).unsqueeze(0)).flatten()
        parts = [self._weight_gradient(x, b, weights, clean) for x, b in zip(self.images, self.backprops, strict=True)]
        return sum(parts[1:], parts[0]).flatten()

    def _weight_gradient(self, images: Tensor, backprops: Tensor, weights: Tensor, clean: bool) -> Tensor:
        images, backprops = weighted(images, backprops, weights, clean)
        c, o = self.kernel.channels
        shape = images.new_empty(o, c, *self.kernel.size)
        geometry = (None, self.kernel.stride, (0, 0), self.kernel.dilation, False, (0, 0), 1)
        gradient = torch.ops.aten.convolution_backward(backprops, images, shape, *geometry, (False, True, False))
        return gradient[1]

    def _as_weight(self, gradients: Tensor) -> Tensor:
        """`[m, numel]` as they were formed to `[m, o, c, kh, kw]`."""
        c, o = self.kernel.channels
        if self._by_rows:
            return gradients.view(-1, c, *self.kernel.size, o).permute(0, 4, 1, 2, 3)
        return gradients.view(-1, o, *self.kernel.size, c).permute(0, 1, 4, 2, 3)

    def gradients(self, start: int, stop: int) -> Tensor:
        if not self._sources:
            self._prepare()
        return self._as_weight(self._products(start, stop)).flatten(1)

    def grouped(self, units: Units) -> Term:
        if self._records * self._numel <= self._workspace.keep_floats:
            return Vectors(self.gradients(0, self._records)).grouped(units)
        windows = [self.kernel.windows(_channels_last(x)).flatten(3).flatten(1, 2) for x in self.images]
        return Products(
            torch.cat(windows, 1), torch.cat([b.flatten(2).transpose(1, 2) for b in self.backprops], 1)
        ).grouped(units)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def scaled(values: Tensor, weights: Tensor) -> Tensor:
    """`[b, …]` values times `[b]` weights."""
    return values * weights.view(-1, *[1] * (values.dim() - 1)).to(values.dtype)


def silenced(values: Tensor, weights: Tensor) -> Tensor:
    """`values` `[b, …]` with zeros where a record has no weight, since 0·NaN is NaN."""
    return values.masked_fill((weights == 0).view(-1, *[1] * (values.dim() - 1)), 0)


def weighted(inputs: Tensor, backprops: Tensor, weights: Tensor, clean: bool) -> tuple[Tensor, Tensor]:
    """Both factors of a weighted sum of outer products; both silenced unless everything is finite."""
    backprops = scaled(backprops, weights)
    return (inputs, backprops) if clean else (silenced(inputs, weights), silenced(backprops, weights))


def norms_of(rows: Tensor) -> Tensor:
    """`[b]` squared norms of `[b, numel]`."""
    return torch.linalg.vector_norm(rows, dim=1).square()


def gram_norms(left: Tensor, right: Tensor) -> Tensor:
    """`[b]`: Σ_pq left·right of two Gram matrices `[b, P, P]`, raised where cancellation may have made it too small."""
    size = left.diagonal(dim1=1, dim2=2).sum(1) * right.diagonal(dim1=1, dim2=2).sum(1)
    sums = (left * right).sum((1, 2))
    return torch.where(sums < CANCELLATION * size, sums.clamp(min=0) + SLACK * size, sums)


def materialised_norms(terms: Sequence[Term], records: int, numel: int) -> Tensor:
    """`[b]` squared norms of gradients formed a few records at a time and forgotten.

    Several terms are those of a parameter that several layers share: gradients add before the norm is taken.
    """
    chunk = max(1, CHUNK_FLOATS // max(numel, 1))
    norms = []
    for start in range(0, records, chunk):
        parts = [term.gradients(start, min(start + chunk, records)) for term in terms]
        norms.append(norms_of(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)))
    return torch.cat(norms)
