"""Terms: the per-record gradients of one parameter, in whatever form is cheap to keep.

A term gives the squared norms and the weighted sum of b gradients. If nothing cheaper exists, it also gives the
gradients themselves. Most gradients are sums of outer products over *positions* p of a record (time steps, pixels,
repeated calls of a layer): `Σ_p B[p]ᵀ A[p]`. `A [b, P, i]` are the layer's inputs. `B [b, P, o]` are the backprops, the
gradients at its outputs. The norm follows from the gradient with `P·i·o` multiplications, or from two Gram matrices
with `P²·(i+o)`. `products`, `convolutions` and `lookups` have one class for each kind of layer, and `units` has the
means over a unit's records.

The tricks are those of Goodfellow (2015, norms from activations and backprops), Li et al. (2022, Gram matrices) and
Bu et al. (2023, book-keeping). The shapes of one record alone decide which of them gives a term's norms. The machine is
never timed for it, so a resumed run repeats every rounding. The number of records and their content have no part in it,
so no record's norm and weight depend on another record.

A float32 sum over many positions is rounded by up to 6e-9 of the size of each summand. If the summands cancel, this
rounding is all that is left. A sum that is taken in other steps than the norm is rounded differently, and the weight
would not fit it. So if there are many positions, a weighted sum uses the same gradients: they are kept, or formed again
in the same pieces. The records of a unit count as positions, too, and so do layers that share a parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from equidp.gradients.compiled import CompiledGradients
from equidp.gradients.rounding import LOST, SLACK, norms_of, raised

MANY = 100  # positions; with more of them a weighted sum uses the same gradients that norms were taken of
CHUNK_FLOATS = 1 << 20  # floats of gradients that are formed at a time only to take their norms (4 MiB)
CHUNK_FLOATS_ON_GPU = 1 << 26  # the same on a GPU, where so few would not be worth a launch (256 MiB)


class Gradients(ABC):
    """A batch's gradients of one parameter, one for each record or unit. They are asked for norms, then for a sum."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return the squared l2 norms `[b]` (or `[U]`), in float32 or float64."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        """Return Σ w_i g_i, `[numel]`.

        Args:
            weights: `[b]` (or `[U]`).
            silent: same shape, true where a weight is 0 and must silence even a gradient that is not finite; None if
                all norms are finite.
        """

    @abstractmethod
    def overstatement(self) -> Tensor:
        """Return by how much the squared norms may be too large if gradients cancel, `[b]` (or `[U]`)."""


class Term(Gradients):
    """The b per-record gradients of one parameter in one layer."""

    @abstractmethod
    def gradients(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the records `start` to `stop`, `[stop − start, numel]`."""

    def sizes(self) -> Tensor:
        """Return for each record the sum of its summands' norms, `[b]`: the gradient's own norm if it is no sum."""
        return self.squared_norms().sqrt()

    def overstatement(self) -> Tensor:
        return SLACK * self.sizes().square()


class Vectors(Term):
    """Gradients `[b, numel]` that are in memory already."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._squared: Tensor | None = None  # asked for twice if a bias's gradient is also a factor of the weight's

    def squared_norms(self) -> Tensor:
        self._squared = norms_of(self.values) if self._squared is None else self._squared
        return self._squared

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        return weights.to(self.values.dtype) @ silenced(self.values, silent)

    def gradients(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]


class Formed(Vectors):
    """Gradients `[b, numel]` that were summed over positions; `sizes` `[b]` are those of `Term.sizes`."""

    def __init__(self, values: Tensor, sizes: Tensor) -> None:
        super().__init__(values)
        self._sizes = sizes

    def squared_norms(self) -> Tensor:
        return raised(super().squared_norms(), self._sizes)

    def sizes(self) -> Tensor:
        return self._sizes


class Shared(Gradients):
    """The gradients of a parameter that several layers share. The layers' terms are added before the norm is taken."""

    def __init__(self, terms: Sequence[Term], records: int, numel: int) -> None:
        self._terms, self._records, self._numel = terms, records, numel

    def squared_norms(self) -> Tensor:
        return materialised_norms(self._terms, self._records, self._numel)

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        return formed_again(self._terms, weights, silent, self._numel)

    def overstatement(self) -> Tensor:
        return SLACK * sizes_of(self._terms).square()


def along_positions(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Return the positions of several calls one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def scaled(values: Tensor, weights: Tensor) -> Tensor:
    """Return values `[b, …]` times weights `[b]`."""
    return values * weights.view(-1, *[1] * (values.dim() - 1)).to(values.dtype)


def silenced(values: Tensor, silent: Tensor | None) -> Tensor:
    """Return `values` `[b, …]` with zeros for the records that `silent` `[b]` marks, because 0·NaN is NaN."""
    return values if silent is None else values.masked_fill(silent.view(-1, *[1] * (values.dim() - 1)), 0)


def some_of(silent: Tensor | None, records: slice | Tensor) -> Tensor | None:
    return None if silent is None else silent[records]


def weighted_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w_i·row i of `[b, n]`, `[n]`.

    A product with one vector uses one thread. So the records are halved for two threads. Each thread probably wrote its
    half, and may still have it in its cache.
    """
    half = len(rows) // 2
    halves, shares = rows[: 2 * half].unflatten(0, (2, half)), weights[: 2 * half].view(2, 1, half).to(rows.dtype)
    total = torch.bmm(shares, halves).sum((0, 1))
    return total if 2 * half == len(rows) else total.add_(rows[-1] * weights[-1])


def added_in_order(rows: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w_i·row i `[n]` of rows `[b, n]` on a CPU, one row after the other.

    Each row is added by fused multiplications and additions. This is what `CompiledGradients.weighted_sum` does, so the
    sum is the same to the last bit. A row of weight 0 adds nothing, whatever is in it.
    """
    total = rows.new_zeros(rows.shape[1])
    for row, weight in zip(rows.unbind(), weights.float().tolist(), strict=True):
        if weight:
            total.add_(row, alpha=weight)
    return total


@lru_cache(maxsize=1)
def adds_fused() -> bool:
    """Whether torch's additions on this machine are fused with their multiplications, as `added_in_order` needs it.

    They are not where torch uses no vector instructions (on an old processor, or with `ATEN_CPU_CAPABILITY=default`).
    The compiled code fuses its own whatever torch does.
    """
    one = 1 + 2.0**-12  # its square is 1 + 2⁻¹¹ + 2⁻²⁴, of which float32 drops the end
    rows = torch.tensor([[-1 - 2.0**-11], [one]], dtype=torch.float32, device="cpu").expand(2, 65).contiguous()
    return bool((added_in_order(rows, torch.tensor([1.0, one], device="cpu")) == 2.0**-24).all())


def weighted(inputs: Tensor, backprops: Tensor, weights: Tensor, silent: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both factors of a weighted sum of outer products, silenced; the backprops are weighted."""
    return silenced(inputs, silent), silenced(scaled(backprops, weights), silent)


def compiled_norms(gradients: CompiledGradients, keep: Tensor | None = None) -> Tensor:
    """Return squared norms `[b]` of gradients that are formed in registers; also write these to `keep [b, numel]`."""
    squared, sizes = gradients.squared_norms(keep)
    # an upper bound of the sizes: `Convolutions.sizes` says why
    return raised(squared.add_(gradients.kernel.numel * LOST), sizes.mul_(math.sqrt(gradients.kernel.seen)))


def materialised_norms(terms: Sequence[Term], records: int, numel: int, keep: Tensor | None = None) -> Tensor:
    """Return squared norms `[b]` of the sums of the terms' gradients. These are formed for a few records at a time.

    The gradients are also written to `keep` `[b, numel]`, if it is given.
    """
    sizes, norms = sizes_of(terms), list[Tensor]()
    for some in pieces(records, numel, sizes.device):
        rows = rows_of(terms, some)
        norms.append(norms_of(rows))
        if keep is not None:
            keep[some].copy_(rows)
    return raised(torch.cat(norms), sizes)


def formed_again(
    terms: Sequence[Term], weights: Tensor, silent: Tensor | None, numel: int, kept: Tensor | None = None
) -> Tensor:
    """Return the terms' weighted sum `[numel]`, of the gradients that `materialised_norms` formed.

    They are in `kept` `[b, numel]`, or are formed again if it is None. Both give the same digits.
    """
    sums = (
        Vectors(rows_of(terms, some) if kept is None else kept[some]).weighted_sum(weights[some], some_of(silent, some))
        for some in pieces(len(weights), numel, weights.device)
    )
    return reduce(Tensor.add_, sums)


def formed_at_once(numel: int, device: torch.device) -> int:
    """Return for how many records gradients are formed at a time only to take their norms."""
    floats = CHUNK_FLOATS if device.type == "cpu" else CHUNK_FLOATS_ON_GPU
    return max(1, floats // max(numel, 1))


def pieces(records: int, numel: int, device: torch.device) -> Iterator[slice]:
    chunk = formed_at_once(numel, device)
    return (slice(start, min(start + chunk, records)) for start in range(0, records, chunk))


def sizes_of(terms: Sequence[Term]) -> Tensor:
    return summed([term.sizes() for term in terms])


def summed(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def rows_of(terms: Sequence[Term], records: slice) -> Tensor:
    return summed([term.gradients(records.start, records.stop) for term in terms])
