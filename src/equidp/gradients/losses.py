"""Losses of one record each. With one that knows its own gradient, a model of one linear layer needs no autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.errors import EquidpError

Loss = Callable[[Tensor, Tensor], Tensor]
"""`(outputs [b, …], labels [b])` to per-record losses `[b]` (reduction `none`)."""


@runtime_checkable
class KnowsGradient(Protocol):
    """A loss that gives its gradient itself."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`[b]` losses of `[b, …]` outputs and `[b]` labels."""

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """`[b, …]`: each record's at its own outputs, autograd's to the last bit; None for outputs of another shape."""


class CrossEntropy:
    """−log softmax(z)_y of each record, z its outputs `[b, K]`, y its class `[b]` int64, or its classes' shares."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`[b]` losses."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """softmax(z) − 1_y, by the operations that autograd would use."""
        if outputs.dim() != 2 or outputs.dtype != torch.float32 or labels.dtype != torch.int64:  # shares of classes
            return None
        upstream = torch.zeros_like(outputs).scatter_(1, labels.unsqueeze(1), -1.0)
        with torch.enable_grad():
            node: Any = torch.log_softmax(outputs.detach().requires_grad_(), 1).grad_fn
        with torch.no_grad():  # the node alone is called: autograd.grad takes three times as long for so little
            gradient: Tensor = node(upstream)
        return gradient


class Shifted:
    """A loss of outputs `[b, K]` to which one vector is added, the same for every record.

    Args:
        loss: of the sum.
        shift: `[K]`, public; it may be changed in place between steps. Columns beyond K (an audit has some) stay.
    """

    def __init__(self, loss: Loss, shift: Tensor) -> None:
        self.loss, self.shift = loss, shift
        self._known = loss if isinstance(loss, KnowsGradient) else None  # asked once: asking a protocol takes 5 µs

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`[b]` losses."""
        return self.loss(self._shifted(outputs), labels)

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """The loss's own, at the sum: adding a constant passes it on as it is."""
        return None if self._known is None else self._known.gradient(self._shifted(outputs), labels)

    def _shifted(self, outputs: Tensor) -> Tensor:
        return outputs + widened(self.shift, outputs)


def widened(shift: Tensor, outputs: Tensor) -> Tensor:
    """`[…, K]` shifts, with zeros for the columns of `[b, …]` outputs beyond K.

    Raises:
        EquidpError: for fewer columns than K, whose shifts would be those of other classes.
    """
    beyond = outputs.shape[1] - shift.shape[-1]
    if beyond < 0:
        raise EquidpError(
            f"The model has {outputs.shape[1]} outputs, and the groups of the plan stand for {shift.shape[-1]} "
            "classes: give the classes as groups, or classes within groups and their number (`classes` of `plan_run`)."
        )
    return F.pad(shift, (0, beyond)) if beyond else shift
