"""Which loss a record has."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.gradients.losses import Loss
from equidp.mechanism.parts.base import Combination, Part, listed
from equidp.mechanism.parts.public import Public
from equidp.mechanism.sampling import Batch


class Objective(Part):
    """Which loss a record has, as a function of its own outputs and label and of released values: here, the run's."""

    by_class: ClassVar[bool] = False
    """Whether the groups of training are the classes, whatever `data.groups` says."""

    crossed: ClassVar[bool] = False
    """Whether the groups of training are a product with the classes, if `data.groups` begins with one."""

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        """The objective at work; `loss` is the run's."""
        return Pursuing(loss)

    def objection(self, combination: Combination) -> str | None:
        """The carried public values that it reads must be released by the side release."""
        side = combination.side_release
        missing = self.reads - (side.steers if side else frozenset())
        others = f"which {type(side).__name__} does not release" if side else "and there is no side_release to tell it"
        return f"it needs {listed(missing)}, {others}" if missing else None


class Pursuing:
    """An objective during one run. It depends on public values that the loop carries, and keeps nothing else."""

    in_place: ClassVar[bool] = False
    """Whether the class's own `follow` changes in place what the loss reads. If not, no step or pass is recorded."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def labels(self, batch: Batch) -> Tensor:
        """The labels that the loss is given, `[b]`."""
        return batch.labels

    def wrong(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """`[b]` bool: whether a record is classified wrongly by `[b, K]` outputs; `labels` as the loss takes them."""
        return outputs.argmax(1) != labels

    def follow(self, public: Public) -> None:
        """Take over the carried values that the loss reads. Called between steps, so that a step has one loss."""
