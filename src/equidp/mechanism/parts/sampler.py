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
    """The units of a step; `coins` are `[u]` uniforms, kept for a sampler that tosses a second time."""

    units: Tensor
    coins: Tensor | None = None

    def split(self, size: int | Sequence[int] | None) -> list[Draw]:
        """Chunks of at most `size` units, or of these sizes; one, possibly empty, where `size` is None or enough."""
        if not size or (isinstance(size, int) and len(self.units) <= size):
            return [self]
        units = self.units.split(size)
        coins = [None] * len(units) if self.coins is None else self.coins.split(size)
        return [Draw(u, c) for u, c in zip(units, coins, strict=True)]


class Sampler(Part, ABC):
    """Draws the units of a step, each on its own coin."""

    @abstractmethod
    def sampling_rate(self, plan: Plan) -> float:
        """Inclusion probability q of a step, public; of the costliest one where each step comes to its own."""

    @abstractmethod
    def start(self, run: Run) -> Sampling:
        """The sampler at work."""

    @abstractmethod
    def description(self, unit: str) -> str:
        """How batches are drawn, in a reader's words; `unit` is what is drawn."""

    def adapt(self, plan: Plan) -> Plan:
        """The plan as this sampler runs it."""
        return plan

    def releases(self, plan: Plan) -> tuple[Event, ...]:
        """Releases of the sampler's own, outside the steps."""
        return ()

    def budget(self, plan: Plan) -> Budget | None:
        """The budget, fixed here, within which the noise of each step is chosen later; None for a fixed schedule."""
        return None

    def calibrated(self, plan: Plan, target: float) -> Plan | None:
        """The plan with its noise solved for, where the sampler keeps a budget; None leaves that to the ledger."""
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
        """The units of the next step, among those present; their number tosses coins, but never sets their bias."""

    def draw_on_host(self) -> Tensor:
        """`draw`'s units, on the CPU; only where it is `on_host`."""
        return self.draw().units.cpu()

    @property
    def on_host(self) -> bool:
        """Whether the host draws, and nothing else is done to a batch: no second coin, no noise or value of its own."""
        return False

    @abstractmethod
    def rates(self) -> Tensor:
        """`[n]` probability that the next `draw` has each unit; private where a unit's own data set it."""

    def begin_epoch(self, epoch: int) -> None:
        """What is done before the first step of an epoch."""

    def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
        """`[u]` bool, the second coin where the sampler has one: a function of each record alone. None keeps all."""
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
    """Everybody at one rate."""

    def draw(self) -> Draw:
        """Poisson sample of positions, ascending."""
        population = self.run.population
        return Draw(poisson_sample(self.run.random, self.rate, population.size, population.device))

    def draw_on_host(self) -> Tensor:
        """The same, before it is brought to the device."""
        population = self.run.population
        if population.device.type != "cpu":
            return sample_on_host(self.run.random, self.rate, population.size)
        return self.draw().units

    @property
    def on_host(self) -> bool:
        """Where a subclass changes none of these."""
        return draws_plainly(self)

    def rates(self) -> Tensor:
        """q for everybody."""
        return torch.full((self.run.population.size,), self.rate)


def draws_plainly(sampling: Sampling) -> bool:
    """Whether it draws as `PoissonSampling` does, whatever it says of itself."""
    own = ("draw", "draw_on_host", "kept", "noise", "public", "diagnostics")
    return not set(own) & vars(sampling).keys() and all(
        getattr(type(sampling), name, None) is getattr(PoissonSampling, name) for name in own
    )
