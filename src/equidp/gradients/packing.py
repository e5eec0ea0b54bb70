"""Packing: puts several tensors of each record into one, and lets the model take them apart again.

Sampling, views, checks and the engine know a single tensor of features with a row for each record. Token ids and a
mask, or an image and a table's row, lie side by side in this row. No digit is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError

Several = Mapping[str, Tensor] | Sequence[Tensor]
"""Tensors `[N, …]`, by the names of the model's arguments or in their order."""

SEVERAL = (
    "several tensors by the model's arguments, such as {'input_ids': ids, 'attention_mask': mask}, or a tuple of them "
    "in their order"
)
"""How several tensors are given, for messages."""

EXACT = 1 << 24
"""float32 holds all whole numbers up to this one."""


@dataclass(frozen=True)
class Packing:
    """How several tensors lie in one, `[N, d]`: int64 if all are whole numbers, else float32.

    Attributes:
        names: names of the model's arguments, sorted; None if they are given by position.
        shapes: shape of one record's row in each tensor.
        kinds: types in which the model gets the tensors.
    """

    names: tuple[str, ...] | None
    shapes: tuple[torch.Size, ...]
    kinds: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, features: Several) -> Packing:
        """Return the packing of these tensors.

        Raises:
            EquidpError: there are none; one is no tensor `[N, …]`, or has another number of records than the first; or
                one is float64, complex or sparse.
        """
        named = isinstance(features, Mapping)
        if not len(features) or (named and not all(isinstance(name, str) for name in features)):
            raise EquidpError(f"The features have no parts, or parts whose names are no text: give {SEVERAL}.")
        names = tuple(sorted(features)) if isinstance(features, Mapping) else None
        parts = _listed(features, names)
        for name, part in _named(names, parts):
            if not torch.is_tensor(part) or not part.dim():
                found = "a single number" if torch.is_tensor(part) else f"a {type(part).__name__}"
                raise EquidpError(f"Part {name} of the features is {found}: give a tensor [N, …].")
            if len(part) != len(parts[0]):
                raise EquidpError(
                    f"Part {name} of the features has {len(part)} records, and the first part has {len(parts[0])}."
                )
            if part.layout != torch.strided or part.is_complex() or part.dtype == torch.float64:
                raise EquidpError(
                    f"Part {name} of the features is {part.dtype}, {part.layout}: give dense tensors of whole numbers, "
                    "truth values or float32, as .to_dense() and .float() make them."
                )
        return cls(names, tuple(part.shape[1:] for part in parts), tuple(part.dtype for part in parts))

    def pack(self, features: Several) -> Tensor:
        """Return one tensor `[N, d]` of tensors that have this packing.

        Raises:
            EquidpError: the tensors have another packing, or whole numbers that float32 cannot hold beside tensors that
                are not whole.
        """
        if (other := Packing.of(features)) != self:
            raise EquidpError(f"The features are {other}, and those before are {self}: give all alike.")
        parts = _listed(features, self.names)
        for name, part in _named(self.names, parts):
            mixed = not (self.whole or part.is_floating_point()) and part.numel()
            if mixed and max(map(abs, part.double().aminmax())) > EXACT:  # torch has no order of uint16 and its like
                raise EquidpError(
                    f"Part {name} of the features has whole numbers beyond 2^24, which lose digits beside others that "
                    "are not whole: number them anew."
                )
        return self.joined(parts)

    @property
    def whole(self) -> bool:
        """Whether all tensors are whole numbers or booleans."""
        return not any(kind.is_floating_point for kind in self.kinds)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts side by side, `[N, d]`."""
        kind = torch.int64 if self.whole else torch.float32
        return torch.cat([part.reshape(len(part), math.prod(part.shape[1:])).to(kind) for part in parts], dim=1)

    def parts(self, packed: Tensor) -> list[Tensor]:
        """Return the parts, `[N, …]` each, in their own types."""
        found = packed.split([math.prod(shape) for shape in self.shapes], dim=1)
        return [
            part.reshape(len(packed), *shape).to(kind)
            for part, shape, kind in zip(found, self.shapes, self.kinds, strict=True)
        ]

    def __str__(self) -> str:
        names = [f"{name} " for name in self.names] if self.names else [""] * len(self.shapes)
        return " and ".join(map(_kind, names, self.kinds, self.shapes))


class Packed(nn.Module):
    """A model of several tensors, as a module that takes one packed tensor.

    Args:
        model: is called with the tensors, by name or in their order. If its output has `logits`, these are taken. A
            `Packed` model, such as that of another trainer, is unpacked first.
        packing: how the tensors lie in the packed one.
    """

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        super().__init__()
        self.model: nn.Module = model.model if isinstance(model, Packed) else model
        self.packing = packing

    def forward(self, features: Tensor | Several) -> Any:
        """Return outputs `[b, …]` for packed features `[b, d]`, or for several tensors that are not packed."""
        if isinstance(features, Tensor):
            # copies, because a model may write into one of them, which to autograd would change the others, too
            parts, names = [part.clone() for part in self.packing.parts(features)], self.packing.names
            features = parts if names is None else dict(zip(names, parts, strict=True))
        outputs = self.model(**features) if isinstance(features, Mapping) else self.model(*features)
        return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def packed(features: Several, model: nn.Module) -> tuple[Tensor, Packed]:
    """Return one tensor `[N, d]` of these features, and the model that takes it. `make_private` does this by itself.

    Raises:
        EquidpError: as `Packing.of` and `Packing.pack`.
    """
    packing = Packing.of(features)
    return packing.pack(features), Packed(model, packing)


def several(model: nn.Module, features: Tensor) -> list[Tensor]:
    """What a model sees: the parts of packed features, or the features."""
    return model.packing.parts(features) if isinstance(model, Packed) else [features]


def kind_of(values: Tensor) -> str:
    """Type and shape, of any number of records."""
    return _kind("", values.dtype, values.shape[1:])


def _listed(features: Several, names: Sequence[str] | None) -> list[Tensor]:
    return [features[name] for name in names or ()] if isinstance(features, Mapping) else list(features)


def _named(names: Sequence[str] | None, parts: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    return zip(map(repr, names) if names else map(str, range(len(parts))), parts, strict=True)


def _kind(name: str, kind: torch.dtype, shape: Sequence[int]) -> str:
    return f"{name}{str(kind).removeprefix('torch.')} [{', '.join(['b', *map(str, shape)])}]"
