"""Shares: in a secure run on a CPU every thread computes whole records, in whole vectors, of what a pass computes.

torch computes value by value (sigmoids, powers, their derivatives) on several threads, each an equal share of the
values. Where a share ends within a vector of the processor, its last values are computed by another function and
rounded otherwise. A record that is moved there, by one record less, gets another last bit, and at a kink of the model
another gradient: on two threads the sum moved by 1.9·Δ, on four by 3.9·Δ.

How torch shares n values depends on n and on the number of threads: at least 2¹⁵ values a thread, and GELU takes all
threads above 2¹⁴. A softmax along another dimension than the last takes all threads, each for a share of its columns,
whatever their number: attention over time moved the sum by 6·Δ on six. So the number of threads is chosen by the rows
and by the sizes of what the model computes, which a pass of the same shape shows: the largest of those for which no
share ends within a record or a vector. Where a model or a loss asks records for sizes (`o[known]`), it is one thread
from the first pass on: the largest number would be another one for other records, and so would everybody's last digits.

That pass is on one thread, and nothing uses what it gives: a record may get other digits there than on several. Which
pass is the first of its kind depends on the batches before, and one record more may have made another chunk of one.

Norms of units are taken after a pass, on one thread (`FixedRows`): how many units there are, and whose a record is, is
private. The model's passes have the same sizes whatever units their records belong to.
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
"""Values that a thread gets at least, and up to which one thread computes all of a GELU."""

WHOLE = 32
"""Values after which a share may end: two vectors of 16 floats, which torch computes at once."""

VECTOR = 16
"""Records after which a thread's share may end, for a softmax over tensors that do not begin with the records."""


READING = frozenset({"item", "tolist", "numpy", "__array__", "__int__", "__index__"})
"""What hands a tensor's numbers to Python, where they may become sizes; a `__bool__` or a `__float__` is none."""

CHOOSING = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
    | {"_pack_padded_sequence", "to_sparse"}
)
"""What gives as many numbers as a tensor's numbers say."""

SIZED = frozenset(
    {"arange", "zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"}
    | {"narrow", "expand", "repeat", "reshape", "view", "unflatten", "tensor_split", "repeat_interleave"}
)
"""What takes a whole number in a tensor as a size."""


class Sizes(TorchFunctionMode):
    """How many numbers the tensors have that torch's functions compute meanwhile, and whether columns were shared.

    A view computes none. A function of several tensors may compute all their pairs, as `F.pairwise_distance` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.columns = False
        """Whether there was a softmax along another dimension than the last, or may have been."""
        self.hidden = False
        """Whether some sizes are not those of what is computed, as within `torch.vmap`, or may be of their numbers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the function returns, as it is."""
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
            with contextlib.suppress(RuntimeError):  # shapes of no pairs, as of a product of matrices
                self.seen.add(math.prod(torch.broadcast_shapes(*(one.shape for one in given))))
        return found


def _memory(values: Tensor) -> int | None:
    """Where a tensor's numbers are; None of one that stands for many records, one of which it shows."""
    try:
        return values.untyped_storage().data_ptr()
    except NotImplementedError:
        return None


def asks_for_sizes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch's may give as many numbers as the numbers say that it is given."""
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
    """Whether a function of torch's is, or may be, a softmax along another dimension than the last."""
    if ("softm" not in name and "cross_entropy" not in name) or "binary" in name:
        return False
    scores = args[0] if args else kwargs.get("input")
    along = 1 if "cross_entropy" in name else kwargs.get("dim", args[1] if len(args) > 1 else None)
    return not isinstance(scores, Tensor) or along not in (-1, scores.dim() - 1)


def scripted(model: nn.Module, loss: object = None) -> bool:
    """Whether a model or its loss calls a script, of which no function of torch's is seen."""
    used = (*model.modules(), *used_by(model), *used_by(loss))
    return any(isinstance(one, torch.jit.ScriptFunction | torch.jit.ScriptModule) for one in used)


class WholeShares:
    """Threads of a model's private passes; those of a kind are looked for in a pass of its own, on one thread."""

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self.model = model
        self._scripted = scripted(model, loss)
        self._threads: dict[Hashable, int] = {}  # by the kind of pass and the threads there are

    def forget(self) -> None:
        """Look for the threads of every kind anew: a model may have come to compute something else."""
        self._threads.clear()

    def passed(self, work: Callable[[Tensor], T], features: Tensor, rows: int, *others: Hashable) -> T:
        """What `work` makes of these features in a forward pass, and its backward pass.

        Args:
            work: of a kind of pass that is new it is done twice, at first on a copy of the features.
            features: `[rows, …]`, or of m views `[m·rows, …]`, which may be passed one after another.
            rows: of a view.
            others: whatever else says what is computed.
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
    """So many of torch's threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole(rows: int, sizes: Iterable[int], number: int, *, columns: bool = False) -> bool:
    """Whether `number` threads get whole records and vectors of tensors of these sizes, in a pass of so many rows.

    A size that is no multiple of the rows may be of the records and something else, as prototypes: whole vectors do.

    `columns`: of small tensors, too, and of such as do not begin with the records.
    """
    return not (columns and rows % (VECTOR * number)) and all(
        size % (WHOLE * shares) == 0 and (rows % shares == 0 or size % rows > 0)
        for size in sizes
        if size > SHARED
        for shares in {number, min(number, math.ceil(size / EACH))}
        if shares > 1
    )
