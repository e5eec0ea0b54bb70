"""Who is in the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equidp.accounting.budget import Budget
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan, Segment
from equidp.mechanism.parts.base import Part, Run, Running
from equidp.mechanism.poisson import poisson_sample, sample_on_host


@dataclass(frozen=True)
class Draw:
    """The units of a step.

    Attributes:
        units: `[u]` int64 positions in the population.
        coins: `[u]` uniforms in [0, 1), for a sampler that tosses a second coin; else None.
    """

    units: Tensor
    coins: Tensor | None = None

    def split(self, size: int | Sequence[int] | None) -> list[Draw]:
        """Split into chunks of at most `size` units, or of these sizes.

        There is one chunk, possibly empty, where `size` is None or large enough.
        """
        if not size or (isinstance(size, int) and len(self.units) <= size):
            return [self]
        units = self.units.split(size)
        coins = [None] * len(units) if self.coins is None else self.coins.split(size)
        return [Draw(u, c) for u, c in zip(units, coins, strict=True)]


class Sampler(Part, ABC):
    """Draws the units of a step, each on its own coin."""

    @abstractmethod
    def sampling_rate(self, plan: Plan) -> float:
        """Inclusion probability q of a step, public; if every step has its own, that of the costliest one."""

    @abstractmethod
    def start(self, run: Run) -> Sampling:
        """The sampler at work."""

    @abstractmethod
    def description(self, unit: str) -> str:
        """How batches are drawn, as a sentence for readers; `unit` names what is drawn."""

    def adapt(self, plan: Plan) -> Plan:
        """The plan as this sampler runs it."""
        return plan

    def releases(self, plan: Plan) -> tuple[Event, ...]:
        """Releases of the sampler's own, outside the steps."""
        return ()

    def budget(self, plan: Plan) -> Budget | None:
        """The budget within which the noise of each step is chosen later, fixed here; None for a fixed schedule."""
        return None

    def calibrated(self, plan: Plan, target: float) -> Plan | None:
        """The plan with its noise solved for, where the sampler has a budget; None leaves that to `Algorithm`."""
        return None


class Sampling(Running, ABC):
    """A sampler during one run."""

    exhausted: bool = False
    """True once its budget allows no further step."""

    def __init__(self, sampler: Sampler, run: Run) -> None:
        self.run = run
        self.rate = sampler.sampling_rate(run.plan)

    @abstractmethod
    def draw(self) -> Draw:
        """The units of the next step.

        There are as many coins as units are present. Their probability must not follow from that number.
        """

    def draw_on_host(self) -> Tensor:
        """The units of `draw`, on the CPU; asked for only if `on_host`."""
        return self.draw().units.cpu()

    @property
    def on_host(self) -> bool:
        """Whether the host draws, and the sampler does no more: no second coin, no noise or public value of its own."""
        return False

    @abstractmethod
    def rates(self) -> Tensor:
        """`[n]` probability that the next `draw` includes each unit; private if it follows from the unit's data."""

    def begin_epoch(self, epoch: int) -> None:
        """What is done before the first step of an epoch."""

    def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
        """`[u]` bool, the second coin if the sampler has one; it follows from each unit alone. None keeps all."""
        return None

    def noise(self, segment: Segment) -> float:
        """Noise multiplier of the gradient in a step of this segment."""
        return self.run.plan.noise_multiplier * segment.noise

    def public(self) -> dict[str, Tensor]:
        """Public values of the current epoch."""
        return {}

    def diagnostics(self) -> dict[str, Tensor]:
        """Exact figures of the last draw, outside the guarantee."""
        return {}


class PoissonSampler(Sampler):
    """Every unit enters independently with probability B/N."""

    def sampling_rate(self, plan: Plan) -> float:
        """q = B/N with the *declared* N."""
        return plan.sampling_rate

    def start(self, run: Run) -> Sampling:
        """Coins of the `sampling` stream."""
        return PoissonSampling(self, run)

    def description(self, unit: str) -> str:
        """Poisson."""
        return f"Poisson: every {unit} enters a batch independently with probability q"


class PoissonSampling(Sampling):
    """A Poisson sampler during one run: every unit has the same rate."""

    def draw(self) -> Draw:
        """Poisson sample of positions, ascending."""
        population = self.run.population
        return Draw(poisson_sample(self.run.random, self.rate, population.size, population.device))

    def draw_on_host(self) -> Tensor:
        """The positions of `draw` on the CPU, before they are brought to the device."""
        population = self.run.population
        if population.device.type != "cpu":
            return sample_on_host(self.run.random, self.rate, population.size)
        return self.draw().units

    @property
    def on_host(self) -> bool:
        """Whether no subclass changes how batches are drawn (`draws_plainly`)."""
        return draws_plainly(self)

    def rates(self) -> Tensor:
        """q for every unit."""
        return torch.full((self.run.population.size,), self.rate)


def draws_plainly(sampling: Sampling) -> bool:
    """Whether a sampler draws as `PoissonSampling` does, judged by its methods and not by what it says (`on_host`)."""
    own = ("draw", "draw_on_host", "kept", "noise", "public", "diagnostics")
    return not set(own) & vars(sampling).keys() and all(
        getattr(type(sampling), name, None) is getattr(PoissonSampling, name) for name in own
    )
