"""Machine code: programs in LLVM's intermediate language, compiled for this processor and run on torch's threads.

torch divides its own operations among the threads of an OpenMP library that comes with it. Code that runs on these
threads never has more threads than torch is set to use. For this reason, and because nothing else was measured, it is
only for Linux on x86-64. On other systems `openmp` returns None, and torch's operations are used.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

from equidp.errors import EquidpError
from equidp.system.interrupts import waiting

ASKED = ("omp_get_thread_num", "omp_get_num_threads")
"""OpenMP's functions by which code knows its share of the work. OpenMP may start fewer threads than requested."""


@dataclass(frozen=True)
class Registers:
    """The size of a processor's registers.

    Attributes:
        lanes: number of floats in a vector.
        inputs: the most rows of a tile. With two vectors of outputs for each row, registers are left for the operands.
    """

    lanes: int
    inputs: int


@lru_cache(maxsize=1)
def openmp() -> Mapping[str, Any] | None:
    """Return the functions of torch's OpenMP, which call code on all of torch's threads and number these; or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    process = ctypes.CDLL(None)
    try:
        found = {name: getattr(process, name) for name in ("GOMP_parallel", *ASKED)}
    except AttributeError:  # torch was built without OpenMP
        return None
    found["GOMP_parallel"].argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    found["GOMP_parallel"].restype = None
    return found


@lru_cache(maxsize=1)
def registers_here() -> Registers | None:
    """Return this processor's registers; None if it has no fused multiply-adds of vectors, or if nothing is compiled.

    Raises:
        EquidpError: llvmlite is missing. torch's operations would round sums differently, and nobody would notice.
    """
    if openmp() is None:  # llvmlite is not required on other systems
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise EquidpError(
            f"Code is compiled with llvmlite, which cannot be imported ({error}): install the project again "
            "(pip install -e .), which brings it."
        ) from error

    with waiting():
        features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Registers(lanes=16, inputs=8)
    return Registers(lanes=8, inputs=6) if features.get("avx2") and features.get("fma") else None


class MachineCode:
    """A compiled program, for a processor with `registers_here`.

    An interrupt waits until the program is compiled. Otherwise llvmlite would free memory twice, and the process would
    abort.

    Args:
        program: what to compile.
        functions: addresses of further functions that it calls, by name.
    """

    def __init__(self, program: Program, functions: Mapping[str, Any] | None = None) -> None:
        found = openmp()
        assert found is not None
        self._parallel = found["GOMP_parallel"]
        with waiting():
            self._compile(program, {name: found[name] for name in ASKED} | dict(functions or {}))

    def _compile(self, program: Program, functions: Mapping[str, Any]) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        for name, function in functions.items():
            llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
        module = llvm.parse_assembly(str(program.module))
        module.verify()
        features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"  # use vectors as wide as they can be
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault", jit=True
        )
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_vectorization = tuning.slp_vectorization = False  # the code has vectors already
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # must live as long as the code is called
        self._engine.finalize_object()
        self._address = self._engine.get_function_address("work")

    def run(self, work: ctypes.Structure, threads: int) -> None:
        """Call the code on so many of torch's threads, or fewer."""
        self._parallel(self._address, ctypes.byref(work), threads, 0)


class Program:
    """A program `void work(Work *)`, which is called on every thread. This class has methods to write it.

    Args:
        name: name of the module.

    Attributes:
        argument: the address with which the program is called.
        entry: builder of the block in which variables are declared.
        b: builder at the place where the program is continued.
    """

    def __init__(self, name: str) -> None:
        from llvmlite import ir

        self.ir = ir
        self.float, self.double, self.int = ir.FloatType(), ir.DoubleType(), ir.IntType(64)
        self.pointer = ir.PointerType()
        self.module = ir.Module(name)
        self._work = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [self.pointer]), "work")
        self.argument = self._work.args[0]
        self.entry = ir.IRBuilder(self._work.append_basic_block("variables"))
        self.b = ir.IRBuilder(self._work.append_basic_block("begin"))

    def _end(self) -> None:
        self.b.ret_void()
        self.entry.branch(self._work.blocks[1])

    def _share(self, things: Any) -> tuple[Any, Any]:
        """Return the first of `things` that is this thread's, and the first one after its share."""
        b, (thread, threads) = self.b, map(self._ask, ASKED)
        return b.sdiv(b.mul(things, thread), threads), b.sdiv(b.mul(things, self._sum(thread, 1)), threads)

    def _number(self, value: Any) -> Any:
        return self.ir.Constant(self.int, value) if isinstance(value, int) else value

    def _sum(self, left: Any, right: Any) -> Any:
        return self.b.add(self._number(left), self._number(right))

    def _product(self, *factors: Any) -> Any:
        return reduce(self.b.mul, map(self._number, factors))

    def _fused(self, left: Any, right: Any, more: Any) -> Any:
        """Return `left · right + more` of float32 vectors, rounded once."""
        name = f"llvm.fma.v{more.type.count}f32"
        return self.b.call(self._function(name, more.type, [more.type] * 3), [left, right, more])

    def _vector(self, lanes: int, kind: Any) -> Any:
        return self.ir.VectorType(kind, lanes)

    def _zero(self, kind: Any) -> Any:
        return self.ir.Constant(kind, None)

    def _at(self, base: Any, index: Any, kind: Any = None) -> Any:
        """Return the address `index` floats (or values of another kind) after `base`."""
        return self.b.gep(base, [index], source_etype=kind or self.float)

    def _load(self, base: Any, index: Any, kind: Any) -> Any:
        """Load a float or a vector of floats, `index` floats after `base`; or the integer or address at `index`."""
        scalar = kind if kind in (self.int, self.pointer) else self.float
        return self.b.load(self._at(base, index, scalar), typ=kind, align=4 if scalar is self.float else 8)

    def _spread(self, value: Any, lanes: int) -> Any:
        """Return a vector whose lanes all have this value."""
        ir, number = self.ir, self.ir.IntType(32)
        nothing = ir.Constant(self._vector(lanes, self.float), ir.Undefined)
        first = self.b.insert_element(nothing, value, ir.Constant(number, 0))
        return self.b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(number, lanes), None))

    def _added_up(self, start: Any, vector: Any) -> Any:
        kind = vector.type
        add = self._function(f"llvm.vector.reduce.fadd.v{kind.count}f64", self.double, [self.double, kind])
        return self.b.call(add, [start, vector], fastmath=("reassoc",))

    def _ask(self, name: str) -> Any:
        """Call a function of OpenMP that returns an `int`."""
        return self.b.sext(self.b.call(self._function(name, self.ir.IntType(32), []), []), self.int)

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        known: Any = self.module.globals.get(name)
        return known or self.ir.Function(self.module, self.ir.FunctionType(result, arguments), name)

    @contextmanager
    def _loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """Write `for index in range(start, stop, step)`, whose body runs at least once."""
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
