"""Kernels: sums that a GPU takes in one launch where torch launches several operations (Triton).

They only sum what is there already, once read: squares of rows, products of Gram matrices, GroupNorm's gradients. Every
number of a sum is float32, added up in at least as many partial sums as torch's own kernels have, so that what
`rounding.py` says of a norm holds for theirs; nothing is added by atomics, whose order would change from run to run.
Their torch twins are in `rounding.py` and `layers.py`; who may use them says `fused.py`.
"""
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equidp.gradients import rounding

PIECE = 1 << 16  # floats of a row that one program sums, in BLOCK partial sums
BLOCK = 2048
MOST = 16  # tensors of one launch
TILE = 1 << 12  # floats of a group of channels that one program has at a time

LOST = tl.constexpr(rounding.LOST)


def launch(kernel: Any, like: Tensor, grid: tuple[int, int], *given: Any, **constants: Any) -> None:
    """Launch a kernel on the device of `like`, on torch's current stream."""
    with torch.cuda.device_of(like):
        kernel[grid](*given, **constants)


@triton.jit
def _squares(
    rows,
    lengths,
    strides,
    entries,
    starts,
    out,
    records,
    COUNT: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece, record = tl.program_id(0), tl.program_id(1)
    row, length, stride, start, lost = rows[0], lengths[0], strides[0], starts[0], entries[0]
    for i in tl.static_range(1, COUNT):  # whose piece it is; one body for all, as each would be compiled anew
        own = piece >= starts[i]
        row, length, stride = (
            tl.where(own, rows[i], row),
            tl.where(own, lengths[i], length),
            tl.where(own, strides[i], stride),
        )
        start, lost = tl.where(own, starts[i], start), tl.where(own, entries[i], lost)
    row += record.to(tl.int64) * stride
    first = (piece - start) * PIECE
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, PIECE, BLOCK):
        at = first + begin + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < length, other=0.0)
        total += value * value
    tl.store(out + piece * records + record, tl.sum(total, 0) + tl.where(piece == start, lost * LOST, 0.0))


def row_squares(rows: Sequence[Tensor], entries: Sequence[int]) -> tuple[Tensor, list[int]]:
    """`[K, b]`: squares of the pieces of rows `[b, …]`, added up; and of how many pieces each row is.

    Args:
        rows: float32, each record's entries without gaps, in any order.
        entries: of how many entries each row's squares may be lost; its first piece has them added.
    """
    records, lengths = len(rows[0]), [row[0].numel() for row in rows]
    pieces = [-(-length // PIECE) for length in lengths]
    out = rows[0].new_empty(sum(pieces), records)
    first = 0
    for some in _some(len(rows)):
        starts = tuple(accumulate(pieces[some], initial=0))
        part = out[first : first + starts[-1]]
        strides = tuple(row.stride(0) for row in rows[some])
        given = tuple(rows[some]), tuple(lengths[some]), strides, tuple(map(float, entries[some])), starts
        launch(
            _squares, out, (starts[-1], records), *given, part, records,
            COUNT=len(rows[some]), PIECE=PIECE, BLOCK=BLOCK,
        )  # fmt: skip
        first += starts[-1]
    return out, pieces


@triton.jit
def _products(
    lefts,
    rights,
    sides,
    places,
    counts,
    out,
    each,
    COUNT: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry, record = tl.program_id(0), tl.program_id(1)
    lefts_, rights_, side, place, count = lefts[0], rights[0], sides[0], places[0], counts[0]
    for i in tl.static_range(1, COUNT):
        own = entry >= i
        lefts_, rights_ = tl.where(own, lefts[i], lefts_), tl.where(own, rights[i], rights_)
        side, place, count = (
            tl.where(own, sides[i], side),
            tl.where(own, places[i], place),
            tl.where(own, counts[i], count),
        )
    numel = tl.where(record < count, side * side, 0)
    matrix = record.to(tl.int64) * numel
    total, left_total, right_total = (
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
    )
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
    """`[3, L, b]`: of each layer's Gram matrices the sum of products and the sums of both diagonals.

    Args:
        layers: of each its pairs `[m, P, P]`, of some records after the others.
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
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # a program has one record's group of channels: it reads the values three times, twice from a cache
    own = (tl.program_id(0).to(tl.int64) * GROUPS + tl.program_id(1)) * CHANNELS
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
    """`[b, c]` gradients of a GroupNorm's scale and of its shift, from its inputs and backprops `[b, c, …]`."""
    records, channels, pixels = len(values), values.shape[1], values[0, 0].numel()
    weight, bias = (values.new_empty(records, channels) for _ in range(2))
    high = triton.next_power_of_2(channels // groups)
    wide = min(triton.next_power_of_2(pixels), max(1, TILE // high))
    launch(
        _group_norm, weight, (records, groups), values.contiguous(), backprop.contiguous(), weight, bias, eps,
        CHANNELS=channels // groups, PIXELS=pixels, GROUPS=groups, HIGH=high, WIDE=wide,
    )  # fmt: skip
    return weight, bias


def _some(count: int) -> list[slice]:
    return [slice(start, start + MOST) for start in range(0, count, MOST)]
