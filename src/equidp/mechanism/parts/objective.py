"""Which loss a record has."""

from __future__ import annotations

from typing import ClassVar

import torch

from equidp.accounting.plan import Plan
from equidp.gradients.losses import Loss
from equidp.mechanism.parts.base import Combination, Part, listed
from equidp.mechanism.parts.public import Public


class Objective(Part):
    """Which loss a record has, as a function of its own outputs and label and of released values: here, the run's."""

    by_class: ClassVar[bool] = False
    """Whether its groups are the classes, whatever `data.groups` says."""

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        """The objective at work; `loss` is the run's."""
        return Pursuing(loss)

    def objection(self, combination: Combination) -> str | None:
        """What it reads, carried public values, has to be released by somebody."""
        side = combination.side_release
        missing = self.reads - (side.steers if side else frozenset())
        return f"it needs {listed(missing)}, which {type(side).__name__} does not release" if missing else None


class Pursuing:
    """An objective during one run. What it depends on are public values that the loop carries; it keeps no others."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def follow(self, public: Public) -> None:
        """Take over the carried values that it reads; called between steps, so that a step has one loss throughout."""
