"""Compiled convolutions: per-record gradients formed in registers, by machine code made for one layer's geometry.

torch has no operation for per-record gradients: it must write windows out, multiply them, write the gradients, and read
them again for their norms. Here a tile of a record's gradient (a few inputs by a vector or two of outputs) stays in
registers while the code goes over all of the record's output pixels. Then only what was asked for is written: the sum
of the tile's squares, the tile itself, or its part of the weighted sum. Windows are read from the images. LLVM
(llvmlite) compiles the code when a geometry is first used, which takes a tenth of a second. Vectors are as wide as the
processor's.

A tile always takes its pixels in the same order, by fused multiply-adds, for norms and for sums, and at any place of
the record in the batch. So the weighted sum is, to the last bit, a sum of the same gradients that norms were taken of.

The work is divided among torch's threads (`system/machine_code.py`): by records for norms, by tiles for a sum. A sum
adds the records in their order, whatever the number of threads. If nothing can be compiled, torch's operations are used
(`windows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from equidp.gradients.compiled.code import Code, Operands, code_for
from equidp.gradients.windows import Kernel

BEYOND_CACHES = 1 << 19
"""From so many floats on, their order is changed in two steps that copy whole runs. In one step each float would come
from another cache line."""

FLOATS: Any = {"dtype": torch.float32, "device": "cpu"}
"""Type and device of the tensors that the code reads and writes, whatever torch's defaults are."""


class CompiledGradients:
    """A batch's gradients of one convolution's weight, in the order `[kh, kw, c, o]`; in memory only if asked for.

    Args:
        code: compiled for the geometry.
        images: per call `[b, H, W, c]`, padded, all of one shape.
        backprops: per call `[b, oh, ow, o]`.
    """

    def __init__(self, code: Code, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> None:
        self.kernel = code.kernel
        self._code, self._images, self._backprops = code, images, backprops
        self._records = len(images[0])

    @cached_property
    def _operands(self) -> Operands:
        return Operands(self.kernel, self._images, self._backprops)

    def squared_norms(self, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return squared norms and sizes, `[b]` float64 each.

        The norms lack squares that are too small for float32. A size is the sum over the calls of |image|·|backprop|.

        Args:
            keep: `[b, numel]` without gaps; if given, the gradients are written to it, too.
        """
        squares, sizes = torch.empty(2, self._records, dtype=torch.float64, device="cpu").unbind()
        self._code.run(self._operands, gradients=keep, squares=squares, sizes=sizes)
        return squares, sizes

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ w_i g_i, `[numel]`. A record of weight 0 adds nothing, whatever its gradient."""
        sums = torch.zeros(self.kernel.numel, **FLOATS)
        weights = torch.empty(self._records, **FLOATS).copy_(weights)  # a copy in memory with its signs: `_readable`
        self._code.run(self._operands, weights=weights, sums=sums)
        return sums

    def gradients(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the records `start` to `stop`, `[stop − start, numel]`."""
        some = ([x[start:stop] for x in calls] for calls in (self._images, self._backprops))
        gradients = torch.empty(stop - start, self.kernel.numel, **FLOATS)
        self._code.run(Operands(self.kernel, *some), gradients=gradients)
        return gradients

    def as_weight(self, gradients: Tensor) -> Tensor:
        """Return gradients `[m, numel]` as `[m, o, c, kh, kw]`."""
        (c, o), size = self.kernel.channels, self.kernel.size
        if gradients.numel() >= BEYOND_CACHES:
            by_place = gradients.view(-1, size[0] * size[1], c * o)
            return by_place.transpose(1, 2).contiguous().view(-1, c, o, *size).transpose(1, 2)
        return gradients.view(-1, *size, c, o).permute(0, 4, 3, 1, 2)


def gradients_of(kernel: Kernel, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> CompiledGradients | None:
    """Return a batch's gradients by compiled code; arguments as of `CompiledGradients`.

    None if this machine cannot compile, or if the code cannot read these tensors.
    """
    if not all(map(_readable, (*images, *backprops))):
        return None
    code = code_for(kernel)
    return None if code is None else CompiledGradients(code, images, backprops)


def _readable(values: Tensor) -> bool:
    """Whether a tensor's float32 values are in the CPU's memory, with at least one value for each record.

    The code's loops run at least once. torch may keep the sign of all entries out of memory (`is_neg`), or all entries
    if they are zero.
    """
    if type(values) is not Tensor or not values.is_cpu or values.dtype != torch.float32 or 0 in values.shape[1:]:
        return False
    return not values.is_neg() and (not len(values) or values.data_ptr() != 0)
