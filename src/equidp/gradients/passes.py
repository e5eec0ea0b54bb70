"""Passes: what gives norms and weighted sums, as its wrappers see it.

The probe, the recordings and the engine are written against this; `bookkeeping` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor, nn

Precision = Literal["float32", "bf16"]

Iterate = tuple[Tensor | None, float]
"""A flat `[d]` vector of parameters, or None for the current ones, and the coefficient of the gradients there."""


class Passes(Protocol):
    """Norms of a batch's gradients, then any weighted sum of them.

    Attributes:
        model: whose gradients.
        parameters: the trained ones, in order.
        precision: in which forward and backward run.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...
    @property
    def precision(self) -> Precision: ...

    def norms(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        owners: Tensor | None = None,
        iterates: Sequence[Iterate] | None = None,
    ) -> Tensor:
        """`[b]` (or `[U]`) l2 norms; keeps what `weighted_sum` needs."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[d]`: Σ w_i g_i of the last `norms`."""

    def clear(self) -> None:
        """Forget the last batch."""

    def twin(self) -> Passes:
        """Others on the same model, with memory of their own."""
