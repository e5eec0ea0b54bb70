"""Shares: in a secure run on a CPU every thread computes whole records, in whole vectors, of what a pass computes.

torch computes value by value (sigmoids, powers, their derivatives) on several threads, each an equal share of the
values. Where a share ends within a vector of the processor, its last values are computed by another function and
rounded otherwise. A record that is moved there, by one record less, gets another last bit, and at a kink of the model
another gradient: on two threads the sum moved by 1.9·Δ, on four by 3.9·Δ.

How torch shares n values depends on n and on the number of threads: at least 2¹⁵ values a thread, and GELU takes all
threads above 2¹⁴. So the number of threads is chosen by the sizes of what the model computes, which a pass of the same
shape shows: the largest of those for which no share ends within a record or within 32 values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EACH, SHARED = 1 << 15, 1 << 14
"""Values that a thread gets at least, and up to which one thread computes all of a GELU."""

WHOLE = 32
"""Values after which a share may end: two vectors of 16 floats, which torch computes at once."""


class Sizes(TorchFunctionMode):
    """How many numbers the tensors have that torch's functions return meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the function returns, as it is."""
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.seen.add(one.numel())
        return found


class WholeShares:
    """Threads of private passes; those of a shape are looked for in its first pass, which takes one thread."""

    def __init__(self) -> None:
        self._threads: dict[tuple[int, ...], int] = {}  # by the features' shape and the threads there are

    @contextlib.contextmanager
    def of(self, features: Tensor) -> Iterator[None]:
        """For one forward pass of these features `[rows, …]`, and its backward pass."""
        most = torch.get_num_threads()
        shape = (*features.shape, most)
        chosen = self._threads.get(shape, 1)
        if chosen == most or not len(features) or not features.is_cpu:
            yield
            return
        with threads(chosen):
            if shape in self._threads:
                yield
                return
            with Sizes() as sizes:
                yield
        self._threads[shape] = max(
            (number for number in range(1, most + 1) if whole(len(features), sizes.seen, number)), default=1
        )


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """So many of torch's threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole(rows: int, sizes: Iterable[int], number: int) -> bool:
    """Whether `number` threads get whole records and vectors of tensors of these sizes, in a pass of so many rows."""
    return all(
        rows % shares == 0 and size // shares % WHOLE == 0
        for size in sizes
        if size > SHARED and size % rows == 0  # else nothing of records
        for shares in {number, min(number, math.ceil(size / EACH))}
    )
