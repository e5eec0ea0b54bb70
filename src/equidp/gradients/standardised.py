"""Standardised convolutions: per-record gradients of a weight that is standardised before it convolves.

    c_o = w_o − mean(w_o),   ŵ_o = c_o/√(‖c_o‖² + ε)       for every output channel o (Qiao et al. 2019)

Let v be a record's gradient with respect to ŵ. The transposed derivative J turns it into the gradient with respect to
w. Because c_o sums to zero, J is

    (J v)_o = (v_o − mean(v_o) − ŵ_o·⟨ŵ_o, v_o⟩)/√(‖c_o‖² + ε)

J is the same linear map for all records. So the weighted sum is J of the convolution's own weighted sum. Norms are
those of J v, which is formed for a few records at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.rounding import norms_of, raised
from equidp.gradients.terms import Term, pieces, summed

EPSILON = 1e-6
"""ε, added to squared norms of centred weights, so that a channel of equal weights gives zeros."""


class StandardisedConv2d(nn.Conv2d):
    """A convolution with ŵ, whose parameter is w. Every ŵ_o has norm 1 (apart from ε), whatever the fan-in.

    Raises:
        EquidpError: the padding is not zeros.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.padding_mode != "zeros":
            raise EquidpError(f"StandardisedConv2d pads with zeros alone, not by {self.padding_mode!r}.")

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs `[b, o, oh, ow]`."""
        weight = Standardisation.of(self.weight).weight.view_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@dataclass(frozen=True, eq=False)
class Standardisation:
    """ŵ of one weight, and the scale that its derivative needs."""

    weight: Tensor  # ŵ [o, n], n the fan-in
    scale: Tensor  # 1/√(‖c_o‖² + ε) [o, 1]

    @classmethod
    def of(cls, weight: Tensor) -> Standardisation:
        """Standardise weights `[o, …]`."""
        centred = weight.flatten(1)
        centred = centred - centred.mean(1, keepdim=True)
        scale = (centred.square().sum(1, keepdim=True) + EPSILON).rsqrt()
        return cls(centred * scale, scale)

    def back(self, gradients: Tensor) -> Tensor:
        """Return J v `[…, o·n]`, the gradients of w, from gradients v of ŵ."""
        v = gradients.unflatten(-1, self.weight.shape)
        v = v - v.mean(-1, keepdim=True)
        return ((v - self.weight * (v * self.weight).sum(-1, keepdim=True)) * self.scale).flatten(-2)


class Standardised(Term):
    """Gradients of w, from gradients of ŵ. Each value of the weight (older iterates) has a term, and the terms add."""

    def __init__(self, terms: Sequence[Term], maps: Sequence[Standardisation], records: int) -> None:
        self._pairs, self._records = list(zip(terms, maps, strict=True)), records
        self._numel = maps[0].weight.numel()

    def squared_norms(self) -> Tensor:
        some = pieces(self._records, self._numel, self._pairs[0][1].weight.device)
        norms = [norms_of(self.gradients(part.start, part.stop)) for part in some]
        return raised(torch.cat(norms), self.sizes())  # sizes last: some terms know them from their gradients

    def sizes(self) -> Tensor:
        # J projects, which makes no vector longer, and then scales
        return summed([term.sizes() * standardisation.scale.max() for term, standardisation in self._pairs])

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        return summed([s.back(term.weighted_sum(weights, silent)) for term, s in self._pairs])

    def gradients(self, start: int, stop: int) -> Tensor:
        return summed([s.back(term.gradients(start, stop)) for term, s in self._pairs])
