"""Code: the machine code of one geometry, what it is called with, and what of this machine it needs."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.compiled.writer import ADDRESSES, ASKED, SIZES, Registers, Writer
from equidp.gradients.windows import Kernel


class Work(ctypes.Structure):
    """What the code is called with: sizes, and addresses, 0 for what is not wanted.

    Attributes:
        records: b.
        calls: how many images and backprops there are; their gradients add.
        height, width: oh and ow of the outputs.
        row, image: floats of a padded image's row and of an image.
        images: addresses of `[b, H, W, c]`.
        backprops: addresses of `[b, oh, ow, o]`.
        gradients: `[b, kh·kw·c·o]`, written.
        squares: `[b]` float64, written: squared norms.
        sizes: `[b]` float64, written: Σ over the calls of |image|·|backprop|.
        weights: `[b]`; a record of weight 0 is not looked at.
        sums: `[kh·kw·c·o]`, added to.
    """

    _fields_ = (*((name, ctypes.c_int64) for name in SIZES), *((name, ctypes.c_void_p) for name in ADDRESSES))


class Operands:
    """What gradients are made of, without gaps, and where it lies. Arguments as of `CompiledGradients`.

    Raises:
        ValueError: for shapes that do not belong together: the code trusts them.
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
        """What the code is called with; as long as these operands and what is wanted live.

        Raises:
            ValueError: for what is wanted in a room that is not its own: the code would write beside it.
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
    """The machine code of one geometry, for a processor's registers and what `openmp` found."""

    def __init__(self, kernel: Kernel, registers: Registers, openmp: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self._parallel = openmp["GOMP_parallel"]
        self._address, self._engine = _compile(kernel, registers, openmp)

    def run(self, operands: Operands, **wanted: Tensor | None) -> None:
        """Fill what is wanted, by its name in `Work`."""
        work = operands.work(**wanted)
        self._parallel(self._address, ctypes.byref(work), torch.get_num_threads(), 0)


@lru_cache(maxsize=256)
def code_for(kernel: Kernel) -> Code | None:
    """The code for a geometry; None where this machine has none."""
    found = openmp()
    registers = None if found is None else registers_here()  # llvmlite is not asked for on other systems
    return None if found is None or registers is None else Code(kernel, registers, found)


@lru_cache(maxsize=1)
def openmp() -> Mapping[str, Any] | None:
    """The functions of the OpenMP that torch brings: it calls code on all of torch's threads, and tells them apart."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    process = ctypes.CDLL(None)
    try:
        found = {name: getattr(process, name) for name in ("GOMP_parallel", *ASKED)}
    except AttributeError:  # a torch built without
        return None
    found["GOMP_parallel"].argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    found["GOMP_parallel"].restype = None
    return found


@lru_cache(maxsize=1)
def registers_here() -> Registers | None:
    """This processor's; None where it has no fused multiply-adds of vectors.

    Raises:
        EquidpError: without llvmlite. torch's operations would round sums differently without any sign of it.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise EquidpError(
            f"Gradients of convolutions are compiled with llvmlite, which cannot be imported ({error}): install the "
            "project again (pip install -e .), which brings it."
        ) from error

    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Registers(lanes=16, inputs=8)
    return Registers(lanes=8, inputs=6) if features.get("avx2") and features.get("fma") else None


def _compile(kernel: Kernel, registers: Registers, openmp: Mapping[str, Any]) -> tuple[int, object]:
    """Address of `void (Work *)`, to be called on every thread; and what must live as long as that is called."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in ASKED:
        llvm.add_symbol(name, ctypes.cast(openmp[name], ctypes.c_void_p).value)
    module = llvm.parse_assembly(str(Writer(kernel, registers).module))
    module.verify()
    features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"  # tiles are cut for the widest vectors
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault", jit=True
    )
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False  # it is vectors already
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine.get_function_address("work"), engine
