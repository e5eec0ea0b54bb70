"""`make_private` in hands that change things between steps: what would not hold is refused, before it is charged."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equidp.errors import EquidpError
from equidp.gradients import engine
from equidp.gradients.engine import LOOKS_APART, GradientEngine
from equidp.mechanism.trainer import Trainer
from equidp.training import make_private, spent

FEATURES = torch.rand(300, 4, generator=torch.Generator().manual_seed(1))
LABELS = (FEATURES[:, 0] > 0.7).long()
LOSS = nn.CrossEntropyLoss(reduction="none")


def trainer_of(loss: Any = LOSS, model: nn.Module | None = None, features: Tensor = FEATURES, **asked: Any) -> Trainer:
    torch.manual_seed(3)
    model = model or nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    given = {
        "noise_multiplier": 1.5, "delta": 1e-4, "epochs": 8, "batch_size": 60, "learning_rate": 0.5, "device": "cpu",
        "seed": 0,
    }  # fmt: skip
    return make_private(model, (features, LABELS), loss, **(given | asked))


def charged(trainer: Trainer) -> int:
    return sum(event.count for event in trainer.ledger.events)


def _batch_norm(model: Any) -> None:
    model[1] = nn.BatchNorm1d(4)


def _other_layer(model: Any) -> None:
    model[2] = nn.Linear(4, 2)


def _one_more(model: Any) -> None:
    model.append(nn.Linear(4, 4))


def _assigned(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (_batch_norm, r"layers are others than when it was made private \(1\)"),
    (_other_layer, r"layers are others than when it was made private \(2\)"),
    (_one_more, r"layers are others than when it was made private \(3\)"),
    (lambda model: nn.utils.parametrizations.weight_norm(model[0]), r"layers are others .*0\.parametrizations"),
    (lambda model: model.__delitem__(1), "layers are others"),
    (_assigned, r"in the place of '0\.weight'.*without assign=True"),
    (lambda model: setattr(model[2], "bias", nn.Parameter(torch.zeros(2))), r"in the place of '2\.bias'"),
    (lambda model: nn.utils.weight_norm(model[0]), r"in the place of '0\.weight'"),
    (lambda model: model.half(), r"'0\.weight' has become float16"),
    (lambda model: model.double(), r"'0\.weight' has become float64"),
    (lambda model: setattr(model[0].weight, "data", torch.zeros(4, 5)), r"'0\.weight' has become \[4, 5\]"),
    (lambda model: model[0].register_forward_hook(_centred), "not those of the loss"),
    (lambda model: model[2].register_full_backward_hook(_summed), "mixes records|not those of the loss"),
    (
        lambda model: setattr(model[1], "forward", lambda given: torch.tanh(_centred(None, None, given))),
        "mixes records",
    ),
    (lambda model: setattr(model, "forward", _halved(model.forward)), "turns torch.autocast on in its own forward"),
]


def _centred(layer: object, given: object, outputs: Tensor) -> Tensor:
    return outputs - outputs.mean(0)


def _summed(layer: object, inward: tuple[Tensor, ...], outward: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(values + values.mean(0) for values in inward)


def _halved(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As `Accelerator(mixed_precision="bf16").prepare` does it."""

    def within(features: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(features).float()

    return within


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_model_that_is_changed_between_steps_is_not_trained_on(change: Callable[[Any], object], words: str) -> None:
    """A BatchNorm that is put in later would learn exact statistics; another parameter would learn nothing at all.

    By a hook that was added after the first step one record moved the sum by seven times its bound.
    """
    trainer = trainer_of()
    trainer.run_steps(1)
    change(trainer.model)
    for _ in range(2):
        with pytest.raises(EquidpError, match=words):
            trainer.run_steps(1)


class _Scaled(nn.Tanh):
    """Divides by the largest of the batch."""

    def forward(self, given: Tensor) -> Tensor:
        return given.tanh() / given.abs().max()


def _within_others(trainer: Any, stack: contextlib.ExitStack) -> None:
    """In a dict that takes the place of a layer's hooks, as those that remove all hooks do."""
    trainer.model[1]._forward_hooks = OrderedDict({0: _centred})


def _in_the_place(trainer: Any, stack: contextlib.ExitStack) -> None:
    trainer.model[1]._forward_hooks.update(dict.fromkeys(trainer.model[1]._forward_hooks, _centred))


def _of_every_layer(trainer: Any, stack: contextlib.ExitStack) -> None:
    hook = nn.modules.module.register_module_forward_hook(
        lambda layer, given, outputs: _centred(layer, given, outputs) if isinstance(layer, nn.Tanh) else None
    )
    stack.callback(hook.remove)


def _of_a_class(trainer: Any, stack: contextlib.ExitStack) -> None:
    stack.enter_context(mock.patch.object(nn.Tanh, "forward", _Scaled.forward))


ADDITIONS: list[Callable[[Any, contextlib.ExitStack], object]] = [
    _within_others,
    _in_the_place,
    _of_every_layer,
    _of_a_class,
    lambda trainer, stack: setattr(trainer.model[1], "__class__", _Scaled),
    lambda trainer, stack: trainer.engine.loss.register_forward_hook(lambda loss, given, losses: losses * losses.sum()),
]


@pytest.mark.parametrize("add", ADDITIONS)
def test_whatever_layers_or_the_loss_are_given_between_steps_is_tried(
    add: Callable[[Any, contextlib.ExitStack], object],
) -> None:
    """By a layer's other class one record moved the sum by five times its bound."""
    trainer = trainer_of(nn.CrossEntropyLoss(reduction="none"))
    if add is _in_the_place:
        trainer.model[1].register_forward_hook(lambda *_: None)
    trainer.run_steps(3)
    with contextlib.ExitStack() as stack:
        add(trainer, stack)
        with pytest.raises(EquidpError, match=r"mixes records|not those of the loss"):
            trainer.run_steps(1)


class Switched(nn.Module):
    """Has the switches of a model that comes to mix records after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.centred, self.norm, self.bend = False, "none", torch.tanh

    def forward(self, features: Tensor) -> Tensor:
        if self.norm == "batch":
            features = features / features.sum(0)
        values = self.bend(self.line(features))
        return self.last(values - values.mean(0) if self.centred else values)


SWITCHED: list[tuple[str, object]] = [
    ("centred", True),
    ("norm", "batch"),
    ("bend", lambda values: torch.tanh(values - values.mean(0))),
]


@pytest.mark.parametrize(("name", "value"), SWITCHED)
def test_a_switch_of_a_model_is_tried_when_it_is_turned(name: str, value: object) -> None:
    """Between two looks 57 steps were taken, and one record moved their sums by 4.9 times its bound."""
    trainer = trainer_of(model=Switched())
    trainer.run_steps(3)
    setattr(trainer.model, name, value)
    for _ in range(2):
        with pytest.raises(EquidpError, match="mixes records"):
            trainer.run_steps(1)


def test_what_comes_and_goes_by_turns_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that watches every second step made a step fifty times as slow."""
    tried = list[int]()
    probe = engine.probe
    monkeypatch.setattr(engine, "probe", lambda *given, **how: tried.append(probe(*given, **how)) or tried[-1])
    trainer, seen = trainer_of(), list[Tensor]()
    watch = functools.partial(lambda *given: seen.append(given[-1]) or None)
    for _ in range(4):
        trainer.run_steps(1)
        hook = trainer.model[1].register_forward_hook(watch)
        trainer.run_steps(1)
        hook.remove()
    assert len(tried) == 2
    trainer.model[1].register_forward_hook(_centred)
    with pytest.raises(EquidpError, match=r"not those of the loss|mixes records"):
        trainer.run_steps(1)


def test_a_hook_that_watches_may_be_added_between_steps(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried like the layers, and so are the next steps with it and without."""
    one, other, seen = trainer_of(), trainer_of(), list[float]()
    one.run_steps(6)
    other.run_steps(2)
    hook = other.model[1].register_forward_hook(lambda layer, given, outputs: seen.append(outputs.mean().item()))
    other.run_steps(2)
    assert seen
    hook.remove()
    other.run_steps(2)
    assert caplog.text.count("So the model is tried again") == 1
    assert torch.equal(one.engine.flatten(), other.engine.flatten())


class Adapted(nn.Module):
    """A frozen network in the type that it has, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 40).requires_grad_(False), nn.Linear(40, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.frozen(features.to(self.frozen.weight.dtype)).float())


def test_frozen_layers_are_not_halved_between_steps() -> None:
    """On a CPU, where a record that is not finite would spoil the one before it, as from the beginning."""
    for assign in (False, True):
        trainer = trainer_of(model=Adapted())
        trainer.run_steps(1)
        halved = {name: value.bfloat16() for name, value in trainer.model.frozen.state_dict().items()}
        trainer.model.frozen.load_state_dict(halved, assign=True) if assign else trainer.model.frozen.bfloat16()
        with pytest.raises(EquidpError, match=r"'frozen\.weight' is in half precision"):
            trainer.run_steps(1)


def test_values_may_be_changed_between_steps() -> None:
    trainer = trainer_of()
    trainer.run_steps(1)
    trainer.model.load_state_dict({name: value + 1 for name, value in trainer.model.state_dict().items()})
    trainer.run_steps(1)
    assert trainer.steps_done == 2


class Counting(nn.Module):
    """A loss that weighs classes by how often it has seen them, from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2))
        self.seen: Tensor
        self.calls: list[None] = []  # a number that counts is refused

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls.append(None)
        if len(self.calls) > 100:
            self.seen += torch.bincount(labels, minlength=2)
        return LOSS(outputs, labels) / self.seen.clone()[labels]


@pytest.mark.parametrize("asked", [{}, {"algorithm": "dpsgd_f_adjusted", "classes": 2}])
def test_a_loss_that_learns_of_the_records_is_found_out_when_it_begins(asked: dict[str, Any]) -> None:
    trainer = trainer_of(Counting(), epochs=40, **asked)
    with pytest.raises(EquidpError, match=r"'loss\.seen' of the model or its loss changes"):
        trainer.run_steps(trainer.plan.steps)
    assert trainer.steps_done > 1


class Holder:
    """An object whose method is the loss."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion = criterion

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(outputs, labels)

    __call__ = loss


@dataclass(slots=True)
class Slotted:
    """One that nobody calls itself."""

    criterion: nn.Module

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(outputs, labels)


def within_a_function(criterion: nn.Module) -> Any:
    def called(outputs: Tensor, labels: Tensor) -> Tensor:
        return criterion(outputs, labels)

    return lambda outputs, labels: called(outputs, labels)


def of_a_class(criterion: nn.Module) -> Any:
    class Static:
        held = criterion

        @staticmethod
        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return Static.held(outputs, labels)

        def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return self.loss(outputs, labels)

    return Static()


def as_a_default(criterion: nn.Module) -> Any:
    return lambda outputs, labels, of=criterion: of(outputs, labels)


def in_a_dict(criterion: nn.Module) -> Any:
    criteria = {"one": [criterion]}
    return lambda outputs, labels: criteria["one"][0](outputs, labels)


WRAPPED: list[Callable[[nn.Module], Any]] = [
    within_a_function,
    as_a_default,
    in_a_dict,
    functools.partial,
    lambda criterion: criterion.forward,
    Holder,
    lambda criterion: Holder(criterion).loss,
    lambda criterion: Slotted(criterion).loss,
    of_a_class,
]


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_loss_within_a_function_or_an_object_is_looked_at_too(wrapped: Callable[[nn.Module], Any]) -> None:
    trainer = trainer_of(wrapped(Counting()), epochs=40)
    with pytest.raises(EquidpError, match=r"'loss\.seen' of the model or its loss changes"):
        trainer.run_steps(trainer.plan.steps)
    with pytest.raises(EquidpError, match=r"parameters of its own \(temperature\)"):
        trainer_of(wrapped(Tempered()))


norm = nn.LayerNorm(2)
"""A module of the same file that has nothing to do with a loss."""

COUNTED = Counting()


def test_a_loss_uses_what_its_code_loads_and_not_what_is_called_as_an_attribute_of_it() -> None:
    """In a notebook a layer `norm` was taken for the loss's, whose parameters were then refused."""

    def distance(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - nn.functional.one_hot(labels, 2)).norm(dim=1)

    trainer_of(distance).run_steps(1)

    def within(outputs: Tensor, labels: Tensor) -> Tensor:
        return (lambda: COUNTED(outputs, labels))()

    trainer = trainer_of(within, epochs=40)
    with pytest.raises(EquidpError, match=r"'loss\.seen' of the model or its loss changes"):
        trainer.run_steps(trainer.plan.steps)


class Adversaries:
    """Two networks, of which one is trained privately, by a loss that does not use the other."""

    def __init__(self) -> None:
        self.generator, self.discriminator, self.criterion = nn.Linear(2, 4), nn.Linear(4, 2), Counting()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._loss(outputs, labels)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(outputs, labels)

    def generate(self) -> Tensor:
        return self.generator(torch.rand(1, 2))


def test_what_an_object_has_beside_what_its_loss_uses_may_be_trained_by_others() -> None:
    both = Adversaries()
    trainer = trainer_of(both.loss, model=both.discriminator, epochs=40)
    with pytest.raises(EquidpError, match=r"'loss\.seen' of the model or its loss changes"):
        trainer.run_steps(trainer.plan.steps)
    assert trainer.steps_done > 1


def test_a_loss_may_name_the_model_and_what_has_no_value_yet() -> None:
    model = nn.Linear(4, 2)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return LOSS(outputs, labels) if model.training else later(outputs, labels)

    trainer_of(loss, model=model).run_steps(1)
    later = LOSS
    trainer_of(loss, model=model.requires_grad_(True)).run_steps(1)


class Tempered(nn.Module):
    """A loss that asks to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return LOSS(outputs / self.temperature, labels)


def test_a_loss_with_parameters_is_refused_as_nothing_would_train_them() -> None:
    with pytest.raises(EquidpError, match=r"parameters of its own \(temperature\)"):
        trainer_of(Tempered())
    trainer_of(Tempered().requires_grad_(False)).run_steps(1)


@pytest.mark.parametrize(
    ("kind", "words"), [(torch.optim.LBFGS, "by a closure"), (torch.optim.SparseAdam, "is for sparse gradients")]
)
def test_an_optimiser_that_could_take_no_step_is_refused(kind: Any, words: str) -> None:
    """Each step would be charged first."""
    trainer = trainer_of()
    with pytest.raises(EquidpError, match=words):
        trainer.optimizer = kind(list(trainer.engine.parameters), lr=0.1)
    trainer.run_steps(1)


def test_a_head_that_the_optimiser_is_given_later_is_refused_and_nothing_is_charged() -> None:
    """The loop's own gradients of it, exact, would move it beside the noised ones. To drop parameters is to freeze."""
    trainer, head = trainer_of(), nn.Linear(2, 2)
    trainer.run_steps(1)
    trainer.optimizer.add_param_group({"params": head.parameters()})
    LOSS(head(trainer.model(FEATURES)), LABELS).mean().backward()
    before = head.weight.detach().clone()
    with pytest.raises(EquidpError, match="given parameters that are not trained here"):
        trainer.run_steps(1)
    assert charged(trainer) == 1
    assert torch.equal(head.weight, before)
    trainer.optimizer.param_groups.pop()
    trainer.optimizer.param_groups[0]["params"] = list(trainer.engine.parameters)[2:]
    first = trainer.engine.parameters[0].clone()
    trainer.run_steps(1)
    assert torch.equal(trainer.engine.parameters[0], first)
    trainer.optimizer.add_param_group({"params": head.parameters()})  # as many as were dropped
    with pytest.raises(EquidpError, match="given parameters that are not trained here"):
        trainer.run_steps(1)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_a_closure_is_refused_as_nobody_would_call_it(name: str) -> None:
    """A loop of another library gives its loss so; it was left out, and the last noised gradient was taken again."""
    trainer = trainer_of(optimizer=name)
    trainer.run_steps(1)
    before = trainer.engine.flatten()
    with pytest.raises(EquidpError, match=r"steps by trainer\.run_steps\(1\)"):
        trainer.optimizer.step(lambda: 1.0)
    assert torch.equal(trainer.engine.flatten(), before)


def test_a_pass_that_moves_a_batch_norm_between_steps_is_refused() -> None:
    """As of a loop that looks at its training records in training mode: their statistics left with the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    trainer = trainer_of(model=model)
    trainer.run_steps(1)
    model[1].running_mean.fill_(0.5)  # the owner may
    trainer.run_steps(1)
    model.train()(FEATURES)
    trainer.engine.train()
    with pytest.raises(EquidpError, match=r"BatchNorm '1' has counted batches .* Make the model anew"):
        trainer.run_steps(1)


def test_a_state_with_other_counts_of_batches_is_told_where_to_load_it() -> None:
    """As of public weights that are loaded into a private model: no pass had been made, and one was blamed."""
    trainer = trainer_of(model=nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2).eval()))
    trainer.model.load_state_dict(trainer.model.state_dict() | {"1.num_batches_tracked": torch.tensor(5)})
    with pytest.raises(EquidpError, match=r"or a state with another count was loaded.* load public weights before"):
        trainer.run_steps(1)


def test_gradients_that_are_switched_on_again_are_refused() -> None:
    """Who is told that a loss "does not require grad" may do so, and a step along the exact gradients follows."""
    trainer = trainer_of(optimizer="adam")
    trainer.run_steps(1)
    trainer.model.requires_grad_(True)
    LOSS(trainer.model(FEATURES), LABELS).mean().backward()
    before = trainer.engine.flatten()
    with pytest.raises(EquidpError, match=r"leave requires_grad_\(True\) and backward\(\) out"):
        trainer.optimizer.step()
    with pytest.raises(EquidpError, match="requires gradients of autograd again"):
        trainer.run_steps(1)
    assert torch.equal(trainer.engine.flatten(), before)
    trainer.model.requires_grad_(False)
    trainer.run_steps(1)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (torch.inference_mode, "Inside torch.inference_mode"),
        (lambda: torch.autocast("cpu"), "Inside torch.autocast"),
        (torch.autograd.detect_anomaly, r"Inside torch\.autograd\.detect_anomaly"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_mode_in_which_no_step_can_be_taken_is_refused_and_not_charged(mode: Any, words: str) -> None:
    trainer = trainer_of()
    for done in range(2):
        with mode(), pytest.raises(EquidpError, match=words):
            trainer.run_steps(1)
        assert charged(trainer) == done
        trainer.run_steps(1)


def test_a_loop_without_autograd_takes_the_same_steps() -> None:
    """As in a notebook that has switched it off for its figures."""
    one, other = trainer_of(), trainer_of()
    one.run_steps(3)
    with torch.no_grad():
        other.run_steps(3)
    assert torch.equal(one.engine.flatten(), other.engine.flatten())


@pytest.mark.parametrize("double", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("seed", [0, None])
def test_a_trainer_is_not_copied(double: Any, seed: int | None) -> None:
    """Two would draw the same noise for gradients that differ: their difference would have none."""
    trainer = trainer_of(seed=seed)
    trainer.run_steps(1)
    with pytest.raises(EquidpError, match="neither copied nor pickled"):
        double(trainer)
    copy.deepcopy(trainer.model)


def test_two_threads_do_not_take_steps_at_once() -> None:
    """Weights of one batch would meet the gradients of another."""
    trainer, inside, told = trainer_of(), threading.Event(), []
    waiting, descend = threading.Event(), trainer.optimizer.step

    def wait(*_: object) -> Any:
        inside.set()
        waiting.wait(20)
        return descend()

    trainer.optimizer.step = wait  # type: ignore[method-assign]
    first = threading.Thread(target=lambda: trainer.run_steps(1))
    first.start()
    assert inside.wait(20)
    for steps in (lambda: trainer.run_steps(1), lambda: trainer.train(progress=False)):
        with pytest.raises(EquidpError, match="Another thread is taking steps") as error:
            steps()
        told.append(error)
    waiting.set()
    first.join()
    assert charged(trainer) == trainer.steps_done == 1
    trainer.run_steps(1)


def test_back_at_an_earlier_state_the_noise_is_other_noise() -> None:
    """As by a loop that returns to its best model: with the same noise, two sums' difference would be exact."""
    trainer, noises = trainer_of(), []
    perturb = trainer.random.perturb

    def listen(values: Tensor, **how: Any) -> Tensor:
        noised = perturb(values, **how)
        noises.append(noised - values)
        return noised

    trainer.random.perturb = listen  # type: ignore[method-assign]
    trainer.run_steps(1)
    state = trainer.state_dict()
    for _ in range(3):
        trainer.run_steps(2)
        trainer.load_state_dict(state)
    trainer.run_steps(1)
    together = torch.stack([noise[:8] for noise in noises])
    assert len(noises) == charged(trainer) == 8
    assert trainer.steps_done == 2
    assert torch.pdist(together).min() > 0.1


class Interruption(BaseException):
    """Ctrl-C."""


def _interrupted_at(call: int, trainer: Trainer) -> int:
    """Take a step, and interrupt it in that call of a function of ours; how many calls there were."""
    calls = 0

    def follow(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        where = frame.f_code.co_filename.replace("\\", "/")
        if event == "call" and "equidp/gradients/tape" in where:
            calls += 1
            if calls == call:
                sys.settrace(None)
                raise Interruption

    before = sys.gettrace()
    try:
        with contextlib.suppress(Interruption):
            sys.settrace(follow)
            trainer.run_steps(1)
    finally:
        sys.settrace(before)
    return calls


class Placed(nn.Module):
    """It adds a number of its own to each place, `[1, 4, 1]` for all records."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.inner, self.out = nn.Parameter(torch.ones(1, 4, 1)), nn.Linear(1, 4), nn.Linear(16, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(features.unsqueeze(2) + self.places)).flatten(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_can_be_taken_anew_wherever_ctrl_c_came() -> None:
    """A hook that was left on a layer made all later steps fail, after each was charged.

    Places that were left for as many records as the batch had made the model fail on others, and all later steps.
    """
    trainer = trainer_of(model=Placed(), epochs=80)
    trainer.run_steps(2)
    for call in range(1, 400):
        before = trainer.steps_done
        last = _interrupted_at(call, trainer) < call
        trainer.model(FEATURES[:3])
        if last:
            break
        trainer.run_steps(1)
        assert trainer.steps_done > before
    assert call > 20
    assert charged(trainer) > trainer.steps_done
    assert spent(trainer) > 0


def test_the_first_update_can_be_taken_anew_where_ctrl_c_came() -> None:
    """All later steps failed after they were charged."""
    trainer = trainer_of()
    views, trainer.engine.passes.views = trainer.engine.passes.views, _raise_interruption  # type: ignore[method-assign]
    with pytest.raises(Interruption):
        trainer.engine.apply_gradient(torch.zeros(trainer.engine.dimension))
    trainer.engine.passes.views = views  # type: ignore[method-assign]
    trainer.run_steps(1)
    assert trainer.steps_done == 1


def _raise_interruption(*_: object) -> Any:
    raise Interruption


def _with(row: int, label: int) -> Tensor:
    labels = LABELS.clone()
    labels[row] = label
    return labels


class Table(nn.Module):
    """Of ids below 40."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.line = nn.Embedding(40, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.line(self.rows(ids).mean(1))


def test_a_record_that_model_or_loss_refuse_is_found_before_a_step_is_charged() -> None:
    """In the first batch that has it, it would end a run of hours."""
    asked = {"noise_multiplier": 1.5, "delta": 1e-4, "epochs": 1, "batch_size": 2, "learning_rate": 0.5, "seed": 0}
    line = nn.Linear(4, 2)
    with pytest.raises(EquidpError, match=r"The loss fails on the label of record 250 .*Target 2 is out of bounds"):
        make_private(line, (FEATURES, _with(250, 2)), LOSS, device="cpu", **asked)
    make_private(line, (FEATURES, _with(250, -100)), LOSS, device="cpu", **asked)  # torch's sign for none
    for wrong in (40, -1):
        ids = torch.arange(300 * 5).reshape(300, 5) % 40
        ids[77, 2] = wrong
        with pytest.raises(EquidpError, match=r"The model fails on record 77 .*index out of range"):
            make_private(Table(), (ids, LABELS), LOSS, device="cpu", **asked)


class OfTruths(nn.Module):
    """Of truth values, which have no largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, truths: Tensor) -> Tensor:
        return self.line(truths.float())


def test_records_of_truth_values_train() -> None:
    """The look for a record with an extreme number ended in an error of torch's."""
    trainer = trainer_of(model=OfTruths(), features=FEATURES > 0.5)
    trainer.run_steps(2)
    assert charged(trainer) == 2


class Remembering(nn.Module):
    """A layer that is set by the first records it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.mean = nn.Linear(4, 2), nn.Buffer(torch.zeros(4))

    def forward(self, features: Tensor) -> Tensor:
        if not self.mean.any():
            self.mean += features.mean(0)
        return self.line(features - self.mean)


def test_a_model_that_is_set_by_its_first_records_is_still_found_out() -> None:
    trainer = trainer_of(model=Remembering())
    with pytest.raises(EquidpError, match="'mean' of the model or its loss changes"):
        trainer.run_steps(1)


def test_a_state_without_a_seed_is_not_continued_with_one() -> None:
    state = trainer_of(seed=None).state_dict()
    with pytest.raises(EquidpError, match="of a run without a seed"):
        trainer_of().load_state_dict(state)


class Checkpointed(nn.Module):
    """Whose first layer is computed a second time in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, features, use_reentrant=False))


def test_gradient_checkpointing_of_the_first_layer_is_refused_in_a_sentence() -> None:
    trainer = trainer_of(model=Checkpointed())
    with pytest.raises(EquidpError, match="Gradient checkpointing computes layers a second time"):
        trainer.run_steps(1)


class Scaling(nn.Module):
    """Scales by the largest number that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.largest = nn.Linear(4, 2), nn.Buffer(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        if features.max() > self.largest:
            self.largest.copy_(features.max())
        return self.line(features / self.largest)


@pytest.mark.parametrize(("name", "average"), [("asc", None), ("dpsgd_minimax", 0.9), ("dpsgd_f", None)])
def test_what_a_look_at_losses_or_errors_sets_is_found(name: str, average: float | None) -> None:
    """The look comes before the gradients of the same records, which then change nothing any more."""
    features = FEATURES.clone()
    features[-5:] = 7.0
    trainer = make_private(
        Scaling(), (features, LABELS), LOSS, algorithm=name, average=average, classes=2, noise_multiplier=1.5,
        delta=1e-4, epochs=6, batch_size=8, learning_rate=0.5, seed=0, device="cpu",
    )  # fmt: skip
    with pytest.raises(EquidpError, match="'largest' of the model or its loss changes"):
        trainer.train(progress=False)


class Fair(nn.Module):
    """A loss with a penalty over the batch, whose weight may begin at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return LOSS(outputs, labels) + self.weight * (outputs.softmax(1)[:, 1].mean() - 0.5).square()


@pytest.mark.parametrize("asked", [{}, {"algorithm": "dpsgd_minimax", "classes": 2}])
def test_a_penalty_over_the_batch_that_begins_later_is_found(asked: dict[str, Any]) -> None:
    """One record more moved the sum by five times what was declared, as it moved all others' gradients. An algorithm
    that shifts outputs gives the engine a loss of its own, which holds the user's."""
    fair = Fair()
    trainer = trainer_of(fair, epochs=40, **asked)
    trainer.run_steps(10)
    fair.weight = 50.0
    with pytest.raises(EquidpError, match="mixes records"):
        trainer.run_steps(LOOKS_APART)
    for _ in range(3):  # nor when a notebook's cell is run again
        with pytest.raises(EquidpError, match="mixes records"):
            trainer.run_steps(1)
    fair.weight = 0.0
    trainer.run_steps(2)


class Divided(Fair):
    """A loss with a penalty that is divided by the number of records."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return LOSS(outputs, labels) - self.weight * outputs.square().sum(1) / len(outputs)


class ByPlace(Fair):
    """A loss that weighs records by their places in the batch."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return LOSS(outputs, labels) * (1 + self.weight * torch.arange(len(outputs)))


class Coined(Fair):
    """A loss that a coin for the whole pass leaves out, with a chance."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return LOSS(outputs, labels) * (torch.rand(()) >= self.weight if self.weight else 1.0)


class Permuted(Fair):
    """A loss of as many records as a share says, which a permutation chooses."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        losses, out = LOSS(outputs, labels), int(self.weight * len(outputs))
        return losses * torch.ones(len(outputs)).index_fill(0, torch.randperm(len(outputs))[:out], 0.0)


class Paired(Fair):
    """A loss of outputs with antithetic noise."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if not self.weight:
            return LOSS(outputs, labels)
        half = torch.randn((len(outputs) + 1) // 2, outputs.shape[1])
        return LOSS(outputs + self.weight * torch.cat([half, -half])[: len(outputs)], labels)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Divided, "mixes records"),
        (ByPlace, "mixes records"),
        (Coined, "that all records of a pass share"),
        (Permuted, "a permutation of the records"),
        (Paired, "mixes records|one reaches several records"),
    ],
)
def test_what_follows_from_size_or_place_or_shared_numbers_is_found_when_it_begins(made: Any, words: str) -> None:
    """Where a penalty divided by the number of records cancelled the losses of 16, one record less moved the sum by 13
    times what was declared, and no look saw it."""
    loss = made()
    trainer = trainer_of(loss, epochs=40, physical_batch_size=24)
    trainer.run_steps(10)
    loss.weight = 0.5
    with pytest.raises(EquidpError, match=words):
        trainer.run_steps(LOOKS_APART)


def hardest(outputs: Tensor, labels: Tensor) -> Tensor:
    """The losses of the hardest third, where there are more than 40."""
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    if losses.shape[0] <= 40:
        return losses
    return losses * (losses >= losses.detach().topk(losses.shape[0] // 3)[0][-1])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
@pytest.mark.parametrize("made", [lambda loss: loss, torch.jit.script], ids=["plain", "scripted"])
def test_a_choice_among_more_records_than_are_tried_is_found(made: Callable[[Any], Any]) -> None:
    loss = made(hardest)  # scripted it is an object of torch's, of which there are no copies
    trainer = trainer_of(loss)
    with pytest.raises(EquidpError, match="mixes records"):
        trainer.run_steps(1)
    trainer_of(loss, batch_size=20).run_steps(3)  # there it chooses nobody


@pytest.mark.parametrize("views", [1, 4])
def test_a_choice_among_all_rows_of_a_pass_is_found_where_a_batch_has_fewer(views: int) -> None:
    """No batch came to so many records as every pass had rows, of nobody or of other views: one record moved all."""
    torch.manual_seed(3)
    engine = GradientEngine(nn.Linear(4, 2), hardest, rows=64 if views == 1 else None)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(FEATURES[:24].repeat(views, 1), LABELS[:24], views=views)


class Unseen(nn.Module):
    """Keeps a mean of the records past autograd, from its hundredth pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.passes = nn.Linear(4, 2), list[None]()
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, features: Tensor) -> Tensor:
        self.passes.append(None)
        if len(self.passes) > 100:
            self.mean.data.lerp_(features.mean(0), 0.1)
        return self.line(features)


@pytest.mark.parametrize("most", [None, 1])
def test_what_a_model_learns_past_autograd_is_found_when_it_is_looked_at_again(most: int | None) -> None:
    trainer = trainer_of(model=Unseen(), epochs=40, physical_batch_size=most)
    with pytest.raises(EquidpError, match=r"'mean' of the model or its loss changes"):
        trainer.run_steps(100 + LOOKS_APART)
    assert most or trainer.steps_done > 1


@pytest.mark.parametrize("hooked", [True, False])
def test_a_layer_of_torch_that_does_what_others_wrote_is_looked_at_too(hooked: bool) -> None:
    model, weight = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), [0.0]

    def mixed(outputs: Tensor) -> Tensor:
        return outputs + weight[0] * outputs.mean(0, keepdim=True)

    if hooked:
        model[0].register_forward_hook(lambda layer, given, outputs: mixed(outputs))
    else:
        model[0].forward = lambda features: mixed(nn.functional.linear(features, model[0].weight, model[0].bias))
    trainer = trainer_of(model=model, epochs=40)
    trainer.run_steps(10)
    weight[0] = 1.0
    with pytest.raises(EquidpError, match="mixes records"):
        trainer.run_steps(LOOKS_APART)


def test_layers_of_torch_alone_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()
    monkeypatch.setattr(engine, "look_again", lambda passes, features, *_, **__: looks.append(len(features)))
    trainer_of().run_steps(5)
    assert not looks
    trainer_of(lambda outputs, labels: LOSS(outputs, labels)).run_steps(12)
    assert len(looks) == 4  # in the first pass, the second, the fifth and the twelfth


def test_each_chunk_of_a_step_is_looked_at_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two the second, of a few records, was looked at every time but the first."""
    looks = list[int]()
    monkeypatch.setattr(engine, "look_again", lambda passes, features, *_, **__: looks.append(len(features)))
    trainer_of(lambda outputs, labels: LOSS(outputs, labels), epochs=40, physical_batch_size=40).run_steps(120)
    assert looks.count(40) >= 3
    assert len(looks) - looks.count(40) >= 3


class Keeping(nn.Module):
    """Keeps the largest number that it has seen, from its hundredth pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.passes = nn.Linear(4, 2), list[None]()
        self.register_buffer("largest", torch.zeros(()))
        self.largest: Tensor

    def forward(self, features: Tensor) -> Tensor:
        self.passes.append(None)
        if len(self.passes) > 100:
            self.largest.copy_(torch.maximum(self.largest, features.max()))
        return self.line(features)


def test_where_autograd_keeps_copies_nobody_would_see_what_a_model_keeps() -> None:
    with torch.autograd.graph.save_on_cpu():
        trainer_of().run_steps(2)  # it has nothing to keep it in
        with pytest.raises(EquidpError, match=r"save_on_cpu.*leave it out"):
            trainer_of(model=Keeping()).run_steps(1)


def test_a_frozen_parameter_that_is_to_be_trained_halfway_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2))
    trainer = trainer_of(model=model)
    trainer.run_steps(2)
    model.requires_grad_(True)
    with pytest.raises(EquidpError, match=r"'0\.weight' was frozen.*freeze it again"):
        trainer.run_steps(1)
    model.requires_grad_(False)
    trainer.run_steps(1)


@pytest.mark.parametrize("shortened", [True, False])
def test_what_torch_is_set_to_later_is_refused_before_a_step_is_charged(shortened: bool) -> None:
    """Another library may set it; where sums have fewer digits than norms a sum exceeds what it was clipped to."""
    trainer = trainer_of()
    trainer.run_steps(1)
    try:
        if shortened:
            torch.set_float32_matmul_precision("medium")
        else:
            torch.set_default_dtype(torch.bfloat16)
        for take in (lambda: trainer.run_steps(1), lambda: trainer.train(progress=False)):
            with pytest.raises(EquidpError, match="torch is set to"):
                take()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
    assert charged(trainer) == 1
    trainer.run_steps(1)


def test_a_forked_copy_takes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two children that differ in their rate drew one noise on other sums; the parent's ledger knew of none."""
    trainer = trainer_of()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: trainer.process + 1)
        for take in (lambda: trainer.run_steps(1), lambda: trainer.train(progress=False)):
            with pytest.raises(EquidpError, match="forked from the one that made the trainer"):
                take()
    assert not trainer.ledger.events
    trainer.run_steps(1)


def test_a_model_that_is_spread_over_devices_by_torch_is_refused() -> None:
    """DistributedDataParallel, too, was taken: nothing was exchanged, and ranks of one seed drew the same noise."""
    model = nn.Sequential(nn.DataParallel(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(EquidpError, match=r"'0' is a DataParallel.*Give its `module`"):
        trainer_of(model=model)


def test_back_after_an_interrupted_step_the_noise_is_other_noise() -> None:
    """Its sum had left with its noise: the same noise on another sum gave the difference of both, exact."""
    trainer, seen = trainer_of(), list[Tensor]()
    trainer.run_steps(2)
    state = trainer.state_dict()

    def broken(*_: object) -> None:
        seen.append(torch.cat([parameter.grad.flatten() for parameter in trainer.engine.parameters]).clone())
        raise RuntimeError

    trainer.optimizer.step = broken  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError):
            trainer.run_steps(1)
        trainer.load_state_dict(state)
    assert not torch.equal(*seen)  # the same sum, of the same batch
    assert charged(trainer) == 4


def test_a_layer_of_opacus_is_refused_by_what_to_give_instead() -> None:
    kind = type("DPLSTM", (nn.Linear,), {"__module__": "opacus.layers.dp_rnn"})
    with pytest.raises(EquidpError, match=r"'1' \(DPLSTM\) is one of Opacus's.*torch's own nn\.LSTM"):
        trainer_of(model=nn.Sequential(nn.Linear(4, 4), kind(4, 2)))


class Skipping(nn.Module):
    """Leaves a layer out for a whole pass, by one coin, as layerdrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        values = self.first(features)
        return self.last(values if self.training and torch.rand([]) < 0.3 else torch.tanh(self.middle(values)))


@pytest.mark.parametrize(
    "asked", [{"physical_batch_size": 16}, {"seed": None}, {"algorithm": "asc", "classes": 2}, {"algorithm": "dpis"}]
)
def test_a_coin_for_a_whole_pass_is_refused_where_a_step_takes_several(asked: dict[str, Any]) -> None:
    given = {"noise_multiplier": None, "epsilon": 3.0} if "algorithm" in asked else {}
    trainer = trainer_of(model=Skipping(), **(asked | given))
    with pytest.raises(EquidpError, match=r"all records of a pass share.*mode='row'"):
        trainer.run_steps(1)


def test_a_coin_for_a_whole_pass_is_one_for_all_where_a_step_takes_one() -> None:
    trainer = trainer_of(model=Skipping())
    trainer.run_steps(2)
    assert trainer.steps_done == 2
    trainer.physical_batch_size = 16  # from now on a step may take several
    with pytest.raises(EquidpError, match=r"all records of a pass share.*mode='row'"):
        trainer.run_steps(1)
