"""Workspace: buffers that live from step to step, because fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ROOMY = 1 << 26
"""Floats in all buffers (256 MiB) beyond which a CPU keeps nothing more that can be formed again to the same bit."""


class Workspace:
    """Named buffers of one engine.

    Args:
        device: decides how much scratch is worth having at a time: a core's cache, or a share of a GPU's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch_floats, self.keep_floats = (1 << 20, 1 << 25) if device.type == "cpu" else (1 << 29, 1 << 30)
        if device.type == "cuda":  # on small cards less: a 32nd of the memory, and a quarter for what is kept
            total = torch.cuda.get_device_properties(device).total_memory
            self.scratch_floats = min(self.scratch_floats, total // 128)
            self.keep_floats = min(self.keep_floats, total // 16)
        # on a GPU `memory.py` leaves what is beside the quarter of all
        self.roomy_floats = ROOMY if device.type == "cpu" else self.keep_floats // 4
        self._buffers: dict[object, Tensor] = {}
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._segments: dict[tuple[int, ...], Tensor] = {}

    def take(self, owner: object, *shape: int, like: Tensor) -> Tensor:
        """A tensor of unknown content that only the next `take` of the same owner overwrites."""
        numel = math.prod(shape)
        buffer = self._buffers.get(owner)
        if buffer is None or buffer.numel() < numel or buffer.dtype != like.dtype or buffer.device != like.device:
            # Poisson batches vary in size: a little more often saves the next reallocation
            buffer = self._buffers[owner] = like.new_empty(numel + numel // 8)
        return buffer[:numel].view(shape)

    def take_if_roomy(self, owner: object, *shape: int, like: Tensor) -> Tensor | None:
        """As `take`, or None if all buffers would then hold more than `roomy_floats`."""
        others = sum(buffer.numel() for of, buffer in self._buffers.items() if of is not owner)
        return self.take(owner, *shape, like=like) if others + math.prod(shape) <= self.roomy_floats else None

    def constant(self, numbers: tuple[float, ...], like: Tensor) -> Tensor:
        """`[n]` of these numbers, brought to the device once."""
        if numbers not in self._constants:
            self._constants[numbers] = torch.tensor(numbers, dtype=like.dtype, device=like.device)
        return self._constants[numbers]

    def segments(self, counts: Sequence[int], like: Tensor) -> Tensor:
        """`[n, Σ counts]` that adds up so many rows each of a matrix behind it, brought to the device once."""
        key = tuple(counts)
        if key not in self._segments:
            owners = torch.arange(len(key), device="cpu").repeat_interleave(torch.tensor(key, device="cpu"))
            self._segments[key] = torch.nn.functional.one_hot(owners, len(key)).T.to(like)
        return self._segments[key]

    def ones(self, size: int, like: Tensor) -> Tensor:
        """`[size]` of ones, made once; not to be written to."""
        if (size, like.dtype) not in self._ones:
            self._ones[size, like.dtype] = like.new_ones(size)
        return self._ones[size, like.dtype]

    def chunks(self, records: int, floats: int) -> Iterator[tuple[int, int]]:
        """Ranges of records so that `floats` of scratch per record stay within bounds."""
        size = max(2, self.scratch_floats // max(floats, 1))
        return ((start, min(start + size, records)) for start in range(0, records, size))
