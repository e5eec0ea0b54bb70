"""Public values: settings and noised releases, all that a weight rule may depend on besides a record's own norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from equidp.accounting.plan import Segment

Public = Mapping[str, Tensor]
"""Values a weight rule may depend on, by name: shape `()` for all records, or `[K]`, one per group."""


def per_record(public: Public, groups: Tensor) -> dict[str, Tensor]:
    """Public values as seen by each of `[u]` records: one per record where the value is per group."""
    return {name: value.index_select(0, groups) if value.dim() else value for name, value in public.items()}


def scheduled(carried: Mapping[str, Tensor], segment: Segment) -> dict[str, Tensor]:
    """This step's public values: the carried ones, with the schedule's clip factor applied."""
    values = dict(carried)
    if segment.clip != 1.0:
        values["clip_norm"] = values["clip_norm"] * segment.clip
    return values


def tensors(values: Mapping[str, float], device: torch.device | str) -> dict[str, Tensor]:
    """Initial public values as 0-dimensional tensors; `scale` is 1 unless an algorithm says otherwise."""
    numbers = {"scale": 1.0, **values}
    return {name: torch.tensor(float(value), device=device) for name, value in numbers.items()}
