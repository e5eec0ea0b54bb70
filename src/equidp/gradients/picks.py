"""Picks: in a secure run, what is computed of values that records pick must not depend on the place they are at.

A mask (`outputs[known]`) gives as many values as the records say, each at a place that follows from those before it. A
CPU computes the last values of a tensor, which fill no vector, by another function (sigmoids, BCE), and some rows of a
product by another kernel, as their number is. One record more gives others other last digits, which any two batches
show seldom. So one pass shows which functions are given such values: what is not known to be exact at any place is
refused. What a script computes is not seen, nor is what numpy or lists of places pick.
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
"""Of the pass: a prime above what is tried, as no width of a model is by chance."""

FILLING = frozenset({"setitem", "index_put", "masked_scatter", "scatter", "scatter_add", "index_add", "index_copy"})
"""What puts picked values to places of their own: what is filled keeps its size."""

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
"""Names of functions, without underscores around them, that give a value the same digits at any place, and on the way
back too: each value by itself, rounded as IEEE says, or each row along the last dimension by itself."""

SUMS = frozenset({"sum", "mean"})
"""Exact along the last dimensions of what lies in order; else columns that fill no vector are added up otherwise."""


class Picks(TorchFunctionMode):
    """Which function that may round by place is given values meanwhile that records have picked.

    What again has as many rows as there are records holds whole vectors, wherever its values came from.
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
        """What the function returns, as it is."""
        kwargs, whole = kwargs or {}, getattr(func, "__name__", "")
        given, name = list(_tensors((args, kwargs))), whole.strip("_")
        found = func(*args, **kwargs)
        if not any(id(one) in self._of_records for one in given):
            return found
        in_place = args[:1] if whole == f"{name}_" or name in ("setitem", "set") else ()
        results = [*_tensors(found), *_tensors(kwargs.get("out")), *in_place]
        self._of_records.update((id(one), one) for one in results)
        # the rows of each expert's product are as many as records pick
        picked = given[:1] if name == "grouped_mm" else [one for one in given if id(one) in self._picked]
        if picked and any(one.is_floating_point() or one.is_complex() for one in results):
            self.inexact = self.inexact or ("" if _exact(name, picked[0], args, kwargs) else name)
        whole_numbers = [one for one in given if not one.is_floating_point()]
        chosen = asks_for_sizes(whole, args, kwargs) and (
            name not in SIZED or any(id(one) in self._of_records for one in whole_numbers)
        )
        if not (picked or chosen) or (name in FILLING and id(given[0]) not in self._picked):
            return found
        # as many values as there are records may have been picked by chance, unless they are asked to be so many
        by_chance = (chosen and _of_rows(name, args)) or self.rows in map(len, picked)
        by_chance = by_chance and not (name in SIZED and self.rows in _numbers(args)[:1])
        for one in results:
            if one.dim() and (by_chance or len(one) != self.rows):  # a single number is at no place
                self._picked[id(one)] = one
        return found


def refuse_picks(passes: BookKeeping, features: Tensor, labels: Tensor) -> None:
    """Refuse a model or a loss that gives picked values to a function that may round them by their place.

    Args:
        passes: of the model and the loss; only a forward pass is made.
        features: `[b, …]`, of up to 36 records.
        labels: `[b, …]`.

    Raises:
        EquidpError: naming the function.
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
    """Those in lists, tuples, dicts and slices too."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, slice):
        yield from _tensors((values.start, values.stop, values.step))
    elif isinstance(values, list | tuple | dict):
        for one in values.values() if isinstance(values, dict) else values:
            yield from _tensors(one)


def _of_rows(name: str, args: tuple[Any, ...]) -> bool:
    """Whether what is chosen may be along the first dimension."""
    if name == "narrow":
        return args[1:2] == (0,)
    if name != "getitem":
        return True
    first = args[1][0] if isinstance(args[1], tuple | list) else args[1]
    return first is None or is_mask(first) or (isinstance(first, slice) and is_cut(first))


def _numbers(args: tuple[Any, ...]) -> list[Any]:
    """Whole numbers that a function is given, such as sizes."""
    return [one for part in args for one in (part if isinstance(part, list | tuple) else (part,)) if type(one) is int]


def _exact(name: str, values: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what a function makes of picked values is the same at any place."""
    if name == "pow":
        return len(args) > 1 and isinstance(args[1], int | float) and args[1] == 2
    if name not in SUMS:
        return name in EXACT and not shares_columns(name, args, kwargs)
    every, along = range(values.dim()), kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = sorted(every[at] for at in ((along,) if isinstance(along, int) else along or every))
    return values.is_contiguous() and dims == list(every)[values.dim() - len(dims) :]
