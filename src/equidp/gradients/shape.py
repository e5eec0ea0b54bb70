"""Shape: on a GPU and in a secure run every private pass has a public number of rows, whatever the batch.

A GPU's libraries choose a kernel by the size of the batch, and two kernels round differently. One record less could
then change the rounding of every gradient in the batch: by B·r·C in the worst case for a relative error r, which is
half of Δ at B 512 and r 1e-3 (TF32). So rows that belong to nobody follow the records, and the model always sees one
shape. A record's gradient is then the same to the last bit, whatever records are beside it. What remains is the
rounding of the float32 sum over records.

On a CPU r is only 1e-7, and only some rows change their kernel. But at a kink of the model (ReLU, |z − y|) a last bit
can turn a whole gradient: 26·Δ were seen. On a CPU a row's place matters, too, in two ways:

- the last rows of a pass are rounded differently if they do not fill a vector of the processor, or a block of rows;
- MKL rounds a row of a layer with few outputs by its place modulo four, if the number of inputs is no multiple of four.
  One record less moved a sum by 132·Δ. With `MKL_CBWR` set this does not happen.

If a batch has more records than rows, the caller cuts it into chunks. If a single unit has more records, its pass has a
multiple of the rows. Only the gradient of that unit depends on how many.
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
"""The public number of rows is B plus so many times √B. A Poisson batch exceeds it once in 160 steps, on a CPU once in
44, and then takes another chunk. More rows would cost time in every step. Steps that are recorded have one chunk.
"""

EIGHTS, VECTORS = 8, 32
"""The number of rows is a multiple of 8 on a GPU, and of 32 on a CPU. 32 rows fill two vectors of 16 floats, whatever a
record's width is, and whole blocks of rows. `shares.py` does the same for each thread's share."""

MOST = (1 << 16) - 8
"""The most rows: CUDA starts at most 65,535 programs along the axis that kernels use for records."""


def public_rows(batch_size: float, physical: int | None, *, on_cpu: bool = False) -> int:
    """Return the number of rows of every private pass, computed from public numbers alone.

    Args:
        batch_size: expected number of records in a batch.
        physical: the most rows that the memory holds; None: no limit.
        on_cpu: whether the passes are on a CPU.
    """
    unit, spare = (VECTORS, ON_CPU) if on_cpu else (EIGHTS, OVERFLOW)
    rows = min(math.ceil((batch_size + spare * math.sqrt(batch_size)) / unit) * unit, MOST // unit * unit)
    if physical is None or physical >= rows:
        return rows
    return in_vectors(physical) if on_cpu else physical


def in_vectors(rows: int) -> int:
    """Return the largest multiple of 32 that is at most `rows`, but at least 32: for passes on a CPU."""
    return max(rows // VECTORS, 1) * VECTORS


@lru_cache(maxsize=1)  # warned once: MKL's mode is fixed when it first computes
def warn_of_rounding_by_place() -> None:
    """Warn if MKL rounds a row by its address in memory, although this package sets `MKL_CBWR` when it is imported."""
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
    """Return `values` with rows added up to the next multiple of `rows`.

    On a CPU the last row is repeated, because a model or a loss need not accept rows that no record has (classes from
    1, a text without a word). On a GPU zeros are added: a text without a word makes sure that there is always a mask,
    because attention without a mask uses another kernel.
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
    """Return the weights `[b]` with zeros added up to `[rows]`."""
    return torch.cat([weights, weights.new_zeros(rows - len(weights))])


class FixedRows:
    """Makes passes with a public number of rows. The rows that are added have weight 0.

    On a CPU the norms of units are taken after the passes, on one thread.
    """

    def __init__(self, passes: BookKeeping | Recordings, rows: int, shares: WholeShares) -> None:
        self.passes, self.rows, self.shares = passes, rows, shares
        self._found = 0  # units of the last batch
        self._weights = 0  # rows of its passes (or its units and one for the added rows)

    def norms(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Return the norms, as the passes do."""
        records, owners = len(labels), asked.get("owners")
        if records:
            features = torch.cat([padded(view, self.rows) for view in features.chunk(asked.get("views", 1))])
            labels = padded(labels, self.rows)
        nobody = owners is not None and len(labels) > records  # the added rows are one more unit
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
            # the number of units and the owners of records are private: no number of threads may follow from them
            with threads(1):
                found = self.passes.kept_norms(asked["owners"])
        self._weights = len(found)
        self._found = records if owners is None else len(found) - nobody
        return found[: self._found]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the weighted sum, as the passes do."""
        if len(weights) == self._found < self._weights:
            weights = weighed_nothing(weights, self._weights)
        return self.passes.weighted_sum(weights)
