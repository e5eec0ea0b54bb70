"""Secure randomness: coins and Gaussian noise from a cryptographic generator, added without floating-point leaks.

Three things make the textbook Gaussian mechanism unsafe on a computer. This module has an answer to each.

*Predictable noise.* Whoever learns the seed of an ordinary generator, or enough of its outputs, can subtract the noise.
Here every bit comes from AES-256 in counter mode, under a key of the operating system that is never stored or shown.

*Holes in the noise.* A Gaussian computed from one pair of floating-point uniforms reaches only some of the numbers of
its format, and from one released number an attacker can test whether a guessed exact value could have led to it
(Mironov 2012; Jin et al. 2022). Holohan and Braghin (2021, "Secure Random Sampling in Differential Privacy", §5.1) add
2n independent Gaussians and divide by √(2n). The test then takes an attacker of the order of 2^(53·(2n−1)) trials; with
n = 2, used here, these are 2¹⁵⁹. Four fresh 64-bit integers give two such sums, one of cosines and one of sines, which
are independent (`box_muller`). An attacker who sees both has two equations for the four integers: 2¹⁰⁶ trials, if these
floats themselves were released.

*Rounding of the sum.* Even with perfect noise ξ the float x ⊕ ξ betrays x: an output smaller than x keeps the spacing
of x's own digits. So nothing is added in floating point: `perturb` works on integers. The grid step g is a power of 2
that depends on public values only. Then

    K = round(x/g),   Z = round(s·ξ/g),   released: g·(K + Z).

All of it is exact in float64 (|K + Z| < 2⁵³). As K is an integer, K + round(s·ξ/g) = round(K + s·ξ/g). So the released
number is the Gaussian mechanism on g·K after a fixed rounding. By post-processing its guarantee is the ordinary one for
the sensitivity of g·K. Rounding moves each of the d entries of either of two neighbouring sums by g/2 at most, so this
sensitivity is at most Δ + g·√d.

The noise is made for Δ' = Δ + 2g·√d, and s = σ·Δ'. The second g·√d is for two releases of one sample, which are charged
as the largest M = a²/σ² + h²/σ_1² that a record causes (`SideRelease.joint_noise`). Rounding lets a record move each by
a share r = g·√d/Δ more than a and h. As 1/σ², 1/σ_1² ≤ M, (a + r)²/σ² + (h + r)²/σ_1² ≤ M·(1 + √2·r)². With
g ≤ Δ·2⁻¹⁶/√d this costs 3·10⁻⁵ of noise.

*Rounding before the sum is released.* The engine forms the sum in float32, so that removing a record can move it by
Δ·(1 + ρ), where ρ depends on how the other records' digits are rounded. The noise is therefore made for
Δ·(1 + 2⁻⁸) + 2g·√d. By the inequality above, with r = ρ + g·√d/Δ, it covers ρ ≤ 2⁻⁸/√2 = 2.7·10⁻³, alone and in two
releases together. The largest ρ that was measured is 1.6·10⁻³, for 65,536 records that agree (docs/rounding.md lists
all). This is a margin above what was seen, and no bound that was derived.

The 2²⁵⁶ choices of four integers fall on pairs of values of Z. With d ≤ 10⁹ and σ ≤ 100, each pair no longer than six
standard deviations comes about in more than 2¹⁵⁰ ways. Turning the released number into float32 afterwards is
post-processing too. The noise ends at 13.3 standard deviations, beyond which a true Gaussian has mass 2·10⁻⁴⁰.

This does not hide how long a step takes, and does not protect the machine's memory.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from equidp.errors import EquidpError
from equidp.mechanism.box_muller import gaussians
from equidp.mechanism.noise import Stream, refuse_other_shapes

WORD = 8
"""Bytes of one random integer."""

GRID_BITS = 16
"""The rounding of a whole vector to the grid adds at most 2^−GRID_BITS of the sensitivity."""

MARGIN = 2.0**-8
"""The share of the sensitivity that noise is made for beyond it, as float32 rounds the sums that it protects."""

LARGEST = 2.0**52
"""Integers up to here (plus noise) are exact in float64. Larger ones are clamped, which never moves two sums apart."""

CHUNK = 1 << 17
"""Numbers noised at once: few enough for caches to hold what their noise is made of, enough for several threads."""
GPU_CHUNK = (1 << 23) - 2
"""The same on a GPU, which is quick with many. With `SPARE` their words take just under 128 MiB: torch pins memory in
powers of two."""

ZEROS = bytes(1 << 19)
"""Zeros, which are encrypted to give the key stream, so many bytes at once."""
THREADS = 8
"""The most threads that draw words; each draws a block as long as `ZEROS` or more."""
SPARE = 2
"""Words of free memory that the cipher asks for behind what it writes."""


class SecureRandom:
    """Unpredictable streams, delivered on one device. Nothing can be seeded, saved, copied or repeated.

    A run that resumes continues with fresh randomness. The steps done after its last checkpoint are then done again
    with new batches and new noise: two different releases, so the ledger charges both (see `checkpoint`). Saving the
    generator instead would write the key to disk: whoever reads it can subtract all noise.
    """

    repeatable = False
    """Steps that are done again after a crash are new releases."""
    margin = MARGIN
    renewed = False
    """Nothing is saved that could be continued."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._begin()

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        """`[size]` bool, independent coins.

        A 64-bit integer is compared with ⌊2⁶⁴·p⌋. So a coin's probability is never above p, and less than 2⁻⁶⁴ below.
        """
        chance = np.asarray(probability.detach().cpu() if isinstance(probability, Tensor) else probability, np.float64)
        if np.isnan(chance).any():
            raise ValueError("A probability is not a number.")
        certain = chance >= 1.0
        threshold = np.ldexp(np.where(certain, 0.0, chance.clip(0.0, 1.0)), 64).astype(np.uint64)
        coins = (self.words(size) < threshold) | certain
        return torch.from_numpy(coins).to(self.device)

    def uniform(self, size: int, stream: Stream = "sampling") -> Tensor:
        """`[size]` float64 in [0, 1), multiples of 2⁻⁵³; every stream is fresh, whatever its name."""
        return torch.from_numpy((self.words(size) >> np.uint64(11)) * 2.0**-53).to(self.device)

    def words(self, size: int) -> np.ndarray:
        """`[size]` uint64 of the key streams."""
        return self._drawn(size).numpy().view(np.uint64)

    def normal(self, size: int) -> Tensor:
        """`[size]` float32 standard normal. To protect a value use `perturb`, which adds it safely."""
        drawn = torch.empty(size, dtype=torch.float32, device=self.device)
        for part in drawn.split(_chunk(self.device)):
            part.copy_(self._gaussian(len(part)))
        return drawn

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        """`[d]` values plus Gaussian noise of standard deviation σ·(Δ·(1 + MARGIN) + 2g√d), on a grid of step g.

        Args:
            values: `[d]` exact values, finite.
            sensitivity: Δ > 0, their l2 sensitivity; public.
            noise_multiplier: σ.

        Raises:
            EquidpError: for a sensitivity that is not a positive number, or values that are no vector.
        """
        refuse_other_shapes(values)
        delta, size = float(sensitivity), len(values)
        if not (math.isfinite(delta) and delta > 0):
            raise EquidpError(f"A sensitivity of {delta} cannot be protected in secure mode; check the clip norms.")
        step = grid_step(delta, size)
        spread = noise_multiplier * (delta * (1 + self.margin) + 2 * step * math.sqrt(size)) / step
        noised, chunk = torch.empty_like(values), _chunk(self.device)
        for exact, part in zip(values.detach().split(chunk), noised.split(chunk), strict=True):
            multiples = exact.double().div(step).round_().clamp_(-LARGEST, LARGEST)
            part.copy_(multiples.add_(self._gaussian(len(part)).mul_(spread).round_()).mul_(step))
        return noised

    def renew(self, life: int) -> None:
        """Nothing to do: no two draws are alike."""

    def state_dict(self) -> dict[str, Tensor]:
        """Empty: a secure stream is never continued."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Accept only the empty state.

        Raises:
            EquidpError: for the state of a seeded stream.
        """
        if state:
            raise EquidpError(
                "The checkpoint holds the state of seeded random numbers, which secure mode refuses: start again, or "
                "resume with privacy.secure=false."
            )

    def set_back(self, state: dict[str, Tensor]) -> None:
        """Nothing to do: no draw is repeated."""

    def _gaussian(self, size: int) -> Tensor:
        """`[size]` float64."""
        pairs = -(-size // 2)
        words = self._drawn(4 * pairs).to(self.device, non_blocking=True)
        return gaussians(words.view(2, 2, pairs))[:size]

    def _drawn(self, size: int) -> Tensor:
        """`[size]` int64 of the key streams on the CPU; for a GPU in pinned memory, which it reads by itself."""
        if os.getpid() != self._process:
            self._begin()  # a forked child would otherwise continue its parent's streams: one noise in two releases
        number = min(THREADS, torch.get_num_threads(), WORD * size // len(ZEROS)) or 1
        while len(self._streams) < number:
            self._streams.append(_new_stream())
        drawn = torch.empty(size + SPARE, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        memory, share = drawn.numpy().data.cast("B"), WORD * -(-size // number)
        parts = [memory[i * share : (i + 1) * share + WORD * SPARE] for i in range(number)]
        try:
            filled = (map if number == 1 else self._threads.map)(_fill, self._streams, parts)
        except RuntimeError:  # the main thread has ended, after which no pool takes work
            filled = map(_fill, self._streams, parts)
        list(filled)
        return drawn[:size]

    def _begin(self) -> None:
        """Begin with fresh keys, and with threads of this process."""
        self._streams: list[CipherContext] = []
        self._threads, self._process = ThreadPoolExecutor(THREADS), os.getpid()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("SecureRandom can neither be copied nor pickled: its noise must not be drawn twice.")


def grid_step(sensitivity: float, size: int) -> float:
    """The largest power of two g with g·√size ≤ 2^−GRID_BITS · sensitivity."""
    return 2.0 ** math.floor(math.log2(sensitivity / math.sqrt(max(size, 1))) - GRID_BITS)


def _chunk(device: torch.device) -> int:
    return GPU_CHUNK if device.type == "cuda" else CHUNK


def _fill(stream: CipherContext, part: memoryview) -> None:
    """Write the key stream into `part`, except the `SPARE` words at its end."""
    size = len(part) - WORD * SPARE
    for start in range(0, size, len(ZEROS)):
        stream.update_into(memoryview(ZEROS)[: size - start], part[start:])


def _new_stream() -> CipherContext:
    """AES-256-CTR under a fresh key: encrypting zeros gives its key stream; the 128-bit counter never repeats."""
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
