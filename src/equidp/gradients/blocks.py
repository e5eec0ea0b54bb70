"""Blocks: layers that see several rows of each record along the first dimension.

Windows of an image, frames of a film and instances of a bag reach a layer as `[b·w, …]`: w rows of the first record,
then w rows of the second, and so on. The gradient of a record is then the sum over its w rows. A layer may see w rows
of each record on two conditions:

- w is the same in every pass of records of one shape;
- no number in a record decides how many rows there are, as a mask would (`x[mask]`).

Whether row i really belongs to record i // w is tested like everything else: each record's gradient must be the one of
autograd (`probe.py`).

Later passes must repeat the trial call by call. For example, a model may cut its rows into pieces of 64. With 32
records of two rows each there is one call, which sees two rows of each record. With 64 records there are two calls of
64 rows. Each of them looks like one row of each record, so rows would be credited to the wrong records.
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
"""Rules that take all dimensions between the first and the last as positions. A record's rows become positions, too."""


class Blocks:
    """Remembers how many rows of each record the layers of a model see, where a layer sees more than one."""

    def __init__(self) -> None:
        self.trying = False
        """Whether the model is on trial. A trial notes the rows of each layer; later passes may only repeat them."""
        self.asking: Asking | None = None
        self.first = ""
        """Name of the first layer that sees several rows of a record."""
        self._found: dict[Hashable, int] = {}
        self._several = False

    def __bool__(self) -> bool:
        """Whether any layer sees several rows of a record."""
        return self._several

    def forget(self) -> None:
        """Forget what was noted, before the model is tried again."""
        self._found.clear()
        self._several = False

    def fit(self, site: Site, rows: int, records: int, call: Hashable) -> int:
        """Return how many rows of each record a layer sees in a call; 0 if that is not certain.

        Args:
            site: the layer.
            rows: number of rows that the layer is given.
            records: number of records in the pass.
            call: identifies the call: the shapes of a record and of a row, and the call's number within the pass.
        """
        if rows == records and not (self.trying or self._several):
            return 1
        each, left = divmod(rows, records)
        if left or not each:
            return 0
        if each > 1 and self.asking is not None and self.asking.name:
            return 0
        if not self.trying:  # one row per record is the default: its shape may differ in each pass, as with texts
            return each if each == self._found.get((site, call), 1) else 0
        if each > 1:
            self.first, self._several = self.first or site.name, True
        return each if each == self._found.setdefault((site, call), each) else 0


class Asking(TorchFunctionMode):
    """Within this mode: finds the first torch function whose output size may depend on the numbers in a record."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what the function returns, unchanged."""
        name = getattr(func, "__name__", "")
        if not self.name and asks_for_sizes(name, args, kwargs or {}):
            self.name = name
        return func(*args, **(kwargs or {}))


def by_record(site: Site, call: Call, each: int) -> list[Call]:
    """Return a call on `[b·w, …]` rows, w of each record, as calls on b records."""
    if each == 1:
        return [call]
    inputs, backprop = [_unflat(x, each) for x in call.inputs], _unflat(call.backprop, each)
    if site.rule in BY_PLACE or site.rule is fallback:
        return [replace(call, inputs=tuple(inputs), backprop=backprop, several=True)]
    rows = zip(backprop.unbind(1), *(x.unbind(1) for x in inputs), strict=True)
    return [replace(call, inputs=tuple(some), backprop=back) for back, *some in rows]


def _unflat(values: Tensor, each: int) -> Tensor:
    return values.unflatten(0, (-1, each))
