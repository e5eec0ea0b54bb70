"""Planted faults: mechanisms that are broken on purpose, as published code has been, and the check that catches each.

Every check is one of the contract's (`tests/algorithms/test_contract.py`), one of the two below, or the audit
(`tests/audit/test_canaries.py`, half the noise, for every algorithm). Each is run on the honest algorithm too: a check
that refused everything would catch every fault and prove nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from scipy import stats
from tests.algorithms import test_asc
from tests.algorithms import test_contract as contract
from tests.algorithms.conftest import Laboratory, Scripted, cross_entropy, make_records, zero_loss
from torch import Tensor

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS
from equidp.algorithms.asc import GroupSampler
from equidp.algorithms.auto_dpsgd import OwnThreshold
from equidp.algorithms.dc_sgd import NormHistogram
from equidp.algorithms.dpis import ImportanceSampler
from equidp.algorithms.dpsgd_quantile import QuantileCount
from equidp.algorithms.slaclip import Slack
from equidp.algorithms.soft_adaclip import SoftClip
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Added, Draw, FlatClip, PoissonSampler, Public, Run, Sampling, sensitivity
from equidp.mechanism.parts.sampler import PoissonSampling
from equidp.mechanism.trainer import Trainer

# ----------------------------------------------------------------------------------------------------- two more checks


def bound_is_public(lab: Laboratory, name: str) -> None:
    """Δ is the same whoever is in the batch: an empty one, one group, another, everybody, loud or quiet."""
    trainer = contract.at_its_beginning(lab, name)
    public = contract.TestSensitivity().released(lab, trainer, (3.0, 1.0))
    found = []
    for groups in ([], [0], [1], [2], [0, 1, 2], [1, 0]):
        for size in (0.01, 100.0):
            norms = torch.linspace(1.0, 2.0, len(groups)) * size
            trainer.weights(norms, torch.tensor(groups, dtype=torch.long), public)
            found.append(float(sensitivity(trainer.algorithm.weights, public)))
    assert len(set(found)) == 1


def side_releases_are_noised(lab: Laboratory, name: str) -> None:
    """Side statistics of empty batches leave with the noise that is charged for them."""
    plan = lab.plan(epochs=60)
    trainer = lab.trainer(name, plan=plan, random=lab.random(5, coins=False))
    release = trainer.algorithm.side_release
    assert release is not None
    seen: list[Tensor] = []
    perturb = trainer.random.perturb

    def listen(values: Tensor, **how: Any) -> Tensor:
        released = perturb(values, **how)
        if len(values) != trainer.engine.dimension:
            seen.append((released - values) / release.noise(plan))
        return released

    trainer.random.perturb = listen  # type: ignore[method-assign]
    trainer.run_steps(plan.steps)
    assert len(seen) == plan.steps
    assert stats.kstest(torch.cat(seen).numpy(), "norm").pvalue > 1e-3


# -------------------------------------------------------------------------------------------------------- broken parts


class HalfNoise(Scripted):
    """Adds half the noise it is charged for."""

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier / 2)


class SilentCounts(Scripted):
    """Lets counts pass without noise."""

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        if len(values) <= 6:  # K or 2K counts of the laboratory's three groups
            return values
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)


class PresentGroupsClip(FlatClip):
    """Its bound is the largest C^k of the groups in the batch: the noise then tells which groups are there."""

    _present: ClassVar[Tensor | None] = None

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        if len(norms):
            object.__setattr__(self, "_present", public["clip_norm"].max())  # past the refusal to keep anything
        return super().weights(norms, public)

    def bound(self, public: Public) -> Tensor:
        return public["clip_norm"] if self._present is None else self._present


class LastThreshold(OwnThreshold):
    """Its bound is the threshold of the batch's last record, as in published code of AUTO-DPSGD."""

    _last: ClassVar[Tensor | None] = None

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        found = super().weights(norms, public)
        if len(norms):
            object.__setattr__(self, "_last", (found * norms)[-1].clamp(min=1e-6))
        return found

    def bound(self, public: Public) -> Tensor:
        return super().bound(public) if self._last is None else self._last


class MaxScaled(FlatClip):
    """w = C/max n: bounded, but every weight depends on the longest gradient of the batch."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return (public["clip_norm"] / norms.max().clamp(min=1e-12)).clamp(max=1e12).expand_as(norms)


class BadlyBounded(FlatClip):
    """States half of its bound."""

    def bound(self, public: Public) -> Tensor:
        return super().bound(public) / 2


class CountsBeyond(QuantileCount):
    """Says that it counts within κ·C, and counts within C."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return (norms <= public["clip_norm"]).sum(0, keepdim=True, dtype=torch.float32)

    def added(self) -> tuple[Added, ...]:
        return Added(1.0, self.counts_below), Added(0.0)


class CentredForFree(QuantileCount):
    """Centred, and forgets that who is not counted moves the statistic too."""

    def added(self) -> tuple[Added, ...]:
        return Added(0.5, self.counts_below), Added(0.0)


class HalfAdded(QuantileCount):
    """Says half of what a counted record adds."""

    def added(self) -> tuple[Added, ...]:
        return Added(0.5, self.counts_below), Added(0.0)


class OtherUnit(QuantileCount):
    """Compares with one public value and says another."""

    def added(self) -> tuple[Added, ...]:
        return Added(1.0, self.counts_below, "strict_clip_norm"), Added(0.0)


class HalfCharged(QuantileCount):
    """Counts 0 and 1, and is charged for ½, as in public code of bounded clipping."""

    def sensitivity(self) -> float:
        return 0.5

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return (norms <= self.counts_below * public["clip_norm"]).sum(0, keepdim=True, dtype=torch.float32)


class WideSlack(Slack):
    """Takes half a norm for the whole: slack that is not there."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return super().statistic(norms / 2, groups, public, plan)

    def added(self) -> tuple[Added, ...]:
        return super().added()


class FilledSlots(Slack):
    """Fills slots of C instead of C/√K."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return super().statistic(norms, groups, public, plan) * self.slots**0.5

    def added(self) -> tuple[Added, ...]:
        return super().added()


class TwoBins(NormHistogram):
    """Counts each gradient in its bin and in the next, and says that it moves one."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        found = super().statistic(norms, groups, public, plan)
        return found + found.roll(1)


class HardEdge(FlatClip):
    """Clips as DP-SGD does, and says what tanh leaves."""

    def reach(self, unit: str, upto: float) -> float:
        return SoftClip().reach(unit, upto)


class OneBound(GroupSampler):
    """Samples hard groups more often and clips them no shorter."""

    def start(self, run: Run) -> Sampling:
        sampling = super().start(run)
        sampling.public = lambda: {"clip_norm": torch.full((run.plan.groups,), sampling.clip)}  # type: ignore
        return sampling


class ShortReach(FlatClip):
    """Says κ²·C of what it lets gradients within κ·C add."""

    def reach(self, unit: str, upto: float) -> float:
        return super().reach(unit, upto) ** 2


class Shuffled(PoissonSampler):
    """Batches of B records from a shuffled list, charged as if they were Poisson samples."""

    def start(self, run: Run) -> Sampling:
        return _Shuffling(self, run)


class _Shuffling(PoissonSampling):
    left: Tensor = torch.zeros(0, dtype=torch.long)

    def draw(self) -> Draw:
        if len(self.left) < self.run.plan.batch_size:
            self.left = torch.argsort(self.run.random.uniform(self.run.population.size))
        units, self.left = self.left.split([self.run.plan.batch_size, len(self.left) - self.run.plan.batch_size])
        return Draw(units.sort().values)


class Uncapped(ImportanceSampler):
    """Proposals without their cap: rates above 1, so inclusion is not what it is charged as."""

    def start(self, run: Run) -> Sampling:
        sampling = super().start(run)
        part = sampling.part  # type: ignore[attr-defined]

        def proposals(clipped: Tensor) -> Tensor:
            return part.proposal_multiplier * clipped.clamp(min=0.01 * sampling.clip)  # type: ignore[attr-defined]

        sampling._proposals = proposals  # type: ignore[attr-defined]
        return sampling


class AcceptedOnly(Ledger):
    """Forgets the charge of every candidate that was refused."""

    def forget(self) -> None:
        last = self._events[-1]
        self._events[-1:] = [dataclasses.replace(last, count=last.count - 1)] if last.count > 1 else []


class Uncharged(Ledger):
    """Charges every other event."""

    turn = False

    def append(self, event: Event) -> None:
        self.turn = not self.turn
        if self.turn:
            super().append(event)


# -------------------------------------------------------------------------------------------------------------- plants


def _unchanged(algorithm: Algorithm) -> Algorithm:
    return algorithm


@dataclass(frozen=True)
class Broken(Laboratory):
    """A laboratory whose algorithms, random numbers or ledger are broken."""

    mutate: Callable[[Algorithm], Algorithm] = _unchanged
    ledger: type[Ledger] = Ledger

    def trainer(self, name: str, options: dict[str, Any] | None = None, **changes: Any) -> Trainer:
        honest = super().trainer(name, options)
        given = {"algorithm": self.mutate(honest.algorithm), "random": self.random(), "ledger": self.ledger()}
        trainer = super().trainer(name, options, **(given | changes))
        if isinstance(trainer.ledger, AcceptedOnly):
            _forget_refused(trainer, trainer.ledger)
        return trainer


def _forget_refused(trainer: Trainer, ledger: AcceptedOnly) -> None:
    accept = trainer.accepting.accept

    def and_forget() -> bool:
        taken = accept()
        if not taken:
            ledger.forget()
        return taken

    trainer.accepting.accept = and_forget  # type: ignore[method-assign]


def laboratory(kind: type[Laboratory] = Laboratory, *, random: type[Scripted] = Scripted, **more: Any) -> Any:
    """A laboratory, broken or not."""
    return kind(make_records, random, cross_entropy, zero_loss, **more)


def _noise(lab: Any, name: str) -> None:
    contract.TestNoise().test_with_zero_gradients_only_noise_is_left(lab, name, None)


def _bounded(lab: Any, name: str) -> None:
    contract.TestSensitivity().test_a_record_moves_the_sum_by_at_most_the_sensitivity(lab, name)


def _apart(lab: Any, name: str) -> None:
    begun = partial(contract.at_its_beginning, lab)  # a new one each: a planted fault may remember
    contract.TestSensitivity().test_no_weight_depends_on_the_others(lab, begun, name)


def _sampled(lab: Any, name: str) -> None:
    contract.TestSampling().test_inclusion_rates_and_independence(lab, name)


def _charged(lab: Any, name: str) -> None:
    contract.TestLedger().test_a_run_charges_what_was_announced(lab, name)


def _together(lab: Any, name: str) -> None:
    for options in contract.JOINT[name][:3]:
        for size in (1.0, 3e4):
            contract.TestJointBound().test_no_record_is_found_that_moves_both_by_more(lab, name, options, size)


def _no_group_costs_more(lab: Any, name: str) -> None:
    trainer = lab.trainer(name, {"steepness": 4.0})
    trainer.begin_epoch(0)
    trainer.sampling.group_rates = torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64)
    test_asc.costs_at_most_what_is_charged(trainer)


def _charged_when_refusing(lab: Any, name: str) -> None:
    # many candidates of an energy that is hardly better: some are refused
    run = lab.trained(name, plan=lab.plan(epochs=10))
    assert run.trainer.accepting.rejected > 0
    assert run.trainer.algorithm.covers(run.trainer.plan, run.trainer.ledger.events)


@dataclass(frozen=True)
class Plant:
    """A fault, in which algorithm it is planted, and the check that must find it."""

    fault: str
    algorithm: str
    check: Callable[[Any, str], None]
    broken: Any


def parts(**changed: Any) -> Any:
    """A laboratory whose algorithms have other parts."""
    return laboratory(Broken, mutate=lambda algorithm: dataclasses.replace(algorithm, **changed))


COUNTING: dict[str, Any] = {"counts_below": 0.6, "count_noise_multiplier": 1.25}

PLANTS = [
    Plant("half the noise", "dpsgd", _noise, laboratory(random=HalfNoise)),
    Plant("half the noise", "dpsgd_f", side_releases_are_noised, laboratory(random=HalfNoise)),
    Plant("Δ of the groups present", "dpsgd_f", bound_is_public, parts(weights=PresentGroupsClip())),
    Plant("no noise on the counts", "dpsgd_f", side_releases_are_noised, laboratory(random=SilentCounts)),
    Plant("no noise on the counts", "naive", side_releases_are_noised, laboratory(random=SilentCounts)),
    Plant("Δ of the last record", "auto_dpsgd_l", bound_is_public, parts(weights=LastThreshold())),
    Plant("uncapped proposal", "dpis", _sampled, parts(sampler=Uncapped())),
    Plant("only accepted steps charged", "sa_dpsgd", _charged_when_refusing, laboratory(Broken, ledger=AcceptedOnly)),
    Plant("every other step charged", "dpsgd", _charged, laboratory(Broken, ledger=Uncharged)),
    Plant("shuffled, not Poisson", "dpsgd", _sampled, parts(sampler=Shuffled())),
    Plant("weights by the batch's maximum", "dpsgd", _apart, parts(weights=MaxScaled())),
    Plant("half the bound", "dpsgd", _bounded, parts(weights=BadlyBounded())),
    Plant("counts more than it says", "dpsgd_quantile", _together, parts(side_release=CountsBeyond(**COUNTING))),
    Plant(
        "centred for free", "dpsgd_quantile", _together, parts(side_release=CentredForFree(**COUNTING, centred=True))
    ),
    Plant(
        "half a count",
        "dpsgd_quantile",
        _together,
        parts(side_release=HalfAdded(**{**COUNTING, "count_noise_multiplier": 1.0})),
    ),
    Plant("a rule that understates short gradients", "dpsgd_quantile", _together, parts(weights=ShortReach())),
    Plant("½ charged for 1", "dpsgd_bounded", _together, parts(side_release=HalfCharged(count_noise_multiplier=1.0))),
    Plant("slack that is not there", "slaclip", _together, parts(side_release=WideSlack())),
    Plant("slots too wide", "slaclip", _together, parts(side_release=FilledSlots())),
    Plant("a gradient in two bins", "dc_sgd_p", _together, parts(side_release=TwoBins(count_noise_multiplier=1.0))),
    Plant("a hard edge", "soft_adaclip", _together, parts(weights=HardEdge())),
    Plant("one bound for all groups", "asc", _no_group_costs_more, parts(sampler=OneBound())),
    Plant(
        "another unit",
        "dpsgd_global_adapt",
        _together,
        parts(side_release=OtherUnit(**COUNTING)),
    ),
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.fault} in {plant.algorithm}")
class TestPlanted:
    """Each fault is caught by its check, which passes the honest algorithm."""

    @pytest.fixture(autouse=True)
    def unwatched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Past the loop's own looks at parts of others."""
        monkeypatch.setattr("equidp.mechanism.trainer.of_others", lambda *of: False)

    def test_the_honest_algorithm_passes(self, plant: Plant) -> None:
        plant.check(laboratory(), plant.algorithm)

    def test_the_fault_is_caught(self, plant: Plant) -> None:
        with pytest.raises((AssertionError, ValueError)):
            plant.check(plant.broken, plant.algorithm)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"sgd"}))
def test_every_bound_is_public(name: str) -> None:
    bound_is_public(laboratory(), name)


WITH_SIDE_RELEASE = [
    name for name in sorted(ALGORITHMS) if laboratory().trainer(name).algorithm.side_release is not None
]


@pytest.mark.parametrize("name", WITH_SIDE_RELEASE)
def test_every_side_release_is_noised(name: str) -> None:
    side_releases_are_noised(laboratory(), name)


@pytest.mark.parametrize("name", WITH_SIDE_RELEASE)
def test_all_that_is_made_of_a_side_release_follows_from_its_noised_value(name: str) -> None:
    """Nobody or everybody in the batch: where the noised value is the same, so are bounds and carried values."""

    def made(*, everybody: bool) -> dict[str, Any]:
        trainer = laboratory().trainer(name, random=Scripted(5, coins=everybody))
        perturb = trainer.random.perturb

        def told(values: Tensor, **how: Any) -> Tensor:
            gradient = len(values) == trainer.engine.dimension
            return perturb(values, **how) if gradient else torch.linspace(1.0, 2.0, len(values))

        trainer.random.perturb = told  # type: ignore[method-assign]
        trainer.run_steps(2)
        return {**trainer.shown, **trainer.public}

    nobody, everybody = made(everybody=False), made(everybody=True)
    assert nobody.keys() == everybody.keys()
    for what, value in nobody.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(everybody[what])), what
