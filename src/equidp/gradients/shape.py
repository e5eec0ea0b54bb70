"""Shape: on a GPU and in a secure run every private pass has as many rows as a public number says, whatever the batch.

A GPU's libraries choose a kernel by the size of a batch, and two kernels round differently. One record less could then
change the rounding of everybody's gradient: B·r·C in the worst case for a relative error r, which is half of Δ at
B 512 and r 1e-3 (TF32). Here rows that stand for nobody follow the records, so that the model's passes see one shape. A
record's gradient is then the same, to the last bit, whoever else is in the batch. What is left is the rounding of the
float32 sum over records.

On a CPU r is 1e-7, and only some rows change their kernel. But where a model has kinks (ReLU, |z − y|) a last bit turns
a whole gradient: 26·Δ were seen. There the rows' places matter, too: the last ones of a pass are rounded otherwise
where they fill no vector, or no block of rows. And MKL rounds a row of a layer with few outputs by its place modulo
four, where inputs are no multiple of four: one record less moved a sum by 132·Δ. It does not where `MKL_CBWR` is set.

A batch with more records than rows is the caller's to cut into chunks. A unit that has more records alone gets a
multiple of the rows: only its own gradient depends on how many.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache, partial
from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.bookkeeping import Asked, BookKeeping
from equidp.gradients.recording import Recordings
from equidp.gradients.shares import WholeShares, threads

logger = logging.getLogger(__name__)

OVERFLOW, ON_CPU = 2.5, 2.0
"""A Poisson batch has more rows than the public number once in 160 steps, on a CPU once in 44: it then costs another
chunk, and every row above the expected number costs its share in every step. What is recorded has one chunk.
"""

EIGHTS, VECTORS = 8, 32
"""Rows of a pass come in so many, on a GPU and on a CPU: there two vectors of 16 floats, which are filled whatever a
record's width is, and whole blocks of rows. `shares.py` sees to those of each thread."""

MOST = (1 << 16) - 8
"""Programs that CUDA starts along the axis on which kernels have records: 65,535, in eights."""


def public_rows(batch_size: float, physical: int | None, *, on_cpu: bool = False) -> int:
    """Rows of every private pass: batches have `batch_size` records on average, memory at most `physical`; public."""
    unit, spare = (VECTORS, ON_CPU) if on_cpu else (EIGHTS, OVERFLOW)
    rows = min(math.ceil((batch_size + spare * math.sqrt(batch_size)) / unit) * unit, MOST // unit * unit)
    if physical is None or physical >= rows:
        return rows
    return in_vectors(physical) if on_cpu else physical


def in_vectors(rows: int) -> int:
    """So many rows or fewer, in whole vectors, but 32 at least: for passes on a CPU."""
    return max(rows // VECTORS, 1) * VECTORS


@lru_cache(maxsize=1)  # told once; it is set once and for all when MKL first computes
def warn_of_rounding_by_place() -> None:
    """Warn of an MKL that rounds a row by where in memory it begins; this package sets `MKL_CBWR` as it is imported."""
    generator = torch.Generator().manual_seed(0)
    for inputs in (5, 6, 9, 13) * 8:
        row, weight = (torch.randn(size, inputs, generator=generator, device="cpu") for size in (1, 5))
        rows = F.linear(row.repeat(VECTORS, 1), weight)
        if (rows != rows[:1]).any():
            logger.warning(
                "MKL rounds what it computes for a record by the record's place in its batch. One record less moves "
                "others by a last bit, and at a kink of the model by more than ε allows for. Import equidp before "
                "torch computes anything, or set the environment variable MKL_CBWR=AUTO."
            )
            return


def padded(values: Tensor, rows: int) -> Tensor:
    """`values` and more rows up to the next multiple of `rows`; as it is where nothing is missing.

    On a CPU the last row again: models and losses need not take what no record has (classes from 1, a text without a
    word). On a GPU zeros: a text without a word keeps a mask in place whoever else is there, and without one attention
    has another kernel.
    """
    missing = -len(values) % rows
    if not missing:
        return values
    longer = values.new_zeros(len(values) + missing, *values.shape[1:])
    longer[: len(values)].copy_(values)
    if values.is_cpu:
        longer[len(values) :].copy_(values[-1:])
    return longer


def weighed_nothing(weights: Tensor, rows: int) -> Tensor:
    """Weights `[b]` and zeros up to `[rows]`."""
    return torch.cat([weights, weights.new_zeros(rows - len(weights))])


class FixedRows:
    """Passes with a public number of rows, around others; rows after the batch's have weight 0.

    On a CPU, norms of units are taken after them, on one thread.
    """

    def __init__(self, passes: BookKeeping | Recordings, rows: int, shares: WholeShares) -> None:
        self.passes, self.rows, self.shares = passes, rows, shares
        self._found = 0  # units of the last batch
        self._weights = 0  # and rows that its weights have

    def norms(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """As of the passes."""
        records, owners = len(labels), asked.get("owners")
        if records:
            features = torch.cat([padded(view, self.rows) for view in features.chunk(asked.get("views", 1))])
            labels = padded(labels, self.rows)
        nobody = owners is not None and len(labels) > records  # one more unit, of no record
        if owners is not None and nobody:
            longer = (owners[-1:] + 1).expand(len(labels)).clone()
            longer[:records].copy_(owners)
            asked["owners"] = longer
        kind = ("norms", len(asked.get("iterates") or ()), owners is None)
        if owners is None or not features.is_cpu or not isinstance(self.passes, BookKeeping):
            work = partial(self.passes.norms, labels=labels, **asked)
            found = self.shares.passed(work, features, len(labels), *kind)
        else:
            self.shares.passed(partial(self.passes.keep, labels=labels, **asked), features, len(labels), *kind)
            # how many units there are and whose a record is are private: no number of threads may follow from them
            with threads(1):
                found = self.passes.kept_norms(asked["owners"])
        self._weights = len(found)
        self._found = records if owners is None else len(found) - nobody
        return found[: self._found]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As of the passes."""
        if len(weights) == self._found < self._weights:
            weights = weighed_nothing(weights, self._weights)
        return self.passes.weighted_sum(weights)
