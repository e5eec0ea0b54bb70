"""What an algorithm is made of, and what each part must promise.

An algorithm is one combination of five kinds of parts: a *sampler* (who is in the batch), a *weight rule* (how much each
record's gradient counts, and the bound that follows), a *schedule* (of noise and clip norm over the steps), a *side
release* (a noised statistic of the same batch) and an *acceptance* (whether the step is taken). Each part states its own
bound and its own event, so that the sensitivity and the ε of any combination follow from the parts.

What a part may look at is fixed by the signatures: a weight rule sees a record's own norm and `Public` values, nothing
else. Public values are settings, or outputs of releases that were noised before they got here.

The plain parts live here; the others in the file of the algorithm that introduced them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from equidp.engine.ledger import Conversion, Event, fuse, merged, published_epsilon
from equidp.engine.noise import RandomSource
from equidp.errors import EquidpError

Public = Mapping[str, Tensor]
"""Values a weight rule may depend on, by name: shape `()` for all records, or `[K]`, one per group."""

NoiseLevel = Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=r"^\d+(\.\d+)?x$")]
"""A side noise: a number, or a ratio to the gradient's noise multiplier such as `"10x"`."""

Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Plan:
    """Public facts of one training run, fixed before any record is read.

    Attributes:
        records: the declared number N of privacy units in the training part.
        batch_size: expected batch size B.
        epochs: expected passes over the data E.
        groups: number of groups K of the partition used in training.
        delta: δ.
        noise_multiplier: the scalar that calibration solves for; 0 only for the non-private baseline.
    """

    records: int
    batch_size: int
    epochs: int
    groups: int
    delta: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if self.batch_size > self.records:
            raise EquidpError(
                f"training.batch_size={self.batch_size} exceeds the {self.records} training records: lower it."
            )

    @property
    def sampling_rate(self) -> float:
        """q = B/N."""
        return self.batch_size / self.records

    @property
    def steps(self) -> int:
        """T = round(E·N/B), at least 1."""
        return max(1, round(self.epochs * self.records / self.batch_size))

    def epoch(self, step: int) -> int:
        """Epoch of step t: ⌊t·E/T⌋."""
        return step * self.epochs // self.steps

    def epoch_lengths(self) -> list[int]:
        """Steps in each epoch; they sum to T."""
        ends = [-(-(e + 1) * self.steps // self.epochs) for e in range(self.epochs)]
        return [b - a for a, b in zip([0, *ends], ends, strict=False)]


class Part(BaseModel):
    """A frozen, validated piece of an algorithm. Its fields are its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampler(Part, ABC):
    """Draws the units of a step, each on its own coin."""

    @abstractmethod
    def sampling_rate(self, plan: Plan) -> float:
        """Inclusion probability q, public."""

    @abstractmethod
    def draw(self, random: RandomSource, plan: Plan, size: int) -> Tensor:
        """`[u]` positions among the `size` units present. `size` is used to toss coins, never to set their bias."""


class PoissonSampler(Sampler):
    """Every unit enters independently with probability B/N."""

    def sampling_rate(self, plan: Plan) -> float:
        """q = B/N with the *declared* N."""
        return plan.sampling_rate

    def draw(self, random: RandomSource, plan: Plan, size: int) -> Tensor:
        """Poisson sample of positions, ascending."""
        return random.bernoulli(plan.sampling_rate, size).nonzero().squeeze(1)


class WeightRule(Part, ABC):
    """Turns each record's gradient norm into a weight w_i, with a bound on w_i·n_i for every record that could exist."""

    reads: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    """Names of the public values the rule needs."""

    @abstractmethod
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """`[u]` weights ≥ 0 from `[u]` finite norms ≥ 0; public values are `()` or already one per record, `[u]`."""

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


@dataclass(frozen=True)
class Segment:
    """Consecutive steps with one noise factor (times σ) and one clip factor (times C)."""

    steps: int
    noise: float = 1.0
    clip: float = 1.0


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


class SideRelease(Part, ABC):
    """A noised statistic of the norms and groups of the batch that the gradient is computed from.

    The trainer adds N(0, `noise(plan)`²) to each entry of `statistic` before anything else sees it; `now` and `later` are
    post-processing of the noised values.
    """

    gives: ClassVar[frozenset[str]] = frozenset()
    """Names of the public values that `now` provides to the weight rule."""

    sensitivity: ClassVar[float] = 1.0
    """L2 sensitivity of `statistic` to one record."""

    @abstractmethod
    def noise(self, plan: Plan) -> float:
        """Standard deviation of the noise on each entry."""

    @abstractmethod
    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """`[m]` exact statistic of `[u]` norms (non-finite ones set to 0) and group ids; on an empty batch too."""

    def now(self, noised: Tensor, public: Public, plan: Plan) -> dict[str, Tensor]:
        """Public values that hold for this step only."""
        return {}

    def later(self, noised: Tensor, public: Public, plan: Plan) -> dict[str, Tensor]:
        """Public values that hold from the next step on."""
        return {}


def noise_level(level: float | str, plan: Plan) -> float:
    """Resolve a `NoiseLevel`: a number stays, a ratio `"10x"` multiplies the gradient's noise multiplier."""
    return float(level.removesuffix("x")) * plan.noise_multiplier if isinstance(level, str) else float(level)


class Acceptance(Part, ABC):
    """Whether a candidate step is taken."""

    always: ClassVar[bool] = False
    """True where no candidate is ever refused, so that nothing needs to be kept for a rollback."""


class AlwaysAccept(Acceptance):
    """Take every step."""

    always: ClassVar[bool] = True


@dataclass(frozen=True)
class Published:
    """The ε a paper would print for this run, and the formula that gives it."""

    value: float
    formula: str


@dataclass(frozen=True)
class Algorithm:
    """One combination of parts. `weights=None` is non-private training: no clipping, no noise, no event.

    Attributes:
        initial: public values at the first step, `clip_norm` among them.
        model_options: settings that the algorithm imposes on the model (a bounded activation, say).
        features: name of a fixed feature map that the algorithm trains on, or None.
        published: the paper's own figure for a finished plan; default RDP of the gradients' events, improved conversion.

    Raises:
        EquidpError: where two parts cannot hold together.
    """

    name: str
    weights: WeightRule | None
    initial: Mapping[str, float] = field(default_factory=dict)
    sampler: Sampler = field(default_factory=PoissonSampler)
    schedule: Schedule = field(default_factory=Constant)
    side_release: SideRelease | None = None
    acceptance: Acceptance = field(default_factory=AlwaysAccept)
    model_options: Mapping[str, object] = field(default_factory=dict)
    features: str | None = None
    published: Callable[[Algorithm, Plan], Published] | None = None

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        given = set(self.initial) | (self.side_release.gives if self.side_release else frozenset())
        missing = sorted(self.weights.reads - given)
        if missing:
            raise EquidpError(
                f"{self.name}: the weight rule {type(self.weights).__name__} needs {', '.join(missing)}, which no part "
                f"provides. Set it in the options or choose a side release that gives it."
            )

    @property
    def private(self) -> bool:
        """Whether the algorithm gives a guarantee at all."""
        return self.weights is not None

    def step_event(self, plan: Plan, segment: Segment) -> Event:
        """The event of one step: gradient and side release of one sample are one Gaussian release."""
        return Event(self.sampler.sampling_rate(plan), self.effective_noise(plan, segment))

    def effective_noise(self, plan: Plan, segment: Segment) -> float:
        """σ^eff of one step, side release included."""
        gradient = plan.noise_multiplier * segment.noise
        if self.side_release is None:
            return gradient
        return fuse(gradient, self.side_release.noise(plan) / self.side_release.sensitivity)

    def events(self, plan: Plan) -> tuple[Event, ...]:
        """Everything the whole run will charge, known before it starts."""
        if not self.private:
            return ()
        steps = [(self.step_event(plan, segment), segment.steps) for segment in self.schedule.segments(plan)]
        return merged(Event(event.sampling_rate, event.noise_multiplier, count) for event, count in steps)

    def published_epsilon(self, plan: Plan) -> Published | None:
        """The paper's own figure, or None for non-private training."""
        if not self.private:
            return None
        return (self.published or published_by("improved"))(self, plan)


def published_by(conversion: Conversion) -> Callable[[Algorithm, Plan], Published]:
    """The common way of the papers: RDP of the gradients' events alone, one conversion, integer orders 2…64."""

    def figure(algorithm: Algorithm, plan: Plan) -> Published:
        gradients = [
            Event(algorithm.sampler.sampling_rate(plan), plan.noise_multiplier * s.noise, s.steps)
            for s in algorithm.schedule.segments(plan)
        ]
        left_out = "; the side release's cost is left out" if algorithm.side_release else ""
        formula = f"RDP of the noisy gradients, {conversion} conversion, integer orders 2 to 64{left_out}"
        return Published(published_epsilon(gradients, plan.delta, conversion), formula)

    return figure


def per_record(public: Public, groups: Tensor) -> dict[str, Tensor]:
    """Public values as seen by each of `[u]` records: one per record where the value is per group."""
    return {name: value[groups] if value.dim() else value for name, value in public.items()}


def sensitivity(rule: WeightRule, public: Public) -> Tensor:
    """Δ, shape `()`: the largest bound over *all* K groups, present in the batch or not, times the groups' scales.

    Taking the maximum over the groups present would let the noise reveal who is in the batch.
    """
    return (rule.bound(public) * public["scale"]).max()


def scheduled(initial: Mapping[str, Tensor], segment: Segment) -> dict[str, Tensor]:
    """This step's public values: the carried ones, with the schedule's clip factor applied."""
    values = dict(initial)
    if segment.clip != 1.0:
        values["clip_norm"] = values["clip_norm"] * segment.clip
    return values


def tensors(values: Mapping[str, float], device: torch.device | str) -> dict[str, Tensor]:
    """Initial public values as 0-dimensional tensors; `scale` is 1 unless an algorithm says otherwise."""
    numbers = {"scale": 1.0, **values}
    return {name: torch.tensor(float(value), device=device) for name, value in numbers.items()}


def segment_at(segments: Sequence[Segment], step: int) -> Segment:
    """The segment that step t falls in."""
    for segment in segments:
        if step < segment.steps:
            return segment
        step -= segment.steps
    raise IndexError("step beyond the schedule")
