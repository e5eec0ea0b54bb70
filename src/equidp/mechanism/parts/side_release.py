"""A noised statistic of the batch that the gradient is computed from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.mechanism.parts.base import Combination, Part, listed
from equidp.mechanism.parts.facts import StepFacts
from equidp.mechanism.parts.public import Public


class SideRelease(Part, ABC):
    """A noised statistic of the norms and groups of the batch that the gradient is computed from.

    The trainer adds N(0, `noise(plan)`²) to each entry of `statistic` before anything else sees it; `now` and `later`
    are post-processing of the noised values.
    """

    every: Annotated[int, Field(ge=1)] = 1
    """Steps from one release to the next; what it gives holds until then, and the steps between do not pay for it."""

    keeps: ClassVar[frozenset[str]] = frozenset()
    """Names of the carried values that `later` keeps for the release itself; the history does not show them."""

    defaults: ClassVar[Mapping[str, float]] = {}
    """Start values of what it steers or compares with, unless given otherwise."""

    @abstractmethod
    def noise(self, plan: Plan) -> float:
        """Standard deviation of the noise on each entry."""

    def sensitivity(self) -> float:
        """L2 sensitivity of `statistic` to one record."""
        return 1.0

    @abstractmethod
    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """`[m]` exact statistic of `[u]` norms (non-finite ones set to 0) and group ids; on an empty batch too."""

    def at(self, plan: Plan) -> range:
        """The steps t, from 0, at which it is released: fixed before training, as the events follow from it."""
        return range(0, plan.steps, self.every)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Public values that hold from the next step on."""
        return {}

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Public values that hold from this step to the next release; those it `keeps` are `later`'s already."""
        return {}

    def consequences(
        self, noised: Tensor, carried: Public, public: Public, facts: StepFacts
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`later` of the carried values, and `now` of this step's public ones."""
        later = self.later(noised, carried, facts)
        return later, self.now(noised, {**public, **{name: later[name] for name in self.keeps}}, facts)

    def objection(self, combination: Combination) -> str | None:
        """A statistic that nobody uses costs privacy for nothing."""
        rule, objective = combination.weights, combination.objective
        used = rule.reads | {"scale"} | objective.reads if rule else frozenset()
        if used & (self.gives | self.steers):
            return None
        return f"it releases {listed(self.gives | self.steers)}, which {type(rule).__name__} does not use"


def counts(ids: Tensor, size: int) -> Tensor:
    """`[size]` float32: how often each of `[u]` ids below `size` occurs."""
    if ids.device.type == "cpu":
        return torch.bincount(ids, minlength=size).float()  # on a GPU it would wait for an answer
    one = torch.ones((), device=ids.device)
    return torch.zeros(size, device=ids.device).index_add_(0, ids, one.expand(len(ids)))


def noise_level(level: float | str, plan: Plan) -> float:
    """Resolve a `NoiseLevel`: a number stays, a ratio `"10x"` multiplies the gradient's noise multiplier."""
    return float(level.removesuffix("x")) * plan.noise_multiplier if isinstance(level, str) else float(level)
