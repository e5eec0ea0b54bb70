"""Reading of features and labels that are not the registry's, as tensors; each item of a dataset is read once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Sized
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from equidp.errors import EquidpError
from equidp.gradients.packing import SEVERAL, Packing, Several
from equidp.gradients.refusals import same
from equidp.mechanism.sampling import Examples

Data = Examples | tuple[Tensor | Several, Tensor] | Dataset[tuple[Tensor | Several, Tensor]]
"""Features and labels: as `Examples`, as two tensors, or as a dataset that is read once, from its first item on.

Features may be several tensors: by the names of the model's arguments, or in the order of the arguments.
"""

MORE = f" Features may be {SEVERAL}."

READ_AT_ONCE = 1024
"""How many items of a dataset are joined to tensors at once."""

READ_TWICE = 32
"""How many items, all over the dataset, are read again, to see whether they are the same."""


def examples_of(data: Data) -> Examples:
    """Return features and labels as `Examples`, also those of a dataset.

    Raises:
        EquidpError: for other data, and for items that are there more than once or draw at random.
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, DataLoader):
        raise EquidpError("Batches are drawn here: give the dataset of the DataLoader, `loader.dataset`.")
    if type(data) is TensorDataset:  # not a subclass, which may change its items
        data = data.tensors  # type: ignore[assignment]
    if isinstance(data, tuple):
        if len(data) != 2:
            raise EquidpError(f"The data have {len(data)} tensors: give (features, labels).{MORE * (len(data) > 2)}")
        return Examples(*data)
    if not isinstance(data, Dataset | Sequence):
        by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not by_number or isinstance(data, Mapping) or hasattr(data, "columns"):  # a table, a generator
            raise EquidpError(
                f"The data are a {type(data).__name__}, which gives no item by its number: give (features, labels), "
                "two tensors, or a Dataset."
            )
    _refuse_repeated(data)
    items = cast("Dataset[tuple[Tensor, Tensor]]", data)
    joined = _Joined()
    read = list(DataLoader(items, batch_size=READ_AT_ONCE, collate_fn=joined))
    if not read:
        raise EquidpError("The dataset has no items.")
    columns = tuple(zip(*read, strict=True))
    for what, parts in zip(("features", "label"), columns, strict=True):
        _refuse_ragged(what, [part[0] for part in parts])
    features, labels = map(torch.cat, columns)
    if not isinstance(data, IterableDataset):
        # all over it: rare classes, which are the ones that transforms are for, may come last
        some = sorted({at * len(labels) // READ_TWICE for at in range(READ_TWICE)})
        # one by one: a dataset that gives several at once may make each from all of these
        again = zip(some, DataLoader(Subset(items, some), batch_size=1, collate_fn=joined), strict=True)
        if not all(same(features[[at]], its) and same(labels[[at]], label) for at, (its, label) in again):
            raise EquidpError(
                "The dataset draws at random, or makes an item from others: read twice, its items differ. Each is read "
                "once, so leave random transforms out, and what follows from other items; for flips and crops give "
                "`augmentation`."
            )
    # Python's floats have become float64
    labels = labels.float() if labels.dtype == torch.float64 else labels
    return Examples(features, labels, packing=joined.packing)


def _refuse_repeated(data: object) -> None:
    """Refuse items that a list, or a dataset of torch's, has more than once: each copy would add the bound."""
    if isinstance(data, ChainDataset):
        sources: list[Any] = list(map(id, _streams(data)))
    elif isinstance(data, Subset | ConcatDataset):
        sources = [_source(data, item) for item in range(len(data))]
    elif isinstance(data, list):  # as of `many + 10 * few`
        sources = [id(item) for item in data if isinstance(item, tuple | list)]  # others are refused as no pairs
    else:
        return
    if len(set(sources)) < len(sources):
        raise EquidpError(
            f"The {type(data).__name__} has items more than once, and each row is protected alone: so often one record "
            "would add its bound. Leave copies out, or give the rows of one record the same number, in "
            "Examples(features, labels, unit=…)."
        )


def _streams(several: ChainDataset) -> list[Any]:
    """The innermost datasets that a chain reads one after another."""
    several.datasets = list(several.datasets)  # it may have been given an iterator, which can be read only once
    parts = ((_streams(part) if isinstance(part, ChainDataset) else [part]) for part in several.datasets)
    return list(chain.from_iterable(parts))


def _source(data: Any, item: int) -> tuple[int, int]:
    """The innermost dataset that an item comes from, by its id, and the item's number there."""
    while isinstance(data, Subset | ConcatDataset):
        if isinstance(data, Subset):
            item, data = int(data.indices[item]), data.dataset
            item += len(data) if item < 0 else 0
        else:
            part = bisect_right(data.cumulative_sizes, item)
            data, item = data.datasets[part], item - (data.cumulative_sizes[part - 1] if part else 0)
    return id(data), item


class _Joined:
    """Joins items of a dataset to `[b, …]` features and `[b, …]` labels."""

    packing: Packing | None = None

    def __call__(self, items: Sequence[Any]) -> tuple[Tensor, Tensor]:
        for item in items:
            if not isinstance(item, tuple | list) or len(item) != 2:
                size = len(item) if isinstance(item, Sized) else 0
                raise _no_pair(f"is a {type(item).__name__}" + (f" of {size}" if size else ""), more=2 < size < 10)
        features, labels = zip(*items, strict=True)
        column = _collated("features", features)
        if column is not None and isinstance(features[0], Mapping | tuple):
            self.packing = self.packing or Packing.of(column)
            column = self.packing.pack(column)
        return _tensor("features", column, features), _tensor("label", _collated("label", labels), labels)


def _collated(what: str, values: Sequence[Any]) -> Any:
    if all(isinstance(value, Mapping) for value in values):
        other = next((value for value in values if value.keys() != values[0].keys()), None)
        if other is not None:
            raise EquidpError(
                f"The {what} of the dataset's items differ in their names, such as {list(values[0])} and "
                f"{list(other)}: give all items the same."
            )
        return {name: _part(f"{what} {name!r}", [value[name] for value in values]) for name in values[0]}
    _refuse_ragged(what, values)
    try:
        return default_collate(list(values))
    except (TypeError, RuntimeError):  # for pictures, None, or lists of different lengths
        return None


def _part(what: str, values: Sequence[Any]) -> Tensor:
    if not torch.is_tensor(column := _collated(what, values)):
        raise EquidpError(
            f"The {what} of the dataset's items are no tensors of one shape, such as a {type(values[0]).__name__}: let "
            "each item give a tensor or a number (and fill texts up to one length)."
        )
    return column


def _tensor(what: str, column: Any, values: Sequence[Any]) -> Tensor:
    if not torch.is_tensor(column):
        raise _no_pair(f"has a {type(values[0]).__name__} as its {what}")
    return column


def _no_pair(found: str, *, more: bool = False) -> EquidpError:
    return EquidpError(f"Each item of the dataset must be features and a label; one {found}.{MORE * more}")


def _refuse_ragged(what: str, values: Sequence[Any]) -> None:
    shaped = [value for value in values if hasattr(value, "shape")]
    other = next((value for value in shaped if value.shape != shaped[0].shape), None)
    if other is not None:
        raise EquidpError(
            f"The {what} of the dataset's items differ in shape, such as {list(shaped[0].shape)} and "
            f"{list(other.shape)}: bring all to one (fill texts up with an id that the model masks, resize images)."
        )
