"""An algorithm: one combination of parts, and the guarantee that follows from it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from equidp.accounting.budget import Budget
from equidp.accounting.calibration import smallest_noise
from equidp.accounting.epsilon import Conversion, Epsilon, published_epsilon
from equidp.accounting.events import Event, counted, merged
from equidp.accounting.plan import Plan, Segment
from equidp.errors import EquidpError, unknown_name
from equidp.mechanism.optimizers import OPTIMIZERS, Descent, MakeOptimizer
from equidp.mechanism.parts import (
    KINDS,
    Acceptance,
    AlwaysAccept,
    Combination,
    Constant,
    Contribution,
    ExponentialAverage,
    Objective,
    Part,
    PoissonSampler,
    Released,
    Sampler,
    Schedule,
    SideRelease,
    Update,
    WeightRule,
    tensors,
)
from equidp.mechanism.parts.base import listed


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the ledger's events, the number of steps taken, and that of steps taken or refused."""

    events: tuple[Event, ...]
    accepted_steps: int
    steps: int


@dataclass(frozen=True)
class Published:
    """The ε a paper would print for this run, and the formula that gives it.

    `guarantee` is False where the paper's rule is known not to hold; the figure is then shown, never relied on.
    """

    value: float
    formula: str
    guarantee: bool = True


PublishedRule = Callable[["Algorithm", Plan, Outcome | None], Published]
"""Gives a paper's own figure: of a plan, or with an outcome of a finished run."""


@dataclass(frozen=True)
class Algorithm:
    """One combination of parts. `weights=None` is non-private training: no clipping, no noise, no event.

    Attributes:
        initial: public values at the first step, `clip_norm` among them.
        model_options: settings that the algorithm imposes on the model (a bounded activation, say).
        model: name of the model that the algorithm's own features need; None for the run's model.
        learning_rate: replaces the run's; None for the run's.
        optimizer: a name of `OPTIMIZERS`, or a function that makes an optimiser; replaces the run's. None: any will do.
        published: the paper's own figure; by default RDP of the gradients' events with the improved conversion.

    Raises:
        EquidpError: for a part of the wrong kind, for values that no part provides, for a weight rule without a bound,
            and for parts that do not go together.
    """

    name: str
    weights: WeightRule | None
    initial: Mapping[str, float] = field(default_factory=dict)
    sampler: Sampler = field(default_factory=PoissonSampler)
    objective: Objective = field(default_factory=Objective)
    contribution: Contribution = field(default_factory=Contribution)
    schedule: Schedule = field(default_factory=Constant)
    side_release: SideRelease | None = None
    update: Update = field(default_factory=Update)
    acceptance: Acceptance = field(default_factory=AlwaysAccept)
    released_weights: Released = field(default_factory=Released)
    model_options: Mapping[str, object] = field(default_factory=dict)
    model: str | None = None
    learning_rate: float | None = None
    optimizer: str | MakeOptimizer | None = None
    published: PublishedRule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise unknown_name(f"optimizer of {self.name}", self.optimizer, OPTIMIZERS)
        for name, kind in KINDS.items():
            part = getattr(self, name)
            if not (isinstance(part, kind) or (part is None and name in ("weights", "side_release"))):
                given = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
                raise EquidpError(f"{self.name}: {name} is {given}: give an object of a class of {kind.__name__}'s.")
        if self.weights is None:
            return
        side = self.side_release
        missing = self.weights.reads - set(self.initial) - self.sampler.gives - (side.gives if side else frozenset())
        if missing:
            raise EquidpError(
                f"{self.name}: the weight rule {type(self.weights).__name__} needs {', '.join(sorted(missing))}, which "
                f"no part provides. Set it in the options, or choose a sampler or side release that gives it."
            )
        if side is not None and (unset := side.steers - set(self.initial)):
            raise EquidpError(
                f"{self.name}: the side release {type(side).__name__} moves {', '.join(sorted(unset))} from step to "
                "step, and there is no value to start from: give the algorithm one in `initial`."
            )
        try:
            example = tensors(dict.fromkeys(self.weights.reads, 1.0) | dict(self.initial), "cpu")
        except (TypeError, ValueError) as error:
            raise EquidpError(
                f"{self.name}: `initial` holds numbers, one for all groups ({error}); what differs by group is given "
                "by a side release."
            ) from error
        try:
            bound, weights = self.weights.bound(example), self.weights.weights(torch.ones(1), example)
        except KeyError as error:
            raise EquidpError(
                f"{self.name}: the weight rule {type(self.weights).__name__} looks up {error}, which its `reads` does "
                "not name: add it there, and a value to start from to `initial`."
            ) from error
        for method, value in (("bound", bound), ("weights", weights)):
            if not isinstance(value, Tensor):
                raise EquidpError(
                    f"{self.name}: `{method}` of the weight rule {type(self.weights).__name__} gives a "
                    f"{type(value).__name__}, and must give a tensor."
                )
        if not math.isfinite(float(bound.max())):
            raise EquidpError(
                f"{self.name}: the weight rule {type(self.weights).__name__} has no bound on what one record adds, so "
                f"no noise makes it private. Choose a rule that clips or normalises."
            )
        for part in self.parts:
            if reason := part.objection(self.combination):
                raise EquidpError(f"{self.name}: the part {type(part).__name__} does not hold here: {reason}.")

    @property
    def combination(self) -> Combination:
        """The parts and `initial`, without the rest."""
        return Combination(**{field.name: getattr(self, field.name) for field in fields(Combination)})

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that the algorithm has."""
        begin = (self.sampler, self.objective, self.contribution, self.weights)
        found = (*begin, self.schedule, self.side_release, self.update, self.acceptance, self.released_weights)
        return tuple(part for part in found if part is not None)

    @property
    def private(self) -> bool:
        """Whether the algorithm gives a guarantee at all."""
        return self.weights is not None

    @property
    def needs_public(self) -> bool:
        """Whether it needs public records besides the training part."""
        return self.acceptance.public_records > 0

    @property
    def fixed(self) -> bool:
        """Whether all events and their number are known before training."""
        return not self.acceptance.may_stop and type(self.sampler).budget is Sampler.budget

    def optimizer_beside(self, asked: Descent) -> MakeOptimizer:
        """Return what makes the optimiser to train with, where a run asks for `asked`; without a name it asks for none.

        Raises:
            EquidpError: if the run asks for another optimiser than the algorithm's own, or gives settings for an own
                one that brings its settings.
        """
        own = self.optimizer
        if own is None or asked.optimizer == own:
            return asked.make
        if asked.optimizer is not None:
            raise EquidpError(
                f"{self.name} brings its own optimiser, and training.optimizer={asked.optimizer} would be a second "
                "one: leave it out, or set training.optimizer=null over a preset's."
            )
        if isinstance(own, str):
            return replace(asked, optimizer=own).make
        if asked.own_settings:
            raise EquidpError(
                f"{self.name} brings its own optimiser with its settings: leave out {listed(asked.own_settings)}."
            )
        return own

    def averaged(self, decay: float | None) -> Algorithm:
        """Return this algorithm with an exponential average of its weights leaving the run; None changes nothing.

        Raises:
            EquidpError: for an algorithm that says itself which weights leave the run.
        """
        average = None if decay is None else ExponentialAverage(decay=decay)
        if average in (None, self.released_weights):
            return self
        if type(self.released_weights) is not Released:
            raise EquidpError(
                f"{self.name} says itself which weights leave the run, and training.average would be a second choice: "
                "leave one of them out."
            )
        return replace(self, released_weights=average)

    def adapt(self, plan: Plan) -> Plan:
        """The plan as this algorithm runs it (a full-batch algorithm has B = N); to adapt it twice changes nothing."""
        return self.sampler.adapt(plan)

    def release_steps(self, plan: Plan) -> range:
        """The steps, from 0, at which the side release happens.

        Raises:
            EquidpError: for steps that the run does not have, or steps before the first release that lack its values.
        """
        side = self.side_release
        if side is None:
            return range(0)
        steps, name = side.at(plan), type(side).__name__
        if not isinstance(steps, range):
            raise EquidpError(
                f"{self.name}: `at` of the side release {name} gives a {type(steps).__name__}, and must give a range "
                "of steps, such as range(0, plan.steps, 2)."
            )
        if steps.step < 1 or (steps and not 0 <= steps[0] <= steps[-1] < plan.steps):
            raise EquidpError(
                f"{self.name}: the side release {name} is at the steps {steps}, and the run has the steps 0 to "
                f"{plan.steps - 1}: give some of these in `at`, in ascending order."
            )
        needed = (side.gives & (self.weights.reads if self.weights else frozenset())) - self.initial.keys()
        if needed and (not steps or steps[0] > 0):
            raise EquidpError(
                f"{self.name}: before the first release of {name} there is no value of {listed(needed)}: release it at "
                "step 0 too, or give a value in `initial`."
            )
        return steps

    def step_event(self, plan: Plan, rate: float, noise_multiplier: float, *, released: bool = True) -> Event:
        """The event of one step: gradient and side release of one sample are one Gaussian release (`joint_noise`).

        `released`: whether the side release, if there is one, happens at this step.
        """
        side, rule = self.side_release, self.weights
        if side is None or rule is None or not released:
            return Event(rate, noise_multiplier)
        return Event(rate, side.joint_noise(rule, plan, noise_multiplier))

    def rides_free(self, plan: Plan) -> bool:
        """Whether there is no side release, or one that costs nothing beside the gradients."""
        rate, noises = self.sampler.sampling_rate(plan), {s.noise for s in self.schedule.segments(plan)}
        steps = [(rate, plan.noise_multiplier * noise) for noise in noises]
        return all(self.step_event(plan, *step) == Event(*step) for step in steps)

    def events(self, plan: Plan) -> tuple[Event, ...]:
        """Everything the whole run can charge, known before it starts.

        If the run may stop early, these are the events of its longest run. If the noise is chosen within a budget, they
        are the sampler's worst case, and the guarantee is the budget's alone (`epsilon`).
        """
        plan = self.adapt(plan)
        if self.private and self.side_release is None and not self.acceptance.candidate_events(plan):  # one event each
            last = self.acceptance.cap(plan, self.sampler.sampling_rate(plan))
            steps = self._charges(plan, 0, last, _ends(self.schedule, plan))
            return merged((*self.sampler.releases(plan), *steps))
        return merged(event for epoch in self.events_by_epoch(plan) for event in epoch)

    def events_by_epoch(self, plan: Plan) -> list[list[Event]]:
        """`events` of each of the E epochs."""
        plan = self.adapt(plan)
        if not self.private:
            return [[] for _ in range(plan.epochs)]
        last = self.acceptance.cap(plan, self.sampler.sampling_rate(plan))
        epochs, start, segments = [], 0, _ends(self.schedule, plan)
        for length in plan.epoch_lengths():
            epochs.append(self._charges(plan, start, min(start + length, last), segments))
            start += length
        epochs[0] = [*self.sampler.releases(plan), *epochs[0]]
        return epochs

    def events_until(self, plan: Plan, steps: int) -> tuple[Event, ...]:
        """What the first `steps` steps, taken or refused, charge; with the sampler's own releases."""
        plan = self.adapt(plan)
        return (*self.sampler.releases(plan), *self._charges(plan, 0, steps, _ends(self.schedule, plan)))

    def _charges(
        self, plan: Plan, start: int, stop: int, schedule: tuple[list[int], tuple[Segment, ...]]
    ) -> list[Event]:
        """What the steps from `start` to before `stop` charge, run-length encoded."""
        rate, extra = self.sampler.sampling_rate(plan), self.acceptance.candidate_events(plan)
        steps, charges, (ends, segments) = self.release_steps(plan), list[Event](), schedule
        for at in range(bisect_right(ends, start), len(segments)):
            segment = segments[at]
            low, high = max(start, ends[at] - segment.steps), min(stop, ends[at])
            if high <= low:
                break
            noise, releases = plan.noise_multiplier * segment.noise, _how_many(steps, low, high)
            for released, count in ((True, releases), (False, high - low - releases)):
                if count:
                    charges.append(replace(self.step_event(plan, rate, noise, released=released), count=count))
            charges += [replace(event, count=event.count * (high - low)) for event in extra]
        return charges

    @property
    def of_groups(self) -> bool:
        """Whether a part's `released` says that it releases something of groups."""
        return any("group" in part.released for part in self.parts)

    def epsilon(self, plan: Plan) -> Epsilon:
        """The ε we stand by, known before training: of all trials that the plan declares. Infinite without privacy.

        Raises:
            EquidpError: where a sampler's budget is for another number of trials than the plan.
        """
        if not self.private:
            return Epsilon(math.inf, None)
        plan = self.adapt(plan)
        budget = self.budget(plan)
        return plan.trials.epsilon(self.events(plan), plan.delta) if budget is None else Epsilon(budget.epsilon, None)

    def budget(self, plan: Plan) -> Budget | None:
        """The sampler's budget, or None where events are fixed before training."""
        budget = self.sampler.budget(plan)
        if budget is not None and (plan.trials.law is not None or budget.trials != plan.trials.cap):
            raise EquidpError(
                f"{self.name}: the budget of the sampler {type(self.sampler).__name__} is for {budget.trials} trials, "
                "and privacy.max_trials or privacy.trials_law declares others: let its budget follow plan.trials."
            )
        return budget

    def epsilon_path(self, plan: Plan) -> list[float]:
        """ε after each of the E epochs; constant if a budget holds for the whole run."""
        if not self.private:
            return [math.inf] * plan.epochs
        plan = self.adapt(plan)
        budget = self.budget(plan)
        if budget is not None:
            return [budget.epsilon] * plan.epochs
        return plan.trials.epsilon_path(self.events_by_epoch(plan), plan.delta)

    def calibrated(self, plan: Plan, target: float, *, published: bool = False) -> Plan:
        """The plan with the smallest noise whose ε is at most `target`.

        Args:
            published: let the paper's own figure meet the target, for a comparison with its tables. The ε we stand by
                then follows from the same events, and may be more or less than the target.

        Raises:
            EquidpError: where the target cannot be met, naming what costs it.
        """
        if published:
            return self._as_published(self.adapt(plan), target)
        plan = replace(self.adapt(plan), epsilon=target)
        if found := self.sampler.calibrated(plan, target):
            return found
        if self.acceptance.may_stop:
            raise EquidpError(
                f"{self.name}: the number of steps it may take depends on the noise, so the noise cannot be solved "
                f"for. Give privacy.noise_multiplier instead of privacy.epsilon, or let the number of steps be fixed."
            )
        noise = plan.trials.calibrate(
            lambda sigma: self.events(replace(plan, noise_multiplier=sigma)), target, plan.delta
        )
        return replace(plan, noise_multiplier=noise)

    def _as_published(self, plan: Plan, target: float) -> Plan:
        if self.sampler.budget(replace(plan, epsilon=target)) is not None:
            raise EquidpError(
                f"{self.name}: what it samples and adds is chosen within a sound budget while it trains, so no noise "
                "can be solved for by the paper's count. Set privacy.epsilon_as=sound; the paper's figure is reported "
                "beside it."
            )

        def figure(noise: float) -> float:
            found = self.published_epsilon(replace(plan, noise_multiplier=noise))
            return found.value if found else 0.0

        return replace(plan, noise_multiplier=smallest_noise(figure, target))

    def covers(self, plan: Plan, spent: Sequence[Event], steps: int | None = None) -> bool:
        """Whether the ε of this plan covers a ledger: equal to the plan, within its cap, or within its budget.

        Args:
            steps: how many steps the run has taken or refused. If they charge less than the ledger holds, an earlier
                process charged the rest before it crashed. The cap of a run that may stop early does not cover both:
                the run could have gone on to its cap, and these would come on top.
        """
        plan = self.adapt(plan)
        budget = self.sampler.budget(plan)
        if budget is not None:
            return budget.holds(spent)
        planned, found = counted(self.events(plan)), counted(spent)
        if self.fixed:
            return planned == found
        return found <= planned and (steps is None or found <= counted(self.events_until(plan, steps)))

    def published_epsilon(self, plan: Plan, outcome: Outcome | None = None) -> Published | None:
        """The paper's own figure, or None for non-private training."""
        if not self.private:
            return None
        return (self.published or published_by("improved"))(self, self.adapt(plan), outcome)


def _ends(schedule: Schedule, plan: Plan) -> tuple[list[int], tuple[Segment, ...]]:
    """Where each segment of a schedule ends, and the segments."""
    segments = tuple(segment for segment in schedule.segments(plan) if segment.steps)
    return list(accumulate(segment.steps for segment in segments)), segments


def _how_many(steps: range, low: int, high: int) -> int:
    """How many of these steps are from `low` on and before `high`."""
    first = steps.start + max(0, -(-(low - steps.start) // steps.step)) * steps.step
    return len(range(first, min(high, steps.stop), steps.step))


def published_by(conversion: Conversion) -> PublishedRule:
    """The papers' usual figure: RDP of the gradients' events alone, one conversion, integer orders 2…64."""

    def figure(algorithm: Algorithm, plan: Plan, outcome: Outcome | None) -> Published:
        beside = [*algorithm.sampler.releases(plan), *algorithm.acceptance.candidate_events(plan)]
        left_out = "" if algorithm.rides_free(plan) else "; the side release's cost is left out"
        if beside:
            left_out = "; the cost of what is released beside them is left out"
        formula = f"RDP of the noisy gradients, {conversion} conversion, integer orders 2 to 64{left_out}"
        rate, segments = algorithm.sampler.sampling_rate(plan), algorithm.schedule.segments(plan)
        gradients = [Event(rate, plan.noise_multiplier * segment.noise, segment.steps) for segment in segments]
        value = published_epsilon(gradients, plan.delta, conversion)
        return Published(value, formula, guarantee=not left_out)

    return figure
