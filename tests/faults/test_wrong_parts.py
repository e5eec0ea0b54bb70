"""Parts of one's own that are wrong, as a newcomer writes them: each is refused with a sentence, before ε is told."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan, Segment
from equidp.algorithms import algorithm_settings
from equidp.algorithms.auto_s import Normalise
from equidp.algorithms.dpsgd_quantile import QuantileCount
from equidp.data.records import Records, Schema
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.gradients.losses import Loss
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.diagnostics import Diagnostics
from equidp.mechanism.parts import (
    Acceptance,
    Accepting,
    Added,
    Contributing,
    Contribution,
    Draw,
    ExponentialAverage,
    FlatClip,
    Objective,
    PoissonSampler,
    Public,
    Pursuing,
    Released,
    Releasing,
    Run,
    Sampling,
    Schedule,
    SideRelease,
    StepFacts,
    Update,
    Updating,
    WeightRule,
)
from equidp.mechanism.parts.sampler import PoissonSampling
from equidp.mechanism.sampling import Batch
from equidp.mechanism.trainer import Trainer
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, make_private, plan_run, train_model
from equidp.training.promises import _unlike


def trained(
    epochs: int = 2, *, units: Tensor | None = None, spoilt: bool = False, at_once: int | None = None, **parts: Any
) -> dict[str, Any]:
    """The privacy statement of a small training with these parts.

    `spoilt`: some features are no numbers; `at_once`: so many records in a chunk.
    """
    stream = torch.Generator().manual_seed(0)
    features, labels = torch.rand(200, 4, generator=stream), torch.arange(200) % 2
    if spoilt:
        features[::20] = math.nan
    schema = Schema("toy", "tabular", (4,), ("a", "b"), {"class": ("a", "b")}, ("w", "x", "y", "z"))
    records = split(Records(features, labels, {"class": labels}, schema, unit=units), seed=0)
    algorithm = Algorithm(name="mine", **{"weights": FlatClip(), "initial": {"clip_norm": 0.5}, **parts})
    privacy = PrivacySettings(noise_multiplier=2.0, unit="record" if units is None else "unit")
    settings = TrainingSettings(epochs=epochs, batch_size=20, device="cpu", physical_batch_size=at_once)
    plan = plan_run(algorithm, units=160, groups=2, privacy=privacy, training=settings)
    model = ModelSettings(name="logistic")
    request = TrainingRequest(algorithm, plan, "class", model=model, privacy=privacy, training=settings, seed=0)
    return train_model(request, records, progress=False).privacy


def small(batch_size: int = 20, seed: int = 0, groups: int = 0, epochs: int = 1, **parts: Any) -> Trainer:
    """A loop over 200 records with these parts."""
    stream = torch.Generator().manual_seed(0)
    data = torch.rand(200, 4, generator=stream), torch.arange(200) % 2
    algorithm = Algorithm(name="mine", **{"weights": FlatClip(), "initial": {"clip_norm": 0.5}, **parts})
    return make_private(
        nn.Linear(4, 2), data, nn.CrossEntropyLoss(reduction="none"), algorithm=algorithm, noise_multiplier=1.0,
        delta=1e-5, epochs=epochs, batch_size=batch_size, learning_rate=0.1, seed=seed, device="cpu",
        groups=(torch.arange(200) % groups, groups) if groups else None,
    )  # fmt: skip


# ----------------------------------------------------------------------------- exact figures of records, without noise


def everybody(run: Run) -> Tensor:
    return torch.arange(run.plan.records)


class LedByNorms(Update):
    """Divides the step by the exact mean norm."""

    def start(self, run: Run) -> Updating:
        updating = Updating()
        updating.direction = lambda noisy, facts: noisy / run.norms_of_all().mean()  # type: ignore[method-assign]
        return updating


class AddsTheGradient(Update):
    def start(self, run: Run) -> Updating:
        updating = Updating()
        updating.direction = lambda noisy, facts: noisy + run.engine.weighted_sum(torch.ones(1))  # type: ignore
        return updating


class Best(Released):
    """Releases the weights of the least training loss."""

    def start(self, run: Run) -> Releasing:
        releasing = Releasing(run)
        releasing.follow = lambda: run.losses(everybody(run)).mean()  # type: ignore
        return releasing


class OnlyBetter(Acceptance):
    @property
    def always(self) -> bool:
        return False

    def start(self, run: Run) -> Accepting:
        accepting = Accepting()
        accepting.accept = lambda: bool(run.losses(everybody(run)).mean() < 1)  # type: ignore[method-assign]
        return accepting


class Hardest(PoissonSampler):
    def start(self, run: Run) -> Sampling:
        sampling = PoissonSampling(self, run)
        sampling.draw = lambda: Draw(run.losses(everybody(run)).topk(20).indices)  # type: ignore[method-assign]
        return sampling


class Made(Contribution):
    kind: str

    def start(self, run: Run) -> Contributing:
        return globals()[self.kind](run)


class TowardsAll(Contributing):
    """Adds the exact mean gradient of all records to each one's (SVRG)."""

    def norms(self, batch: Batch) -> Tensor:
        everyone = self.run.population.batch(everybody(self.run))
        self.mean = self.run.engine.norms(everyone.features, everyone.labels).mean()
        return super().norms(batch)


class ByAllNorms(Contributing):
    def norms(self, batch: Batch) -> Tensor:
        return super().norms(batch) / self.run.norms_of_all().mean()


class ByActivations(Update):
    """Divides the step by what a hook saw of the activations."""

    def start(self, run: Run) -> Updating:
        updating = Updating()
        run.engine.model.register_forward_pre_hook(lambda layer, given: setattr(updating, "seen", given[0].mean()))
        return updating


class Pruned(Released):
    """Releases the weights of units that were active, by a hook."""

    def start(self, run: Run) -> Releasing:
        releasing = Releasing(run)
        run.engine.model.register_forward_hook(lambda layer, given, out: setattr(releasing, "seen", out.mean(0)))
        return releasing


class Again(Acceptance):
    """Gives a candidate that is refused the noise of the next one."""

    def start(self, run: Run) -> Accepting:
        accepting = Accepting()
        accepting.accept = lambda: bool(run.random.load_state_dict(run.random.state_dict()))  # type: ignore
        return accepting

    @property
    def always(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("parts", "asked"),
    [
        ({"contribution": Made(kind="TowardsAll")}, "Made asks for run.population.batch"),
        ({"contribution": Made(kind="ByAllNorms")}, "Made asks for run.norms_of_all"),
        ({"update": ByActivations()}, "ByActivations asks for run.engine.model"),
        ({"update": LedByNorms()}, "LedByNorms asks for run.norms_of_all"),
        ({"update": AddsTheGradient()}, "AddsTheGradient asks for run.engine.weighted_sum"),
        ({"released_weights": Best()}, "Best asks for run.losses"),
        ({"released_weights": Pruned()}, "Pruned asks for run.engine.model"),
        ({"acceptance": Again()}, "Again asks for run.random.load_state_dict"),
        ({"acceptance": OnlyBetter()}, "OnlyBetter asks for run.losses"),
        ({"sampler": Hardest()}, "Hardest asks for run.losses"),
    ],
)
def test_a_part_that_charges_nothing_sees_no_record(parts: dict[str, Any], asked: str) -> None:
    with pytest.raises(EquidpError, match=f"{asked}, and charges nothing.*may see"):
        trained(**parts)


def test_what_follows_the_noise_still_sees_the_iterates() -> None:
    assert trained(released_weights=ExponentialAverage())["epsilon"] > 0


class FiveAtMost(Acceptance):
    """Says that there are five candidates at most, and never ends the run."""

    @property
    def may_stop(self) -> bool:
        return True

    def cap(self, plan: Plan, sampling_rate: float) -> int:
        return 5


def test_a_run_ends_with_the_most_steps_that_its_epsilon_is_of() -> None:
    ended = trained(acceptance=FiveAtMost())
    assert (ended["accepted_steps"], [event["count"] for event in ended["charged"]]) == (5, [5])


def test_a_ledger_beyond_the_cap_is_not_covered() -> None:
    """However many steps the run has taken."""
    plan = Plan(400, 20, 4, 2, 1e-5, 1.0)
    algorithm = replace(algorithm_settings("dpsgd").build(), acceptance=FiveAtMost())
    (event,) = algorithm.events(plan)
    assert event.count == 5
    assert algorithm.covers(plan, [event], 5)
    assert not algorithm.covers(plan, [replace(event, count=80)], 80)


class Extra(Acceptance):
    """Charges next to nothing, and is shown the whole run."""

    def candidate_events(self, plan: Plan) -> tuple[Event, ...]:
        return (Event(1.0, 1e3),)

    def start(self, run: Run) -> Accepting:
        accepting = Accepting()
        accepting.begin = lambda: run.ledger.append(Event(1.0, 1e3))  # type: ignore[method-assign]
        return accepting


def test_a_statement_says_what_rests_on_parts_of_others() -> None:
    told = trained(side_release=Sums(), acceptance=Extra())
    assert told["releases"][1:] == [
        f"Noised values of {name}, which does not say what they are." for name in ("Sums", "Extra")
    ]
    assert [sentence for sentence in told["assumptions"] if "Extra" in sentence] == [
        "Parts of others hold what they promise: Extra, Sums. Trials found no fault, which proves nothing.",
        "Their own events cover all that these make of the records, which nobody has tried: Extra.",
    ]
    ours = trained(released_weights=ExponentialAverage())
    assert not any("Parts of others" in sentence for sentence in ours["assumptions"])


# ------------------------------------------------------------------------------------- what is kept from step to step


class Sums(SideRelease):
    """Σ min(n, 1), which leads the bound."""

    steers: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

    def noise(self, plan: Plan) -> float:
        return 10 * plan.noise_multiplier

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return norms.clamp(max=1).sum(0, keepdim=True)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": 0.1 + (noised.squeeze(0) / facts.plan.batch_size).clamp(0, 1)}


class InTensors(Sums):
    """Noise by torch, in seven digits."""

    def noise(self, plan: Plan) -> Tensor:
        return torch.tensor(10 * plan.noise_multiplier)


class OfLength(Sums):
    def sensitivity(self) -> Tensor:
        return torch.ones(2).norm()


@pytest.mark.parametrize(("release", "method"), [(InTensors(), r"noise\(plan\)"), (OfLength(), r"sensitivity\(\)")])
def test_noise_and_sensitivity_are_numbers(release: SideRelease, method: str) -> None:
    with pytest.raises(EquidpError, match=rf"gives a Tensor as `{method}`, and must give a number"):
        trained(side_release=release)


class Remembers(Sums):
    """Hands the exact norms to `later`."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        self._exact = norms
        return super().statistic(norms, groups, public, plan)


class NoiseOfTheBatch(Remembers):
    def noise(self, plan: Plan) -> float:
        return float(self._exact.max()) * plan.noise_multiplier


class BoundOfTheBatch(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        self._longest = norms.max()
        return super().weights(norms, public)


class Appends(FlatClip):
    _seen: list[Tensor] = PrivateAttr(default_factory=list)


class OfTheClass(FlatClip):
    seen: ClassVar[list[float]] = []


class AField(FlatClip):
    seen: dict[str, float] = {}  # noqa: RUF012


class Fickle(Schedule):
    """Other noise whenever it is asked."""

    _asked: int = PrivateAttr(0)

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        self._asked += 1
        return (Segment(plan.steps, 1.0 / self._asked),)


ELSEWHERE: dict[str, Tensor] = {}


class RemembersElsewhere(Sums):
    """Hands the exact norms to `later` by a global of its module."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        ELSEWHERE["exact"] = super().statistic(norms, groups, public, plan)
        return ELSEWHERE["exact"]

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return super().later(ELSEWHERE["exact"], public, facts)


class RemembersInItsClass(Sums):
    last: ClassVar[Any] = None

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        type(self).last = super().statistic(norms, groups, public, plan)
        return self.last

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return super().later(self.last, public, facts)


class NoiseOfTheLongest(Sums):
    """The sum needs no bound: its noise grows with the longest gradient of the batch."""

    def noise(self, plan: Plan) -> float:
        return 10 * plan.noise_multiplier * self.sensitivity()

    def sensitivity(self) -> float:
        return float(ELSEWHERE.get("longest", 1.0))

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        ELSEWHERE["longest"] = norms.max() if len(norms) else torch.tensor(1.0)
        return norms.sum(0, keepdim=True)


class LaterByChance(Sums):
    """Draws, as whoever has a noised value may."""

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": 0.1 + torch.rand(())}


class LaterBound(FlatClip):
    """The longest gradient of the last batch."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        ELSEWHERE["bound"] = norms.max()
        return super().weights(norms, public)

    def bound(self, public: Public) -> Tensor:
        return ELSEWHERE.get("bound", public["clip_norm"])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"side_release": RemembersElsewhere()}, "RemembersElsewhere gives other values for clip_norm once"),
        ({"side_release": RemembersInItsClass()}, "RemembersInItsClass gives other values for clip_norm once"),
        ({"side_release": NoiseOfTheLongest()}, "NoiseOfTheLongest gives other values for noise, sensitivity once"),
        ({"weights": LaterBound()}, "LaterBound gives another `bound` once `weights` was told of records"),
    ],
)
def test_nothing_is_kept_outside_a_part_either(parts: dict[str, Any], told: str) -> None:
    ELSEWHERE.clear()
    with pytest.raises(EquidpError, match=told):
        trained(**parts)


def test_what_is_drawn_from_a_noised_value_is_let_through() -> None:
    assert trained(side_release=LaterByChance())["epsilon"] > 0


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"side_release": Remembers()}, "Remembers keeps '_exact' from one call to the next"),
        ({"side_release": NoiseOfTheBatch()}, "NoiseOfTheBatch keeps '_exact'"),
        ({"weights": BoundOfTheBatch()}, "BoundOfTheBatch keeps '_longest'"),
        ({"weights": Appends()}, "mine: Appends has '_seen', which it can change"),
        ({"weights": OfTheClass()}, "mine: OfTheClass has 'seen', which it can change"),
        ({"weights": AField()}, "mine: AField has 'seen', which it can change"),
        ({"schedule": Fickle()}, "(keeps|has) '_asked'"),
    ],
)
def test_a_part_keeps_nothing(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        trained(**parts)


# ------------------------------------------------------------------------------------------- bounds that do not hold


class FarOut(FlatClip):
    """Whole in a band far from its bound, and without one for what is very long."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return torch.where((norms > 1e3) & (norms < 1.3e3), 1.0, super().weights(norms, public))


class NeverLess(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public).clamp(min=1e-10)


class ShortensInPlace(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return public["clip_norm"] / norms.clamp_(min=float(public["clip_norm"]))


class InRows(Sums):
    """A count for each group, one below the other: noise for as many rows would be added to each of them."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return torch.bincount(groups, minlength=plan.groups).float().unsqueeze(1)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": 0.1 + noised.mean().clamp(0, 1)}


class LongerForMany(Sums):
    """Its length tells how many there are."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return super().statistic(norms, groups, public, plan).expand(1 + len(norms) // 20)


class ClampsInPlace(Sums):
    """The norms that it has clamped are then weighed as if they were short."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return norms.clamp_(max=1).sum(0, keepdim=True)


class OfCrowds(Sums):
    """Counts nobody in batches of few."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        many = (norms > 0.5).sum(0, keepdim=True).float()
        return many * (many > 12)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"weights": FarOut()}, "lets a record add 1[0-9]{3}.*, more than the 0.5 of its `bound`"),
        ({"weights": NeverLess()}, "lets a record add .*, more than the 0.5 of its `bound`"),
        ({"weights": ShortensInPlace()}, "changes the norms in place"),
        ({"side_release": ClampsInPlace()}, "changes the norms in place"),
        ({"side_release": InRows()}, r"InRows gives statistics of the shapes \(2, 1\), and must give \[m\]"),
        ({"side_release": LongerForMany()}, r"LongerForMany gives statistics of the shapes \(1,\), \(4,\), and must"),
        ({"side_release": OfCrowds()}, "times what the step is charged for"),
    ],
)
def test_a_bound_holds_for_every_norm_and_in_every_batch(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        trained(**parts)


TAKEN = {"steps": 0}


class Counted(Update):
    """Tells of the run's steps elsewhere."""

    def start(self, run: Run) -> Updating:
        updating = Updating()
        updating.direction = lambda noisy, facts: TAKEN.update(steps=facts.step) or noisy  # type: ignore
        return updating


class LaterLonger(FlatClip):
    """A hundredth beyond its bound, once the run is under way."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public) * (1.01 if TAKEN["steps"] > 10 else 1)


def for_some(norms: Tensor, most: float) -> Tensor:
    """`[u]` factors, once the run is under way: `most` for about half of the records, by their own norms, else 1."""
    chosen = (norms * 1000).long() % 2 == 1
    return torch.where(chosen & (TAKEN["steps"] > 10), most, 1.0)


class LaterLongerForSome(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public) * for_some(norms, 1.01)


class LaterBelowForSome(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public) * for_some(norms, -1.0)


class LaterMoreForSome(Sums):
    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return (norms.clamp(max=1) * for_some(norms, 20.0)).sum(0, keepdim=True)


class LaterByOthers(FlatClip):
    """By the longest of its batch, once the run is under way."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public) * (norms.min() / norms.max() if TAKEN["steps"] > 10 else 1)


class LaterMore(Sums):
    """Sums that are twice as large, once the run is under way."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return super().statistic(norms, groups, public, plan) * (2 if TAKEN["steps"] > 10 else 1)


class LaterAll(QuantileCount):
    """Counts those beyond its bound too, of which `added` says 0, once the run is under way."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        late = TAKEN["steps"] > 10
        return norms.new_full((1,), len(norms)) if late else super().statistic(norms, groups, public, plan)

    def added(self) -> tuple[Added, ...]:
        return Added(1.0, self.counts_below, "clip_norm"), Added(0.0)


class LaterKept(RemembersElsewhere):
    """Begins to hand exact sums to `later` once the run is under way."""

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        late = TAKEN["steps"] > 10
        return super().later(noised, public, facts) if late else Sums.later(self, noised, public, facts)


class LaterKeptBeside(LaterKept):
    """Of two values one follows from exact sums."""

    steers: ClassVar[frozenset[str]] = frozenset({"clip_norm", "beside"})

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return super().later(noised, public, facts) | {"beside": noised.squeeze(0)}


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            {"side_release": LaterKeptBeside(), "initial": {"clip_norm": 0.5, "beside": 0.0}},
            "LaterKeptBeside makes of a noised value what follows from records",
        ),
        ({"side_release": LaterKept()}, "LaterKept makes of a noised value what follows from records"),
        ({"weights": LaterLonger()}, "LaterLonger lets a record add more than its `bound`"),
        ({"weights": LaterLongerForSome()}, "LaterLongerForSome lets a record add more than its `bound`"),
        ({"weights": LaterBelowForSome()}, "LaterBelowForSome gives weights that are below 0"),
        ({"side_release": LaterMoreForSome()}, "LaterMoreForSome lets a unit of a batch move its statistic by more"),
        ({"weights": LaterByOthers()}, "LaterByOthers weighs a record by the others of its batch"),
        ({"side_release": LaterAll(counts_below=0.1)}, "LaterAll lets .* than its `sensitivity` or `added` says"),
        ({"side_release": LaterMore()}, "LaterMore lets a unit of a batch move its statistic by more than"),
    ],
)
def test_rules_and_side_releases_are_tried_again_as_the_run_goes_on(parts: dict[str, Any], told: str) -> None:
    TAKEN["steps"] = 0
    with pytest.raises(EquidpError, match=told):
        trained(10, update=Counted(), **parts)


@pytest.mark.parametrize(
    "parts",
    [{"weights": LaterByOthers()}, {"side_release": LaterMore()}, {"contribution": Made(kind="Warming")}],
    ids=lambda parts: next(iter(parts)),
)
def test_what_was_refused_is_refused_at_the_next_step_too(parts: dict[str, Any]) -> None:
    """A notebook's cell that was run again trained on, until the next trial 60 steps later."""
    TAKEN["steps"] = 0
    trainer = small(epochs=20, update=Counted(), **parts)
    with pytest.raises(EquidpError, match="So ε would not hold"):
        trainer.run_steps(60)
    for _ in range(3):
        with pytest.raises(EquidpError, match="So ε would not hold"):
            trainer.run_steps(1)


class HalvesAfterwards(FlatClip):
    """Halves the bound that its noise follows, once the weights are made."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        weights = super().weights(norms, public)
        if 1 < len(norms) < 50:
            public["clip_norm"].mul_(0.5)
        return weights


class Doubles(Update):
    def start(self, run: Run) -> Updating:
        updating = Updating()
        updating.direction = lambda noisy, facts: noisy / facts.sensitivity.mul_(2)  # type: ignore[method-assign]
        return updating


@pytest.mark.parametrize("parts", [{"weights": HalvesAfterwards()}, {"update": Doubles()}])
def test_what_a_part_changes_in_place_is_its_own(parts: dict[str, Any]) -> None:
    """Δ follows from the values that the weights were made of."""
    trainer = small(**parts)
    trainer.run_steps(5)
    assert (trainer.shown["sensitivity"], trainer.public["clip_norm"]) == (0.5, 0.5)


class WritesLater(Sums):
    """Changes all that it is given, once the run is under way."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        found = super().statistic(norms, groups, public, plan)
        if TAKEN["steps"] > 2:
            norms.mul_(0.5)
            groups.zero_()
            public["clip_norm"].mul_(0.5)
        return found

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        if TAKEN["steps"] > 2:
            public["clip_norm"].mul_(3)
        return super().later(noised, public, facts)


def test_what_a_side_release_changes_in_place_weighs_no_record() -> None:
    """Of norms that it halves, records would add twice their bound."""
    found = []
    for release in (Sums(), WritesLater()):
        TAKEN["steps"] = 0
        torch.manual_seed(0)
        trainer = small(side_release=release, update=Counted())
        trainer.run_steps(8)
        found.append(trainer.engine.flatten())
    assert torch.equal(*found)


class OfShort:
    """Counts twice; mixed in, it is no class of parts."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return (norms <= public["clip_norm"]).sum(0, keepdim=True).float()


class Mixed(OfShort, QuantileCount):
    """Counts all that are within the bound, and inherits what is said of those within half of it."""


def test_what_is_said_of_another_statistic_is_not_inherited_beside_a_class_that_is_mixed_in() -> None:
    assert len(QuantileCount(counts_below=0.5).added()) == 2
    assert Mixed(counts_below=0.5).added() == (Added(1.0),)


class Falling(Schedule):
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        return (Segment(plan.steps, clip=0.5),)


class ThreeStretches(Schedule):
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        return (Segment(5, 1.5, clip=1.5), Segment(plan.steps - 10), Segment(5, 0.5, clip=0.5))


class ForgetsItselfBetween(Sums):
    """Charges the gradients alone at the noise of the second stretch."""

    def joint_noise(self, rule: WeightRule, plan: Plan, noise_multiplier: float) -> float:
        between = noise_multiplier == plan.noise_multiplier
        return noise_multiplier if between else super().joint_noise(rule, plan, noise_multiplier)


class FarOutBetween(FlatClip):
    """Exceeds its bound in the second stretch."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public) * (4.0 if float(public["clip_norm"].max()) == 0.5 else 1.0)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"side_release": ForgetsItselfBetween()}, "times what the step is charged for"),
        ({"weights": FarOutBetween()}, "more than the 0.5 of its `bound`"),
    ],
)
def test_promises_hold_in_every_stretch_of_a_schedule(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        trained(schedule=ThreeStretches(), **parts)


def test_stretches_of_least_and_largest_noise_and_bound_are_among_those_that_are_tried() -> None:
    every = [Segment(1, noise=1 + k / 100, clip=1.0) for k in range(60)]
    for at, ends in {7: {"noise": 9.0}, 9: {"noise": 0.1}, 11: {"clip": 9.0}, 13: {"clip": 0.1}}.items():
        every[at] = replace(every[at], **ends)
    assert {every[at] for at in (0, 7, 9, 11, 13)} <= set(_unlike(every))


class ALittleLonger(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public) * 1.001


class ChargesByRecords(RemembersElsewhere):
    """What a step is charged follows from the records that it was told of last."""

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return Sums.later(self, noised, public, facts)

    def joint_noise(self, rule: WeightRule, plan: Plan, noise_multiplier: float) -> float:
        return super().joint_noise(rule, plan, noise_multiplier) * (1 - 1e-9 * float(ELSEWHERE["exact"] > 1))


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"weights": ALittleLonger()}, "ALittleLonger lets a record add"),
        ({"side_release": ChargesByRecords()}, "ChargesByRecords gives other values for joint_noise"),
    ],
)
def test_a_little_beyond_what_is_charged_is_refused(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        small(**parts)


def test_a_schedule_of_bounds_needs_a_bound() -> None:
    with pytest.raises(EquidpError, match="the schedule Falling moves clip_norm, and Normalise reads none that begins"):
        trained(schedule=Falling(), weights=Normalise(), initial={})
    assert trained(schedule=Falling())["epsilon"] > 0


class AtOnce(Sums):
    """Gives the bound of the batch itself, by the scheduled one or whatever that is."""

    steers: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    follows: bool = True

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {}

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        found = super().later(noised, public, facts)["clip_norm"]
        return {"clip_norm": found * public["clip_norm"] if self.follows else found}


class Nowhere(AtOnce):
    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {}


def test_a_bound_that_is_declared_and_not_given_is_refused_beside_a_schedule_too() -> None:
    with pytest.raises(EquidpError, match="declares 'clip_norm', and `now` does not return it"):
        trained(schedule=Falling(), side_release=Nowhere())


def test_a_scheduled_bound_is_not_silently_replaced_by_a_released_one() -> None:
    with pytest.raises(EquidpError, match="the side release AtOnce gives one that does not follow it"):
        trained(schedule=Falling(), side_release=AtOnce(follows=False))
    assert trained(side_release=AtOnce(follows=False))["epsilon"] > 0
    assert trained(schedule=Falling(), side_release=AtOnce())["epsilon"] > 0


class OnceMore(Sums):
    def at(self, plan: Plan) -> range:
        return [0, 3]  # type: ignore[return-value]


def test_steps_of_a_release_are_a_range() -> None:
    with pytest.raises(EquidpError, match=r"`at` of the side release OnceMore gives a list, and must give a range"):
        trained(side_release=OnceMore())


class Wrongly(Contributing):
    """Norms and sums in multiples of what they are, or by the others of a batch."""

    def __init__(self, part: Stated, run: Run) -> None:
        super().__init__(run)
        self.part = part

    def norms(self, batch: Batch) -> Tensor:
        norms = super().norms(batch)
        stated = norms * self.part.norm * (len(norms) if self.part.by_others else 1)
        return torch.cat([stated[:1], norms[1:]]) if self.part.first else stated

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.part.shorter:
            weights = torch.cat([weights[:1] / len(weights), weights[1:]])
        return super().weighted_sum(weights) * (self.part.sum if len(weights.nonzero()) > 1 else 1.0)


class Stated(Contribution):
    norm: float = 1.0
    sum: float = 1.0
    by_others: bool = False
    first: bool = False
    """Norms of the first record of a batch alone."""
    shorter: bool = False
    """Of the first record the vector, by how many there are."""

    def start(self, run: Run) -> Contributing:
        return Wrongly(self, run)


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        (Stated(norm=0.5), "the vector of a record is longer than its norm"),
        (Stated(norm=0.995), "the vector of a record is longer than its norm"),
        (Stated(sum=2.0), "`weighted_sum` is no sum of the records' vectors"),
        (Stated(by_others=True), "the norm of a record changes with the others of its batch"),
        (Stated(norm=0.5, first=True), "the vector of a record is longer than its norm"),
        (Stated(by_others=True, first=True), "the norm of a record changes with the others of its batch"),
        (Stated(shorter=True), "the vector of a record changes with the others of its batch"),
    ],
)
def test_a_contribution_is_as_long_as_it_says(stated: Stated, told: str) -> None:
    with pytest.raises(EquidpError, match=f"mine: Wrongly does not hold what it says: {told}"):
        trained(contribution=stated)


def test_a_contribution_of_others_is_tried_though_it_begins_ours() -> None:
    class Halving(Contribution):
        def start(self, run: Run) -> Contributing:
            contributing = Contributing(run)
            whole = contributing.norms
            contributing.norms = lambda batch: whole(batch) / 2  # type: ignore[method-assign]
            return contributing

    with pytest.raises(EquidpError, match="the vector of a record is longer than its norm"):
        small(contribution=Halving()).run_steps(1)


class Carrying(Contributing):
    """Momentum of the exact sums: a record stays in every later one."""

    remembers, remembered = True, ("past", "last")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.past, self.last = torch.zeros(()), torch.zeros(())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        self.last = super().weighted_sum(weights)
        return self.last + 0.9 * self.past

    def advance(self, previous: Tensor) -> None:
        self.past = self.last


class Momentum(Contribution):
    def start(self, run: Run) -> Contributing:
        return Carrying(run)


def test_a_contribution_that_carries_exact_sums_to_the_next_step_is_refused() -> None:
    with pytest.raises(
        EquidpError, match=r"Carrying does not hold what it says: .* with the records of earlier batches"
    ):
        trained(contribution=Momentum())


class Turned(Contributing):
    """Vectors that point where most of the batch do, each as long as it was."""

    def norms(self, batch: Batch) -> Tensor:
        norms = super().norms(batch)
        self.sign = -1.0 if len(norms) > 1 else 1.0
        return norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.sign * super().weighted_sum(weights)


class Scaled(Contributing):
    """Vectors in units of the last batch's exact sum: Adam's second moment, before noise."""

    remembers, remembered = True, ("scale", "last")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.scale, self.last = torch.ones(()), torch.ones(())

    def norms(self, batch: Batch) -> Tensor:
        return super().norms(batch) / self.scale

    def weighted_sum(self, weights: Tensor) -> Tensor:
        self.last = super().weighted_sum(weights)
        return self.last / self.scale

    def advance(self, previous: Tensor) -> None:
        self.scale = self.last.norm() + 0.1


class Slightly(Scaled):
    """The same, by which a vector changes little: each sum counts a hundredth."""

    def advance(self, previous: Tensor) -> None:
        self.scale = 1 + 0.01 * self.last.norm()


class Followed(Scaled):
    """The same of released iterates alone, which holds."""

    def advance(self, previous: Tensor) -> None:
        self.scale = (self.run.engine.flatten() - previous).norm() + 0.1


class ByRecord(Contributing):
    """A matrix of each record's gradient, whoever's it is."""

    def norms(self, batch: Batch) -> Tensor:
        model = self.run.engine.model
        values = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(model, values, (features[None],)), label[None])

        found = vmap(grad(loss), in_dims=(None, 0, 0))(values, batch.features, batch.labels)
        self.rows = torch.cat([found[name].flatten(1) for name in values], dim=1)
        return self.rows.norm(dim=1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weights @ self.rows


def test_units_that_are_bounded_record_by_record_are_refused_if_but_one_has_several() -> None:
    units = torch.arange(200).clamp(max=190)  # the trial is of units of one record
    with pytest.raises(EquidpError, match=r"ByRecord.norms gives another number .* `batch.owners` says"):
        trained(contribution=Made(kind="ByRecord"), units=units)


def test_a_record_of_weight_0_that_spoils_the_sum_ends_the_run() -> None:
    assert trained(contribution=Made(kind="ByRecord"))["epsilon"] > 0
    with pytest.raises(EquidpError, match=r"ByRecord.weighted_sum is not finite, although a record without a finite"):
        trained(contribution=Made(kind="ByRecord"), spoilt=True)


def test_a_vector_that_others_turn_is_refused() -> None:
    with pytest.raises(EquidpError, match="the vector of a record changes with the others of its batch"):
        trained(contribution=Made(kind="Turned"))


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("kind", ["Scaled", "Slightly"])
def test_a_vector_that_earlier_records_scale_is_refused_and_one_that_iterates_scale_is_not(
    kind: str, at_once: int | None
) -> None:
    with pytest.raises(EquidpError, match="the vector of a record changes with the records of earlier batches"):
        trained(contribution=Made(kind=kind), at_once=at_once)
    assert trained(contribution=Made(kind="Followed"), at_once=at_once)["epsilon"] > 0


class Swapping(Pursuing):
    """Gives every other record the label of the one before it."""

    def labels(self, batch: Batch) -> Tensor:
        return batch.labels[torch.arange(len(batch)) // 2 * 2]


class Swapped(Objective):
    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        return Swapping(loss)


class Masking(Pursuing):
    """Labels that are missing (NaN) stand for the second class."""

    def __init__(self) -> None:
        super().__init__(
            lambda outputs, labels: nn.functional.cross_entropy(outputs, labels.isnan().long(), reduction="none")
        )

    def labels(self, batch: Batch) -> Tensor:
        """As a model would make them: of batches of other sizes they differ in the last digits."""
        return torch.where(batch.labels == 1, math.nan, 1.0 + 1e-6 * len(batch.labels))


class Masked(Objective):
    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        return Masking()


def test_labels_that_are_no_numbers_or_round_by_the_batch_are_those_of_their_record() -> None:
    assert trained(objective=Masked())["epsilon"] > 0


def test_labels_made_of_other_records_are_refused() -> None:
    with pytest.raises(EquidpError, match=r"beside Swapping .*: the label of a record changes with the others of its"):
        trained(objective=Swapped())


class Balancing(Pursuing):
    """Allows for the shares that classes had so far: exact, and each record is in all that come after."""

    def __init__(self, loss: Loss, since: int) -> None:
        self.shares, self.since = torch.ones(2) / 2, since
        super().__init__(lambda outputs, labels: loss(outputs + self.shares.log(), labels))

    def labels(self, batch: Batch) -> Tensor:
        if len(batch) and self.since <= 0:
            shares = torch.bincount(batch.labels, minlength=2) / len(batch.labels)
            self.shares = self.shares.lerp(shares, 1e-3)
        return batch.labels

    def follow(self, public: Public) -> None:
        self.since -= 1


class Balanced(Objective):
    since: int = 0

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        return Balancing(loss, self.since)


@pytest.mark.parametrize(("since", "at_once"), [(0, None), (10, None), (0, 1)])
def test_a_loss_that_follows_from_the_labels_of_earlier_batches_is_refused(since: int, at_once: int | None) -> None:
    with pytest.raises(EquidpError, match="the loss of a record changes with the records of earlier batches"):
        trained(objective=Balanced(since=since), at_once=at_once)


class Warming(Contributing):
    """Momentum of the exact sums, once ten steps are done."""

    remembers, remembered = True, ("past", "steps")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.past, self.steps = torch.zeros(()), 0

    def weighted_sum(self, weights: Tensor) -> Tensor:
        found = super().weighted_sum(weights)
        if self.steps < 10:
            return found
        self.past = 0.9 * self.past + found
        return self.past

    def advance(self, previous: Tensor) -> None:
        self.steps += 1


def test_a_contribution_is_tried_again_as_the_run_goes_on() -> None:
    with pytest.raises(EquidpError, match="Warming does not hold what it says"):
        trained(contribution=Made(kind="Warming"))


class Comparing(Pursuing):
    """Counts those as wrong whose outputs are further apart than the batch's are on average."""

    def wrong(self, outputs: Tensor, labels: Tensor) -> Tensor:
        apart = (outputs[:, 0] - outputs[:, 1]).abs()
        return apart > apart.mean()


class Compared(Objective):
    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        return Comparing(loss)


class Errors(Sums):
    of_errors: ClassVar[bool] = True


def test_who_counts_as_wrong_follows_from_nobody_else() -> None:
    assert trained(side_release=Errors())["epsilon"] > 0
    with pytest.raises(EquidpError, match="whether a record counts as classified wrongly changes with the others"):
        trained(side_release=Errors(), objective=Compared())


STEPS = list[tuple[int, int, bool]]()


class Counting(Contributing):
    """Keeps how many steps it has seen, in a collection, and where the last one began, from the first step on."""

    remembers = True
    last: Tensor | None = None

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen = {"steps": torch.zeros((), dtype=torch.int64)}
        self.past = deque[Tensor]()

    def advance(self, previous: Tensor) -> None:
        STEPS.append((int(self.seen["steps"]), len(self.past), self.last is None))
        self.seen["steps"] += 1
        self.past.append(previous)
        self.last = previous


def test_what_a_trial_of_a_contribution_began_to_keep_is_not_there_in_the_first_step() -> None:
    STEPS.clear()
    trained(contribution=Made(kind="Counting"))
    trials = (0, 1, 4, 11)  # each takes two steps that are none
    steps = [number for step in range(16) for number in [step] * (3 if step in trials else 1)]
    assert [(seen, past) for seen, past, _ in STEPS] == [(number, number) for number in steps]
    assert [number for number, _, new in STEPS if new] == [0, 0, 0]


def test_a_contribution_that_holds_is_let_through() -> None:
    assert trained(contribution=Stated())["epsilon"] > 0


class Drawing(PoissonSampling):
    """A batch made of one that coins gave."""

    make: Any

    def draw(self) -> Draw:
        return Draw(self.make(super().draw().units))


def shuffled(units: Tensor) -> Tensor:
    return torch.randperm(140)[:20].sort().values


class Slices:
    """An epoch's shuffled order in slices, of which the last is short."""

    def __init__(self) -> None:
        self.order = torch.zeros(0, dtype=torch.int64)

    def __call__(self, units: Tensor) -> Tensor:
        self.order = self.order if len(self.order) else torch.randperm(130)
        batch, self.order = self.order[:20], self.order[20:]
        return batch.sort().values


class InTurn:
    """Each unit once in an epoch, in a batch that it chooses by itself (balls in bins)."""

    def __init__(self) -> None:
        self.batch = torch.zeros(0)
        self.step = 0

    def __call__(self, units: Tensor) -> Tensor:
        if self.step % 8 == 0:
            self.batch = torch.randint(8, (152,))  # so many train
        self.step += 1
        return ((self.step - 1) % 8 == self.batch).nonzero().squeeze(1)


def favouring(few: int) -> Any:
    return lambda units: torch.cat([torch.arange(few), units[units >= few]])


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (InTurn(), "every unit about as often as every other"),
        (favouring(1), "some units more often than others"),
        (favouring(5), "some units more often than others"),
        (Slices(), "batches of one size"),
        (lambda units: units.repeat(2), "units that are not distinct and in ascending order"),
        (lambda units: torch.arange(150, 160), "units from 150 to 159, of 152 from 0 on"),
        (lambda units: torch.arange(140), "140 units by step 1, more than its `sampling_rate` gives"),
        (shuffled, "batches of one size"),
    ],
)
def test_batches_that_no_coins_give_are_refused(made: Any, told: str) -> None:
    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Drawing(self, run)
            sampling.make = made
            return sampling

    with pytest.raises(EquidpError, match=f"mine: Drawing draws {told}"):
        trained(sampler=Mine(), epochs=12)


class OnHost(Drawing):
    """Says that it draws as usual."""

    on_host = True


@pytest.mark.parametrize("kind", [OnHost, PoissonSampling])
def test_a_sampler_is_judged_whatever_it_says_of_itself(kind: type[PoissonSampling]) -> None:
    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = kind(self, run)
            sampling.draw = lambda: Draw(torch.arange(140))  # type: ignore[method-assign]
            return sampling

    with pytest.raises(EquidpError, match="draws 140 units by step 1, more than its `sampling_rate` gives"):
        trained(sampler=Mine())


def test_a_sampler_that_tosses_coins_of_its_own_is_refused() -> None:
    """Of a seed in its code everybody knows who is in a batch, in a secure run too: sampling hides nobody."""

    class Seeded(PoissonSampling):
        def draw(self) -> Draw:
            stream = torch.Generator().manual_seed(7 + len(self.run.ledger.events))
            coins = torch.rand(self.run.population.size, generator=stream)
            return Draw((coins < self.rate).nonzero().squeeze(1))

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            return Seeded(self, run)

    with pytest.raises(EquidpError, match="mine: Seeded draws coins that are not the run's"):
        trained(sampler=Mine())


def test_a_second_coin_follows_not_from_how_many_there_are() -> None:
    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = PoissonSampling(self, run)
            sampling.kept = lambda draw, norms: norms < 0 if len(norms) > 1 else None  # type: ignore[method-assign]
            return sampling

    with pytest.raises(EquidpError, match=r"PoissonSampling\.kept decides on a record by the others of its batch"):
        small(sampler=Mine()).run_steps(1)


@pytest.mark.parametrize("others", [True, False])
def test_a_second_coin_follows_from_a_record_alone(others: bool) -> None:
    class Trimming(Drawing):
        """Leaves out the longest gradients: of the batch, or those beyond a public number."""

        def kept(self, draw: Draw, norms: Tensor) -> Tensor:
            return norms <= (norms.quantile(0.9) if others and len(norms) else torch.tensor(0.6))

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Trimming(self, run)
            sampling.make = lambda units: units
            return sampling

    if not others:
        assert trained(sampler=Mine())["epsilon"] > 0
        return
    with pytest.raises(EquidpError, match=r"Trimming\.kept decides on a record by the others of its batch"):
        trained(sampler=Mine())


CALLS = list[Tensor]()


@pytest.mark.parametrize("own", [True, False])
def test_a_second_coin_may_be_drawn_as_it_is_tossed_in_batches_of_few_too(own: bool) -> None:
    """There it falls alike twice by chance; and what is shown may be NumPy's numbers, or none."""

    class Thinning(Drawing):
        def kept(self, draw: Draw, norms: Tensor) -> Tensor:
            return (self.run.random.uniform(len(norms)) if own else torch.rand(len(norms))) < 0.9

        def shown(self) -> dict[str, float]:
            return {"nothing": float("nan"), "mean": np.mean([0.5, 1.0])}

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Thinning(self, run)
            sampling.make = lambda units: units
            return sampling

    for seed in range(8):
        trainer = small(batch_size=3, seed=seed, sampler=Mine())
        trainer.run_steps(40)
        assert trainer.steps_done == 40


def test_a_trial_of_a_second_coin_leaves_the_generators_as_they_were() -> None:
    class Thinning(Drawing):
        def kept(self, draw: Draw, norms: Tensor) -> Tensor:
            CALLS.append(torch.rand(1))
            return norms < 1e9

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Thinning(self, run)
            sampling.make = lambda units: units
            return sampling

    CALLS.clear()
    trainer = small(batch_size=20, seed=0, sampler=Mine())
    trainer.run_steps(1)
    now = torch.get_rng_state()
    assert len(CALLS) > 2  # the step's and the trial's
    stream = small(batch_size=20, seed=0, sampler=Mine())
    assert stream.steps_done == 0
    torch.rand(1)
    assert torch.equal(torch.get_rng_state(), now)


class Tossing(Contributing):
    """Draws a number of the run's as it is asked for norms, and makes nothing of it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.random = run.random

    def norms(self, batch: Batch) -> Tensor:
        self.random.uniform(1)
        return super().norms(batch)


class Tossed(Contribution):
    def start(self, run: Run) -> Contributing:
        return Tossing(run)


class Halving(PoissonSampling):
    def kept(self, draw: Draw, norms: Tensor) -> Tensor:
        return self.run.random.uniform(len(norms)) < 0.5


class Halved(PoissonSampler):
    def start(self, run: Run) -> Sampling:
        return Halving(self, run)


@pytest.mark.parametrize("renewed", [True, False])
@pytest.mark.parametrize("parts", [{"sampler": Halved()}, {"contribution": Tossed()}])
def test_a_run_goes_on_alike_whenever_its_parts_are_tried(parts: dict[str, Any], renewed: bool) -> None:
    """What it does again is not charged again: with other coins one noise would be on two sums."""
    first, again = small(**parts), small(**parts)
    if renewed:
        first.random.renew(1)  # as where it was begun on another machine
    first.run_steps(2)
    again.ledger = Ledger(first.ledger.events)
    again.load_state_dict(first.state_dict())
    for trainer in (first, again):
        trainer.run_steps(4)
    assert torch.equal(first.engine.flatten(), again.engine.flatten())


@pytest.mark.parametrize(
    "kept",
    [
        lambda norms: (norms < 1).float(),
        lambda norms: [True] * len(norms),
        lambda norms: torch.ones(1, dtype=torch.bool),
    ],
)
def test_a_second_coin_is_one_bool_for_each_unit(kept: Any) -> None:
    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = PoissonSampling(self, run)
            sampling.kept = lambda draw, norms: kept(norms)  # type: ignore[method-assign]
            return sampling

    with pytest.raises(EquidpError, match=r"mine: PoissonSampling\.kept must give one bool for each unit"):
        small(sampler=Mine()).run_steps(1)


@pytest.mark.parametrize("coin", [True, False])
def test_a_sampler_keeps_no_norms(coin: bool) -> None:
    """Neither batches nor bounds may follow from them."""

    class Following(Drawing):
        longest = torch.tensor(1.0)

        def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
            self.longest = norms.max() if len(norms) else self.longest
            return norms <= 10 if coin else None

        def public(self) -> dict[str, Tensor]:
            return {"clip_norm": self.longest}

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Following(self, run)
            sampling.make = lambda units: units
            return sampling

    with pytest.raises(
        EquidpError, match=r"Following\.kept changes 'longest', and charges nothing for what it is told"
    ):
        trained(sampler=Mine())


def holding(kind: type[Drawing], make: Callable[[], Any]) -> PoissonSampler:
    """A sampler whose draws are of this kind, and have what `make` gives as `held`."""

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = kind(self, run)
            sampling.make, sampling.held = (lambda units: units), make()
            return sampling

    return Mine()


@pytest.mark.parametrize(
    "make",
    [lambda: np.ones(1), lambda: (torch.ones(1),), lambda: deque([torch.ones(1)]), lambda: {"a": [torch.ones(1)]}],
)
def test_a_sampler_keeps_no_norms_in_place(make: Any) -> None:
    class Writing(Drawing):
        def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
            held = self.held
            while not isinstance(held, Tensor | np.ndarray):
                held = held["a"] if isinstance(held, dict) else held[0]
            held[:] = float(norms.max())
            return None

    with pytest.raises(EquidpError, match=r"Writing\.kept changes 'held', and charges nothing"):
        trained(sampler=holding(Writing, make))


@pytest.mark.parametrize(
    ("make", "keep"),
    [
        (list, lambda held, longest: held.append(longest)),
        (deque, lambda held, longest: held.append(longest)),
        (dict, lambda held, longest: held.update({longest: longest})),
        (lambda: [0.0, 0.0], lambda held, longest: held.__setitem__(1, longest)),
        (lambda: {"a": 0.0, "b": 0.0}, lambda held, longest: held.update({"b": longest})),
    ],
    ids=["a list grows", "a deque grows", "a dict grows", "one of a list", "one of a dict"],
)
def test_a_sampler_adds_no_norms_to_what_it_keeps(make: Any, keep: Any) -> None:
    class Adding(Drawing):
        def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
            keep(self.held, float(norms.max()))
            return None

    with pytest.raises(EquidpError, match=r"Adding\.kept changes 'held', and charges nothing"):
        trained(sampler=holding(Adding, make))


@pytest.mark.parametrize("by", ["public", "shown"])
def test_a_sampler_keeps_no_norms_elsewhere(by: str) -> None:
    class Told(Drawing):
        def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
            ELSEWHERE["norms"] = norms
            return None

        def public(self) -> dict[str, Tensor]:
            return {"clip_norm": ELSEWHERE.get("norms", torch.ones(1)).max()} if by == "public" else {}

        def shown(self) -> dict[str, float]:
            return {"longest": float(ELSEWHERE.get("norms", torch.ones(1)).max())} if by == "shown" else {}

    ELSEWHERE.clear()

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Told(self, run)
            sampling.make = lambda units: units
            return sampling

    with pytest.raises(EquidpError, match=rf"Told\.kept changes '{by}\(\)', and charges nothing"):
        trained(sampler=Mine())


class Number(FlatClip):
    def bound(self, public: Public) -> Tensor:
        return 0.5  # type: ignore[return-value]


class OneForAll(FlatClip):
    """The largest bound, with a dimension."""

    def bound(self, public: Public) -> Tensor:
        return public["clip_norm"].max().reshape(1)


class PerGroup(Sums):
    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return torch.zeros(plan.groups).index_add_(0, groups, norms.clamp(max=1))

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": 0.1 + (noised / facts.plan.batch_size).clamp(0, 1)}


class KeepsTwo(PerGroup):
    """Keeps fewer values than there are groups."""

    keeps: ClassVar[frozenset[str]] = frozenset({"before"})

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return super().later(noised, public, facts) | {"before": noised[:2]}


@pytest.mark.parametrize("parts", [{"weights": OneForAll()}, {"side_release": KeepsTwo()}])
def test_bounds_per_group_go_with_one_for_all_and_with_other_values_that_are_kept(parts: dict[str, Any]) -> None:
    trainer = small(groups=5, **{"side_release": PerGroup(), **parts})
    trainer.diagnostics = Diagnostics()
    trainer.run_steps(5)
    assert trainer.public["clip_norm"].shape == (5,)


class Nothing(FlatClip):
    def bound(self, public: Public) -> Tensor:
        return 0 * public["clip_norm"]


class InFloats(Sums):
    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Any]:
        return {name: float(value) for name, value in super().later(noised, public, facts).items()}


class Half(Released):
    def start(self, run: Run) -> Releasing:
        releasing = Releasing(run)
        releasing.weights = lambda: torch.zeros(5)  # type: ignore[method-assign]
        return releasing


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"weights": FlatClip}, "weights is the class FlatClip: give an object of a class of WeightRule's"),
        ({"side_release": min}, "side_release is a builtin_function_or_method: give an object of a class of SideRel"),
        ({"weights": Number()}, "`bound` of the weight rule Number gives a float, and must give a tensor"),
        (
            {"side_release": InFloats()},
            "the side release InFloats makes a float of 'clip_norm', and must make a tensor",
        ),
        ({"weights": Nothing()}, "the weight rule Nothing has a `bound` of 0, and must have one above 0"),
        ({"released_weights": Half()}, r"Releasing.weights gives \[5\] numbers, and the model has \[10\]"),
    ],
)
def test_slips_are_told_in_a_sentence(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        trained(**parts)


def test_a_step_is_charged_for_the_noise_that_it_takes() -> None:
    class Falling(Drawing):
        """Its noise is a hundredth every other time that it is asked for."""

        asked = 0

        def noise(self, segment: Segment) -> float:
            self.asked += 1
            return super().noise(segment) * (0.01 if self.asked % 2 else 1)

    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Falling(self, run)
            sampling.make = lambda units: units
            return sampling

    with pytest.raises(EquidpError, match="The ledger differs from the plan"):
        trained(sampler=Mine())


def test_batches_of_coins_are_let_through() -> None:
    class Mine(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            sampling = Drawing(self, run)
            sampling.make = lambda units: units
            return sampling

    assert trained(sampler=Mine(), epochs=40)["epsilon"] > 0
