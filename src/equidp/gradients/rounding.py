"""Rounding: sums of products and squares, computed so that no norm comes out too small.

A norm may be too large, but never too small. The clipping weight of a record follows from its norm, so a norm that is
too small would let the record exceed the sensitivity Δ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.workspace import Workspace

CANCELLATION = 1e-3  # a Gram sum below this share of its terms' size has lost digits (a larger share for wide products)
SLACK = 1e-6  # such a sum is raised by up to this share of its terms' size
PER_PRODUCT = 4e-9  # the share that a float32 sum of equal products loses for each product (measured up to 65,536)
LOST = 2.0**-126  # smaller squares lose digits in float32, at last all of them; this much is added for each instead
LONG_ROW = 1 << 15  # so many squares are summed in one go on a CPU, in some 32 partial sums
LONG_ROW_ON_GPU = 1 << 17  # the same on a GPU, whose kernel has at least 128 partial sums a row (read, not measured)


def alike(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`, `[…, n, m]`, with a rounding that does not depend on a record's place in the batch.

    MKL rounds a record's result differently if it begins at another address modulo four floats (or if the rows of its
    left factor do). One more record in the batch would move all later records. Where gradients cancel over 2,000
    positions, each could change by a thousandth of Δ. So sizes are padded to multiples of four. A GPU's library uses
    one kernel for all records.

    Args:
        left: `[…, n, k]`.
        right: `[…, k, m]`.
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
    """Return the squared norms `[…]` of rows `[…, numel]`.

    In float32 a sum of many squares comes out too small. With random entries the error is negligible (4e-7 for the
    longest rows that are summed in one go). With equal entries it would be 5e-5, and 2e-3 for a million entries, so
    longer rows are summed in parts. The squares of entries below 1e-19 vanish in float32. The most that they can be is
    added, which does not matter beside other entries.
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
    """Return the most that so many squares lose, as a tensor `()`: torch would convert a number at every addition."""
    return torch.tensor(squares * LOST, dtype=dtype, device="cpu")


def row_squares(rows: Sequence[Tensor], entries: Sequence[int], workspace: Workspace) -> tuple[Tensor, list[int]]:
    """The same as `kernels.row_squares`, by torch's operations: on a GPU one for each row, and two for all."""
    norms = [_norms_of_parts(row) for row in rows]
    parts = [norm.shape[1] for norm in norms]
    lost = [LOST * numel for count, those in zip(parts, entries, strict=True) for numel in (those, *[0] * (count - 1))]
    together = torch.cat(norms, 1).T
    return torch.addcmul(workspace.constant(tuple(lost), together).unsqueeze(1), together, together), parts


def _norms_of_parts(rows: Tensor) -> Tensor:
    """Return norms `[b, k]` of k parts of rows `[b, …]` on a GPU. Long rows have equal parts, if possible."""
    numel = rows[0].numel()
    if rows.dim() > 2 or numel <= LONG_ROW_ON_GPU:
        return torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.dim()))).unsqueeze(1)
    least = -(-numel // LONG_ROW_ON_GPU)
    equal = next((parts for parts in range(least, 4 * least + 1) if numel % parts == 0), 0)
    if equal:
        return torch.linalg.vector_norm(rows.unflatten(1, (equal, -1)), dim=2)
    return torch.stack([torch.linalg.vector_norm(part, dim=1) for part in rows.split(LONG_ROW_ON_GPU, dim=1)], 1)


def _norms_on_gpu(rows: Tensor) -> Tensor:
    """Return norms in two operations for rows of any length, if these can be divided into equal parts."""
    if rows.shape[-1] <= LONG_ROW_ON_GPU:
        return torch.linalg.vector_norm(rows, dim=-1)
    return torch.linalg.vector_norm(_norms_of_parts(rows.reshape(-1, rows.shape[-1])), dim=1).view(rows.shape[:-1])


def gram_slack(width: int) -> float:
    """Return the share of its terms' size by which `gram_norms` raises a sum at most; `width` as there."""
    return max(SLACK, PER_PRODUCT * width)


def gram_overstatement(left: Tensor, right: Tensor, width: int) -> Tensor:
    """Return by how much `gram_norms` may be too large, `[b]`.

    `gram_norms` raises a sum by the most that rounding may have taken from it. Rounding may as well have added as much;
    how much it does depends on the processor. It also adds what tiny entries may have lost, which matters only if one
    factor is almost zero and the other one is huge.

    Args:
        left: `[b]`, sums of the diagonals of the left Gram matrices.
        right: `[b]`, of the right ones.
        width: as of `gram_norms`.
    """
    return 2 * gram_slack(width) * left * right + beside_lost(left, right)


def beside_lost(left: Tensor, right: Tensor) -> Tensor:
    """Return the most `[b]` that entries too small for float32 add when multiplied by the other matrix's entries."""
    return LOST * 2.0**26 * (left + right + 1)


def gram_norms(left: Tensor, right: Tensor, width: int) -> Tensor:
    """Return Σ_pq left·right `[b]`, raised if cancellation may have made the sum too small.

    The more digits were lost, the more the sum is raised. This is continuous, so rounding cannot make it jump. The most
    that entries too small for float32 can add is added, too: they are multiplied by the other matrix's entries
    (P·max(i, o) up to 2²⁶).

    Args:
        left: Gram matrices `[b, P, P]`.
        right: Gram matrices `[b, P, P]`.
        width: i + o, the number of products that are summed in an entry of either.
    """
    total = left.diagonal(dim1=1, dim2=2).sum(1), right.diagonal(dim1=1, dim2=2).sum(1)
    size = total[0] * total[1]
    sums = (left * right).sum((1, 2)) + beside_lost(*total)
    known, slack = sums.clamp(min=0), gram_slack(width)
    few = CANCELLATION * slack / SLACK  # where the raise ends, less than a thousandth can have been lost
    return torch.where(sums < few * size, known + slack * (size - known / few), sums)


def gram_parts(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, each `[b]`, Σ_pq left·right of Gram matrices `[b, P, P]` and the sums of both diagonals."""
    return (left * right).sum((1, 2)), left.diagonal(dim1=1, dim2=2).sum(1), right.diagonal(dim1=1, dim2=2).sum(1)


def all_parts(chunks: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Join the parts of `gram_parts` of several chunks of records."""
    sums, left, right = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*chunks, strict=True))
    return sums, left, right


def gram_raised(sums: Tensor, left: Tensor, right: Tensor, slack: Tensor) -> Tensor:
    """Return `gram_norms` of L layers at once, `[L, b]`.

    A sum s is raised to s·(1 − slack/few) + slack·size if that is larger, where slack/few is SLACK/CANCELLATION. The
    two meet at the same point as in `gram_norms`, so the larger one is right on both sides.

    Args:
        sums: `[L, b]`, Σ_pq left·right.
        left: `[L, b]`, sums of the left diagonals.
        right: `[L, b]`, of the right ones.
        slack: `[L, 1]`, `gram_slack` of each layer.
    """
    sums = (left + right).add_(1).mul_(LOST * 2.0**26).add_(sums)
    more = sums.clamp(min=0).mul_(1 - SLACK / CANCELLATION).addcmul_(left * right, slack)
    return torch.maximum(sums, more)


def raised(squared: Tensor, sizes: Tensor) -> Tensor:
    """Return squared norms `[b]` of gradients, raised so that no norm is below √SLACK of the size of its summands.

    If the summands cancel, the gradient that a weighted sum holds is mere rounding. A norm of almost zero would give it
    the weight of a gradient of almost zero, and the rounding could exceed the bound.
    """
    return torch.maximum(squared, SLACK * sizes.square())
