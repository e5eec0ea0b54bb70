"""Code: the machine code of one geometry, and the structure with its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from equidp.gradients.compiled.writer import ADDRESSES, SIZES, Writer
from equidp.gradients.windows import Kernel
from equidp.system.machine_code import MachineCode, Registers, registers_here


class Work(ctypes.Structure):
    """The code's arguments: sizes and addresses. An address is 0 if the result is not wanted.

    Attributes:
        records: b.
        calls: how many images and backprops there are; their gradients add.
        height, width: oh and ow of the outputs.
        row, image: number of floats in a row of a padded image, and in an image.
        images: addresses of `[b, H, W, c]`.
        backprops: addresses of `[b, oh, ow, o]`.
        gradients: `[b, kh·kw·c·o]`, written.
        squares: `[b]` float64, written: squared norms.
        sizes: `[b]` float64, written: Σ over the calls of |image|·|backprop|.
        weights: `[b]`; a record of weight 0 is not read.
        sums: `[kh·kw·c·o]`; the weighted sum is added to it.
    """

    _fields_ = (*((name, ctypes.c_int64) for name in SIZES), *((name, ctypes.c_void_p) for name in ADDRESSES))


class Operands:
    """Images and backprops without gaps in memory, and their addresses. Arguments as of `CompiledGradients`.

    Raises:
        ValueError: the shapes do not fit together; the code itself does not check them.
    """

    def __init__(self, kernel: Kernel, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> None:
        self.records, height, width, c = images[0].shape
        outputs = kernel.outputs(height, width)
        shapes = (self.records, height, width, kernel.channels[0]), (self.records, *outputs, kernel.channels[1])
        self._rows = [[x.contiguous() for x in calls] for calls in (images, backprops)]
        for rows, shape in zip(self._rows, shapes, strict=True):
            if len(rows) != len(images) or any(x.shape != shape for x in rows):
                raise ValueError(f"Not every call has {list(shape)}.")
        if min(outputs) < 1:
            raise ValueError(f"Images of {height} by {width} pixels have no windows.")
        self._tables = [(ctypes.c_void_p * len(rows))(*[x.data_ptr() for x in rows]) for rows in self._rows]
        self._sizes = (self.records, len(images), *outputs, width * c, height * width * c)
        self._numel = kernel.numel

    def work(self, **wanted: Tensor | None) -> Work:
        """Return the code's arguments, which are valid as long as these operands and the wanted tensors live.

        Args:
            wanted: tensors for results, and weights, by their names in `Work`.

        Raises:
            ValueError: a tensor has another shape, type or place than its name requires; the code would write beside
                it.
        """
        rooms = {name: x for name, x in wanted.items() if x is not None}
        shapes = {"gradients": (self.records, self._numel), "sums": (self._numel,)}
        for name, x in rooms.items():
            shape = shapes.get(name, (self.records,))
            kind = torch.float64 if name in ("squares", "sizes") else torch.float32
            if x.shape != shape or x.dtype != kind or not x.is_cpu or not x.is_contiguous():
                raise ValueError(f"{name} must be {list(shape)} of {kind}, without gaps, in the CPU's memory.")
        addresses = {name: x.data_ptr() for name, x in rooms.items()}
        return Work(*self._sizes, *map(ctypes.addressof, self._tables), **addresses)


class Code:
    """The machine code of one geometry, for a processor's registers."""

    def __init__(self, kernel: Kernel, registers: Registers) -> None:
        self.kernel, self._code = kernel, MachineCode(Writer(kernel, registers))

    def run(self, operands: Operands, **wanted: Tensor | None) -> None:
        """Fill the wanted tensors, given by their names in `Work`."""
        self._code.run(operands.work(**wanted), torch.get_num_threads())


@lru_cache(maxsize=256)
def code_for(kernel: Kernel) -> Code | None:
    """Return the code for a geometry; None if this machine cannot compile."""
    registers = registers_here()
    return None if registers is None else Code(kernel, registers)
