"""Terms: the per-record gradients of one parameter, in whatever form is cheap to keep.

A term knows three things about the b gradients it stands for: their squared norms, their weighted sum and, only where
nothing cheaper exists, the gradients themselves. Most gradients are sums of outer products over *positions* p of a
record (time steps, pixels, repeated calls of a layer): `Σ_p B[p]ᵀ A[p]`, `A [b, P, i]` what went in, `B [b, P, o]` what
came back. Such a norm can be had from the gradient, `P·i·o` multiplications, or from two Gram matrices, `P²·(i+o)`.

The tricks are those of Goodfellow (2015, norms from activations and backprops), Li et al. (2022, Gram matrices) and
Bu et al. (2023, book-keeping). Which of them gives a term's norms is decided by the shapes of one record alone: never
by timing the machine, so that a resumed run repeats every rounding, and never by how many records there are or who they
are, so that nobody's norm, hence weight, is another's doing.

A float32 sum over many positions rounds, by up to 6e-9 of its terms' sizes for each of them, and where they cancel that
is all there is. One that takes other steps than the norm did rounds otherwise, and the weight belongs to the norm. So
where positions are many, a weighted sum forms again what the norms were taken of, in the same pieces. A unit's records
are such positions too, and so are layers that share a parameter.
"""

from __future__ import annotations

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.compiled import CompiledGradients, compiled
from equidp.gradients.windows import COPY_COST, RUN_COST, Kernel, Layout, cheapest
from equidp.gradients.workspace import Workspace

CANCELLATION = 1e-3  # a Gram sum below this share of its terms' size has lost digits (of wide products, below more)
SLACK = 1e-6  # and is raised by up to this share: a norm may be overstated, never understated (Δ depends on it)
PER_PRODUCT = 4e-9  # share that a float32 sum of equal products loses for each of them (measured up to 65,536)
LOST = 2.0**-126  # squares below this lose digits in float32, in the end all: what they may have been is added instead
MANY = 100  # positions; beyond, a weighted sum is one of the very gradients that norms were taken of
LONG_ROW = 1 << 15  # squares summed in one go
TYPICAL_RECORDS = 64  # of a batch, where the number would decide how a norm is formed: the batch's own is private
KEPT_SUMS = 1 << 22  # floats of a parameter's sums over units that are kept for the weighted sum (16 MiB)
CHUNK_FLOATS = 1 << 20  # floats of gradients formed at a time only to take their norms (4 MiB)
# What things cost on a CPU, in multiplications of a matrix product (measured):
KEEP_COST = 20  # a float written to main memory and read again
WEIGHT_COST = 1.3  # a multiplication in torch's own weight gradient


@dataclass(frozen=True)
class Units:
    """Which records belong to which unit of privacy; a unit's gradient is the mean of its records' gradients.

    Attributes:
        owners: `[b]` int64, record to unit, ascending.
        counts: `[U]` records per unit.
    """

    owners: Tensor
    counts: Tensor

    @classmethod
    def of(cls, owners: Tensor) -> Units:
        """Count the records of each unit.

        Raises:
            EquidpError: for owners that do not ascend.
        """
        if (owners[1:] < owners[:-1]).any():
            raise EquidpError("A unit's records must stand together in a batch, units in ascending order.")
        return cls(owners, torch.bincount(owners))

    def share(self) -> Tensor:
        """`[b]`: a record's share in its unit's mean."""
        return 1 / self.counts[self.owners].to(torch.float32)

    def ranges(self, size: int) -> Iterator[tuple[slice, slice]]:
        """So many units at a time: their numbers, and their records'. Reads the counts back from the device."""
        starts = [0, *itertools.accumulate(self.counts.tolist())]
        for first in range(0, len(self.counts), size):
            last = min(first + size, len(self.counts))
            yield slice(first, last), slice(starts[first], starts[last])


class Gradients(ABC):
    """What a batch's gradients of one parameter are asked for, of records or of units: norms first, then a sum."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """`[b]` (or `[U]`) squared l2 norms, in float32 or float64."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        """`[numel]`: Σ w_i g_i.

        Args:
            weights: `[b]` (or `[U]`).
            silent: of the same shape, which weights are 0, and must silence even a gradient that is not finite; None
                where all are finite.
        """


class Term(Gradients):
    """The b per-record gradients of one parameter, as one layer gives them."""

    @abstractmethod
    def gradients(self, start: int, stop: int) -> Tensor:
        """`[stop − start, numel]`: the gradients of some records, materialised."""

    def sizes(self) -> Tensor:
        """`[b]`: the norms of what each gradient is a sum of, added up: its own norm if nothing cancelled."""
        return self.squared_norms().sqrt()


class Vectors(Term):
    """Gradients that are there already: `[b, numel]`."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._squared: Tensor | None = None  # asked for twice where a layer's bias is also a factor of its weight

    def squared_norms(self) -> Tensor:
        self._squared = norms_of(self.values) if self._squared is None else self._squared
        return self._squared

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        return weights.to(self.values.dtype) @ silenced(self.values, silent)

    def gradients(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]


class Outer(Term):
    """Gradients `b aᵀ` of shape `[o, i]`, one position each: from `a [b, i]` and `b [b, o]`."""

    def __init__(self, inputs: Tensor, backprops: Vectors) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        # a factor of lost squares would be multiplied by the other, which may be huge: each has its own share back
        squared = norms_of(self.inputs) * self.backprops.squared_norms()
        return squared.add_(LOST)

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        inputs, backprops = weighted(self.inputs, self.backprops.values, weights, silent)
        return (backprops.T @ inputs).view(-1)

    def gradients(self, start: int, stop: int) -> Tensor:
        return self._products().gradients(start, stop)

    def _products(self) -> Products:
        return Products([self.inputs.unsqueeze(1)], [self.backprops.values.unsqueeze(1)])


class Products(Term):
    """Gradients `B[b]ᵀ A[b]` of shape `[o, i]`, from `A [b, P, i]` and `B [b, P, o]`.

    Args:
        inputs, backprops: per call, whose positions follow one another.
    """

    def __init__(self, inputs: Sequence[Tensor], backprops: Sequence[Tensor]) -> None:
        self._calls = inputs, backprops
        self._records, self._widths = len(inputs[0]), (inputs[0].shape[2], backprops[0].shape[2])
        self._positions = sum(x.shape[1] for x in inputs)

    @cached_property
    def _compiled(self) -> CompiledGradients | None:
        """Asked for only where gradients are formed: to compile takes longer than many a run's Gram matrices."""
        if len({x.shape[1] for x in self._calls[0]}) > 1:
            return None
        rows = ([x.unsqueeze(1) for x in calls] for calls in self._calls)  # images of one row, a pixel per position
        return compiled(Kernel((1, 1), (1, 1), (1, 1), self._widths), *rows)

    @cached_property
    def inputs(self) -> Tensor:
        """`[b, P, i]`."""
        return along_positions(self._calls[0])

    @cached_property
    def backprops(self) -> Tensor:
        """`[b, P, o]`."""
        return along_positions(self._calls[1])

    def squared_norms(self) -> Tensor:
        if self._by_gram():
            return self._gram()
        if self._compiled is not None:
            return compiled_norms(self._compiled)
        return materialised_norms([self], self._records, math.prod(self._widths))

    def _by_gram(self) -> bool:
        return self._positions <= MANY and self._positions * sum(self._widths) < math.prod(self._widths)

    def sizes(self) -> Tensor:
        return (norms_of(self.inputs).sqrt() * norms_of(self.backprops).sqrt()).sum(1)

    def _gram(self) -> Tensor:
        left = alike(self.inputs, self.inputs.transpose(1, 2))
        right = alike(self.backprops, self.backprops.transpose(1, 2))
        return gram_norms(left, right, sum(self._widths))

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        if not self._by_gram() and self._compiled is not None:
            return self._turned(self._compiled.weighted_sum(weights))
        if self._positions > MANY:
            return formed_again([self], weights, silent, math.prod(self._widths))
        inputs, backprops = weighted(self.inputs, self.backprops, weights, silent)
        return (backprops.flatten(0, 1).T @ inputs.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        if self._compiled is not None:
            return self._turned(self._compiled.gradients(start, stop))
        return alike(self.backprops[start:stop].transpose(1, 2), self.inputs[start:stop]).flatten(1)

    def _turned(self, gradients: Tensor) -> Tensor:
        """`[…, i·o]` to `[…, o·i]`."""
        return gradients.unflatten(-1, self._widths).transpose(-1, -2).flatten(-2)


class GroupedProducts(Term):
    """One product per group of channels: `A [b, g, P, i]`, `B [b, g, P, o]`, gradients `[g, o, i]`."""

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        return materialised_norms([self], len(self.inputs), self._numel())

    def _numel(self) -> int:
        return self.inputs.shape[1] * self.inputs.shape[3] * self.backprops.shape[3]

    def sizes(self) -> Tensor:
        return (norms_of(self.inputs).sqrt() * norms_of(self.backprops).sqrt()).sum((1, 2))

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        if self.inputs.shape[2] > MANY:
            return formed_again([self], weights, silent, self._numel())
        inputs, backprops = weighted(self.inputs, self.backprops, weights, silent)
        inputs, backprops = inputs.transpose(0, 1).flatten(1, 2), backprops.transpose(0, 1).flatten(1, 2)
        return (backprops.transpose(1, 2) @ inputs).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        return alike(self.backprops[start:stop].transpose(2, 3), self.inputs[start:stop]).flatten(1)


class Lookups(Term):
    """Gradients of a table `[rows, D]` read at `ids [b, P]`: row r gets `Σ_{p: ids[p]=r} B[p]`, `B [b, P, D]`."""

    def __init__(self, ids: Tensor, backprops: Tensor, rows: int) -> None:
        self.ids, self.backprops, self.rows = ids, backprops, rows

    def squared_norms(self) -> Tensor:
        if self.ids.shape[1] > MANY:
            pieces = _pieces(len(self.ids), self.backprops[0].numel())
            return raised(torch.cat([norms_of(self._read_rows(some)) for some in pieces]), self.sizes())
        products = alike(self.backprops, self.backprops.transpose(1, 2))
        same = (self.ids.unsqueeze(2) == self.ids.unsqueeze(1)).to(products.dtype)
        return gram_norms(products, same, self.backprops.shape[2])

    def sizes(self) -> Tensor:
        return norms_of(self.backprops).sqrt().sum(1)

    def _read_rows(self, some: slice) -> Tensor:
        """`[m, P·D]`: gradients of the rows that a record reads, others left out; with all digits."""
        ids, order = self.ids[some].sort(1)
        row = F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))  # which of its own, by position
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
        """A row's positions are added one after the other: many of them with all digits, as tables are dear to form."""
        return backprops.double() if self.ids.shape[1] > MANY else backprops


class Convolutions(Term):
    """Gradients of a convolution's weight `[o, c, kh, kw]`: outer products whose positions are the output's pixels.

    The windows that the pixels see overlap, so they are never written out for the whole batch. Norms come either from
    gradients, formed in registers or a cache-full of records at a time (and kept, if they fit, so that the weighted sum
    is one vector-matrix product), or from Gram matrices of *pixels*: `⟨window p, window q⟩ = Σ_δ ⟨x[p+δ], x[q+δ]⟩`
    needs only the pixels' own products, shifted and added. Without kept gradients the weighted sum forms them again,
    or, where positions are few and nothing is compiled, is torch's own weight gradient.

    Args:
        kernel: the geometry.
        images: per call, padded inputs `[b, c, H, W]`, all of one shape.
        backprops: per call, `[b, o, oh, ow]`.
        workspace: where gradients are kept and windows written.
    """

    def __init__(
        self, kernel: Kernel, images: Sequence[Tensor], backprops: Sequence[Tensor], workspace: Workspace, owner: object
    ) -> None:
        self._outputs = kernel.channels[1]
        height, width = images[0].shape[2:]
        channels_last = ([x.permute(0, 2, 3, 1) for x in calls] for calls in (images, backprops))
        self._compiled = compiled(kernel, *channels_last)
        odd = self._outputs == 1 and math.prod(kernel.outputs(height, width)) % 4
        if self._compiled is None and (odd or kernel.numel % 4):  # see `alike`
            spare = -self._outputs % 4
            kernel = replace(kernel, channels=(kernel.channels[0], self._outputs + spare))
            backprops = [F.pad(b, (0, 0, 0, 0, 0, spare)) for b in backprops]
        self._cut, self._copies = cheapest(kernel, height, width, tuple(map(Layout.of, images)))
        self.kernel, self.images, self.backprops = kernel, images, backprops
        self._workspace, self._owner = workspace, owner
        self._kept: Tensor | None = None
        self._factors: list[tuple[Tensor, Tensor]] = []
        self._records, self._positions = len(backprops[0]), len(images) * math.prod(self._cut.outputs)
        self._pixels = len(images) * math.prod(images[0].shape[2:])
        self._numel = kernel.numel

    def squared_norms(self) -> Tensor:
        if self._positions <= MANY and self._gram_cost() < self._gradient_cost():
            return torch.cat([self._gram(*chunk) for chunk in self._workspace.chunks(self._records, self._pixels**2)])
        return self._materialised()

    def _keeps(self, records: int = TYPICAL_RECORDS) -> bool:
        """Whether to keep the gradients: where forming them again costs more than a trip to main memory and back.

        Of a batch's own records only where they are kept may depend, never how norms are formed.
        """
        return records * self._numel <= self._workspace.keep_floats and self._positions > KEEP_COST

    def _gram_cost(self) -> float:
        """Per record, as `_gradient_cost`."""
        c, o = self.kernel.channels
        shift = self._positions**2 / self._cut.outputs[1] * RUN_COST + self._positions**2 * COPY_COST
        products = self._pixels**2 * c + self._positions**2 * o
        return products + math.prod(self.kernel.size) * shift + self._sum_cost()

    def _gradient_cost(self) -> float:
        copies = 0 if self._compiled is not None else self._copies + COPY_COST * self._numel
        later = KEEP_COST * self._numel if self._keeps() else self._sum_cost()
        return copies + self._positions * self._numel + later

    def _sum_cost(self) -> float:
        """Per record, of a weighted sum without kept gradients."""
        return self._positions * self._numel * (1 if self._compiled is not None else WEIGHT_COST)

    def _materialised(self) -> Tensor:
        if self._keeps(self._records):
            self._kept = self._workspace.take(self._owner, self._records, self._numel, like=self.images[0])
        if self._compiled is not None:
            return compiled_norms(self._compiled, self._kept)
        sizes = self.sizes()  # before what is formed drives images and backprops out of the caches
        return raised(torch.cat([norms_of(found) for _, found in self._pieces()]), sizes)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Some records at a time and their gradients `[m, numel]`, kept or soon overwritten."""
        for start, stop in self._workspace.chunks(self._records, self._cut.scratch() + self._numel):
            if self._kept is None:
                found = self._workspace.take("gradients", stop - start, self._numel, like=self.images[0])
            else:
                found = self._kept[start:stop]
            self._form(start, stop, found)
            yield slice(start, stop), found
        self._factors = []

    def sizes(self) -> Tensor:
        # at most: Σ_p |window p|·|backprop p| ≤ √(Σ |window p|²·Σ |backprop p|²), and so many windows see each pixel
        pairs = zip(self.images, self.backprops, strict=True)
        return _sum([(self.kernel.seen * _squares(x) * _squares(b)).sqrt() for x, b in pairs])

    def _form(self, start: int, stop: int, out: Tensor) -> None:
        """Write the gradients of some records, summed over the calls, to `out [m, numel]`."""
        self._factors = self._factors or [
            (self._cut.view(x), b.flatten(2)) for x, b in zip(self.images, self.backprops, strict=True)
        ]
        for call, (view, backprops) in enumerate(self._factors):
            self._cut.multiply(view[start:stop], backprops[start:stop], out, call > 0, self._workspace)

    def _gram(self, start: int, stop: int) -> Tensor:
        pixels = torch.cat([x[start:stop].flatten(2) for x in self.images], 2)
        backprops = torch.cat([b[start:stop].flatten(2) for b in self.backprops], 2)
        left = self._window_products(alike(pixels.transpose(1, 2), pixels))
        right = alike(backprops.transpose(1, 2), backprops)
        return gram_norms(left, right, self.kernel.fan_in + self.kernel.channels[1])

    def _window_products(self, products: Tensor) -> Tensor:
        """Products of pixels `[m, LHW, LHW]` to products of windows `[m, P, P]`; L calls of one shape."""
        calls, (height, width) = len(self.images), self.images[0].shape[2:]
        shaped = products.unflatten(2, (calls, height, width)).unflatten(1, (calls, height, width))
        total: Tensor | None = None
        for rows, columns in self.kernel.offsets(height, width):
            part = shaped[:, :, rows, columns, :, rows, columns]
            total = part.clone(memory_format=torch.contiguous_format) if total is None else total.add_(part)
        assert total is not None
        return total.flatten(4).flatten(1, 3)

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        if self._kept is not None:
            return self._as_weight(weighted_rows(silenced(self._kept, silent), weights))
        if self._compiled is not None:
            return self._as_weight(self._compiled.weighted_sum(weights))
        if self._positions > MANY:
            pieces = ((silenced(found, _some(silent, some)), weights[some]) for some, found in self._pieces())
            formed = (weighted_rows(found, shares) for found, shares in pieces)
            return self._as_weight(reduce(Tensor.add_, formed))
        parts = [self._weight_gradient(x, b, weights, silent) for x, b in zip(self.images, self.backprops, strict=True)]
        return _sum(parts)[: self._outputs].flatten()

    def _as_weight(self, gradients: Tensor) -> Tensor:
        """`[…, numel]` in the weight's own order."""
        source = self._compiled or self._cut
        return source.as_weight(gradients)[:, : self._outputs].reshape(*gradients.shape[:-1], -1)

    def _weight_gradient(self, images: Tensor, backprops: Tensor, weights: Tensor, silent: Tensor | None) -> Tensor:
        images, backprops = weighted(images, backprops, weights, silent)
        c, o = self.kernel.channels
        shape = images.new_empty(o, c, *self.kernel.size)
        geometry = (None, self.kernel.stride, (0, 0), self.kernel.dilation, False, (0, 0), 1)
        with as_precise_as_norms():
            gradient = torch.ops.aten.convolution_backward(backprops, images, shape, *geometry, (False, True, False))
        return gradient[1]

    def gradients(self, start: int, stop: int) -> Tensor:
        if self._compiled is not None:
            return self._as_weight(self._compiled.gradients(start, stop))
        room = self.images[0].new_empty(stop - start, self._numel)  # the caller keeps it: no buffer
        self._form(start, stop, room)
        return self._as_weight(room)


def refuse_autocast(kind: str) -> None:
    """Refuse to take norms or sums in half precision; to be called before either.

    There one of 512 records that agree moved the sum by 1.6 times what it may, and a gradient that cancels to 6 % had a
    thirtieth of its norm.

    Args:
        kind: the device's; asking it for that takes longer than all else here.

    Raises:
        EquidpError: inside `torch.autocast`.
    """
    if torch.is_autocast_enabled(kind):
        raise EquidpError(
            "Inside torch.autocast norms and sums of gradients would be taken in half precision: leave it out, and set "
            'precision="bf16" (training.precision=bf16), which runs the model alone under it.'
        )


def refuse_short_products(device: torch.device) -> None:
    """Refuse to begin where torch is told to shorten float32's products, or to make new tensors of other numbers, noise
    among them. Switched, it would be for all threads.

    Raises:
        EquidpError: with a lower precision of products than torch's default, or another default type than float32.
    """
    if torch.get_default_dtype() != torch.float32:
        name = str(torch.get_default_dtype()).removeprefix("torch.")
        raise EquidpError(
            f"torch is told to make new tensors {name}, noise and sums among them, which are reckoned in float32: "
            "leave out torch.set_default_dtype, and give your own tensors their dtype."
        )
    cpu: Any = torch.backends.mkldnn  # torch does not declare them
    kinds = (torch.backends.cuda.matmul,) if device.type == "cuda" else (cpu.matmul, cpu.conv)  # cuDNN's: see below
    if any(kind.fp32_precision not in ("ieee", "none") for kind in kinds):
        raise EquidpError(
            "torch is told to shorten float32's products, and norms and sums of gradients want all digits: leave out "
            "torch.set_float32_matmul_precision, torch.backends' fp32_precision and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE; "
            'for cheaper passes there is precision="bf16" (training.precision=bf16).'
        )


_TF32 = threading.RLock()
"""The switch is the process's: of two threads the first to leave would turn it on again under the other.

Reentrant, as a model is tried out without TF32 as a whole, weighted sums included.
"""


@contextmanager
def as_precise_as_norms() -> Iterator[None]:
    """Without TF32, which cuDNN's convolutions use by default: it would let a sum exceed the norms that it was clipped
    by, by up to a thousandth.
    """
    cudnn = torch.backends.cudnn
    with _TF32:
        before, cudnn.allow_tf32 = cudnn.allow_tf32, False
        try:
            yield
        finally:
            cudnn.allow_tf32 = before


def along_positions(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Calls' positions one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def alike(left: Tensor, right: Tensor) -> Tensor:
    """`[…, n, m]`: `left @ right` of `[…, n, k]` and `[…, k, m]`, rounded alike wherever in a batch a record stands.

    To MKL it matters where in memory, modulo four floats, a record's result begins, or its left factor if that has its
    rows there. A record that joins would move all that come after it: by a thousandth of Δ each, where their gradients
    cancel over 2,000 positions.
    """
    (n, k), m = left.shape[-2:], right.shape[-1]
    turned = left.stride(-1) != 1
    if n * m % 4 == 0 and (turned or n * k % 4 == 0):
        return left @ right
    if turned and m < n:
        return (left @ F.pad(right, (0, -m % 4)))[..., :m]
    return (F.pad(left, (0, 0, 0, -n % 4)) @ right)[..., :n, :]


def scaled(values: Tensor, weights: Tensor) -> Tensor:
    """`[b, …]` values times `[b]` weights."""
    return values * weights.view(-1, *[1] * (values.dim() - 1)).to(values.dtype)


def silenced(values: Tensor, silent: Tensor | None) -> Tensor:
    """`values` `[b, …]` with zeros where `[b]` says that a record has no weight, since 0·NaN is NaN."""
    return values if silent is None else values.masked_fill(silent.view(-1, *[1] * (values.dim() - 1)), 0)


def _some(silent: Tensor | None, records: slice | Tensor) -> Tensor | None:
    return None if silent is None else silent[records]


def weighted_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """`[n]`: Σ w_i·row i of `[b, n]`. A product with one vector keeps one thread busy: it takes two, each with half of
    the records, which it has written and may have in its cache still.
    """
    half = len(rows) // 2
    halves, shares = rows[: 2 * half].unflatten(0, (2, half)), weights[: 2 * half].view(2, 1, half).to(rows.dtype)
    total = torch.bmm(shares, halves).sum((0, 1))
    return total if 2 * half == len(rows) else total.add_(rows[-1] * weights[-1])


def weighted(inputs: Tensor, backprops: Tensor, weights: Tensor, silent: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both factors of a weighted sum of outer products, both silenced."""
    return silenced(inputs, silent), silenced(scaled(backprops, weights), silent)


def norms_of(rows: Tensor) -> Tensor:
    """`[…]` squared norms of `[…, numel]`.

    In float32 a sum of many squares comes out too small. For random entries that is nothing (4e-7 for the longest rows
    summed in one go); were all entries equal it would be 5e-5, and 2e-3 for a million. Longer rows are summed in parts.
    Entries below 1e-19 have no squares: their most is added, which is nothing beside any others.
    """
    if rows.shape[-1] <= LONG_ROW:
        norms = torch.linalg.vector_norm(rows, dim=-1)
    else:
        parts = [torch.linalg.vector_norm(part, dim=-1) for part in rows.split(LONG_ROW, dim=-1)]
        norms = torch.linalg.vector_norm(torch.stack(parts, dim=-1), dim=-1)
    return norms.square().add_(rows.shape[-1] * LOST)


def gram_norms(left: Tensor, right: Tensor, width: int) -> Tensor:
    """`[b]`: Σ_pq left·right of two Gram matrices `[b, P, P]`, raised where cancellation may have made it too small.

    By the more the more was lost, so that rounding cannot make it jump. And by the most that entries too small for
    float32 may have come to: they would have been multiplied by the other matrix's (P·max(i, o) up to 2²⁶).

    Args:
        width: i + o, of how many products the entries of both are sums.
    """
    total = left.diagonal(dim1=1, dim2=2).sum(1), right.diagonal(dim1=1, dim2=2).sum(1)
    size = total[0] * total[1]
    sums = (left * right).sum((1, 2)) + LOST * 2.0**26 * (total[0] + total[1] + 1)
    known, slack = sums.clamp(min=0), max(SLACK, PER_PRODUCT * width)
    few = CANCELLATION * slack / SLACK  # so that where nothing is added any more, less than a thousandth may be lost
    return torch.where(sums < few * size, known + slack * (size - known / few), sums)


def raised(squared: Tensor, sizes: Tensor) -> Tensor:
    """`[b]` squared norms of gradients that were formed, at least √SLACK of the sizes of what they were summed from.

    Where that cancels, what a weighted sum holds of it is its own rounding, which a norm of next to nothing would let
    it multiply by a weight for next to nothing.
    """
    return torch.maximum(squared, SLACK * sizes.square())


def compiled_norms(gradients: CompiledGradients, keep: Tensor | None = None) -> Tensor:
    """`[b]` squared norms of gradients formed in registers, and written to `keep [b, numel]` too if it is given."""
    squared, sizes = gradients.squared_norms(keep)
    # sizes as in `Convolutions.sizes`, which says why that is the most
    return raised(squared.add_(gradients.kernel.numel * LOST), sizes.mul_(math.sqrt(gradients.kernel.seen)))


def materialised_norms(terms: Sequence[Term], records: int, numel: int) -> Tensor:
    """`[b]` squared norms of gradients, the terms' sums, formed a few records at a time and forgotten."""
    norms = [norms_of(_rows(terms, some)) for some in _pieces(records, numel)]
    return raised(torch.cat(norms), _sizes(terms))


def formed_again(terms: Sequence[Term], weights: Tensor, silent: Tensor | None, numel: int) -> Tensor:
    """`[numel]`: the terms' weighted sum, of the gradients that `materialised_norms` formed and forgot."""
    pieces = ((Vectors(_rows(terms, some)), some) for some in _pieces(len(weights), numel))
    return reduce(Tensor.add_, (rows.weighted_sum(weights[some], _some(silent, some)) for rows, some in pieces))


def _pieces(records: int, numel: int) -> Iterator[slice]:
    chunk = max(1, CHUNK_FLOATS // max(numel, 1))
    return (slice(start, min(start + chunk, records)) for start in range(0, records, chunk))


class Shared(Gradients):
    """The gradients of a parameter that several layers share: theirs add before the norm is taken.

    Args:
        terms: of these layers.
        records: b.
        numel: of the parameter.
    """

    def __init__(self, terms: Sequence[Term], records: int, numel: int) -> None:
        self._terms, self._records, self._numel = terms, records, numel

    def squared_norms(self) -> Tensor:
        return materialised_norms(self._terms, self._records, self._numel)

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        return formed_again(self._terms, weights, silent, self._numel)


class UnitSums(Gradients):
    """The gradients of units with respect to one parameter: means of their records', formed one unit after the other.

    Gram matrices over a unit's positions would be cheaper, but as wide as the batch's widest unit, so that a unit's
    arrival would round, and at worst cancel, otherwise for all. A unit's records may cancel too: their sum is `raised`
    as a record's is, and the weighted sum is one of these very sums: in one over all of the batch's records a thousand
    that nearly cancel would round otherwise.

    Args:
        terms: of the parameter's layers; gradients of layers that share it add.
        units: of the batch.
        numel: of the parameter.
    """

    def __init__(self, terms: Sequence[Term], units: Units, numel: int) -> None:
        self._terms, self._units, self._numel = terms, units, numel
        # the one term whose gradients need not be formed for units of one record
        self._single = terms[0] if len(terms) == 1 and isinstance(terms[0], Outer) else None
        self._kept: list[tuple[slice | Tensor, Tensor]] | None = None

    def squared_norms(self) -> Tensor:
        counts, owners = self._units.counts, self._units.owners
        sizes = torch.zeros_like(counts, dtype=torch.float32).index_add_(0, owners, _sizes(self._terms).float())
        squared = torch.zeros_like(sizes)
        if self._single is not None:
            squared = self._single.squared_norms()[counts.cumsum(0) - 1]
        self._kept = list(self._formed()) if len(counts) * self._numel <= KEPT_SUMS else None
        for some, sums in self._kept or self._formed():
            squared[some] = norms_of(sums)
        return raised(squared, sizes) / counts.square()

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        counts = self._units.counts
        if self._single is not None:
            alone = (weights * (counts == 1))[self._units.owners]
            total = self._single.weighted_sum(alone, None if silent is None else alone == 0)
        else:
            total = torch.zeros(self._numel, device=weights.device)
        for some, sums in self._kept or self._formed():
            total += Vectors(sums).weighted_sum((weights / counts)[some], _some(silent, some))
        return total

    def _formed(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some units at a time, by number, and the sums of their records' gradients `[m, numel]`.

        All units; where single ones need no forming those of several records, units of equally many together.
        """
        units, chunk = self._units, max(1, CHUNK_FLOATS // max(self._numel, 1))
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
                sums.index_add_(0, units.owners[part] - some.start, _rows(self._terms, part).float())
            yield some, sums


def _sizes(terms: Sequence[Term]) -> Tensor:
    return _sum([term.sizes() for term in terms])


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def _squares(images: Tensor) -> Tensor:
    """`[b]` squared norms of `[b, c, H, W]`, in whichever order it lies in memory."""
    return torch.linalg.vector_norm(images, dim=(1, 2, 3)).square() + images[0].numel() * LOST


def _rows(terms: Sequence[Term], records: slice) -> Tensor:
    parts = [term.gradients(records.start, records.stop) for term in terms]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
