"""Pairs of Gaussians made of random integers: the noise that `secure` adds.

Box and Muller: with U and V uniform in (0, 1], r = √(−2 ln U) and θ = 2πV, the two numbers r·cos θ and r·sin θ are
independent standard Gaussians. Two such pairs are added, and divided by √2:

    [r₁ cos θ₁ + r₂ cos θ₂]/√2   and   [r₁ sin θ₁ + r₂ sin θ₂]/√2

are jointly Gaussian, of variance 1 and covariance 0: again a pair of independent standard Gaussians.

`secure` says why two are added. On Linux with an x86-64 processor one loop does all of it in registers, with the C
library's logarithms and sines of vectors (libmvec). It is compiled for the first draw, in a twentieth of a second.
torch's operations, each of which passes over memory, take three times as long. Their results differ from the loop's by
some 10⁻¹⁵; that does no harm, because secure noise is never repeated.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.system.machine_code import MachineCode, Program, registers_here

HALF, UNIT = 0.5, 2.0**-63
"""A signed integer w gives U = (|w| + ½)·2⁻⁶³ in (0, 1], with 53 significant bits however small, and θ = w·π·2⁻⁶³ in
[−π, π)."""

PAIRS_EACH = 4096
"""The least number of pairs for each thread. Fewer are made before another thread has woken up. And once a process that
was forked from one with such threads uses several, it waits for ever, as it does in torch's own larger operations."""


def gaussians(words: Tensor) -> Tensor:
    """`[2m]` float64 independent standard Gaussians: √(−ln U₁)·cos θ₁ + √(−ln U₂)·cos θ₂, then with sines.

    Args:
        words: `[2, 2, m]` int64, uniform: first those of the two radii, then those of the two angles.
    """
    loop = compiled_loop() if words.is_cpu else None
    return _by_torch(words) if loop is None else loop(words)


def _by_torch(words: Tensor) -> Tensor:
    """The same by torch's operations, on any device."""
    radius, angle = words.to(torch.float64).unbind()
    radius.abs_().add_(HALF).mul_(UNIT).log_().neg_().sqrt_()
    angle.mul_(math.pi * UNIT)
    one, other = torch.stack([angle, angle - math.pi / 2]).cos_().mul_(radius).unbind(1)  # sin θ = cos(θ − π/2)
    return (one + other).view(-1)


class Loop:
    """`gaussians` as compiled code for the CPU. Arguments as of `Writer`."""

    def __init__(self, lanes: int, functions: dict[str, Any]) -> None:
        self._lanes, self._code = lanes, MachineCode(Writer(lanes, functions), functions)

    def __call__(self, words: Tensor) -> Tensor:
        """Arguments and result as of `gaussians`.

        Raises:
            ValueError: for words that the code would read wrongly.
        """
        if not words.is_cpu or words.dtype != torch.int64 or not words.is_contiguous() or words.shape[:-1] != (2, 2):
            raise ValueError("words must be [2, 2, m] of int64, without gaps, in the CPU's memory.")
        pairs = words.shape[-1]
        if pairs < self._lanes:  # the loop writes whole vectors
            return self(F.pad(words, (0, self._lanes - pairs))).view(2, -1)[:, :pairs].reshape(-1)
        made = torch.empty(2 * pairs, dtype=torch.float64, device="cpu")
        work = Work(pairs, words.data_ptr(), made.data_ptr())
        self._code.run(work, min(torch.get_num_threads(), pairs // PAIRS_EACH) or 1)
        return made


class Work(ctypes.Structure):
    """The arguments of the compiled code.

    Attributes:
        pairs: m.
        words: address of `[2, 2, m]`.
        made: address of `[2, m]`, written.
    """

    _fields_ = (("pairs", ctypes.c_int64), ("words", ctypes.c_void_p), ("made", ctypes.c_void_p))


class Writer(Program):
    """The loop in LLVM's language: for each vector of pairs, two radii and two angles, and the pairs made of them.

    The last vector begins early enough to end with the last pair. Where it overlaps the vector before it, the same
    numbers are written twice.

    Args:
        lanes: float64 of a vector.
        functions: names of the C library's logarithm, cosine and sine of such vectors, in this order.
    """

    def __init__(self, lanes: int, functions: Any) -> None:
        super().__init__("gaussians")
        b = self.b
        self.numbers, self.integers = (self._vector(lanes, kind) for kind in (self.double, self.int))
        logarithm, cosine, sine = functions
        kinds = (self.int, self.pointer, self.pointer)
        pairs, words, made = (self._load(self.argument, self._number(k), kind) for k, kind in enumerate(kinds))
        start, stop = self._share(b.sdiv(self._sum(pairs, lanes - 1), self._number(lanes)))
        with b.if_then(b.icmp_signed("<", start, stop)), self._loop(start, stop) as vector:
            first, last = self._product(vector, lanes), b.sub(pairs, self._number(lanes))
            first = b.select(b.icmp_signed("<", first, last), first, last)
            sums = None
            for k in (0, 1):
                radius, angle = (self._word(words, self._sum(first, self._product(pairs, row))) for row in (k, 2 + k))
                uniform = b.fmul(b.fadd(self._of("llvm.fabs", radius), self._all(HALF)), self._all(UNIT))
                radius = self._of("llvm.sqrt", self._of("llvm.fabs", self._of(logarithm, uniform)))
                angle = b.fmul(angle, self._all(math.pi * UNIT))
                pair = [b.fmul(radius, self._of(name, angle)) for name in (cosine, sine)]
                sums = pair if sums is None else [b.fadd(*both) for both in zip(sums, pair, strict=True)]
            for row, numbers in enumerate(sums or ()):
                b.store(numbers, self._at(made, self._sum(first, self._product(pairs, row)), self.double), align=8)
        self._end()

    def _word(self, words: Any, index: Any) -> Any:
        """A vector of words as float64."""
        read = self.b.load(self._at(words, index, self.int), typ=self.integers, align=8)
        return self.b.sitofp(read, self.numbers)

    def _all(self, value: float) -> Any:
        return self.ir.Constant(self.numbers, [value] * self.numbers.count)

    def _of(self, name: str, vector: Any) -> Any:
        """An operation of LLVM's, or a function of the C library's, of a vector."""
        name = f"{name}.v{vector.type.count}f64" if name.startswith("llvm.") else name
        return self.b.call(self._function(name, vector.type, [vector.type]), [vector])


@lru_cache(maxsize=1)
def compiled_loop() -> Loop | None:
    """The loop for this processor; None where the machine or its C library has none."""
    if (registers := registers_here()) is None:
        return None
    lanes = registers.lanes // 2
    functions = vector_functions(lanes)
    return None if functions is None else Loop(lanes, functions)


def vector_functions(lanes: int) -> dict[str, Any] | None:
    """The C library's logarithm, cosine and sine of so many float64, by name; None where it has none.

    Their names are those of the vector function ABI of x86-64: `d` for AVX2, `e` for AVX-512, `v` for a vector.
    """
    names = [f"_ZGV{'d' if lanes == 4 else 'e'}N{lanes}v_{name}" for name in ("log", "cos", "sin")]
    try:
        library = ctypes.CDLL("libmvec.so.1")
        return {name: getattr(library, name) for name in names}
    except (OSError, AttributeError):
        return None
