"""Writer: writes the code of one geometry in LLVM's intermediate language."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from equidp.gradients.windows import Kernel
from equidp.system.machine_code import Program, Registers

SIZES = ("records", "calls", "height", "width", "row", "image")
ADDRESSES = ("images", "backprops", "gradients", "squares", "sizes", "weights", "sums")


def tiles(extent: int, most: int) -> list[tuple[int, int, int]]:
    """Cut an extent into the fewest tiles of at most `most`; the first ones may be larger by one.

    Returns:
        A list of `(start, size, count)`: from `start` there are `count` tiles of this size.
    """
    count = -(-extent // most)
    size, larger = divmod(extent, count)
    parts = [(0, size + 1, larger), (larger * (size + 1), size, count - larger)]
    return [part for part in parts if part[2]]


class Writer(Program):
    """Writes the code of one geometry, in LLVM's intermediate language.

    for record, for tile of inputs, for tile of outputs:
        for call, row, column: tile += input · outputs
        squares += tile²; gradients = tile; sums += weight · tile
    """

    def __init__(self, kernel: Kernel, registers: Registers) -> None:
        super().__init__("convolution")
        self.kernel, self.registers = kernel, registers
        self.work = {
            name: self._load(self.argument, self._number(k), self.int if name in SIZES else self.pointer)
            for k, name in enumerate((*SIZES, *ADDRESSES))
        }
        nothing = self._zero(self.pointer)
        self.wanted = {name: self.b.icmp_unsigned("!=", self.work[name], nothing) for name in ADDRESSES}
        self.backprop = self._product(self.work["height"], self.work["width"], kernel.channels[1])
        self._write()
        self._end()

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
        """Write code for a record's Σ over the calls of |image|·|backprop|."""
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
        """Write code for the sum of the squares of so many floats, in float64."""
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
        """Write code for the tiles of one record's gradient: all tiles, or for a sum only this thread's tiles."""
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
        """Return how many runs of contiguous inputs a row of the kernel sees, and the length of a run."""
        (_, columns), c = self.kernel.size, self.kernel.channels[0]
        return (1, columns * c) if self.kernel.dilation[1] == 1 else (columns, c)

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Give `(first output, lanes, vectors, blocks)` for two vectors at a time, then one vector, then the rest."""
        lanes, o, done = self.registers.lanes, self.kernel.channels[1], 0
        for width, vectors in ((lanes, 2), (lanes, 1), (o % lanes, 1)):
            blocks = (o - done) // (width * vectors) if width else 0
            if blocks:
                yield done, width, vectors, blocks
                done += blocks * width * vectors

    def _count(self) -> int:
        """Return the number of tiles of a gradient."""
        runs, length = self._runs()
        inputs = sum(count for *_, count in tiles(length, self.registers.inputs))
        return self.kernel.size[0] * runs * inputs * sum(blocks for *_, blocks in self._blocks())

    @contextmanager
    def _mine(self, number: Any) -> Iterator[None]:
        """Count this tile. The code inside runs unless a sum is wanted and the tile belongs to another thread."""
        b, (first, last) = self.b, self.own_tiles
        this = b.load(number)
        b.store(self._sum(this, 1), number)
        inside = b.and_(b.icmp_signed(">=", this, first), b.icmp_signed("<", this, last))
        with b.if_then(b.or_(inside, b.not_(self.wanted["sums"]))):
            yield

    def _widths(self) -> list[int]:
        """Return the widths, in lanes, of the vectors into which outputs are cut."""
        lanes, o = self.registers.lanes, self.kernel.channels[1]
        return [n for n in (lanes if o >= lanes else 0, o % lanes) if n]

    def _tile(self, record: Any, seen: Any, column: Any, inputs: int, lanes: int, vectors: int) -> list[list[Any]]:
        """Write code for a tile's sums over calls and pixels, `[inputs][vectors]`."""
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
        """Write code that stores the wanted results of a tile, before the next tile takes its registers."""
        b, kind = self.b, found[0][0].type

        def entries() -> Iterator[tuple[Any, Any]]:
            for k, row in enumerate(found):
                first = self._sum(self._product(self._sum(place, k), self.kernel.channels[1]), column)
                for v, vector in enumerate(row):
                    yield vector, self._sum(first, v * kind.count)

        with b.if_then(self.wanted["squares"]):
            total = self._zero(kind)  # of 16 squares at most: float32 loses 1e-6 at worst; then float64 adds them up
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
