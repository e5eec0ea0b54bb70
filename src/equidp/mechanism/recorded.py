"""Recorded steps: a whole step is recorded once on a GPU, and then replayed as one CUDA graph.

A recording holds everything between the draw and the next step: gather, passes, norms, side release, weights, noise
and update. What keeps values outside of tensors is not recorded, and runs after each replay: most updates other than
SGD (see `_updates`), an average of weights, and an objective that follows public values. The host draws the batch, so
its size is known before anything is launched. The positions are copied from pinned memory, and nothing in a step waits
for the device. A step is charged before it is replayed, and stays charged if the replay fails.

*Rows.* A recording has the public number of rows (`gradients/shape.py`). Rows beyond the batch hold the first record of
the training data, with weight 0. A side release must be a sum over records (`SideRelease.additive`). It counts these
rows as records of norm 0 in group 0, and their share is taken off again.

*Noise.* The run's own generator is registered with the graph, so a replay draws the noise of a step without recording.

*Trust.* A new recording is not trusted. Its first steps are done twice from one state of parameters, optimiser, public
values and generators: replayed, and afresh (launched operation by operation). The step afresh counts, and the ledger
has one event. Updates that run after a replay are left out of the replayed trial, because an update must not see two
noised sums of one event. Recordings are given up, and one line of the log says why, if the two results differ by more
than rounding, if a replay does not move the noise generator as far as a step afresh, or if a step cannot be recorded.

Where whole steps cannot be recorded (see `_objection`), steps are taken afresh, and only the model's passes are
recorded. After a failure these are not recorded either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equidp.accounting.plan import Plan, Segment
from equidp.errors import first_line
from equidp.gradients.recording import Recorder
from equidp.mechanism.noise import brought, pinned
from equidp.mechanism.optimizers import OPTIMIZERS
from equidp.mechanism.parts import Contributing, Draw, Pursuing, StepFacts, Updating
from equidp.mechanism.sampling import Batch
from equidp.mechanism.states import global_random, set_global_random

if TYPE_CHECKING:
    from equidp.mechanism.trainer import Trainer

logger = logging.getLogger(__name__)

TRIALS = 3
"""Steps of a recording that are done both ways before it is trusted."""
MOST = 4
"""The most recordings of one run: every noise, clip factor and setting of the optimiser needs its own."""
TOLERANCE = 1e-3
"""Difference that rounding may make, as a share of what a step moved; a forgotten input, noise or update makes more."""


class UnrecordableError(Exception):
    """A step asks for what a recording does not have; the message says what."""


@dataclass(frozen=True)
class Padded:
    """What a step knows of a batch that is filled up to R rows; the added rows stand for no record.

    Attributes:
        norms: `[R]`; infinite for added rows.
        wrong: `[R]`, 1 for each record that is classified wrongly, else 0; None where no side release counts errors.
        groups: `[R]`; 0 for added rows.
        absent: `()`, how many rows were added.
        weighted_sum: takes `[R]` weights and gives the sum, `[d]`.
    """

    norms: Tensor
    wrong: Tensor | None
    groups: Tensor
    absent: Tensor
    weighted_sum: Callable[[Tensor], Tensor]

    @staticmethod
    def facts(plan: Plan, noise_multiplier: float, delta: Tensor, dimension: int, rate: float) -> StepFacts:
        """Return facts that hold at every step of a recording; they do not have the step's number."""
        return _Facts(plan, 0, noise_multiplier, delta, dimension, rate)


class _Facts(StepFacts):
    """Facts of every step of a recording. To ask for the step's number is an `UnrecordableError`."""

    def __getattribute__(self, name: str) -> Any:
        if name == "step":
            raise UnrecordableError("what it does depends on the number of the step")
        return super().__getattribute__(name)


@dataclass
class _Recording:
    """The recording of a step with one noise, one clip factor and one set of the optimiser's settings.

    Attributes:
        replay: takes the step on the batch in the input of `RecordedSteps`; gives its sum, `[d]`.
        shown: public values of the step, in tensors that a replay overwrites.
        tried: how many steps were done both ways.
    """

    replay: Callable[[], Tensor]
    shown: dict[str, Tensor | float] = field(default_factory=dict)
    tried: int = 0


class RecordedSteps:
    """Takes a trainer's steps, and replays them where they can be recorded.

    Args:
        trainer: the loop.
        new_recorder: makes what steps are recorded with.
        passes: whether the model's passes are recorded where whole steps cannot be.
    """

    def __init__(self, trainer: Trainer, new_recorder: Callable[[], Recorder], *, passes: bool = True) -> None:
        self._trainer, self._new_recorder, self._passes_too = trainer, new_recorder, passes
        self._recorder: Recorder | None = None
        self._made: dict[object, _Recording] = {}
        self._public: dict[str, Tensor] = {}
        self._steps = 0
        self._generator: torch.Generator | None = getattr(trainer.random, "noise_generator", None)
        self.reason = self._objection()
        self._given_up, self._failed = False, False
        device, rows = trainer.population.device, trainer.engine.rows or 1
        self._input = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # positions, and how many there are
        self._places = torch.arange(rows, device=device)
        self._infinite = torch.full((), torch.inf, device=device)
        self._passes = trainer.engine.passes.twin()
        trained = set(map(id, trainer.engine.parameters))
        self._holding = [layer for layer in trainer.model.modules() if any(id(t) not in trained for t in _held(layer))]
        self._lay_at: list[int] = []  # addresses of the optimiser's state
        self._of: object = None  # modes, hooks and forwards of the layers that were recorded

    def _objection(self) -> str:
        """Return why these steps cannot be recorded whole; empty where they can."""
        trainer, algorithm = self._trainer, self._trainer.algorithm
        side = algorithm.side_release
        expected = trainer.expected_batch()
        held = {
            "its batches are cut into chunks": expected <= (trainer.engine.rows or 0),
            "a batch is drawn by what only the device knows": trainer.draws_on_host,
            "units have several records": trainer.population.of_records,
            "records have random views": trainer.augmentation is None,
            "exact training figures are collected": trainer.diagnostics is None,
            "several processes train together": trainer.alone,
            "a step may be refused": algorithm.acceptance.always,
            "a record stands for more than its gradient": type(trainer.contributing) is Contributing,
            "its loss keeps values that are not changed in place": self._loss_stays(),
            "the bits of its noise come from the CPU": self._generator is not None,
            "its side release is no sum over records": side is None or side.additive,
            "its errors are counted at weights that are made anew": all(map(is_, self._leaving(), self._leaving())),
            "its side release is not at every step": side is None
            or len(algorithm.release_steps(trainer.plan)) == trainer.plan.steps,
        }
        return next((reason for reason, holds in held.items() if not holds), "")

    def _loss_stays(self) -> bool:
        """Whether the tensors that the loss reads stay where they are when the objective follows new public values."""
        kind = type(self._trainer.pursuing)
        follows = next(one for one in kind.mro() if "follow" in vars(one))  # `in_place` is of the class's own `follow`
        return follows is Pursuing or vars(follows).get("in_place", False)

    @property
    def _updates(self) -> bool:
        """Whether the update is recorded. If not, it runs after each replay.

        It is not with a schedule of the learning rate, with an update of another kind, which may keep values, or with
        an optimiser other than our SGD (with or without momentum), which may count its steps on the host.
        """
        trainer = self._trainer
        plain = trainer.descent.schedule == "constant" and type(trainer.optimizer) is OPTIMIZERS["sgd"][0]
        return plain and type(trainer.updating) is Updating

    def step(self, segment: Segment) -> None:
        """Take the trainer's next step."""
        trainer = self._trainer
        if self.reason and not self._given_up:
            self._give_up()
        # another mode or hook: a replay runs no code of the model, and would go on without it; or the optimiser's state
        # was loaded: a replay would go on from the old one, and write to it
        if not self.reason and (trainer.engine.computed_by() != self._of or self._lie_at() != self._lay_at):
            self.forget()
            self._of = trainer.engine.computed_by()
        self._steps += 1
        if self.reason or self._steps == 1:  # the first step tries the model out, and makes the optimiser's state
            trainer.step_afresh(trainer.draw(), segment)
            self._lay_at = self._lie_at()
            return
        units = trainer.sampling.draw_on_host()
        draw = Draw(brought(units, trainer.population.device))
        if len(units) > len(self._places):
            trainer.step_afresh(draw, segment)
            return
        trainer.charge(segment)
        self._lay(units)
        made = self._recording(segment)
        if made is None:
            trainer.step_afresh(draw, segment, charged=True)
        elif made.tried < TRIALS:
            self._try(made, draw, segment)
        else:
            # a replay runs no code of the model, but the values that the model reads may have changed
            if len(units) and trainer.engine.look_is_due():
                batch = trainer.batch(draw.units)
                trainer.engine.look(batch.features, batch.labels, batch.views)
            self._replay(made)
            trainer.shown = made.shown
            trainer.steps_done += 1
            trainer.releasing.follow()
            trainer.tell_objective()

    def _replay(self, made: _Recording) -> None:
        total, trainer = made.replay(), self._trainer
        if not self._updates:
            noise, delta = (made.shown.get(of, 0.0) for of in ("noise_multiplier", "sensitivity"))
            facts = StepFacts(
                trainer.plan, trainer.steps_done, float(noise), torch.as_tensor(delta).clone(),
                trainer.engine.dimension, trainer.sampling.rate,
            )  # fmt: skip
            trainer.set_gradient(trainer.updating.direction(total.clone(), facts))  # the update may keep its sum
            trainer.set_rate()
            trainer.optimizer.step()

    def forget(self) -> None:
        """Drop all recordings: a state was loaded, or the optimiser replaced, so their tensors are not the run's.

        The next step is taken afresh, and makes the optimiser's state. If that were made while a step is recorded, it
        would keep sums of the recording, which draws several noises for one batch and one event.
        """
        self._steps = 0
        self._made.clear()
        self._public.clear()

    def _give_up(self) -> None:
        self._given_up = True
        self._made.clear()
        trainer = self._trainer
        passes = self._passes_too and trainer.algorithm.private and not self._failed and self._loss_stays()
        if passes:
            trainer.engine.record_passes(self._new_recorder)
        how = "only their passes" if passes else "not at all"
        logger.info("%s: steps are not replayed whole, %s: %s.", trainer.algorithm.name, how, self.reason)

    def _lay(self, units: Tensor) -> None:
        """Write the batch's positions and their number into the input, by one copy that nobody waits for.

        The trainer's public values become the tensors that recordings read.
        """
        positions = torch.zeros(len(self._input), dtype=torch.int64, device="cpu")
        positions[: len(units)] = units
        positions[-1] = len(units)
        self._input.copy_(pinned(positions, self._input.device), non_blocking=True)
        trainer = self._trainer
        if not self._public:
            self._public = {name: value.clone() for name, value in trainer.public.items()}
        for name, value in trainer.public.items():
            if name in self._public and value is not self._public[name]:
                self._public[name].copy_(value)
        trainer.public = dict(self._public)

    def _recording(self, segment: Segment) -> _Recording | None:
        trainer = self._trainer
        moved = trainer.optimizer.param_groups if self._updates else []
        rules = [v if name != "params" else tuple(map(id, v)) for group in moved for name, v in group.items()]
        # The key has the addresses of tensors that a recording reads or writes, because others may take their place: a
        # model that goes to the CPU to be saved, and comes back, has its frozen weights and buffers elsewhere, too.
        # It has the noise multiplier that the step was charged with.
        read = [*trainer.engine.parameters, *chain.from_iterable(map(_held, self._holding)), *self._leaving()]
        key = (trainer.sampling.noise(segment), segment.clip, *rules, *(tensor.data_ptr() for tensor in read))
        if key not in self._made:
            if len(self._made) == MOST:
                self.reason = "its noise, clip norm or a setting of its optimiser changes too often"
                return None
            before = self._state()
            made = _Recording(lambda: self._infinite)
            try:
                self._recorder = self._recorder or self._new_recorder()
                generators = [self._generator] if self._generator is not None and trainer.algorithm.private else []
                made.replay = self._recorder.record(lambda: self._work(segment, made), generators)
            except UnrecordableError as error:
                self.reason = str(error)
                return None
            except RuntimeError as error:
                self.reason, self._failed = first_line(error), True
                return None
            except BaseException:
                before = replace(before, noise=None)  # the next batch must not have the noise of this one
                raise
            finally:
                self._restore(before)
            self._made[key] = made
        return self._made[key]

    def _work(self, segment: Segment, made: _Recording) -> Tensor:
        """Do what is recorded of a step, on the batch that the input holds; return the step's sum, `[d]`."""
        trainer, side = self._trainer, self._trainer.algorithm.side_release
        moving = side.steers | side.keeps if side else frozenset()  # copied: the step shows what they were before it
        trainer.public = {k: v.clone() if k in moving else v for k, v in self._public.items()}
        index, present = self._input[:-1], self._places < self._input[-1]
        batch = trainer.batch(index)
        if trainer.algorithm.private:
            total = trainer.noised_at_once(self._padded(batch, present), segment)
        else:
            total = self._passes.plain_sum(batch.features, batch.labels, weights=present.float())
        if self._updates:
            trainer.set_gradient(total)
            trainer.optimizer.step()
        for name, value in trainer.public.items():
            if value is not self._public.get(name):
                if name not in self._public:
                    raise UnrecordableError(f"it carries {name}, which it did not have at first")
                self._public[name].copy_(value)
        trainer.public = dict(self._public)
        made.shown = trainer.shown
        return total

    def _padded(self, batch: Batch, present: Tensor) -> Padded:
        """Return what the step knows of these rows; `present`, `[R]` bool: whether a row is a record of the batch."""
        passes, wrong = self._passes, None
        # before the norms: between norms and weighted sum nothing else may use the passes
        outputs = next((passes.outputs_at(batch.features, weights) for weights in self._leaving()), None)
        norms = torch.where(present, passes.norms(batch.features, batch.labels), self._infinite)
        if self._counts_errors():
            outputs = passes.outputs_kept if outputs is None else outputs
            assert outputs is not None
            wrong = (self._trainer.wrong(outputs, batch.labels) & present).float()
        groups = batch.groups * present  # added rows are in group 0
        return Padded(norms, wrong, groups, (~present).sum(), passes.weighted_sum)

    def _counts_errors(self) -> bool:
        side = self._trainer.algorithm.side_release
        return side is not None and side.of_errors

    def _leaving(self) -> list[Tensor]:
        """Weights at which errors are counted, `[d]`, if these are not the parameters: a list of one or none."""
        weights = self._trainer.releasing.weights() if self._counts_errors() else None
        return [] if weights is None else [weights]

    def _try(self, made: _Recording, draw: Draw, segment: Segment) -> None:
        """Do one step twice from one state, replayed and afresh, and compare the results; the step afresh counts.

        Both have the same number of rows. With another number a GPU chooses other kernels, and the rounding of TF32
        alone would be taken for a fault.
        """
        trainer, before = self._trainer, self._state()
        total = made.replay().clone()
        replayed = self._state()
        self._restore(before)
        try:
            found = trainer.step_afresh(draw, segment, charged=True, padded=True)
        except BaseException:
            self._draw_on(replayed)  # the next batch must not have the noise of this one
            raise
        afresh = self._state()
        pairs = list(zip(replayed.values, afresh.values, before.values, strict=True))
        if not self._updates:  # the replay has updated nothing: compare the sums instead of what updates move
            moved = len(trainer.engine.parameters) + len(self._kept())
            pairs[:moved] = [(total, found, torch.zeros_like(found))]
        for one, other, start in pairs:
            room = (other - start).norm() + TOLERANCE * other.norm()
            if not (one - other).norm() <= TOLERANCE * room:
                self.reason, self._failed = "replayed they come to something else than afresh", True
                return
        # otherwise the next replay would draw this one's noise again, and no result would show it
        if afresh.noise is not None and not (replayed.noise is not None and torch.equal(replayed.noise, afresh.noise)):
            self.reason, self._failed = "replayed they leave the generator of noise elsewhere than afresh", True
            return
        made.tried += 1

    def _state(self) -> _State:
        trainer = self._trainer
        tensors = [*trainer.engine.parameters, *self._kept(), *trainer.public.values()]
        return _State(
            tensors,
            [tensor.detach().clone() for tensor in tensors],
            dict(trainer.public),
            None if self._generator is None else self._generator.get_state(),
            global_random(trainer.population.device),
        )

    @torch.no_grad()
    def _restore(self, state: _State) -> None:
        for tensor, value in zip(state.tensors, state.values, strict=True):
            tensor.copy_(value)
        trainer = self._trainer
        trainer.public = dict(state.public)
        self._draw_on(state)
        set_global_random(state.others, trainer.population.device)

    def _kept(self) -> list[Tensor]:
        """Tensors of the optimiser's state."""
        kept = (value for state in self._trainer.optimizer.state.values() for value in state.values())
        return [value for value in kept if isinstance(value, Tensor)]

    def _lie_at(self) -> list[int]:
        """Addresses of these tensors if the update is recorded."""
        return [tensor.data_ptr() for tensor in self._kept()] if self._updates else []

    def _draw_on(self, state: _State) -> None:
        """Let noise go on from that state."""
        if self._generator is not None and state.noise is not None:
            self._generator.set_state(state.noise)


@dataclass(frozen=True)
class _State:
    """What a step changes: tensors and their values, the public ones by name, states of generators."""

    tensors: list[Tensor]
    values: list[Tensor]
    public: dict[str, Tensor]
    noise: Tensor | None
    others: dict[str, Tensor]


def _held(layer: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a layer without those of the layers in it."""
    return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
