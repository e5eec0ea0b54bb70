"""Kernels: Triton kernels that do in one launch on a GPU what takes torch several.

Some kernels sum tensors that are in memory, and read them once: squares of rows, products of Gram matrices, GroupNorm's
gradients. Others form the gradients of convolutions, a tile at a time, without writing windows out.

All sums are float32, with at least as many partial sums as torch's own kernels have. So what `rounding.py` says of
norms holds for them, too. No kernel adds by atomics, whose order would change from run to run. The same operations in
torch are in `rounding.py`, `layers.py` and `convolutions.py`. `fused.py` decides which of them are used.
"""
# ruff: noqa: N803

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from equidp.gradients import rounding
from equidp.gradients.windows import Kernel

PIECE = 1 << 16  # floats of a row that one program sums, in BLOCK partial sums
BLOCK = 2048
MOST = 16  # the most tensors of one launch
TILE = 1 << 12  # floats of a group of channels that one program reads at a time
WIDE = 128  # the most rows and columns of a gradient that one program forms
NARROW = 32  # the same for products with all digits, which compile slowly; and for rows on a B200, where 64 do not
MOST_STAGES = 3  # the most blocks of pixels that a program loads ahead
PROGRAMS = 1 << 9  # number of programs into which a weighted sum is cut if there are few tiles

TURNED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether windows are read as [IN, BLOCK] and then transposed. Since Triton 3.7 neighbouring threads lie along a
block's last axis by default, before that along its first axis."""

LOST = tl.constexpr(rounding.LOST)


def launch(kernel: Any, like: Tensor, grid: tuple[int, int], *given: Any, **constants: Any) -> None:
    """Launch a kernel on the device of `like`, on torch's current stream, with programs that `_own` tells apart."""
    with torch.cuda.device_of(like):  # fused multiply-adds in all versions: from Triton 3.10 on they are off by default
        kernel[(math.prod(grid),)](*given, **constants, enable_fp_fusion=True)


@triton.jit
def _own(each):
    # which of a record's programs this is, and the record; on one axis, as CUDA's others end at 65,535 programs
    return tl.program_id(0) % each, (tl.program_id(0) // each).to(tl.int64)


@triton.jit
def _squares(
    rows, lengths, strides, entries, starts, out, records,
    COUNT: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece, record = _own(starts[COUNT])
    row, length, stride, start, lost = rows[0], lengths[0], strides[0], starts[0], entries[0]
    for i in tl.static_range(1, COUNT):  # find the row of this piece; the sum below is then compiled once for all rows
        own = piece >= starts[i]
        row, length = tl.where(own, rows[i], row), tl.where(own, lengths[i], length)
        stride, start = tl.where(own, strides[i], stride), tl.where(own, starts[i], start)
        lost = tl.where(own, entries[i], lost)
    row += record * stride
    first = (piece - start) * PIECE
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, PIECE, BLOCK):
        at = first + begin + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < length, other=0.0)
        total += value * value
    tl.store(out + piece * records + record, tl.sum(total, 0) + tl.where(piece == start, lost * LOST, 0.0))


def row_squares(rows: Sequence[Tensor], entries: Sequence[int], room: Sequence[int] = ()) -> tuple[Tensor, list[int]]:
    """Return the sums of squares of the pieces of rows, `[K, b]`, and the number of pieces of each row.

    Args:
        rows: `[b, …]` float32, each record's entries without gaps, in any order.
        entries: for each row, the number of squares that float32 may lose; as much is added to its first piece.
        room: numbers of pieces of more rows behind these, which the caller writes.
    """
    records, lengths = len(rows[0]), [row[0].numel() for row in rows]
    piece = max(min(PIECE, triton.next_power_of_2(max(lengths))), BLOCK)
    pieces = [-(-length // piece) for length in lengths] + list(room)
    out = rows[0].new_empty(sum(pieces), records)
    first = 0
    for some in _some(len(rows)):
        starts = tuple(accumulate(pieces[: len(rows)][some], initial=0))
        part = out[first : first + starts[-1]]
        strides = tuple(row.stride(0) for row in rows[some])
        given = tuple(rows[some]), tuple(lengths[some]), strides, tuple(map(float, entries[some])), starts
        launch(
            _squares, out, (starts[-1], records), *given, part, records,
            COUNT=len(rows[some]), PIECE=piece, BLOCK=BLOCK,
        )  # fmt: skip
        first += starts[-1]
    return out, pieces


@triton.jit
def _products(
    lefts, rights, sides, places, counts, out, each,
    COUNT: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry, record = _own(COUNT)
    lefts_, rights_, side, place, count = lefts[0], rights[0], sides[0], places[0], counts[0]
    for i in tl.static_range(1, COUNT):
        own = entry >= i
        lefts_, rights_ = tl.where(own, lefts[i], lefts_), tl.where(own, rights[i], rights_)
        side, place = tl.where(own, sides[i], side), tl.where(own, places[i], place)
        count = tl.where(own, counts[i], count)
    numel = tl.where(record < count, side * side, 0)
    matrix = record * numel
    total, left_total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    right_total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, LONGEST, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        left = tl.load(lefts_ + matrix + at, mask=at < numel, other=0.0)
        right = tl.load(rights_ + matrix + at, mask=at < numel, other=0.0)
        on_diagonal = at % (side + 1) == 0
        total += left * right
        left_total += tl.where(on_diagonal, left, 0.0)
        right_total += tl.where(on_diagonal, right, 0.0)
    to = out + place + record
    tl.store(to, tl.sum(total, 0), mask=record < count)
    tl.store(to + each, tl.sum(left_total, 0), mask=record < count)
    tl.store(to + 2 * each, tl.sum(right_total, 0), mask=record < count)


def gram_parts(layers: Sequence[Sequence[tuple[Tensor, Tensor]]], records: int) -> Tensor:
    """Return for each layer's Gram matrices the sum of products and the sums of both diagonals, `[3, L, b]`.

    Args:
        layers: for each layer the pairs `[m, P, P]`, of some records after the others.
        records: b, the sum of a layer's m.
    """
    out = layers[0][0][0].new_empty(3, len(layers), records)
    pairs: list[tuple[Tensor, Tensor]] = []
    places: list[int] = []
    for layer, given in enumerate(layers):
        counts = accumulate((len(left) for left, _ in given), initial=0)
        places += [layer * records + start for start, _ in zip(counts, given, strict=False)]
        pairs += given
    for some in _some(len(pairs)):
        lefts, rights = (tuple(one.contiguous() for one in both) for both in zip(*pairs[some], strict=True))
        sides, sizes = tuple(one.shape[1] for one in lefts), tuple(map(len, lefts))
        longest = triton.next_power_of_2(max(sides) ** 2)
        launch(
            _products, out, (len(lefts), max(sizes)),
            lefts, rights, sides, tuple(places[some]), sizes, out, len(layers) * records,
            COUNT=len(lefts), LONGEST=longest, BLOCK=min(1024, longest),
        )  # fmt: skip
    return out


@triton.jit
def _group_norm(
    values, backprops, weight, bias, eps,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # a program takes one group of channels of one record: it reads the values three times, twice from a cache
    own = tl.program_id(0).to(tl.int64) * CHANNELS
    channel, pixel = tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]
    at = (own + channel) * PIXELS + pixel
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for begin in range(0, PIXELS, WIDE):
        total += tl.load(values + at + begin, mask=(channel < CHANNELS) & (begin + pixel < PIXELS), other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / (CHANNELS * PIXELS)
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for begin in range(0, PIXELS, WIDE):
        there = (channel < CHANNELS) & (begin + pixel < PIXELS)
        off = tl.where(there, tl.load(values + at + begin, mask=there, other=0.0) - mean, 0.0)
        total += off * off
    scale = 1 / tl.sqrt(tl.sum(tl.sum(total, 1), 0) / (CHANNELS * PIXELS) + eps)
    shifts, scales = tl.zeros([HIGH, WIDE], tl.float32), tl.zeros([HIGH, WIDE], tl.float32)
    for begin in range(0, PIXELS, WIDE):
        there = (channel < CHANNELS) & (begin + pixel < PIXELS)
        back = tl.load(backprops + at + begin, mask=there, other=0.0)
        shifts += back
        scales += back * (tl.load(values + at + begin, mask=there, other=0.0) - mean)
    place, there = own + tl.arange(0, HIGH), tl.arange(0, HIGH) < CHANNELS
    tl.store(weight + place, tl.sum(scales, 1) * scale, mask=there)
    tl.store(bias + place, tl.sum(shifts, 1), mask=there)


def group_norm(values: Tensor, backprop: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of a GroupNorm's scale and shift, `[b, c]` each, from inputs and backprops `[b, c, …]`."""
    records, channels, pixels = len(values), values.shape[1], values[0, 0].numel()
    weight, bias = (values.new_empty(records, channels) for _ in range(2))
    high = triton.next_power_of_2(channels // groups)
    wide = min(triton.next_power_of_2(pixels), max(1, TILE // high))
    launch(
        _group_norm, weight, (groups, records), values.contiguous(), backprop.contiguous(), weight, bias, eps,
        CHANNELS=channels // groups, PIXELS=pixels, HIGH=high, WIDE=wide,
    )  # fmt: skip
    return weight, bias


@triton.jit
def _multiplied(
    image, backprop, limit, out, place, first, total, positions, outputs, channels, height, width,
    down, along, apart, aside, top, left, ACROSS: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # add to a tile of one record's gradient what the next output pixels contribute
    pixel, kernel = first + tl.arange(0, BLOCK), place % (ROWS * COLUMNS)
    known = (out < outputs)[:, None] & (pixel < limit)[None, :]
    one = tl.load(backprop + out[:, None] * positions + pixel[None, :], mask=known, other=0.0)
    # as [BLOCK, IN], or as [IN, BLOCK] to be transposed: neighbouring threads are to read neighbouring pixels
    of_pixels: tl.constexpr = 0 if TURNED else 1
    of_places: tl.constexpr = 1 - of_pixels
    known = (pixel < limit).expand_dims(of_pixels) & (place < channels * ROWS * COLUMNS).expand_dims(of_places)
    if FLAT:  # a window is the pixel itself
        at = pixel.expand_dims(of_pixels) + (place * positions).expand_dims(of_places)
    else:  # ACROSS is a constant for the compiler, because a thread divides by it for every pixel
        row, column = pixel // ACROSS * down - top, pixel % ACROSS * along - left  # of a window's first pixel
        lower, farther = kernel // COLUMNS * apart, kernel % COLUMNS * aside
        if PADDED:  # read as unsigned, a negative number is large, so one comparison covers both ends
            rows = row.expand_dims(of_pixels) + lower.expand_dims(of_places)
            columns = column.expand_dims(of_pixels) + farther.expand_dims(of_places)
            known = known & (rows.to(tl.uint32, bitcast=True) < height) & (columns.to(tl.uint32, bitcast=True) < width)
        seen = (place // (ROWS * COLUMNS) * height + lower) * width + farther
        at = (row * width + column).expand_dims(of_pixels) + seen.expand_dims(of_places)
    other = tl.load(image + at, mask=known, other=0.0)
    if TURNED:
        other = tl.trans(other)
    return tl.dot(one, other, total, input_precision=PRECISION)


@triton.jit
def _form(
    images, backprops, squares, gradients, stride, lost, records,
    positions, outputs, channels, height, width, down, along, apart, aside, top, left,
    KEEP: tl.constexpr, BLOCKS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ACROSS: tl.constexpr,
    FLAT: tl.constexpr, TURNED: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seen = channels * ROWS * COLUMNS
    tile, record = _own(tl.cdiv(outputs, OUT) * tl.cdiv(seen, IN))
    positions = positions // ALIGNED * ALIGNED  # tells the compiler that rows begin at 16 bytes, and may be read so
    out = tile // tl.cdiv(seen, IN) * OUT + tl.arange(0, OUT)
    place = tile % tl.cdiv(seen, IN) * IN + tl.arange(0, IN)
    image, backprop = images + record * (channels * height * width), backprops + record * (outputs * positions)
    total = tl.zeros([OUT, IN], tl.float32)
    for block in range(BLOCKS):
        total = _multiplied(
            image, backprop, positions, out, place, block * BLOCK, total, positions, outputs, channels, height, width,
            down, along, apart, aside, top, left, ACROSS, FLAT, TURNED, ROWS, COLUMNS, PADDED, BLOCK, PRECISION,
        )  # fmt: skip
    sums = tl.sum(tl.sum(total * total, 1), 0) + tl.where(tile == 0, lost, 0.0)
    tl.store(squares + tile * records + record, sums)
    if KEEP:
        to = gradients + record * stride + out[:, None] * seen + place[None, :]
        tl.store(to, total, mask=(out < outputs)[:, None] & (place < seen)[None, :])


@triton.jit
def _weighted(
    images, backprops, weights, sums, records,
    positions, outputs, channels, height, width, down, along, apart, aside, top, left,
    EACH: tl.constexpr, BLOCKS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ACROSS: tl.constexpr,
    FLAT: tl.constexpr, TURNED: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seen = channels * ROWS * COLUMNS
    tile, share = _own(tl.cdiv(outputs, OUT) * tl.cdiv(seen, IN))
    positions = positions // ALIGNED * ALIGNED
    out = tile // tl.cdiv(seen, IN) * OUT + tl.arange(0, OUT)
    place = tile % tl.cdiv(seen, IN) * IN + tl.arange(0, IN)
    total, own = tl.zeros([OUT, IN], tl.float32), tl.zeros([OUT, IN], tl.float32)
    for step in range(EACH * BLOCKS):  # one loop for records and pixels, so that the next ones are loaded meanwhile
        record = share * EACH + step // BLOCKS
        weight = tl.load(weights + record, mask=record < records, other=0.0)
        image, backprop = images + record * (channels * height * width), backprops + record * (outputs * positions)
        limit = tl.where(weight != 0, positions, 0)  # a record of weight 0 is not read, because 0 · NaN would be NaN
        own = _multiplied(
            image, backprop, limit, out, place, step % BLOCKS * BLOCK, own, positions, outputs, channels, height, width,
            down, along, apart, aside, top, left, ACROSS, FLAT, TURNED, ROWS, COLUMNS, PADDED, BLOCK, PRECISION,
        )  # fmt: skip
        ends = step % BLOCKS == BLOCKS - 1  # the record's gradient is complete, and the same as for its norm
        total += tl.where(ends, weight, 0.0) * own
        own = tl.where(ends, 0.0, own)
    to = sums + share * (outputs * seen) + out[:, None] * seen + place[None, :]
    tl.store(to, total, mask=(out < outputs)[:, None] & (place < seen)[None, :])


def products() -> str:
    """Return the present precision of products in cuDNN's convolutions: `tf32` or `ieee` (torch may say `none`)."""
    return "tf32" if cast(Any, torch.backends.cudnn).conv.fp32_precision == "tf32" else "ieee"


@dataclass(frozen=True)
class Tile:
    """How a program forms its part of a gradient: `rows` outputs by `columns` inputs of a window.

    It takes so many output `pixels` at a time, and loads so many blocks of them at once (`stages`).
    """

    rows: int
    columns: int
    pixels: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Gradients of a convolution's weight, formed in tiles that a program holds in its registers.

    Products have the precision of cuDNN's convolutions: TF32, unless that is switched off. So a gradient may have fewer
    digits. But norm and sum are taken of the same gradient, with all of its digits, so no sum exceeds what its norm
    allows.

    Attributes:
        kernel: the geometry.
        images: `[b, c, H, W]`, without their padding.
        backprops: `[b, o, oh, ow]`.
        padding: numbers of zeros above and to the left of an image.
        padded: whether there are zeros on any side, also below and to the right.
        precision: of products; decided once, because it must be the same for a norm and a sum.
        chosen: a tile to use instead of the one that fits the gradient's size, to compare their speed.
    """

    kernel: Kernel
    images: Tensor
    backprops: Tensor
    padding: tuple[int, int]
    padded: bool
    precision: str = field(default_factory=products)
    chosen: Tile | None = None

    @property
    def here(self) -> bool:
        """Whether this device can form gradients in tiles."""
        return self.tile.stages > 0

    @property
    def count(self) -> int:
        """Number of tiles of one gradient."""
        return -(-self.kernel.channels[1] // self.tile.rows) * -(-self.kernel.fan_in // self.tile.columns)

    @property
    def tile(self) -> Tile:
        """The part of a gradient that one program forms."""
        if self.chosen is not None:
            return self.chosen
        most = min(WIDE, NARROW) if self.precision == "ieee" else WIDE
        sides = (self.kernel.channels[1], self.kernel.fan_in)
        rows, columns = (min(max(triton.next_power_of_2(side), 16), most) for side in sides)
        rows = min(rows, NARROW) if capability(self.images.device) == 10 else rows
        pixels = 32 if self.backprops.shape[2:].numel() > 16 else 16
        warps = 8 if rows * columns > WIDE * WIDE // 2 else 4
        stages = min(MOST_STAGES, shared_memory(self.images.device) // (4 * pixels * (rows + columns)))
        return Tile(rows, columns, pixels, warps, stages)

    def form(self, squares: Tensor, gradients: Tensor | None) -> None:
        """Write each tile's sum of squares to `squares [count, b]`, and gradients to `[b, numel]` if that is given."""
        keep = gradients if gradients is not None else squares
        lost, records = self.kernel.numel * rounding.LOST, len(self.images)
        launch(
            _form, squares, (self.count, records), *self._factors(), squares, keep, keep.stride(0), lost, records,
            *self._geometry(), KEEP=gradients is not None, **self._how(),
        )  # fmt: skip

    def weighted_sum(self, weights: Tensor, programs: int | None = None) -> Tensor:
        """Return Σ w_i g_i, `[numel]`, of gradients that are formed again. Records of weight 0 are not read.

        The work is cut into `programs` or more (None: `PROGRAMS`), as far as there are records.
        """
        records = len(self.images)
        each = -(-records // min(records, -(-(programs or PROGRAMS) // self.count)))
        shares = -(-records // each)
        sums = weights.new_empty(shares, self.kernel.numel)
        launch(
            _weighted, sums, (self.count, shares), *self._factors(), weights, sums, records, *self._geometry(),
            EACH=each, **self._how(),
        )  # fmt: skip
        return sums[0] if shares == 1 else sums.sum(0)

    def _factors(self) -> tuple[Tensor, Tensor]:
        return self.images.contiguous(), self.backprops.contiguous()

    def _geometry(self) -> tuple[int, ...]:
        """Return sizes that are no constants. Code depends on which are 1 or multiples of 16, to read rows fast."""
        kernel, pixels = self.kernel, self.backprops.shape[2:]
        shape = (pixels.numel(), kernel.channels[1], kernel.channels[0], *self.images.shape[2:])
        return (*shape, *kernel.stride, *kernel.dilation, *self.padding)

    def _how(self) -> dict[str, Any]:
        pixels, tile = self.backprops.shape[2:], self.tile
        return {
            "BLOCKS": -(-pixels.numel() // tile.pixels),
            "OUT": tile.rows,
            "IN": tile.columns,
            "ACROSS": pixels[1],
            "FLAT": self.kernel.size == (1, 1) and pixels == self.images.shape[2:] and not self.padded,
            "TURNED": TURNED,
            "ALIGNED": math.gcd(pixels.numel(), 4),
            "ROWS": self.kernel.size[0],
            "COLUMNS": self.kernel.size[1],
            "PADDED": self.padded,
            "BLOCK": tile.pixels,
            "PRECISION": self.precision,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


@cache
def capability(device: torch.device) -> int:
    """Return the first number of the device's compute capability; 8 where there is no CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8


@cache
def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory of a program; 0 if the device has no tensor cores for TF32."""
    if device.type != "cuda":
        return 1 << 17  # Triton's interpreter, or no kernels at all
    facts: Any = torch.cuda.get_device_properties(device)
    return int(facts.shared_memory_per_block_optin) if facts.major >= 8 else 0


@triton.jit
def _silence(values, finite, stride, length, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    piece, record = _own(tl.cdiv(length, PIECE))
    if tl.load(finite + record) == 0:
        row = values + record * stride
        for begin in range(0, PIECE, BLOCK):
            at = piece * PIECE + begin + tl.arange(0, BLOCK)
            tl.store(row + at, tl.zeros([BLOCK], tl.float32), mask=at < length)


def silence(values: Tensor, finite: Tensor) -> None:
    """Write zeros into the rows of `values [b, n]` for records whose norm is not finite, as `finite [b]` says."""
    (records, length), flags = values.shape, finite.view(torch.int8)
    launch(
        _silence, values, (-(-length // PIECE), records), values, flags, values.stride(0), length,
        PIECE=PIECE, BLOCK=BLOCK,
    )  # fmt: skip


def _some(count: int) -> list[slice]:
    return [slice(start, start + MOST) for start in range(0, count, MOST)]
