"""Workspace: buffers that are used again from step to step, because new memory costs a page fault for every 4 KiB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ROOMY = 1 << 26
"""Floats in all buffers (256 MiB). Beyond this a CPU keeps no more gradients that can be formed again, bit by bit."""


class Workspace:
    """Named buffers of one engine.

    Args:
        device: decides the size of scratch memory: a core's cache, or a share of a GPU's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.scratch_floats, self.keep_floats = (1 << 20, 1 << 25) if device.type == "cpu" else (1 << 29, 1 << 30)
        if device.type == "cuda":  # less on small cards: a 32nd of the memory, and a quarter for kept gradients
            total = torch.cuda.get_device_properties(device).total_memory
            self.scratch_floats = min(self.scratch_floats, total // 128)
            self.keep_floats = min(self.keep_floats, total // 16)
        # on a GPU this is beside the quarter of the memory for other kept gradients: `memory.py` leaves room for it
        # windows that are written out at once; more than a CPU's cache, because cutting a sum changes its digits
        self.window_floats = ROOMY if device.type == "cpu" else self.scratch_floats
        self.roomy_floats = ROOMY if device.type == "cpu" else self.keep_floats // 4
        self._buffers: dict[object, Tensor] = {}
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._segments: dict[tuple[int, ...], Tensor] = {}

    def take(self, owner: object, *shape: int, like: Tensor) -> Tensor:
        """Return a tensor of unknown content, which only the next `take` of the same owner overwrites."""
        numel = math.prod(shape)
        buffer = self._buffers.get(owner)
        if buffer is None or buffer.numel() < numel or buffer.dtype != like.dtype or buffer.device != like.device:
            # Poisson batches vary in size: a slightly larger buffer often fits the next one, too
            buffer = self._buffers[owner] = like.new_empty(numel + numel // 8)
        return buffer[:numel].view(shape)

    def take_if_roomy(self, owner: object, *shape: int, like: Tensor) -> Tensor | None:
        """Return the same as `take`, or None if all buffers would then hold more than `roomy_floats`."""
        others = sum(buffer.numel() for of, buffer in self._buffers.items() if of is not owner)
        return self.take(owner, *shape, like=like) if others + math.prod(shape) <= self.roomy_floats else None

    def constant(self, numbers: tuple[float, ...], like: Tensor) -> Tensor:
        """Return a tensor `[n]` of these numbers, which is copied to the device once."""
        if numbers not in self._constants:
            self._constants[numbers] = torch.tensor(numbers, dtype=like.dtype, device=like.device)
        return self._constants[numbers]

    def segments(self, counts: Sequence[int], like: Tensor) -> Tensor:
        """Return a matrix `[n, Σ counts]` of zeros and ones, which is copied to the device once.

        Its product with a matrix `[Σ counts, …]` adds up the first `counts[0]` rows, the next `counts[1]` rows, and so
        on.
        """
        key = tuple(counts)
        if key not in self._segments:
            owners = torch.arange(len(key), device="cpu").repeat_interleave(torch.tensor(key, device="cpu"))
            self._segments[key] = torch.nn.functional.one_hot(owners, len(key)).T.to(like)
        return self._segments[key]

    def ones(self, size: int, like: Tensor) -> Tensor:
        """Return `[size]` ones, made once; do not write to them."""
        if (size, like.dtype) not in self._ones:
            self._ones[size, like.dtype] = like.new_ones(size)
        return self._ones[size, like.dtype]

    def chunks(self, records: int, floats: int) -> Iterator[tuple[int, int]]:
        """Give ranges of records that together need no more scratch than there is, for `floats` per record.

        A range has two records at least, if there are so many.
        """
        size = max(2, self.scratch_floats // max(floats, 1))
        return ((start, min(start + size, records)) for start in range(0, records, size))
