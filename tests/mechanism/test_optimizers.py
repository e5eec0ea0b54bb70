"""Optimisers' settings and the schedule of the learning rate: torch's arithmetic, for private and plain runs alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.algorithms.conftest import Laboratory, lab  # noqa: F401 (a fixture)

from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.parts import ExponentialAverage
from equidp.parameters import TrainingSettings


@pytest.mark.parametrize(
    ("descent", "theirs"),
    [
        (Descent(weight_decay=0.3), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
        (Descent("momentum"), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Descent("momentum", momentum=0.4), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.4)),
        (Descent("adam", adam_epsilon=0.1), lambda p: torch.optim.Adam(p, lr=0.1, eps=0.1)),
        (Descent("adamw"), lambda p: torch.optim.AdamW(p, lr=0.1)),
        (
            Descent("adamw", weight_decay=0.5, adam_epsilon=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, eps=0.1),
        ),
    ],
)
def test_settings_are_those_of_torchs_optimiser(lab: Laboratory, descent: Descent, theirs: Any) -> None:  # noqa: F811
    ours, other = lab.trainer("dpsgd", optimizer=descent), lab.trainer("dpsgd")
    other.optimizer = theirs(other.engine.parameters)
    for run in (ours, other):
        run.run_steps(4)
    torch.testing.assert_close(ours.engine.flatten(), other.engine.flatten())


@pytest.mark.parametrize("name", ["sgd", "dpsgd"])
def test_the_cosine_is_torchs_and_steps_fall_at_their_shares(lab: Laboratory, name: str) -> None:  # noqa: F811
    plan = lab.plan(epochs=2)
    ours, other = lab.trainer(name, plan=plan, optimizer=Descent(schedule="cosine")), lab.trainer(name, plan=plan)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(other.optimizer, plan.steps)
    for _ in range(plan.steps):
        ours.run_steps(1)
        other.run_steps(1)
        theirs.step()
    torch.testing.assert_close(ours.engine.flatten(), other.engine.flatten())
    shares = [t / 8 for t in range(8)]
    assert [Descent(schedule="step").factor(s) for s in shares] == pytest.approx([1] * 4 + [0.1] * 2 + [0.01] * 2)
    own = Descent(schedule="step", schedule_at=(0.25,), schedule_factor=0.5)
    assert [own.factor(s) for s in shares] == [1, 1] + [0.5] * 6


def test_a_setting_that_the_choice_does_not_have_is_refused() -> None:
    with pytest.raises(EquidpError, match=r"training.momentum is no setting of training.optimizer=sgd.*take momentum"):
        Descent(momentum=0.9)
    with pytest.raises(EquidpError, match=r"training.adam_epsilon is no setting .*=momentum.*take adam or adamw"):
        TrainingSettings(optimizer="momentum", adam_epsilon=1e-6)
    with pytest.raises(EquidpError, match=r"training.schedule_at is no setting of training.schedule=cosine"):
        TrainingSettings(schedule="cosine", schedule_at=(0.5,))


def test_an_imposed_optimiser_takes_no_settings_of_another() -> None:
    own = algorithm_settings("psasc_momentum").build()
    assert own.optimizer_beside(Descent(weight_decay=0.1))([torch.zeros(1)], 0.1).param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(EquidpError, match=r"brings its own optimiser, and training.optimizer=momentum"):
        own.optimizer_beside(Descent("momentum", momentum=0.5))
    made = dataclasses.replace(own, optimizer=Descent("adam").make)
    with pytest.raises(EquidpError, match=r"own optimiser with its settings: leave out training.weight_decay"):
        made.optimizer_beside(Descent(weight_decay=0.1))


def test_an_average_is_for_every_algorithm_but_one_that_has_its_own_weights_to_release() -> None:
    plain = algorithm_settings("dpsgd").build()
    assert plain.averaged(None) is plain
    averaged = plain.averaged(0.9)
    assert averaged.released_weights == ExponentialAverage(decay=0.9)
    assert averaged.averaged(0.9) is averaged
    with pytest.raises(EquidpError, match=r"dpsgd says itself which weights leave the run"):
        averaged.averaged(0.8)
