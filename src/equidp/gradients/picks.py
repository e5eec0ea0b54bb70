"""Picks: in a secure run, the digits of a value must not depend on its place in a tensor that a mask has made.

A mask (`outputs[known]`) picks as many values as the records say. The place of each value depends on the records before
it. On a CPU the place can change the digits: the last values of a tensor, which do not fill a vector of the processor,
go through another function (in sigmoids and BCE), and some rows of a matrix product go through another kernel. So one
record more can change the last digits of other records. Comparing a few batches seldom shows this.

Instead, one pass shows which torch functions are given picked values. A function that is not known to give the same
digits at every place is refused. What TorchScript computes is not seen, nor what numpy or Python lists pick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.shares import CHOOSING, SIZED, asks_for_sizes, is_cut, is_mask, shares_columns

ROWS = 37
"""Number of records in the pass: a prime that is unlikely to be a width of the model, and above what is tried."""

FILLING = frozenset({"setitem", "index_put", "masked_scatter", "scatter", "scatter_add", "index_add", "index_copy"})
"""Functions that write picked values into a tensor. That tensor keeps its size, so its values are not picked."""

EXACT = (
    FILLING
    | CHOOSING
    | {"view", "reshape", "unflatten", "as_strided"}
    | {"get", "set", "getitem", "take", "gather", "index_select", "take_along_dim", "where", "narrow", "select"}
    | {"unbind", "chunk", "split", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim"}
    | {"swapaxes", "t", "expand", "expand_as", "repeat", "repeat_interleave", "diagonal", "flip", "cat", "concat"}
    | {"concatenate", "stack", "hstack", "vstack", "pad", "pad_sequence", "embedding", "clone", "contiguous"}
    | {"detach", "requires_grad", "copy", "to", "cpu", "cuda", "type", "type_as", "float", "double", "zeros_like"}
    | {"ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero", "fill", "add", "sub", "rsub", "mul"}
    | {"div", "rdiv", "true_divide", "neg", "abs", "sign", "square", "sqrt", "clamp", "clamp_min", "clamp_max"}
    | {"relu", "maximum", "minimum", "amax", "amin", "max", "min", "masked_fill", "nan_to_num", "l1_loss"}
    | {"mse_loss", "cross_entropy", "nll_loss", "log_softmax", "softmax", "layer_norm"}
)
"""Names of functions, without underscores around them, whose digits do not depend on the place, in the backward pass
too. They compute each value by itself with IEEE rounding, or each row along the last dimension by itself."""

SUMS = frozenset({"sum", "mean"})
"""Exact over the last dimensions of a contiguous tensor. Else columns that fill no vector are added up differently."""


class Picks(TorchFunctionMode):
    """Within this mode: finds the first function that is given picked values and may round them by their place.

    A result that again has one row for each record does not count as picked.
    """

    def __init__(self, *records: Tensor) -> None:
        super().__init__()
        self.rows, self.inexact = len(records[0]), ""
        # by id, as tensors are compared number by number
        self._of_records = WeakValueDictionary((id(one), one) for one in records)
        self._picked = WeakValueDictionary[int, Tensor]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what the function returns, unchanged."""
        kwargs, whole = kwargs or {}, getattr(func, "__name__", "")
        given, name = list(_tensors((args, kwargs))), whole.strip("_")
        found = func(*args, **kwargs)
        if not any(id(one) in self._of_records for one in given):
            return found
        in_place = args[:1] if whole == f"{name}_" or name in ("setitem", "set") else ()
        results = [*_tensors(found), *_tensors(kwargs.get("out")), *in_place]
        self._of_records.update((id(one), one) for one in results)
        # of experts: the records decide how many rows each expert's product has
        picked = given[:1] if name == "grouped_mm" else [one for one in given if id(one) in self._picked]
        if picked and any(one.is_floating_point() or one.is_complex() for one in results):
            self.inexact = self.inexact or ("" if _exact(name, picked[0], args, kwargs) else name)
        whole_numbers = [one for one in given if not one.is_floating_point()]
        chosen = asks_for_sizes(whole, args, kwargs) and (
            name not in SIZED or any(id(one) in self._of_records for one in whole_numbers)
        )
        if not (picked or chosen) or (name in FILLING and id(given[0]) not in self._picked):
            return found
        # a mask may by chance pick as many values as there are records; a given size of so many is no chance
        by_chance = (chosen and _of_rows(name, args)) or self.rows in map(len, picked)
        by_chance = by_chance and not (name in SIZED and self.rows in _numbers(args)[:1])
        for one in results:
            if one.dim() and (by_chance or len(one) != self.rows):  # a single number has no place
                self._picked[id(one)] = one
        return found


def refuse_picks(passes: BookKeeping, features: Tensor, labels: Tensor) -> None:
    """Refuse a model or a loss that gives picked values to a function that may round them by their place.

    Args:
        passes: the passes of the model and the loss. Only a forward pass is made.
        features: `[b, …]`, at most 36 records.
        labels: `[b, …]`.

    Raises:
        EquidpError: it names the function.
    """
    places = torch.arange(ROWS, device=features.device).clamp(max=len(features) - 1)
    some, theirs = features[places], labels[places]
    with Picks(some, theirs) as picks:
        passes.loss(passes.outputs(some), theirs)
    if picks.inexact:
        raise EquidpError(
            f"The model or the loss gives what records pick (outputs[known], an expert's tokens) to {picks.inexact!r}, "
            "which may round a value by its place: in a secure run one record more could change others' last digits, "
            "and at a kink whole gradients. Compute all places, with labels that are finite where they are missing, "
            "and weigh them by 0 or 1: (loss(outputs, labels) * known).sum(1)."
        )


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in a value, also those in lists, tuples, dicts and slices."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, slice):
        yield from _tensors((values.start, values.stop, values.step))
    elif isinstance(values, list | tuple | dict):
        for one in values.values() if isinstance(values, dict) else values:
            yield from _tensors(one)


def _of_rows(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function may choose along the first dimension."""
    if name == "narrow":
        return args[1:2] == (0,)
    if name != "getitem":
        return True
    first = args[1][0] if isinstance(args[1], tuple | list) else args[1]
    return first is None or is_mask(first) or (isinstance(first, slice) and is_cut(first))


def _numbers(args: tuple[Any, ...]) -> list[Any]:
    """Return the whole numbers that a function is given, such as sizes."""
    return [one for part in args for one in (part if isinstance(part, list | tuple) else (part,)) if type(one) is int]


def _exact(name: str, values: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function gives picked values the same digits at every place."""
    if name == "pow":
        return len(args) > 1 and isinstance(args[1], int | float) and args[1] == 2
    if name not in SUMS:
        return name in EXACT and not shares_columns(name, args, kwargs)
    every, along = range(values.dim()), kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = sorted(every[at] for at in ((along,) if isinstance(along, int) else along or every))
    return values.is_contiguous() and dims == list(every)[values.dim() - len(dims) :]
