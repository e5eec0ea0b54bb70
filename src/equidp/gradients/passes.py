"""Passes: what gives norms and weighted sums, as those see it who wrap it.

`bookkeeping` does the work. The probe and the recordings ask for two methods more each, which they name themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

Precision = Literal["float32", "bf16"]

Iterate = tuple[Tensor | None, float]
"""A flat `[d]` vector of parameters, or None for the current ones, and the coefficient of the gradients there."""


class Passes(Protocol):
    """Norms of a batch's gradients, then any weighted sum of them."""

    def norms(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        owners: Tensor | None = None,
        iterates: Sequence[Iterate] | None = None,
        views: int = 1,
    ) -> Tensor:
        """`[b]` (or `[U]`) l2 norms; keeps what `weighted_sum` needs."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[d]`: Σ w_i g_i of the last `norms`."""
