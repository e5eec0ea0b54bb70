"""Blocks: layers that see several rows of each record along the first dimension, one record's after another's.

Windows of an image, frames of a film and instances of a bag reach a layer as `[b·w, …]`. A record's gradient is then
the sum over its w rows. So a layer may see `w` times as many rows as there are records, if that is so in every pass of
records of one shape, and if the model lets no number of a record say how many rows there are (`x[mask]`). Whether row i
is of record i // w is tried as everything else is: each record's gradient must be autograd's (`probe.py`).

A later pass repeats what was tried call by call. A model that passes its rows in pieces of 64 has one call for two rows
of each of 32 records, and for 64 records two calls, as of one row each: these would be taken for other records' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from equidp.gradients.layers import Call, embedding, fallback, layer_norm, linear
from equidp.gradients.libraries import layer_scale, transposed_linear
from equidp.gradients.shares import asks_for_sizes
from equidp.gradients.sites import Site

BY_PLACE = frozenset({linear, transposed_linear, layer_norm, layer_scale, embedding})
"""Rules for which all between the first and the last dimensions are positions: rows of a record are some more."""


class Blocks:
    """How many rows of each record a layer sees in passes of a model, where these are more than one."""

    def __init__(self) -> None:
        self.trying = False
        """Whether a model is tried: layers are then noted, of which a later pass may only repeat what is noted."""
        self.asking: Asking | None = None
        self.first = ""
        """Name of the first such layer."""
        self._found: dict[Hashable, int] = {}
        self._several = False

    def __bool__(self) -> bool:
        """Whether any layer sees several rows of a record."""
        return self._several

    def forget(self) -> None:
        """Before a model is tried again."""
        self._found.clear()
        self._several = False

    def fit(self, site: Site, rows: int, records: int, call: Hashable) -> int:
        """How many of so many rows are of each record; 0 where that cannot be told.

        Args:
            site: the layer that sees them.
            rows: of what it is given.
            records: in the pass.
            call: the shapes of a record, and of a row, and which of the layer's calls in the pass it is.
        """
        if rows == records and not (self.trying or self._several):
            return 1
        each, left = divmod(rows, records)
        if left or not each:
            return 0
        if each > 1 and self.asking is not None and self.asking.name:
            return 0
        if not self.trying:  # one row of a record may have another shape each time, as texts have
            return each if each == self._found.get((site, call), 1) else 0
        if each > 1:
            self.first, self._several = self.first or site.name, True
        return each if each == self._found.setdefault((site, call), each) else 0


class Asking(TorchFunctionMode):
    """The first function of torch's meanwhile that a record's numbers may tell how many numbers to give."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the function returns, as it is."""
        name = getattr(func, "__name__", "")
        if not self.name and asks_for_sizes(name, args, kwargs or {}):
            self.name = name
        return func(*args, **(kwargs or {}))


def by_record(site: Site, call: Call, each: int) -> list[Call]:
    """A call on `[b·w, …]` rows, w of each record, as calls on b records."""
    if each == 1:
        return [call]
    inputs, backprop = [_unflat(x, each) for x in call.inputs], _unflat(call.backprop, each)
    if site.rule in BY_PLACE or site.rule is fallback:
        return [replace(call, inputs=tuple(inputs), backprop=backprop, several=True)]
    rows = zip(backprop.unbind(1), *(x.unbind(1) for x in inputs), strict=True)
    return [replace(call, inputs=tuple(some), backprop=back) for back, *some in rows]


def _unflat(values: Tensor, each: int) -> Tensor:
    return values.unflatten(0, (-1, each))
