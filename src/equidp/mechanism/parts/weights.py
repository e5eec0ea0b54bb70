"""How much a record counts, and the bound of what it adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from equidp.mechanism.parts.base import Part
from equidp.mechanism.parts.public import Public


class WeightRule(Part, ABC):
    """Turns each record's gradient norm n_i into a weight w_i, and bounds w_i·n_i for every possible record."""

    reads: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

    defaults: ClassVar[Mapping[str, float]] = {"clip_norm": 1.0}
    """Values of what it reads, unless given otherwise."""

    promised = (("reach", ("weights", "bound")),)

    @abstractmethod
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """`[u]` finite weights ≥ 0 from `[u]` finite norms ≥ 0; public values are `()` or one per record, `[u]`."""

    @abstractmethod
    def bound(self, public: Public) -> Tensor:
        """sup over all norms n ≥ 0 of w(n)·n; shape of the public values, `()` or `[K]`."""

    def reach(self, unit: str, upto: float) -> float:
        """sup of w(n)·n divided by `bound`, for norms n ≤ `upto`·public[`unit`] and *whatever* the public values are.

        1 always holds. A rule with a smaller value states it, for a side release that counts by the same unit.
        """
        return 1.0


class FlatClip(WeightRule):
    """w = min(1, C/n): a gradient longer than C is shortened to C (Abadi et al. 2016)."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """min(1, C/n), and 1 for a zero gradient."""
        return (public["clip_norm"] / norms).clamp(0.0, 1.0)  # noise may make C negative: the weight is then 0

    def bound(self, public: Public) -> Tensor:
        """C."""
        return public["clip_norm"]

    def reach(self, unit: str, upto: float) -> float:
        """n ≤ κ·C adds min(n, C) ≤ min(κ, 1)·C."""
        return min(1.0, upto) if unit == "clip_norm" else 1.0


class UnitWeight(WeightRule):
    """w = 1: no bound, hence no privacy. It exists so that a combination with it is refused for that reason."""

    reads: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, float]] = {}

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """1."""
        return torch.ones_like(norms)

    def bound(self, public: Public) -> Tensor:
        """Infinite."""
        return torch.full_like(public["scale"], torch.inf)


def sensitivity(rule: WeightRule, public: Public, *, scaled: bool = True) -> Tensor:
    """Δ, shape `()`: the largest bound over *all* K groups, present in the batch or not, times the groups' scales.

    A maximum over the groups that are present would let the noise reveal who is in the batch. `scaled`: whether some
    scale may differ from 1.
    """
    bounds = rule.bound(public) * public["scale"] if scaled else rule.bound(public)
    return bounds.max() if bounds.dim() else bounds


def known_sensitivity(rule: WeightRule, public: Public) -> Tensor:
    """Δ if these values have all that the rule reads; else infinite."""
    return sensitivity(rule, public) if rule.reads <= public.keys() else torch.full_like(public["scale"], torch.inf)
