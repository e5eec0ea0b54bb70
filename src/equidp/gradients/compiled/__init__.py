"""Compiled convolutions: per-record gradients formed in registers, by machine code made for one layer's geometry.

torch has no operation for them: windows must be written out, multiplied, the gradients written, and read again for
their norms. Here a tile of a record's gradient (a few inputs by a vector or two of outputs) stays in registers while
all of the record's output pixels pass by, and what leaves them is what was asked for: its squares, itself, or its share
of the weighted sum. Windows are read where they are. LLVM (llvmlite) makes the code when a geometry is first met, which
takes a tenth of a second; vectors are as wide as the processor's.

A tile takes its pixels in one order, by fused multiply-adds, whoever asks and wherever in the batch a record stands:
the weighted sum is, to the last bit, one of the gradients that norms were taken of.

The work is shared out to torch's threads (`system/machine_code.py`): records for their norms, tiles for a sum, which
adds records in their order whatever the threads. Where nothing is compiled, torch's operations do it (`windows.py`).
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
"""Floats whose order is changed in two steps, by whole runs of them: in one, each would be of another line."""

FLOATS: Any = {"dtype": torch.float32, "device": "cpu"}
"""What the code reads and writes, whatever torch's defaults are."""


class CompiledGradients:
    """A batch's gradients of one convolution's weight, never in memory unless asked for; in order `[kh, kw, c, o]`.

    Args:
        code: of the geometry.
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
        """`[b]` float64 squared norms, without squares that float32 cannot hold, and `[b]` float64 sizes: the calls'
        |image|·|backprop|, added up.

        Args:
            keep: `[b, numel]` without gaps, where the gradients are written too.
        """
        squares, sizes = torch.empty(2, self._records, dtype=torch.float64, device="cpu").unbind()
        self._code.run(self._operands, gradients=keep, squares=squares, sizes=sizes)
        return squares, sizes

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[numel]`: Σ w_i g_i; a record of weight 0 adds nothing, whatever its gradient."""
        sums = torch.zeros(self.kernel.numel, **FLOATS)
        weights = torch.empty(self._records, **FLOATS).copy_(weights)  # in memory with its sign, see `_readable`
        self._code.run(self._operands, weights=weights, sums=sums)
        return sums

    def gradients(self, start: int, stop: int) -> Tensor:
        """`[stop − start, numel]`."""
        some = ([x[start:stop] for x in calls] for calls in (self._images, self._backprops))
        gradients = torch.empty(stop - start, self.kernel.numel, **FLOATS)
        self._code.run(Operands(self.kernel, *some), gradients=gradients)
        return gradients

    def as_weight(self, gradients: Tensor) -> Tensor:
        """`[m, numel]` to `[m, o, c, kh, kw]`."""
        (c, o), size = self.kernel.channels, self.kernel.size
        if gradients.numel() >= BEYOND_CACHES:
            by_place = gradients.view(-1, size[0] * size[1], c * o)
            return by_place.transpose(1, 2).contiguous().view(-1, c, o, *size).transpose(1, 2)
        return gradients.view(-1, *size, c, o).permute(0, 4, 3, 1, 2)


def gradients_of(kernel: Kernel, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> CompiledGradients | None:
    """A batch's gradients by compiled code; None where this machine has none, or for tensors that it cannot read.
    Arguments as of `CompiledGradients`.
    """
    if not all(map(_readable, (*images, *backprops))):
        return None
    code = code_for(kernel)
    return None if code is None else CompiledGradients(code, images, backprops)


def _readable(values: Tensor) -> bool:
    """Whether the CPU's memory holds a tensor's float32 values, at least one for each record: loops run at least once.

    torch may leave out of memory the sign of all entries (`is_neg`), or all entries where they are zero.
    """
    if type(values) is not Tensor or not values.is_cpu or values.dtype != torch.float32 or 0 in values.shape[1:]:
        return False
    return not values.is_neg() and (not len(values) or values.data_ptr() != 0)
