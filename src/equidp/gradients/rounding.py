"""Rounding: sums of products and squares of which no norm comes out too small.

A norm may be overstated, never understated: a record's weight follows from it, and the bound Δ from the weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CANCELLATION = 1e-3  # a Gram sum below this share of its terms' size has lost digits (of wide products, below more)
SLACK = 1e-6  # and is raised by up to this share: a norm may be overstated, never understated (Δ depends on it)
PER_PRODUCT = 4e-9  # share that a float32 sum of equal products loses for each of them (measured up to 65,536)
LOST = 2.0**-126  # squares below this lose digits in float32, in the end all: what they may have been is added instead
LONG_ROW = 1 << 15  # squares summed in one go


def alike(left: Tensor, right: Tensor) -> Tensor:
    """`[…, n, m]`: `left @ right` of `[…, n, k]` and `[…, k, m]`, rounded alike wherever in a batch a record stands.

    MKL rounds by where in memory, modulo four floats, a record's result begins (or its left factor, if its rows are
    there). One more record would move all later ones, and change each by up to a thousandth of Δ where gradients cancel
    over 2,000 positions.
    """
    (n, k), m = left.shape[-2:], right.shape[-1]
    turned = left.stride(-1) != 1
    if n * m % 4 == 0 and (turned or n * k % 4 == 0):
        return left @ right
    if turned and m < n:
        return (left @ F.pad(right, (0, -m % 4)))[..., :m]
    return (F.pad(left, (0, 0, 0, -n % 4)) @ right)[..., :n, :]


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


def gram_slack(width: int) -> float:
    """Share of its terms' size by which `gram_norms` raises a sum at most; `width` as there."""
    return max(SLACK, PER_PRODUCT * width)


def gram_norms(left: Tensor, right: Tensor, width: int) -> Tensor:
    """`[b]`: Σ_pq left·right of two Gram matrices `[b, P, P]`, raised where cancellation may have made it too small.

    It is raised the more, the more was lost, so that rounding cannot make it jump; and by the most that entries too
    small for float32 can add: they would be multiplied by the other matrix's entries (P·max(i, o) up to 2²⁶).

    Args:
        width: i + o, of how many products the entries of both are sums.
    """
    total = left.diagonal(dim1=1, dim2=2).sum(1), right.diagonal(dim1=1, dim2=2).sum(1)
    size = total[0] * total[1]
    sums = (left * right).sum((1, 2)) + LOST * 2.0**26 * (total[0] + total[1] + 1)
    known, slack = sums.clamp(min=0), gram_slack(width)
    few = CANCELLATION * slack / SLACK  # so that where nothing is added any more, less than a thousandth may be lost
    return torch.where(sums < few * size, known + slack * (size - known / few), sums)


def raised(squared: Tensor, sizes: Tensor) -> Tensor:
    """`[b]` squared norms of gradients that were formed, at least √SLACK of the sizes of what they were summed from.

    Where that cancels, what a weighted sum holds of it is its own rounding, which a norm of next to nothing would let
    it multiply by a weight for next to nothing.
    """
    return torch.maximum(squared, SLACK * sizes.square())
