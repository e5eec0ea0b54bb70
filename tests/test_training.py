"""Training from plain tensors: the loss of a record, and the code that a run depends on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from equidp import training
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.engine.parts import FlatClip, Part, Public, Schedule
from equidp.engine.plan import Plan, Segment
from equidp.errors import EquidpError
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.training import plan_run, record_loss

CPU = torch.device("cpu")


def test_a_records_loss_is_weighed_by_its_own_class_alone() -> None:
    outputs, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1, 1])
    plain = record_loss(None, ("ill", "well"), CPU)(outputs, labels)
    weighted = record_loss((2.0, 0.5), ("ill", "well"), CPU)(outputs, labels)
    torch.testing.assert_close(weighted, plain * torch.tensor([2.0, 0.5, 0.5]))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_weights_that_are_not_one_per_class_are_refused(weights: tuple[float, ...]) -> None:
    words = rf"class_weights has {len(weights)} numbers; give one for each of the 2 classes, in this order: ill, well\."
    with pytest.raises(EquidpError, match=words):
        record_loss(weights, ("ill", "well"), CPU)


@pytest.mark.parametrize("library", ["kymatio", "numpy", "opacus", "scipy", "torchvision"])
def test_another_version_of_what_sets_sums_and_noise_is_other_code(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    known = training.version
    monkeypatch.setattr(training, "version", lambda name: "another" if name == library else known(name))
    assert training._code_digest() != training.CODE_DIGEST


class BoundTooSmall(FlatClip):
    def bound(self, public: Public) -> Tensor:
        return public["clip_norm"] / 2


class LooksAtOthers(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return (public["clip_norm"] / norms.max()).clamp(max=1.0).expand(len(norms))


class Negative(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return -super().weights(norms, public)


class OneForAll(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public).sum()


class HalfTheRun(Schedule):
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        return (Segment(plan.steps // 2),)


def planned(name: str = "dpsgd", **parts: Part) -> Plan:
    algorithm = dataclasses.replace(algorithm_settings(name).build(), **parts)
    privacy, settings = PrivacySettings(noise_multiplier=1.0), TrainingSettings(epochs=3, batch_size=10)
    return plan_run(algorithm, units=100, groups=3, privacy=privacy, training=settings)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (BoundTooSmall(), r"lets a record add 1, more than the 0\.5 of its `bound`"),
        (LooksAtOthers(), "weighs a record by the others of its batch"),
        (Negative(), "gives weights that are below 0"),
        (OneForAll(), r"gives weights of shape \(\) for 55 records"),
    ],
)
def test_a_weight_rule_that_breaks_its_promise_is_refused_before_an_epsilon_is_told(
    rule: FlatClip, reason: str
) -> None:
    with pytest.raises(EquidpError, match=f"the weight rule {type(rule).__name__} {reason}"):
        planned(weights=rule)


def test_a_schedule_of_other_steps_than_the_run_is_refused() -> None:
    with pytest.raises(EquidpError, match=r"HalfTheRun come to 15 steps where the run has 30"):
        planned(schedule=HalfTheRun())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_keeps_its_promises(name: str) -> None:
    assert planned(name).steps
