"""Shares: the number of threads for a private pass, chosen so that each thread computes whole records.

This is for secure runs on a CPU. There torch divides elementwise work (sigmoids, powers, their derivatives) into equal
shares, one for each thread. Inside a share it computes a processor's vector at a time. If a share ends within a vector,
torch computes the last values by another function, which rounds differently. One record less in the batch moves the
others to other places, so a record can get another last bit. Where the model has a kink, another last bit can mean
another gradient: the sum moved by 1.9·Δ on two threads and by 3.9·Δ on four.

How torch divides n values depends on n and on the number of threads:

- most functions give each thread at least 2¹⁵ values; GELU uses all threads above 2¹⁴ values;
- a softmax along another dimension than the last uses all threads for any number of columns. Attention over time moved
  the sum by 6·Δ on six threads.

So a pass of each new shape is first done on one thread, only to see the sizes of all tensors that the model computes.
Then the most threads are taken for which no share ends within a record or a vector. If the model or the loss lets the
numbers of records decide a size (`o[known]`), there is only one thread, from the first pass on. Otherwise one record
could change the number of threads, and by it the last digits of all others.

The result of that first pass is not used, because on one thread a record may get other digits than on several. Which
pass is the first of its shape depends on the earlier batches, so one record could change the digits of others.

Norms of units (all records of one person) are computed after the pass, on one thread (`FixedRows`), because the number
of units and their sizes are private. The model's passes themselves do not depend on units.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equidp.gradients.used import used_by
from equidp.system.threads import GLOBAL_RANDOM

T = TypeVar("T")

EACH, SHARED = 1 << 15, 1 << 14
"""EACH: the fewest values that torch gives a thread. SHARED: up to so many, one thread computes a whole GELU."""

WHOLE = 32
"""A share may end after a multiple of so many values: two vectors of 16 floats, which torch computes together."""

VECTOR = 16
"""A share may end after a multiple of so many records, in a softmax whose columns are the records."""


READING = frozenset({"item", "tolist", "numpy", "__array__", "__int__", "__index__"})
"""Functions that hand a tensor's numbers to Python, where they may become sizes. A bool or a float cannot be a size."""

CHOOSING = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
    | {"_pack_padded_sequence", "to_sparse"}
)
"""Functions whose output size depends on the numbers in a tensor."""

SIZED = frozenset(
    {"arange", "zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"}
    | {"narrow", "expand", "repeat", "reshape", "view", "unflatten", "tensor_split", "repeat_interleave"}
)
"""Functions that accept a tensor of a whole number as a size."""


class Sizes(TorchFunctionMode):
    """Within this mode: notes the sizes of all tensors that torch's functions compute.

    A view computes nothing. A function of several tensors may compute all pairs of them, as `F.pairwise_distance` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.columns = False
        """Whether there was, or may have been, a softmax along another dimension than the last."""
        self.hidden = False
        """Whether some sizes are unknown: hidden within `torch.vmap`, or dependent on the numbers in records."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what the function returns, unchanged."""
        found, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        self.hidden |= asks_for_sizes(name, args, kwargs or {})
        self.columns |= shares_columns(name, args, kwargs or {})
        given = [one for one in args if isinstance(one, Tensor)]
        for one in found if isinstance(found, tuple | list) else (found,):
            if not isinstance(one, Tensor):
                continue
            memory = _memory(one)
            self.hidden |= memory is None
            if name.endswith("_") or not given or memory != _memory(given[0]):
                self.seen.add(one.numel())
        if len(given) > 1:
            with contextlib.suppress(RuntimeError):  # shapes that cannot be paired, as in a product of matrices
                self.seen.add(math.prod(torch.broadcast_shapes(*(one.shape for one in given))))
        return found


def _memory(values: Tensor) -> int | None:
    """Return the address of a tensor's memory; None within `torch.vmap`, where a tensor stands for many records."""
    try:
        return values.untyped_storage().data_ptr()
    except NotImplementedError:
        return None


def asks_for_sizes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the numbers that a torch function is given may decide how many numbers it returns."""
    if name == "__getitem__":
        places = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        return any(is_mask(place) or (isinstance(place, slice) and is_cut(place)) for place in places)
    if name in SIZED:
        given = (*args[name != "arange" :], *kwargs.values())
        return any(isinstance(one, Tensor) and not one.is_floating_point() for one in given)
    return name in READING or name in CHOOSING or (name == "where" and len(args) + len(kwargs) == 1)


def is_mask(place: object) -> bool:
    return isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8)


def is_cut(place: slice) -> bool:
    return any(isinstance(end, Tensor) for end in (place.start, place.stop, place.step))


def shares_columns(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function is, or may be, a softmax along another dimension than the last."""
    if ("softm" not in name and "cross_entropy" not in name) or "binary" in name:
        return False
    scores = args[0] if args else kwargs.get("input")
    along = 1 if "cross_entropy" in name else kwargs.get("dim", args[1] if len(args) > 1 else None)
    return not isinstance(scores, Tensor) or along not in (-1, scores.dim() - 1)


def scripted(model: nn.Module, loss: object = None) -> bool:
    """Whether a model or its loss uses TorchScript, whose calls of torch functions cannot be seen."""
    used = (*model.modules(), *used_by(model), *used_by(loss))
    return any(isinstance(one, torch.jit.ScriptFunction | torch.jit.ScriptModule) for one in used)


class WholeShares:
    """Runs the private passes of a model on as many threads as the module's docstring allows."""

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self.model = model
        self._scripted = scripted(model, loss)
        self._threads: dict[Hashable, int] = {}  # for each kind of pass and number of threads available

    def forget(self) -> None:
        """Forget the number of threads for every kind of pass, because the model may compute something else now."""
        self._threads.clear()

    def passed(self, work: Callable[[Tensor], T], features: Tensor, rows: int, *others: Hashable) -> T:
        """Return what `work` returns for these features, computed on the allowed number of threads.

        Args:
            work: a forward and a backward pass. For a new kind of pass it is called twice, first on a copy.
            features: `[rows, …]`, or `[m·rows, …]` for m views (augmented copies) of each record.
            rows: number of records.
            others: whatever else decides what is computed.
        """
        most = torch.get_num_threads()
        if most == 1 or not rows or not features.is_cpu:
            return work(features)
        if self._scripted:
            with threads(1):
                return work(features)
        kind = (features.shape, rows, self.model.training, most, others)
        if kind not in self._threads:
            with GLOBAL_RANDOM, torch.random.fork_rng(devices=[]), threads(1), Sizes() as sizes:
                work(features.clone())
            sizes.seen.add(features.numel())
            possible = range(1, 2 if sizes.hidden else most + 1)
            fitting = (n for n in possible if whole(rows, sizes.seen, n, columns=sizes.columns))
            self._threads[kind] = max(fitting, default=1)
        with threads(self._threads[kind]):
            return work(features)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Within this context torch uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole(rows: int, sizes: Iterable[int], number: int, *, columns: bool = False) -> bool:
    """Whether each of `number` threads gets whole records and whole vectors.

    Args:
        rows: number of records in the pass.
        sizes: numbers of values of the tensors that the pass computes. A size that is no multiple of `rows` belongs to
            records and something else, such as prototypes: there whole vectors suffice.
        number: of threads.
        columns: whether small tensors, and tensors that do not begin with the records, are shared as well.
    """
    return not (columns and rows % (VECTOR * number)) and all(
        size % (WHOLE * shares) == 0 and (rows % shares == 0 or size % rows > 0)
        for size in sizes
        if size > SHARED
        for shares in {number, min(number, math.ceil(size / EACH))}
        if shares > 1
    )
