"""What an algorithm is made of, and what each part must promise.

An algorithm is one combination of eight kinds of parts:

    sampler        who is in the batch                          Poisson
    objective      which loss a record has                      the run's
    contribution   which vector stands for a record             its gradient
    weights        how much it counts, and the bound of that    min(1, C/n)
    side release   a noised statistic of the same batch         none
    schedule       noise and clip norm over the steps           constant
    update         what the optimiser is given                  the noisy mean
    acceptance     whether the step is taken                    always

Each part states its own bound and its own event, so that the sensitivity and the ε of any combination follow from the
parts; a part that does not hold beside another says so (`objection`).

What a part may look at is fixed by the signatures: a weight rule sees a record's own norm and `Public` values, nothing
else. Public values are settings, or outputs of releases that were noised before they got here. A part is frozen; what
changes during a run lives in the object that its `start` returns.

The plain parts live here; the others in the file of the algorithm that introduced them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from equidp.accounting.budget import Budget
from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan, Segment
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import Loss
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.poisson import poisson_sample
from equidp.mechanism.sampling import Batch, Population
from equidp.options import RATIO, Declared

if TYPE_CHECKING:
    from equidp.mechanism.algorithm import Algorithm

Public = Mapping[str, Tensor]
"""Values a weight rule may depend on, by name: shape `()` for all records, or `[K]`, one per group."""

NoiseLevel = Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=RATIO)]
"""A side noise: a number, or a ratio to the gradient's noise multiplier such as `"10x"`."""

TINY, HUGE = 1e-12, 1e12
"""Range that adapted thresholds are kept in: a weight must stay a finite number for every record, always."""

Positive = Annotated[float, Field(gt=0, le=HUGE)]
"""Bounds, factors and rates; beyond what any run needs, single precision overflows."""


class Part(Declared):
    """A frozen, validated piece of an algorithm. Its fields are its settings."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def released(self) -> str:
        """What it releases besides the model, in a reader's words; empty for nothing."""
        return ""

    def objection(self, algorithm: Algorithm) -> str | None:
        """Why this part cannot hold in that combination; None where it can."""
        return None


class Running:
    """A part at work during one run. Whatever it remembers is in its state."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain JSON values, enough to continue."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""

    def shown(self) -> dict[str, float]:
        """Figures for the history that may be published: settings, counts of steps, noised values."""
        return {}


class Run(Protocol):
    """What a running part may ask of the training loop it runs in."""

    algorithm: Algorithm
    plan: Plan
    random: RandomSource
    ledger: Ledger
    engine: GradientEngine
    population: Population

    def reduce(self, total: Tensor) -> Tensor:
        """The sum over all processes that train together; the tensor itself where there is one."""

    def norms_of_all(self) -> Tensor:
        """`[n]` contribution norms of every unit at the current parameters; exact, hence private."""

    def losses(self, units: Tensor) -> Tensor:
        """`[u]` exact loss of each of these training units at the current parameters; private."""

    def public_loss(self, records: int) -> float:
        """Mean loss of the first so many public records."""


# ---------------------------------------------------------------------------------------------------------- sampler


@dataclass(frozen=True)
class Draw:
    """The units of a step; `coins` are `[u]` uniforms, kept for a sampler that tosses a second time."""

    units: Tensor
    coins: Tensor | None = None

    def split(self, size: int | None) -> list[Draw]:
        """Chunks of at most `size` units; one, possibly empty, where `size` is None or enough."""
        if not size or len(self.units) <= size:
            return [self]
        coins = [None] * -(-len(self.units) // size) if self.coins is None else self.coins.split(size)
        return [Draw(u, c) for u, c in zip(self.units.split(size), coins, strict=True)]


class Sampler(Part, ABC):
    """Draws the units of a step, each on its own coin."""

    gives: ClassVar[frozenset[str]] = frozenset()
    """Names of the public values that it provides to the weight rule."""

    @abstractmethod
    def sampling_rate(self, plan: Plan) -> float:
        """Inclusion probability q of a step, public; of the costliest one where each step comes to its own."""

    @abstractmethod
    def start(self, run: Run) -> Sampling:
        """The sampler at work."""

    @abstractmethod
    def told(self, unit: str) -> str:
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

    def told(self, unit: str) -> str:
        """Poisson."""
        return f"Poisson: every {unit} enters a batch independently with probability q"


class PoissonSampling(Sampling):
    """Everybody at one rate."""

    def draw(self) -> Draw:
        """Poisson sample of positions, ascending."""
        population = self.run.population
        return Draw(poisson_sample(self.run.random, self.rate, population.size, population.device))

    def rates(self) -> Tensor:
        """q for everybody."""
        return torch.full((self.run.population.size,), self.rate)


# -------------------------------------------------------------------------------------------------------- objective


class Objective(Part):
    """Which loss a record has, as a function of its own outputs and label and of released values: here, the run's."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Names of the carried public values it needs."""

    by_class: ClassVar[bool] = False
    """Whether the groups have to be the classes."""

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        """The objective at work; `loss` is the run's."""
        return Pursuing(loss)

    def objection(self, algorithm: Algorithm) -> str | None:
        """What it reads has to be released by somebody."""
        side = algorithm.side_release
        missing = self.reads - (side.steers if side else frozenset())
        return f"it needs {_listed(missing)}, which {_name(side)} does not release" if missing else None


class Pursuing:
    """An objective during one run. What it depends on are public values that the loop carries; it keeps no others."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def follow(self, public: Public) -> None:
        """Take over the carried values that it reads; called between steps, so that a step has one loss throughout."""


# ----------------------------------------------------------------------------------------------------- contribution


class Contribution(Part):
    """Which vector stands for a record: its gradient at the current parameters."""

    def start(self, run: Run) -> Contributing:
        """The contribution at work."""
        return Contributing(run)


class Contributing(Running):
    """A contribution during one run. Between `norms` and `weighted_sum` nothing else may use the engine."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def norms(self, batch: Batch) -> Tensor:
        """`[u]` l2 norms of the batch's contributions; a function of each unit and of released values alone."""
        return self.run.engine.norms(batch.features, batch.labels, owners=batch.owners)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ w_i m_i of the last `norms`, flat `[d]`."""
        return self.run.engine.weighted_sum(weights)

    def advance(self, previous: Tensor) -> None:
        """Called after a step was taken, with the parameters (`[d]`) it started from."""

    remembers: bool = False
    """True where `advance` wants the previous parameters; otherwise no copy is made."""


# ---------------------------------------------------------------------------------------------------------- weights


class WeightRule(Part, ABC):
    """Turns each record's gradient norm into a weight w_i, and a bound on w_i·n_i for every record that could be."""

    reads: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    """Names of the public values the rule needs."""

    defaults: ClassVar[Mapping[str, float]] = {"clip_norm": 1.0}
    """What those values are unless given otherwise."""

    @abstractmethod
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """`[u]` finite weights ≥ 0 from `[u]` finite norms ≥ 0; public values are `()` or one per record, `[u]`."""

    @abstractmethod
    def bound(self, public: Public) -> Tensor:
        """sup over all norms n ≥ 0 of w(n)·n; shape of the public values, `()` or `[K]`."""


class FlatClip(WeightRule):
    """w = min(1, C/n): a gradient longer than C is shortened to C (Abadi et al. 2016)."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """min(1, C/n), and 1 for a zero gradient."""
        return (public["clip_norm"] / norms).clamp(max=1.0)

    def bound(self, public: Public) -> Tensor:
        """C."""
        return public["clip_norm"]


class UnitWeight(WeightRule):
    """w = 1: no bound, hence no privacy. It exists so that a combination with it is refused with that reason."""

    reads: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, float]] = {}

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """1."""
        return torch.ones_like(norms)

    def bound(self, public: Public) -> Tensor:
        """Infinite."""
        return torch.full_like(public["scale"], torch.inf)


# --------------------------------------------------------------------------------------------------------- schedule


class Schedule(Part, ABC):
    """How noise and clip norm change over the steps; fixed before training."""

    @abstractmethod
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """Segments whose steps sum to T. Factors multiply `noise_multiplier` and `clip_norm`."""


class Constant(Schedule):
    """The same noise and clip norm at every step."""

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """One segment of T steps."""
        return (Segment(plan.steps),)


# ----------------------------------------------------------------------------------------------------- side release


class SideRelease(Part, ABC):
    """A noised statistic of the norms and groups of the batch that the gradient is computed from.

    The trainer adds N(0, `noise(plan)`²) to each entry of `statistic` before anything else sees it; `now` and `later`
    are post-processing of the noised values.
    """

    gives: ClassVar[frozenset[str]] = frozenset()
    """Names of the public values that `now` provides to the weight rule."""

    steers: ClassVar[frozenset[str]] = frozenset()
    """Names of the carried public values that `later` moves; they need a start value."""

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

    def later(self, noised: Tensor, public: Public, plan: Plan) -> dict[str, Tensor]:
        """Public values that hold from the next step on."""
        return {}

    def now(self, noised: Tensor, public: Public, plan: Plan) -> dict[str, Tensor]:
        """Public values that hold for this step only; those it `keeps` are `later`'s already."""
        return {}

    def consequences(
        self, noised: Tensor, carried: Public, public: Public, plan: Plan
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`later` of the carried values, and `now` of this step's public ones."""
        later = self.later(noised, carried, plan)
        return later, self.now(noised, {**public, **{name: later[name] for name in self.keeps}}, plan)

    def objection(self, algorithm: Algorithm) -> str | None:
        """A statistic that nobody uses costs privacy for nothing."""
        used = algorithm.weights.reads | {"scale"} | algorithm.objective.reads if algorithm.weights else frozenset()
        if used & (self.gives | self.steers):
            return None
        return f"it releases {_listed(self.gives | self.steers)}, which {_name(algorithm.weights)} does not use"


def counts(ids: Tensor, size: int) -> Tensor:
    """`[size]` float32: how often each of `[u]` ids below `size` occurs."""
    if ids.device.type == "cpu":
        return torch.bincount(ids, minlength=size).float()  # on a GPU it would wait for an answer
    one = torch.ones((), device=ids.device)
    return torch.zeros(size, device=ids.device).index_add_(0, ids, one.expand(len(ids)))


def noise_level(level: float | str, plan: Plan) -> float:
    """Resolve a `NoiseLevel`: a number stays, a ratio `"10x"` multiplies the gradient's noise multiplier."""
    return float(level.removesuffix("x")) * plan.noise_multiplier if isinstance(level, str) else float(level)


# ----------------------------------------------------------------------------------------------------------- update


class Update(Part):
    """What the optimiser is given: the noisy sum as it is. Any function of noisy sums is post-processing."""

    def start(self, run: Run) -> Updating:
        """The update at work."""
        return Updating()


class Updating(Running):
    """An update during one run."""

    def direction(self, noisy_sum: Tensor) -> Tensor:
        """Flat `[d]`, divided by B afterwards."""
        return noisy_sum


# ------------------------------------------------------------------------------------------------------- acceptance


class Acceptance(Part):
    """Whether a candidate step is taken: here, always."""

    @property
    def always(self) -> bool:
        """True where no candidate is ever refused, so that nothing needs to be kept for a rollback."""
        return True

    @property
    def public_records(self) -> int:
        """How many public records it asks for."""
        return 0

    @property
    def charges(self) -> bool:
        """Whether it has releases of its own."""
        return False

    def candidate_events(self, plan: Plan) -> tuple[Event, ...]:
        """Releases of its own, for every candidate, taken or not."""
        return ()

    def cap(self, plan: Plan, algorithm: Algorithm) -> int:
        """Most candidates there can be, fixed in advance; T unless it may stop earlier."""
        return plan.steps

    @property
    def may_stop(self) -> bool:
        """Whether the number of candidates depends on outputs."""
        return False

    def start(self, run: Run) -> Accepting:
        """The acceptance at work."""
        return Accepting()


class AlwaysAccept(Acceptance):
    """Take every step."""


class Accepting(Running):
    """An acceptance during one run."""

    finished: bool = False
    """True once no further candidate is wanted."""

    accepted: int | None = None
    """Steps taken so far, where it counts them."""

    def begin(self) -> None:
        """Called at the parameters θ, before the candidate θ' is made."""

    def accept(self) -> bool:
        """Called at θ'; False rolls the step back."""
        return True


# ------------------------------------------------------------------------------------------------------------ public


def per_record(public: Public, groups: Tensor) -> dict[str, Tensor]:
    """Public values as seen by each of `[u]` records: one per record where the value is per group."""
    return {name: value.index_select(0, groups) if value.dim() else value for name, value in public.items()}


def sensitivity(rule: WeightRule, public: Public) -> Tensor:
    """Δ, shape `()`: the largest bound over *all* K groups, present in the batch or not, times the groups' scales.

    Taking the maximum over the groups present would let the noise reveal who is in the batch.
    """
    bounds = rule.bound(public) * public["scale"]
    return bounds.max() if bounds.dim() else bounds


def scheduled(carried: Mapping[str, Tensor], segment: Segment) -> dict[str, Tensor]:
    """This step's public values: the carried ones, with the schedule's clip factor applied."""
    values = dict(carried)
    if segment.clip != 1.0:
        values["clip_norm"] = values["clip_norm"] * segment.clip
    return values


def tensors(values: Mapping[str, float], device: torch.device | str) -> dict[str, Tensor]:
    """Initial public values as 0-dimensional tensors; `scale` is 1 unless an algorithm says otherwise."""
    numbers = {"scale": 1.0, **values}
    return {name: torch.tensor(float(value), device=device) for name, value in numbers.items()}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _name(part: object) -> str:
    return type(part).__name__
