"""Rounding: sums of products and squares of which no norm comes out too small.

A norm may be overstated, never understated: a record's weight follows from it, and the bound Δ from the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.workspace import Workspace

CANCELLATION = 1e-3  # a Gram sum below this share of its terms' size has lost digits (of wide products, below more)
SLACK = 1e-6  # and is raised by up to this share: a norm may be overstated, never understated (Δ depends on it)
PER_PRODUCT = 4e-9  # share that a float32 sum of equal products loses for each of them (measured up to 65,536)
LOST = 2.0**-126  # squares below this lose digits in float32, in the end all: what they may have been is added instead
LONG_ROW = 1 << 15  # squares summed in one go on a CPU, in some 32 partial sums
LONG_ROW_ON_GPU = 1 << 17  # and on a GPU, whose kernel has 128 partial sums for a row or more (read, not measured)


def alike(left: Tensor, right: Tensor) -> Tensor:
    """`[…, n, m]`: `left @ right` of `[…, n, k]` and `[…, k, m]`, rounded alike wherever in a batch a record stands.

    MKL rounds by where in memory, modulo four floats, a record's result begins (or its left factor, if its rows are
    there). One more record would move all later ones, and change each by up to a thousandth of Δ where gradients cancel
    over 2,000 positions. A GPU's library has one kernel for all records.
    """
    if left.device.type != "cpu":
        return left @ right
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
    if rows.device.type != "cpu":
        norms = _norms_on_gpu(rows)
    elif rows.shape[-1] <= LONG_ROW:
        norms = torch.linalg.vector_norm(rows, dim=-1)
    else:
        parts = [torch.linalg.vector_norm(part, dim=-1) for part in rows.split(LONG_ROW, dim=-1)]
        norms = torch.linalg.vector_norm(torch.stack(parts, dim=-1), dim=-1)
    return norms.square().add_(lost(rows.shape[-1], norms.dtype))


@lru_cache(maxsize=256)
def lost(squares: int, dtype: torch.dtype) -> Tensor:
    """`()` on the CPU: the most that so many squares lose. A Python number would be made a tensor at every addition."""
    return torch.tensor(squares * LOST, dtype=dtype, device="cpu")


def row_squares(rows: Sequence[Tensor], entries: Sequence[int], workspace: Workspace) -> tuple[Tensor, list[int]]:
    """As `kernels.row_squares`, by torch's operations: one for each row on a GPU, and two for all."""
    norms = [_norms_of_parts(row) for row in rows]
    parts = [norm.shape[1] for norm in norms]
    lost = [LOST * numel for count, those in zip(parts, entries, strict=True) for numel in (those, *[0] * (count - 1))]
    together = torch.cat(norms, 1).T
    return torch.addcmul(workspace.constant(tuple(lost), together).unsqueeze(1), together, together), parts


def _norms_of_parts(rows: Tensor) -> Tensor:
    """`[b, k]` norms of the parts of `[b, …]` on a GPU: long rows have equal ones, where there is a number of them."""
    numel = rows[0].numel()
    if rows.dim() > 2 or numel <= LONG_ROW_ON_GPU:
        return torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.dim()))).unsqueeze(1)
    least = -(-numel // LONG_ROW_ON_GPU)
    equal = next((parts for parts in range(least, 4 * least + 1) if numel % parts == 0), 0)
    if equal:
        return torch.linalg.vector_norm(rows.unflatten(1, (equal, -1)), dim=2)
    return torch.stack([torch.linalg.vector_norm(part, dim=1) for part in rows.split(LONG_ROW_ON_GPU, dim=1)], 1)


def _norms_on_gpu(rows: Tensor) -> Tensor:
    """Two operations, however long the rows are, where these have equal parts."""
    if rows.shape[-1] <= LONG_ROW_ON_GPU:
        return torch.linalg.vector_norm(rows, dim=-1)
    return torch.linalg.vector_norm(_norms_of_parts(rows.reshape(-1, rows.shape[-1])), dim=1).view(rows.shape[:-1])


def gram_slack(width: int) -> float:
    """Share of its terms' size by which `gram_norms` raises a sum at most; `width` as there."""
    return max(SLACK, PER_PRODUCT * width)


def gram_overstatement(left: Tensor, right: Tensor, width: int) -> Tensor:
    """`[b]`: by how much `gram_norms` may be too large, of Gram matrices whose diagonals have these sums `[b]`.

    It raises a sum by what rounding may have taken from it; rounding may as well have added so much. How much it really
    adds or takes depends on the processor. And it adds what may have been lost, which shows where one factor is nothing
    and the other is huge.
    """
    return 2 * gram_slack(width) * left * right + beside_lost(left, right)


def beside_lost(left: Tensor, right: Tensor) -> Tensor:
    """`[b]`: the most that entries too small for float32 can add, multiplied by the other matrix's entries."""
    return LOST * 2.0**26 * (left + right + 1)


def gram_norms(left: Tensor, right: Tensor, width: int) -> Tensor:
    """`[b]`: Σ_pq left·right of two Gram matrices `[b, P, P]`, raised where cancellation may have made it too small.

    It is raised the more, the more was lost, so that rounding cannot make it jump; and by the most that entries too
    small for float32 can add: they would be multiplied by the other matrix's entries (P·max(i, o) up to 2²⁶).

    Args:
        width: i + o, of how many products the entries of both are sums.
    """
    total = left.diagonal(dim1=1, dim2=2).sum(1), right.diagonal(dim1=1, dim2=2).sum(1)
    size = total[0] * total[1]
    sums = (left * right).sum((1, 2)) + beside_lost(*total)
    known, slack = sums.clamp(min=0), gram_slack(width)
    few = CANCELLATION * slack / SLACK  # so that where nothing is added any more, less than a thousandth may be lost
    return torch.where(sums < few * size, known + slack * (size - known / few), sums)


def gram_parts(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[b]` each: Σ_pq left·right of two Gram matrices `[b, P, P]`, and the sums of their diagonals."""
    return (left * right).sum((1, 2)), left.diagonal(dim1=1, dim2=2).sum(1), right.diagonal(dim1=1, dim2=2).sum(1)


def all_parts(chunks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all records, from those of some at a time."""
    sums, left, right = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*chunks, strict=True))
    return sums, left, right


def gram_raised(sums: Tensor, left: Tensor, right: Tensor, slack: Tensor) -> Tensor:
    """`[L, b]`: as `gram_norms`, of L layers at once, from their sums and the sums of both diagonals; `slack` `[L, 1]`.

    Where a sum is raised the other branch is the larger one, as both meet where they change: s against
    s·(1 − slack/few) + slack·size, and slack/few is SLACK/CANCELLATION.
    """
    sums = (left + right).add_(1).mul_(LOST * 2.0**26).add_(sums)
    more = sums.clamp(min=0).mul_(1 - SLACK / CANCELLATION).addcmul_(left * right, slack)
    return torch.maximum(sums, more)


def raised(squared: Tensor, sizes: Tensor) -> Tensor:
    """`[b]` squared norms of gradients that were formed, at least √SLACK of the sizes of what they were summed from.

    Where that cancels, what a weighted sum holds of it is its own rounding, which a norm of next to nothing would let
    it multiply by a weight for next to nothing.
    """
    return torch.maximum(squared, SLACK * sizes.square())
