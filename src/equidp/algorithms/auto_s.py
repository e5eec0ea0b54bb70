"""AUTO-S, also NSGD: normalise instead of clip (Bu et al. 2023, "Automatic Clipping"; Yang et al. 2022).

    w = 1/(n + r),   Δ = 1

w·n < 1 for every n, so no clip norm is needed: the learning rate takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Public, WeightRule

Stability = Annotated[float, Field(ge=1e-12)]
"""r > 0, large enough that 1/r and r itself are ordinary float32 numbers."""


class Normalise(WeightRule):
    """w = 1/(n + r)."""

    reads: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, float]] = {}

    stability: Stability = 0.01
    """r."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """1/(n + r)."""
        return 1.0 / (norms + self.stability)

    def bound(self, public: Public) -> Tensor:
        """1, which w·n approaches as n grows."""
        return torch.ones_like(public["scale"])


class AutoS(AlgorithmSettings):
    """Settings of AUTO-S."""

    stability: Stability = 0.01
    """r, which keeps tiny gradients from being scaled up to length 1."""

    def build(self) -> Algorithm:
        """Normalised gradients, constant noise."""
        return Algorithm(name="auto_s", weights=Normalise(stability=self.stability))
