"""Whole steps, recorded and replayed, are the steps: tried without a GPU, by a recorder that does operations again."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests import small_run
from tests.pretended import Replaying, WaitsError, nothing_waits, pretended_gpu
from tests.small_run import trainer_of
from tests.thorough import ONE_OF_EACH, first
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.algorithms.dpsgd_f_adjusted import Adjusting, LogitAdjusted
from equidp.errors import EquidpError
from equidp.gradients.losses import Loss, Shifted
from equidp.gradients.recording import CudaGraphs
from equidp.mechanism.parts import (
    Draw,
    ExponentialAverage,
    FlatClip,
    Objective,
    PoissonSampler,
    Public,
    Pursuing,
    Releasing,
    Run,
    StepFacts,
    Update,
    Updating,
)
from equidp.mechanism.parts.sampler import PoissonSampling, Sampling
from equidp.mechanism.recorded import TRIALS
from equidp.mechanism.sampling import Batch
from equidp.mechanism.trainer import Trainer
from equidp.models import MODELS, build_model

STEPS = 10
WHOLE = (
    "sgd", "dpsgd", "dpsgd_f", "naive", "dpsgd_quantile", "auto_s", "psasc", "slaclip", "dpsgd_global_adapt",
    "dpsgd_f_adjusted", "dpsgd_level", "dpsgd_minimax", "dp_adambc",
)  # fmt: skip
"""Some of those whose steps are recorded whole."""
PRETRAINED = {"backbone", "resnet_finetune"}
"""Models whose weights are not at hand."""
REASONS = {
    "sa_dpsgd": "a step may be refused",
    "dpis": "a batch is drawn by what only the device knows",
    "psasc_momentum": "a record stands for more than its gradient",
}


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[None]:
    """All train the same few models."""
    with tried_once():
        yield


@pytest.fixture(autouse=True)
def no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composite operations reach a dispatch mode in their parts, and what is replayed may write to what it wrote."""
    monkeypatch.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad())


def trained(algorithm: str, new_recorder: Callable[[], Any] | None, *given: Any, **more: Any) -> Trainer:
    trainer = trainer_of(algorithm, new_recorder, *given, **more)
    trainer.run_steps(STEPS)
    return trainer


def compare(one: Trainer, other: Trainer) -> None:
    assert one.ledger.done == other.ledger.done
    assert one.steps_done == other.steps_done == STEPS
    parameters = other.engine.flatten().cpu()
    assert (one.engine.flatten().cpu() - parameters).norm() < 1e-4 * parameters.norm()
    assert one.shown.keys() == other.shown.keys()
    for name, value in other.shown.items():
        found, expected = (torch.as_tensor(v).cpu() for v in (one.shown[name], value))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def replayed(trainer: Trainer) -> bool:
    assert trainer.recorded is not None
    return not trainer.recorded.reason and all(made.tried == TRIALS for made in trainer.recorded._made.values())


@pytest.mark.parametrize("algorithm", WHOLE)
def test_a_run_of_replayed_steps_is_the_run(algorithm: str) -> None:
    recorded = trained(algorithm, Replaying)
    assert replayed(recorded), recorded.recorded.reason
    compare(recorded, trained(algorithm, None))


class Later(nn.Module):
    """Mixes records from its so-manieth pass on, which it counts where they are: a replay counts too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes = model, torch.zeros(100)  # fewer numbers that count are refused

    def forward(self, features: Tensor) -> Tensor:
        outputs = self.model(features)
        self.passes.add_(1)
        return torch.where(self.passes[0] > 90, outputs - outputs.mean(0, keepdim=True), outputs)


def test_a_model_of_others_that_mixes_records_later_is_found_in_replayed_steps() -> None:
    """No code of its runs in a replay, and yet what it reads changes."""
    made = small_run.build_model
    with mock.patch.object(small_run, "build_model", lambda *given, **more: Later(made(*given, **more))):
        trainer = trainer_of("dpsgd", Replaying, epochs=100)
    with pytest.raises(EquidpError, match="mixes records"):
        trainer.run_steps(200)
    assert replayed(trainer)


def test_an_update_that_remembers_remembers_each_step_once() -> None:
    """In a trial a step is done twice."""
    recorded, plain = trained("dp_adambc", Replaying), trained("dp_adambc", None)
    assert recorded.updating.taken == plain.updating.taken == STEPS
    for one, other in zip(recorded.updating.moments, plain.updating.moments, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("how", [{"optimizer": "momentum"}, {"optimizer": "adam"}], ids=["momentum", "adam"])
def test_an_optimiser_that_remembers_goes_on(how: dict) -> None:
    recorded = trained("dpsgd", Replaying, **how)
    assert replayed(recorded)
    compare(recorded, trained("dpsgd", None, **how))


@pytest.mark.parametrize("algorithm", REASONS)
def test_what_cannot_be_recorded_says_why_once_and_runs_the_same(algorithm: str, caplog) -> None:
    with caplog.at_level(logging.INFO):
        trainer = trainer_of(algorithm, Replaying)
        assert trainer.recorded.reason == REASONS[algorithm]
        trainer.run_steps(2)
    assert caplog.text.count("steps are not replayed whole") == 1


def with_part(algorithm: str, new_recorder: Callable[[], Any] | None, more: Any = None, **part: Any) -> Trainer:
    parts = dataclasses.replace(algorithm_settings(algorithm).build(), **part)
    with mock.patch.object(small_run, "algorithm_settings", return_value=SimpleNamespace(build=lambda: parts)):
        return trainer_of(algorithm, new_recorder, **(more or {}))


def averaged(
    algorithm: str, new_recorder: Callable[[], Any] | None, released: type = ExponentialAverage, **more: Any
) -> Trainer:
    return with_part(algorithm, new_recorder, more, released_weights=released())


class Hoarding(Updating):
    """Keeps sums, and does not say so."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def direction(self, noisy_sum: Tensor, facts: StepFacts) -> Tensor:
        self.seen.append(noisy_sum)
        return noisy_sum


class Hoard(Update):
    def start(self, run: Run) -> Updating:
        return Hoarding()


@pytest.mark.parametrize("algorithm", ["dpsgd", "sgd"])
def test_an_update_sees_one_sum_of_each_event_whatever_it_keeps(algorithm: str) -> None:
    """Of two with the same noise the difference has none."""
    recorded, plain = (with_part(algorithm, how, update=Hoard()) for how in (Replaying, None))
    for trainer in (recorded, plain):
        trainer.run_steps(STEPS)
    assert replayed(recorded), recorded.recorded.reason
    compare(recorded, plain)
    assert len(recorded.updating.seen) == len(plain.updating.seen) == STEPS


def test_a_run_that_goes_back_to_its_beginning_has_no_momentum_of_a_recording() -> None:
    """Which draws noise several times for one batch and one event: their mean has less of it."""
    trainer, plain = (trainer_of("dpsgd", how, optimizer="momentum") for how in (Replaying, None))
    for one in (trainer, plain):  # both, as from there on the noise is other noise
        beginning = one.state_dict()
        one.run_steps(TRIALS + 2)
        one.load_state_dict(beginning)
        one.run_steps(STEPS)
    assert replayed(trainer)
    torch.testing.assert_close(trainer.engine.flatten(), plain.engine.flatten())


@pytest.mark.parametrize("when", [0, TRIALS + 2])
def test_another_optimiser_is_the_one_that_takes_the_steps(when: int) -> None:
    found = []
    for how in (Replaying, None):
        trainer = trainer_of("dpsgd", how, optimizer="momentum")
        trainer.run_steps(when)
        trainer.optimizer = torch.optim.SGD(trainer.engine.parameters, lr=0.1, momentum=0.5)
        trainer.run_steps(STEPS - when)
        found.append(trainer)
    assert replayed(found[0])
    compare(*found)


@pytest.mark.parametrize("fails", ["step_afresh", "set_gradient"], ids=["trial", "recording"])
def test_noise_that_was_drawn_before_a_failure_is_not_drawn_again(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of the next step would have the same."""
    trainer = trainer_of("dpsgd", Replaying)
    trainer.run_steps(1)
    before = trainer.random.noise_generator.get_state()
    monkeypatch.setattr(trainer, fails, mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        trainer.run_steps(1)
    assert not torch.equal(trainer.random.noise_generator.get_state(), before)
    assert sum(event.count for event in trainer.ledger.done) == 2


@pytest.mark.parametrize("how", [{}, {"optimizer": "momentum"}], ids=["sgd", "momentum"])
@pytest.mark.parametrize("algorithm", ["dpsgd_f_adjusted", "dpsgd_minimax"])
def test_a_replayed_step_has_the_loss_and_the_averaged_weights_of_the_steps_before(algorithm: str, how: dict) -> None:
    """Where the loss follows public values, and errors are counted at other weights than those that are trained."""
    recorded, plain = (averaged(algorithm, recorder, **how) for recorder in (Replaying, None))
    for _ in range(STEPS):
        for one in (recorded, plain):
            one.run_steps(1)
        (followed, expected) = ((vars(one.pursuing.loss).values()) for one in (recorded, plain))
        for value, other in zip(followed, expected, strict=True):
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, other)
        torch.testing.assert_close(recorded.releasing.weights(), plain.releasing.weights())
    assert replayed(recorded), recorded.recorded.reason
    assert len(recorded.recorded._made) == 1
    compare(recorded, plain)


class Replacing(Pursuing):
    """Follows by another tensor in the place of the last one."""

    def follow(self, public: Public) -> None:
        self.loss.shift = public["group_shares"].log().expand_as(self.loss.shift)


class Inheriting(Adjusting):
    """And has `in_place` of one that does otherwise."""

    follow = Replacing.follow


@pytest.mark.parametrize("kind", [Replacing, Inheriting, Adjusting])
def test_a_loss_whose_values_may_lie_elsewhere_is_computed_afresh(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would read the old ones, which may differ by less than a trial allows for rounding."""

    def start(part: LogitAdjusted, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        shifted = Shifted(loss, torch.zeros(plan.groups))
        return Replacing(shifted) if kind is Replacing else kind(part, shifted)

    monkeypatch.setattr(LogitAdjusted, "start", start)
    new_recorder = mock.Mock(side_effect=Replaying)
    trainer, plain = trained("dpsgd_f_adjusted", new_recorder), trained("dpsgd_f_adjusted", None)
    compare(trainer, plain)
    assert replayed(trainer) == (kind is Adjusting)
    if kind is not Adjusting:
        assert trainer.recorded.reason == "its loss keeps values that are not changed in place"
        assert not new_recorder.called  # its passes are not recorded, either


class Doubled(ExponentialAverage):
    """Weights that are calculated when they are asked for."""

    def start(self, run: Run) -> Releasing:
        average = super().start(run)
        average.weights = lambda: average.average * 1.0
        return average


class Twice(PoissonSampling):
    """Draws its first unit twice, where the host draws."""

    def draw_on_host(self) -> Tensor:
        units = super().draw_on_host()
        return torch.cat([units[:1], units])


class Twofold(PoissonSampler):
    def start(self, run: Run) -> Sampling:
        return Twice(self, run)


def test_a_sampler_that_draws_otherwise_on_the_host_is_not_recorded() -> None:
    """Its batches would be judged by nobody."""
    trainer = with_part("dpsgd", Replaying, sampler=Twofold())
    assert trainer.recorded.reason == "a batch is drawn by what only the device knows"


class Borrowing(Pursuing):
    """Gives a batch's records the label of the first."""

    def labels(self, batch: Batch) -> Tensor:
        return batch.labels[:1].expand_as(batch.labels).contiguous()


class Borrowed(Objective):
    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        return Borrowing(loss)


def test_an_objective_whose_labels_meet_is_refused() -> None:
    """The trial of a model is given the labels as they are, and sees nothing of it."""
    trainer = with_part("dpsgd", Replaying, objective=Borrowed())
    with pytest.raises(EquidpError, match=r"beside Borrowing does not hold .* changes with the others of its batch"):
        trainer.run_steps(1)


class Swelling(PoissonSampling):
    """Its noise grows with the run, by a method of the object."""

    def begin_epoch(self, epoch: int) -> None:
        self.noise = lambda segment: 5.0 if epoch > 1 else 1.0


class Louder(PoissonSampler):
    def start(self, run: Run) -> Sampling:
        return Swelling(self, run)


def test_the_noise_of_a_replay_is_the_one_that_is_charged() -> None:
    recorded, plain = (with_part("dpsgd", how, sampler=Louder()) for how in (Replaying, None))
    for trainer in (recorded, plain):
        trainer.run_steps(STEPS)
        assert trainer.shown["noise_multiplier"] == trainer.ledger.done[-1].noise_multiplier
    compare(recorded, plain)


def test_errors_at_weights_that_are_made_when_asked_for_are_not_recorded() -> None:
    recorded = averaged("dpsgd_minimax", Replaying, Doubled)
    assert recorded.recorded.reason == "its errors are counted at weights that are made anew"
    assert not averaged("dpsgd", Replaying, Doubled).recorded.reason  # which counts none


@pytest.mark.parametrize("skipped", ["argmax", "bitwise_and"])
def test_errors_that_a_replay_counts_wrongly_are_found_out(skipped: str) -> None:
    trainer = trained("dpsgd_minimax", lambda: Leaving(skipped))
    assert "something else than afresh" in trainer.recorded.reason
    compare(trainer, trained("dpsgd_minimax", None))


@pytest.mark.parametrize("algorithm", first(WHOLE, ONE_OF_EACH))
def test_no_replayed_step_waits_for_the_device(algorithm: str) -> None:
    with pretended_gpu():
        trainer = trainer_of(algorithm, Replaying, "cuda")
        trainer.run_steps(TRIALS + 2)
        assert replayed(trainer)
        with nothing_waits():
            trainer.run_steps(STEPS - trainer.steps_done)
        with nothing_waits(), pytest.raises(WaitsError):
            trainer.engine.flatten().sum().item()
        flat = trainer.engine.flatten().cpu()
    assert trainer.steps_done == STEPS
    assert flat.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(MODELS.keys() - PRETRAINED))
def test_every_models_step_can_be_recorded(model: str) -> None:
    with pretended_gpu():
        trainer = trainer_of("dpsgd", Replaying, "cuda", model)
        trainer.run_steps(TRIALS)
        (made,) = trainer.recorded._made.values()
    assert not trainer.recorded.reason
    assert made.tried == TRIALS - 1


@pytest.mark.parametrize(
    "bring",
    [
        lambda norms: torch.tensor(1.0, device=norms.device),
        lambda norms: torch.ones(len(norms)).to(norms.device),
        lambda norms: torch.empty_like(norms).copy_(torch.ones(len(norms))),
        lambda norms: torch.ones_like(norms)[torch.arange(len(norms))],
    ],
)
def test_a_step_that_brings_something_from_the_host_is_not_recorded(
    bring: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = FlatClip.weights
    monkeypatch.setattr(FlatClip, "weights", lambda self, norms, public: weights(self, norms, public) * bring(norms))
    with pretended_gpu():
        trainer = trainer_of("dpsgd", Replaying, "cuda")
        trainer.run_steps(STEPS)
    assert "copies from the host" in trainer.recorded.reason
    assert trainer.steps_done == STEPS


def test_what_fails_without_a_word_is_not_recorded_again() -> None:
    tried: list[int] = []

    class Silent:
        def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
            tried.append(1)
            raise RuntimeError

    with pretended_gpu():
        trainer = trainer_of("dpsgd", Silent, "cuda")
        trainer.run_steps(STEPS)
    assert trainer.recorded.reason == "RuntimeError"
    assert tried == [1]


@pytest.mark.parametrize("algorithm", ["dpsgd", "dpsgd_f", "dpsgd_minimax", "dp_adambc", "sgd"])
def test_no_step_afresh_waits_either(algorithm: str) -> None:
    with pretended_gpu():
        trainer = trainer_of(algorithm, None, "cuda")
        trainer.run_steps(1)  # its first batch is tried out
        with nothing_waits():
            trainer.run_steps(3)


def test_a_step_is_charged_before_it_is_replayed_and_stays_charged_if_that_fails() -> None:
    trainer = trainer_of("dpsgd", Replaying)
    trainer.run_steps(TRIALS + 1)
    (made,) = trainer.recorded._made.values()

    def failing() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    made.replay = failing
    with pytest.raises(RuntimeError, match="illegal"):
        trainer.run_steps(1)
    assert trainer.steps_done == TRIALS + 1
    assert sum(event.count for event in trainer.ledger.done) == TRIALS + 2


@pytest.mark.parametrize("skipped", ["randn", "index_select", "mm", "add_", "lt"])
def test_a_replay_that_comes_to_something_else_is_found_out_and_the_steps_are_those_afresh(skipped: str) -> None:
    trainer = trained("dpsgd", lambda: Leaving(skipped))
    assert "something else than afresh" in trainer.recorded.reason
    compare(trainer, trained("dpsgd", None))


def test_a_replay_that_does_not_draw_on_is_found_out() -> None:
    """Each would be what a step afresh comes to, and two in a row would have the same noise."""

    class Stuck(Replaying):
        def record(self, work: Callable[[], Any], generators: Any = ()) -> Callable[[], Any]:
            again = super().record(work, generators)

            def stuck() -> Any:
                (generator,) = generators
                state = generator.get_state()
                try:
                    return again()
                finally:
                    generator.set_state(state)

            return stuck

    trainer = trained("dpsgd", Stuck)
    assert "leave the generator of noise elsewhere" in trainer.recorded.reason
    compare(trainer, trained("dpsgd", None))


class RoundedByRows(nn.Module):
    """As a GPU's library that takes another kernel for another number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.01 * (len(x) % 8))


def test_kernels_chosen_by_the_number_of_rows_end_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without privacy a batch has its own number of rows, and a recording always the same one."""
    build = small_run.build_model
    monkeypatch.setattr(small_run, "build_model", lambda *a, **k: nn.Sequential(RoundedByRows(), build(*a, **k)))
    trainer = trained("sgd", Replaying)
    assert replayed(trainer), trainer.recorded.reason


@pytest.mark.parametrize("skipped", ["index_select", "mm", "add_"])
def test_a_wrong_replay_without_privacy_is_found_out_too(skipped: str) -> None:
    trainer = trained("sgd", lambda: Leaving(skipped))
    assert "something else than afresh" in trainer.recorded.reason
    compare(trainer, trained("sgd", None))


@pytest.mark.parametrize("new_recorder", [None, Replaying], ids=["afresh", "recorded"])
def test_a_run_that_is_over_leaves_no_memory_to_the_garbage_collector(new_recorder: Any) -> None:
    """Which does not know how large a GPU's tensors are, and lets those of several runs pile up."""
    gc.collect()
    gc.disable()
    try:
        for algorithm in ("sgd", *ONE_OF_EACH):
            trainer = trainer_of(algorithm, new_recorder)
            trainer.run_steps(min(TRIALS + 2, trainer.plan.steps))
            engine = trainer.engine
            held = [weakref.ref(thing) for thing in (trainer, engine.passes.workspace, *engine.parameters)]
            del trainer, engine
            assert not any(one() for one in held), algorithm
    finally:
        gc.enable()


def test_parameters_in_another_place_are_not_those_of_the_recording() -> None:
    trainer, plain = (trainer_of("dpsgd", how) for how in (Replaying, None))
    for one in (trainer, plain):
        one.run_steps(TRIALS + 2)
        for parameter in one.engine.parameters:
            parameter.data = parameter.data.clone()
        one.run_steps(STEPS - TRIALS - 2)
    assert replayed(trainer)
    compare(trainer, plain)


def _frozen(trainer: Trainer) -> None:
    """As `docs/pytorch.md` says."""
    trainer.optimizer.param_groups[0]["params"] = list(trainer.engine.parameters)[1:]


def _decaying(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.1


def _doubled(trainer: Trainer) -> None:
    trainer.engine.passes.sites[-1].layer.register_forward_pre_hook(lambda layer, given: (2 * given[0],))


@pytest.mark.parametrize("change", [_frozen, _decaying, _doubled])
def test_what_changes_between_steps_changes_those_that_are_replayed(change: Callable[[Trainer], None]) -> None:
    """A replay moved what the optimiser had been told to leave, and went on without a hook."""
    trainer, plain = (trainer_of("dpsgd", how) for how in (Replaying, None))
    for one in (trainer, plain):
        one.run_steps(TRIALS + 2)
        change(one)
        first = one.engine.parameters[0].clone()
        one.run_steps(STEPS - TRIALS - 2)
        assert torch.equal(one.engine.parameters[0], first) == (change is _frozen)
    assert replayed(trainer)
    compare(trainer, plain)


class Untrained(nn.Module):
    """Has a frozen weight and a buffer of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.factor = model, nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("other", torch.ones(1))

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features) * self.factor * self.other


def _new_weight(model: nn.Module) -> None:
    model.factor.data = model.factor.data * 3


def _new_buffer(model: nn.Module) -> None:
    model.other = model.other * 3


@pytest.mark.parametrize("change", [_new_weight, _new_buffer])
def test_frozen_weights_and_buffers_in_another_place_are_not_those_of_the_recording(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model that went to the CPU to be saved, and came back."""
    monkeypatch.setattr(small_run, "build_model", lambda *given, **more: Untrained(build_model(*given, **more)))
    trainer, plain = (trainer_of("dpsgd", how) for how in (Replaying, None))
    for one in (trainer, plain):
        one.run_steps(TRIALS + 2)
        change(one.model)
        one.run_steps(STEPS - TRIALS - 2)
    assert replayed(trainer)
    compare(trainer, plain)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_loaded_state_of_the_optimizer_is_what_the_next_steps_go_on_from(steps: int) -> None:
    """Without a step there is no momentum yet: a recording that made it would keep sums of several noises in it."""
    trainer, plain = (trainer_of("dpsgd", how, optimizer="momentum") for how in (Replaying, None))
    for one in (trainer, plain):
        one.run_steps(steps)
        state = copy.deepcopy(one.optimizer.state_dict())
        one.run_steps(TRIALS + 2 - steps)
        one.optimizer.load_state_dict(state)
        one.run_steps(STEPS - TRIALS - 2)
    assert replayed(trainer)
    compare(trainer, plain)


def test_other_layers_are_refused_where_steps_are_replayed_too() -> None:
    trainer = trained("dpsgd", Replaying)
    trainer.model.set_submodule(trainer.engine.passes.sites[-1].name, nn.Linear(1, 1))
    with pytest.raises(EquidpError, match="layers are others"):
        trainer.run_steps(1)
    assert trainer.ledger.count == STEPS


class Leaving(Replaying):
    """Leaves out one kind of operation: the noise, the batch, a product, the update, who is there."""

    def __init__(self, skipped: str) -> None:
        super().__init__()
        self.skipped = skipped

    def kept(self, done: list[Any]) -> list[Any]:
        return [one for one in done if one[0].overloadpacket.__name__ != self.skipped]


def test_a_batch_with_more_records_than_rows_is_taken_afresh() -> None:
    recorded = trainer_of("dpsgd", Replaying)
    recorded.sampling.draw_on_host = lambda: torch.arange(50)
    plain = trainer_of("dpsgd", None)
    plain.sampling.draw = lambda: Draw(torch.arange(50))
    for trainer in (recorded, plain):
        trainer.run_steps(1)
    for trainer in (recorded, plain):
        trainer.run_steps(STEPS - 1)
    assert not recorded.recorded._made
    assert recorded.ledger.done == plain.ledger.done


@pytest.mark.parametrize("algorithm", ["dpsgd_f", "dpsgd_minimax"])
def test_an_empty_batch_adds_noise_and_is_charged(algorithm: str) -> None:
    trainer = trainer_of(algorithm, Replaying)
    trainer.run_steps(TRIALS + 1)
    trainer.sampling.draw_on_host = lambda: torch.arange(0)
    before = trainer.engine.flatten()
    trainer.run_steps(1)
    assert (trainer.engine.flatten() - before).norm() > 0
    assert sum(event.count for event in trainer.ledger.done) == TRIALS + 2


@pytest.mark.parametrize("algorithm", ["dpsgd_f", "dpsgd_minimax"])
def test_nobodys_rows_have_no_influence_whatever_the_first_record_is(algorithm: str) -> None:
    """They repeat the first record, which is in no batch here."""
    found = []
    for value, group in ((0.5, 0), (float("nan"), 1)):
        trainer = trainer_of(algorithm, Replaying)
        trainer.population.records.features[0], trainer.population.groups[0] = value, group
        trainer.sampling.draw_on_host = lambda: torch.arange(1, 11)
        trainer.sampling.draw = lambda: Draw(torch.arange(1, 11))
        trainer.run_steps(TRIALS + 3)
        assert replayed(trainer)
        found.append(trainer.engine.flatten())
    assert torch.equal(*found)


def test_a_run_goes_on_from_a_state_with_recordings() -> None:
    whole = trained("dpsgd_f", Replaying, optimizer="momentum")
    first, second = (trainer_of("dpsgd_f", Replaying, optimizer="momentum") for _ in range(2))
    for trainer in (first, second):
        trainer.run_steps(6)
    state = first.state_dict()
    first.run_steps(1)
    second.load_state_dict(state)
    second.run_steps(STEPS - 6)
    parameters = whole.engine.flatten()
    assert (second.engine.flatten() - parameters).norm() < 1e-5 * parameters.norm()


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "custom"])
def test_an_additive_statistic_of_a_batch_is_the_sum_of_its_records(algorithm: str) -> None:
    trainer = trainer_of(algorithm, None)
    release = trainer.algorithm.side_release
    if release is None or not release.additive:
        return
    norms, groups = torch.rand(12) * 3, torch.arange(12) % trainer.plan.groups
    public = trainer.public_values(trainer.segments[0])
    whole = release.statistic(norms, groups, public, trainer.plan)
    each = [release.statistic(norms[i : i + 1], groups[i : i + 1], public, trainer.plan) for i in range(12)]
    torch.testing.assert_close(whole, torch.stack(each).sum(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("algorithm", WHOLE)
def test_on_a_gpu_a_run_of_replayed_steps_is_the_run(algorithm: str) -> None:
    recorded = trained(algorithm, CudaGraphs, "cuda", "cnn_small")
    assert replayed(recorded), recorded.recorded.reason
    compare(recorded, trained(algorithm, None, "cuda", "cnn_small"))
