"""Compiled convolutions: per-record gradients formed in registers, by machine code made for one layer's geometry.

torch has no operation for them: windows must be written out, multiplied, the gradients written, and read again for
their norms. Here a tile of a record's gradient (a few inputs by a vector or two of outputs) stays in registers while
all of the record's output pixels pass by, and what leaves them is what was asked for: its squares, itself, or its share
of the weighted sum. Windows are read where they are. LLVM (llvmlite) makes the code when a geometry is first met, which
takes a tenth of a second; vectors are as wide as the processor's.

A tile takes its pixels in one order, by fused multiply-adds, whoever asks and wherever in the batch a record stands:
the weighted sum is, to the last bit, one of the gradients that norms were taken of.

The work is shared out to the threads that torch keeps for its own operations, so there are never more than it was told
to use: records for their norms, tiles for a sum, which adds records in their order whatever the threads. That, and what
was measured, confines this to Linux on x86-64; elsewhere torch's operations do it (`windows.py`).
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.windows import Kernel

ASKED = ("omp_get_thread_num", "omp_get_num_threads")
"""What the code asks OpenMP: which of the records, or tiles, are this thread's? Of those that came, which may be fewer
than were called."""


@dataclass(frozen=True)
class Registers:
    """What a processor holds of a tile.

    Attributes:
        lanes: floats of a vector.
        inputs: rows of a tile at most; with two vectors of outputs each they leave room for what they are made of.
    """

    lanes: int
    inputs: int


FLOATS: Any = {"dtype": torch.float32, "device": "cpu"}
"""What the code reads and writes, whatever torch's defaults are."""

SIZES = ("records", "calls", "height", "width", "row", "image")
ADDRESSES = ("images", "backprops", "gradients", "squares", "sizes", "weights", "sums")


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

    _fields_ = (
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_void_p) for name in ADDRESSES),
    )


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
        weights = torch.empty(self._records, **FLOATS).copy_(weights)  # as it counts, see `_readable`
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
        c, o = self.kernel.channels
        return gradients.view(-1, *self.kernel.size, c, o).permute(0, 4, 3, 1, 2)


def compiled(kernel: Kernel, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> CompiledGradients | None:
    """A batch's gradients by compiled code; None where this machine has none, or for tensors that it cannot read.
    Arguments as of `CompiledGradients`.
    """
    if not all(map(_readable, (*images, *backprops))):
        return None
    code = code_for(kernel)
    return None if code is None else CompiledGradients(code, images, backprops)


def _readable(values: Tensor) -> bool:
    """Whether float32 of the CPU lies in memory as it counts, and some of it for every record: loops run at least once.

    torch leaves out what it may: a minus of all entries (`is_neg`), or all of them where they are zero.
    """
    if type(values) is not Tensor or not values.is_cpu or values.dtype != torch.float32 or 0 in values.shape[1:]:
        return False
    return not values.is_neg() and not values._is_zerotensor()


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
    """The machine code of one geometry.

    Args:
        kernel: the geometry.
        registers: the processor's.
        openmp: what `openmp` found.
    """

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
        EquidpError: without llvmlite. By torch's operations sums would round otherwise, which nobody would be told.
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


def tiles(extent: int, most: int) -> list[tuple[int, int, int]]:
    """`(start, size, count)`: an extent cut into as few equal tiles as possible, none larger than `most`; the first
    ones may be larger by one.

    Raises:
        ValueError: for an extent of nothing.
    """
    if extent < 1:
        raise ValueError(f"An extent of {extent} has no tiles.")
    count = -(-extent // most)
    size, larger = divmod(extent, count)
    parts = [(0, size + 1, larger), (larger * (size + 1), size, count - larger)]
    return [part for part in parts if part[2]]


def _compile(kernel: Kernel, registers: Registers, openmp: Mapping[str, Any]) -> tuple[int, object]:
    """Address of `void (Work *)`, to be called on every thread; and what must live as long as that is called."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in ASKED:
        llvm.add_symbol(name, ctypes.cast(openmp[name], ctypes.c_void_p).value)
    module = llvm.parse_assembly(str(_Writer(kernel, registers).module))
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


class _Writer:
    """Writes the code of one geometry, in LLVM's intermediate language.

    for record, for tile of inputs, for tile of outputs:
        for call, row, column: tile += input · outputs
        squares += tile²; gradients = tile; sums += weight · tile
    """

    def __init__(self, kernel: Kernel, registers: Registers) -> None:
        from llvmlite import ir

        self.ir, self.kernel, self.registers = ir, kernel, registers
        self.float, self.double, self.int = ir.FloatType(), ir.DoubleType(), ir.IntType(64)
        self.pointer = ir.PointerType()
        self.module = ir.Module("convolution")
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [self.pointer]), "work")
        self.entry = ir.IRBuilder(function.append_basic_block("variables"))
        self.b = ir.IRBuilder(function.append_basic_block("begin"))
        self.work = {
            name: self._load(function.args[0], self._number(k), self.int if name in SIZES else self.pointer)
            for k, name in enumerate((*SIZES, *ADDRESSES))
        }
        nothing = ir.Constant(self.pointer, None)
        self.wanted = {name: self.b.icmp_unsigned("!=", self.work[name], nothing) for name in ADDRESSES}
        self.backprop = self._product(self.work["height"], self.work["width"], kernel.channels[1])
        self._write()
        self.b.ret_void()
        self.entry.branch(function.blocks[1])

    # ------------------------------------------------------------------------------------------------- the program

    def _write(self) -> None:
        b, work = self.b, self.work
        self.own_tiles = self._share(self._number(self._count()))
        share, summing = self._share(work["records"]), self.wanted["sums"]
        first = b.select(summing, self._number(0), share[0])
        last = b.select(summing, work["records"], share[1])
        weight = self.entry.alloca(self.float)
        squares = [self.entry.alloca(self._vector(n, self.double)) for n in self._widths()]
        with b.if_then(b.icmp_signed("<", first, last)), self._loop(first, last) as record:
            b.store(self.ir.Constant(self.float, 1.0), weight)
            with b.if_then(self.wanted["weights"]):
                b.store(self._load(work["weights"], record, self.float), weight)
            for room in squares:
                b.store(self._zero(room.allocated_type), room)
            with b.if_then(self.wanted["sizes"]):
                b.store(self._size(record), self._at(work["sizes"], record, self.double))
            with b.if_then(b.fcmp_unordered("!=", b.load(weight), self._zero(self.float))):
                self._write_record(record, b.load(weight), squares)
            with b.if_then(self.wanted["squares"]):
                total = self.ir.Constant(self.double, -0.0)
                for room in squares:
                    total = self._added_up(total, b.load(room))
                b.store(total, self._at(work["squares"], record, self.double))

    def _size(self, record: Any) -> Any:
        """Σ over the calls of |image|·|backprop|."""
        b, total = self.b, self.entry.alloca(self.double)
        root = self._function("llvm.sqrt.f64", self.double, [self.double])
        b.store(self._zero(self.double), total)
        with self._loop(0, self.work["calls"]) as call:
            squares = [
                self._squares(self._at(self._load(self.work[name], call, self.pointer), b.mul(record, floats)), floats)
                for name, floats in (("images", self.work["image"]), ("backprops", self.backprop))
            ]
            b.store(b.fadd(b.load(total), b.call(root, [b.fmul(*squares)])), total)
        return b.load(total)

    def _squares(self, values: Any, floats: Any) -> Any:
        """The sum of the squares of so many floats, in float64."""
        b, lanes = self.b, self.registers.lanes
        whole = self._product(b.sdiv(floats, self._number(lanes)), lanes)
        rooms = [self.entry.alloca(kind) for kind in (self._vector(lanes, self.double), self.double)]
        for room, first, last, step in zip(rooms, (0, whole), (whole, floats), (lanes, 1), strict=True):
            b.store(self._zero(room.allocated_type), room)
            kind = self.float if step == 1 else self._vector(lanes, self.float)
            with b.if_then(b.icmp_signed("<", self._number(first), last)), self._loop(first, last, step) as index:
                value = b.fpext(self._load(values, index, kind), room.allocated_type)
                b.store(b.fadd(b.load(room), b.fmul(value, value)), room)
        return self._added_up(b.load(rooms[1]), b.load(rooms[0]))

    def _write_record(self, record: Any, weight: Any, squares: list[Any]) -> None:
        """The tiles of one record's gradient: all of them, or of a sum this thread's."""
        b, (rows, columns), c = self.b, self.kernel.size, self.kernel.channels[0]
        down, across = self.kernel.dilation
        number = self.entry.alloca(self.int)
        b.store(self._number(0), number)
        with self._loop(0, rows) as i, self._loop(0, self._runs()[0]) as j:
            seen = self._sum(self._product(i, down, self.work["row"]), self._product(j, across * c))
            place = self._sum(self._product(i, columns * c), self._product(j, c))
            for start, size, count in tiles(self._runs()[1], self.registers.inputs):
                with self._loop(0, count) as tile:
                    offset = self._sum(self._product(tile, size), start)
                    for output, lanes, vectors, blocks in self._blocks():
                        room = squares[self._widths().index(lanes)]
                        with self._loop(0, blocks) as block, self._mine(number):
                            column = self._sum(self._product(block, lanes * vectors), output)
                            found = self._tile(record, self._sum(seen, offset), column, size, lanes, vectors)
                            self._leave(record, found, self._sum(place, offset), column, weight, room)

    def _runs(self) -> tuple[int, int]:
        """A row of the kernel sees so many runs of contiguous inputs, and so long ones."""
        (_, columns), c = self.kernel.size, self.kernel.channels[0]
        return (1, columns * c) if self.kernel.dilation[1] == 1 else (columns, c)

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """`(first output, lanes, vectors, blocks)`: two vectors at a time, one, the rest."""
        lanes, o, done = self.registers.lanes, self.kernel.channels[1], 0
        for width, vectors in ((lanes, 2), (lanes, 1), (o % lanes, 1)):
            blocks = (o - done) // (width * vectors) if width else 0
            if blocks:
                yield done, width, vectors, blocks
                done += blocks * width * vectors

    def _count(self) -> int:
        """Tiles of a gradient."""
        runs, length = self._runs()
        inputs = sum(count for *_, count in tiles(length, self.registers.inputs))
        return self.kernel.size[0] * runs * inputs * sum(blocks for *_, blocks in self._blocks())

    def _share(self, things: Any) -> tuple[Any, Any]:
        """From which to before which of so many things are this thread's."""
        b, (thread, threads) = self.b, map(self._ask, ASKED)
        return b.sdiv(b.mul(things, thread), threads), b.sdiv(b.mul(things, self._sum(thread, 1)), threads)

    @contextmanager
    def _mine(self, number: Any) -> Iterator[None]:
        """Unless a sum is wanted and the tile of this number is another thread's; counts it."""
        b, (first, last) = self.b, self.own_tiles
        this = b.load(number)
        b.store(self._sum(this, 1), number)
        inside = b.and_(b.icmp_signed(">=", this, first), b.icmp_signed("<", this, last))
        with b.if_then(b.or_(inside, b.not_(self.wanted["sums"]))):
            yield

    def _widths(self) -> list[int]:
        """Lanes of the vectors that outputs are cut into."""
        lanes, o = self.registers.lanes, self.kernel.channels[1]
        return [n for n in (lanes if o >= lanes else 0, o % lanes) if n]

    def _tile(self, record: Any, seen: Any, column: Any, inputs: int, lanes: int, vectors: int) -> list[list[Any]]:
        """The sums over calls and pixels, `[inputs][vectors]`."""
        b, kind, (c, o) = self.b, self._vector(lanes, self.float), self.kernel.channels
        (down, across), work = self.kernel.stride, self.work
        held = [[self.entry.alloca(kind) for _ in range(vectors)] for _ in range(inputs)]
        for room in (room for row in held for room in row):
            b.store(self._zero(kind), room)
        with self._loop(0, work["calls"]) as call:
            image, backprop = (self._load(work[name], call, self.pointer) for name in ("images", "backprops"))
            image = self._at(image, self._sum(b.mul(record, work["image"]), seen))
            backprop = self._at(backprop, self._sum(b.mul(record, self.backprop), column))
            with self._loop(0, work["height"]) as y, self._loop(0, work["width"]) as x:
                pixel = self._sum(self._product(y, down, work["row"]), self._product(x, across * c))
                outputs = self._product(self._sum(b.mul(y, work["width"]), x), o)
                came_back = [self._load(backprop, self._sum(outputs, v * lanes), kind) for v in range(vectors)]
                for k, row in enumerate(held):
                    value = self._spread(self._load(image, self._sum(pixel, k), self.float), lanes)
                    for room, vector in zip(row, came_back, strict=True):
                        b.store(self._fused(value, vector, b.load(room)), room)
        return [[b.load(room) for room in row] for row in held]

    def _leave(self, record: Any, found: list[list[Any]], place: Any, column: Any, weight: Any, squares: Any) -> None:
        """What is wanted of a tile, before the next one takes its registers."""
        b, kind = self.b, found[0][0].type

        def entries() -> Iterator[tuple[Any, Any]]:
            for k, row in enumerate(found):
                first = self._sum(self._product(self._sum(place, k), self.kernel.channels[1]), column)
                for v, vector in enumerate(row):
                    yield vector, self._sum(first, v * kind.count)

        with b.if_then(self.wanted["squares"]):
            total = self._zero(kind)  # of 16 at most: float32 loses 1e-6 at worst; the rest is added in float64
            for vector in (vector for row in found for vector in row):
                total = self._fused(vector, vector, total)
            b.store(b.fadd(b.load(squares), b.fpext(total, squares.allocated_type)), squares)
        with b.if_then(self.wanted["gradients"]):
            gradient = self._at(self.work["gradients"], self._product(record, self.kernel.numel))
            for vector, entry in entries():
                b.store(vector, self._at(gradient, entry), align=4)
        with b.if_then(self.wanted["sums"]):
            shares, sums = self._spread(weight, kind.count), self.work["sums"]
            for vector, entry in entries():
                total = self._fused(shares, vector, self._load(sums, entry, kind))
                b.store(total, self._at(sums, entry), align=4)

    # ------------------------------------------------------------------------------------------------ the language

    def _number(self, value: Any) -> Any:
        return self.ir.Constant(self.int, value) if isinstance(value, int) else value

    def _sum(self, left: Any, right: Any) -> Any:
        return self.b.add(self._number(left), self._number(right))

    def _product(self, *factors: Any) -> Any:
        return reduce(self.b.mul, map(self._number, factors))

    def _fused(self, left: Any, right: Any, more: Any) -> Any:
        """`left · right + more` of float32 vectors, rounded once."""
        name = f"llvm.fma.v{more.type.count}f32"
        return self.b.call(self._function(name, more.type, [more.type] * 3), [left, right, more])

    def _vector(self, lanes: int, kind: Any) -> Any:
        return self.ir.VectorType(kind, lanes)

    def _zero(self, kind: Any) -> Any:
        return self.ir.Constant(kind, None)

    def _at(self, base: Any, index: Any, kind: Any = None) -> Any:
        """The address so many floats (or values of another kind) after `base`."""
        return self.b.gep(base, [index], source_etype=kind or self.float)

    def _load(self, base: Any, index: Any, kind: Any) -> Any:
        """A float, or a vector of some, so many floats after `base`; an integer or an address so many of them after."""
        scalar = kind if kind in (self.int, self.pointer) else self.float
        return self.b.load(self._at(base, index, scalar), typ=kind, align=4 if scalar is self.float else 8)

    def _spread(self, value: Any, lanes: int) -> Any:
        """A vector of one value."""
        ir, number = self.ir, self.ir.IntType(32)
        nothing = ir.Constant(self._vector(lanes, self.float), ir.Undefined)
        first = self.b.insert_element(nothing, value, ir.Constant(number, 0))
        return self.b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(number, lanes), None))

    def _added_up(self, start: Any, vector: Any) -> Any:
        kind = vector.type
        add = self._function(f"llvm.vector.reduce.fadd.v{kind.count}f64", self.double, [self.double, kind])
        return self.b.call(add, [start, vector], fastmath=("reassoc",))

    def _ask(self, name: str) -> Any:
        """An `int` of OpenMP's."""
        return self.b.sext(self.b.call(self._function(name, self.ir.IntType(32), []), []), self.int)

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        known: Any = self.module.globals.get(name)
        return known or self.ir.Function(self.module, self.ir.FunctionType(result, arguments), name)

    @contextmanager
    def _loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """`for index in range(start, stop, step)`, at least once."""
        b = self.b
        before, body = b.block, b.append_basic_block("loop")
        b.branch(body)
        b.position_at_end(body)
        index = b.phi(self.int)
        index.add_incoming(self._number(start), before)
        yield index
        further = self._sum(index, step)
        index.add_incoming(further, b.block)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", further, self._number(stop)), body, after)
        b.position_at_end(after)
