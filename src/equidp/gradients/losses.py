"""Losses: per-record losses.

If a loss knows its own gradient, a model of one linear layer needs no autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.errors import EquidpError

Loss = Callable[[Tensor, Tensor], Tensor]
"""Gives per-record losses `[b]` (reduction `none`) from `(outputs [b, …], labels [b])`."""


@runtime_checkable
class KnowsGradient(Protocol):
    """A loss that gives its gradient itself."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return losses `[b]` of outputs `[b, …]` and labels `[b]`."""

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return each record's gradient at its outputs, `[b, …]`, equal to autograd's to the last bit.

        None if the loss does not know its gradient for outputs or labels of this shape or type.
        """


class CrossEntropy:
    """−log softmax(z)_y of outputs z `[b, K]` and classes y `[b]` int64, or shares of all classes."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return losses `[b]`."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return softmax(z) − 1_y, by the operations that autograd would use."""
        if outputs.dim() != 2 or outputs.dtype != torch.float32 or labels.dtype != torch.int64:  # shares of classes
            return None
        upstream = torch.zeros_like(outputs).scatter_(1, labels.unsqueeze(1), -1.0)
        with torch.enable_grad():
            node: Any = torch.log_softmax(outputs.detach().requires_grad_(), 1).grad_fn
        with torch.no_grad():  # the node is called by itself: here autograd.grad would take three times as long
            gradient: Tensor = node(upstream)
        return gradient


class Shifted:
    """A loss of outputs `[b, K]` to which the same vector is added for every record.

    Args:
        loss: the loss of these sums.
        shift: `[K]`, public; it may be changed in place between steps. Outputs beyond column K (an audit has some) are
            not shifted.
    """

    def __init__(self, loss: Loss, shift: Tensor) -> None:
        self.loss, self.shift = loss, shift
        self._known = loss if isinstance(loss, KnowsGradient) else None  # asked once: asking a protocol takes 5 µs

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return losses `[b]`."""
        return self.loss(self._shifted(outputs), labels)

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return the loss's own gradient at the sums. To add a constant does not change it."""
        return None if self._known is None else self._known.gradient(self._shifted(outputs), labels)

    def _shifted(self, outputs: Tensor) -> Tensor:
        return outputs + widened(self.shift, outputs)


def widened(shift: Tensor, outputs: Tensor) -> Tensor:
    """Return shifts `[…, K]` with zeros added for the outputs' columns beyond K.

    Raises:
        EquidpError: the outputs have fewer columns than K, so that shifts would meet other classes.
    """
    beyond = outputs.shape[1] - shift.shape[-1]
    if beyond < 0:
        raise EquidpError(
            f"The model has {outputs.shape[1]} outputs, and the groups of the plan stand for {shift.shape[-1]} "
            "classes: give the classes as groups, or classes within groups and their number (`classes` of `plan_run`)."
        )
    return F.pad(shift, (0, beyond)) if beyond else shift
