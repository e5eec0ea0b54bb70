"""Random numbers: separate, named streams, so that runs of one seed share what they should and nothing else.

Two algorithms run with the same seed draw the same batches and start from the same weights; their noise is
independent of both. A fixed seed makes noise predictable: fine for research, worthless for a release.
"""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from equidp.errors import EquidpError

Stream = Literal["sampling", "noise", "acceptance"]
"""`sampling` for batches, `noise` for everything that protects, `acceptance` for coins about released values."""


HOST = "sampling on the host"


def refuse_other_shapes(values: Tensor) -> None:
    """Refuse values that are no vector `[m]`: entries of a table would share noise, and their differences be exact.

    Raises:
        EquidpError: for a table of values, or a single one without dimension.
    """
    if values.dim() != 1:
        raise EquidpError(
            f"Values of shape {tuple(values.shape)} are to be noised, and noise is drawn for a vector [m]: entries of "
            "one column would share it, and their differences would be exact. Flatten them."
        )


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Values on the CPU; for a GPU in pinned memory, which it reads by itself."""
    return values.pin_memory() if device.type == "cuda" else values


def brought(values: Tensor, device: torch.device) -> Tensor:
    """Bring values from the CPU to a device, without waiting for them."""
    return pinned(values, device).to(device, non_blocking=True)


class RandomSource(Protocol):
    """What a training run may ask of its random numbers."""

    repeatable: bool
    """Whether a step done again after a crash draws the same batch and the same noise."""
    margin: float
    """By which share of σ·Δ the noise is larger than that."""

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        """`[size]` bool, independent coins; `probability` is one number or one per coin."""

    def uniform(self, size: int, stream: Stream = "sampling") -> Tensor:
        """`[size]` float64 in [0, 1)."""

    def words(self, size: int) -> np.ndarray:
        """`[size]` uint64 of the `sampling` stream, uniform."""

    def normal(self, size: int) -> Tensor:
        """`[size]` float32 standard normal."""

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        """`[d]` values plus noise N(0, (σ·Δ)²) on each, or a little more: the only way for an exact value to leave."""

    def renew(self, life: int) -> None:
        """Draw other values from here on, whatever state is loaded. Each number `life` has streams of its own."""

    @property
    def renewed(self) -> bool:
        """Whether `renew` was called: no saved state is continued then."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue the streams."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict`, unless the streams were renewed."""

    def set_back(self, state: dict[str, Tensor]) -> None:
        """Go back to this `state_dict`, for example after a trial, which draws; renewed streams go back, too."""


def derived_seed(seed: int, stream: str) -> int:
    """A 63-bit seed for a named stream; different names give independent streams."""
    return int.from_bytes(hashlib.sha256(f"equidp/{seed}/{stream}".encode()).digest()[:8], "big") >> 1


class SeededRandom:
    """Reproducible streams on one device."""

    repeatable = True
    margin = 0.0

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device, self.seed, self.renewed = torch.device(device), seed, False
        self._generators = {
            stream: torch.Generator(self.device).manual_seed(derived_seed(seed, stream)) for stream in get_args(Stream)
        }
        if self.device.type != "cpu":  # words are drawn on the CPU: a batch's size is known without waiting for a GPU
            self._generators[HOST] = torch.Generator().manual_seed(derived_seed(seed, HOST))

    @property
    def noise_generator(self) -> torch.Generator:
        """The generator of the noise."""
        return self._generators["noise"]

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        """`[size]` bool, independent coins."""
        coins = self.uniform(size)
        if self.device.type == "cpu" and not isinstance(probability, Tensor):
            return torch.from_numpy(coins.numpy() < probability)  # a quarter of the time that torch takes
        return coins < probability

    def uniform(self, size: int, stream: Stream = "sampling") -> Tensor:
        """`[size]` float64 in [0, 1)."""
        # float64: with float32 the smallest step, 2⁻²⁴, would distort small rates
        return torch.rand(size, generator=self._generators[stream], device=self.device, dtype=torch.float64)

    def words(self, size: int) -> np.ndarray:
        """`[size]` uint64, uniform."""
        drawn = torch.empty(size, dtype=torch.int64, device="cpu")
        drawn.random_(-(2**63), None, generator=self._generators.get(HOST, self._generators["sampling"]))
        return drawn.numpy().view(np.uint64)

    def normal(self, size: int) -> Tensor:
        """`[size]` float32 standard normal."""
        return torch.randn(size, generator=self._generators["noise"], device=self.device, dtype=torch.float32)

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        """`[d]` values plus σ·Δ times `normal`, in floating point: see `secure` for what that leaves open.

        Raises:
            EquidpError: for values that are no vector.
        """
        refuse_other_shapes(values)
        noise = self.normal(len(values)).mul_(sensitivity * noise_multiplier)
        # in place: fresh memory for a large model's sum costs as much as a pass over it
        return noise.add_(values) if values.dtype == noise.dtype else values + noise

    def renew(self, life: int) -> None:
        """Streams of the same seed that share nothing with those of other lives."""
        self.renewed = True
        for stream, generator in self._generators.items():
            generator.manual_seed(derived_seed(self.seed, f"{stream}/life {life}"))

    def state_dict(self) -> dict[str, Tensor]:
        """State of every stream."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue every stream, unless they were renewed.

        Raises:
            EquidpError: for a state of other streams.
        """
        if self.renewed:
            return
        now = self.state_dict()
        if any(name not in state or state[name].shape != own.shape for name, own in now.items()):
            raise EquidpError(
                "The state is of a run without a seed, or on another device, whose random numbers were not kept: "
                "continue it as it began."
            )
        self.set_back(state)

    def set_back(self, state: dict[str, Tensor]) -> None:
        """Continue every stream from this state, also if streams were renewed."""
        for name, generator in self._generators.items():
            generator.set_state(state[name])
