"""Recorded steps: a whole step launched once on a GPU, recorded, and replayed as one CUDA graph.

What is recorded is everything between the draw and the next step: gather, passes, norms, side release, weights, noise
and update. What has a memory outside of tensors follows the replay: other updates, an average of weights, and the
values that a loss follows. The draw is made on the host, which knows its size before anything is launched, and copied
from pinned memory; nothing in a step waits for the device. A step is charged before it is replayed, and stays charged
if it fails.

*Rows.* A recording has the public number of rows (`gradients/shape.py`). Rows beyond the batch repeat the first record
with weight 0. A side release that is a sum over records (`SideRelease.additive`) takes their share off again: each adds
what a record of norm 0 in group 0 adds.

*Noise.* The run's own generator is registered with the graph, so a replay draws what would be drawn without it.

*Trust.* A new recording is not trusted. Its first steps are done twice, from one state of parameters, optimiser, public
values and generators: replayed, and afresh. The step that counts is the one afresh; the ledger has one event. What
follows a replay is not tried: an update must not see two sums for one event. Where both differ by more than rounding,
where a replay does not move the generator of noise as far as a step afresh, or where something cannot be recorded,
recordings are left out, and a line says why.

A step that does something else than these (see `_objection`) is taken as without recordings, its passes excepted.
What has failed leaves out the recordings of passes too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
"""Recordings of one run: every noise, clip factor and learning rate has its own."""
TOLERANCE = 1e-3
"""Of what a step moved, for rounding; a forgotten input, noise or update is far beyond."""


class UnrecordableError(Exception):
    """A step asks for what a recording does not have; the message says what."""


@dataclass(frozen=True)
class Padded:
    """What a step knows of a batch with rows that are nobody's: `[R]` norms, infinite there, and groups, 0 there.

    `wrong`, `[R]`, is which records are classified wrongly, 0 for nobody's rows; None where no side release asks.
    `absent` `()` counts these rows; `weighted_sum` takes `[R]` weights to `[d]`.
    """

    norms: Tensor
    wrong: Tensor | None
    groups: Tensor
    absent: Tensor
    weighted_sum: Callable[[Tensor], Tensor]

    @staticmethod
    def facts(plan: Plan, noise_multiplier: float, delta: Tensor, dimension: int, rate: float) -> StepFacts:
        """Those that hold at every step: its number is not among them."""
        return _Facts(plan, 0, noise_multiplier, delta, dimension, rate)


class _Facts(StepFacts):
    """The facts of every step of a recording: it has no number."""

    def __getattribute__(self, name: str) -> Any:
        if name == "step":
            raise UnrecordableError("what it does depends on the number of the step")
        return super().__getattribute__(name)


@dataclass
class _Recording:
    """A step of one kind.

    `replay` takes it, on what `RecordedSteps` has laid into its input, and leaves the public values `shown`; `tried`
    counts steps that were done both ways.
    """

    replay: Callable[[], Tensor]
    shown: dict[str, Tensor | float] = field(default_factory=dict)
    tried: int = 0


class RecordedSteps:
    """A trainer's steps; the recorder is what they are recorded with.

    `passes`: record the passes where whole steps cannot be.
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

    def _objection(self) -> str:
        """Why these steps cannot be recorded whole; empty where they can."""
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
        """Whether what the loss reads lies where it lay, whatever it follows."""
        kind = type(self._trainer.pursuing)
        follows = next(one for one in kind.mro() if "follow" in vars(one))  # a class says it of its own `follow`
        return follows is Pursuing or vars(follows).get("in_place", False)

    @property
    def _updates(self) -> bool:
        """Whether the update is recorded; one with a rate or a memory, or steps counted on the host, follows."""
        trainer = self._trainer
        plain = trainer.descent.schedule == "constant" and type(trainer.optimizer) is OPTIMIZERS["sgd"][0]
        return plain and type(trainer.updating) is Updating

    def step(self, segment: Segment) -> None:
        """The trainer's next step."""
        trainer = self._trainer
        if self.reason and not self._given_up:
            self._give_up()
        self._steps += 1
        if self.reason or self._steps == 1:  # the first one tries the model out, and makes what an optimiser keeps
            trainer.step_afresh(trainer.draw(), segment)
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
            if len(units) and trainer.engine.look_is_due():  # no code of the model's runs, but what it reads may change
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
            trainer.set_gradient(trainer.updating.direction(total.clone(), facts))  # it may keep what it is given
            trainer.set_rate()
            trainer.optimizer.step()

    def forget(self) -> None:
        """Record anew: a state was loaded, or the optimiser is another, and what recordings write to lies elsewhere.

        A step afresh comes first: what an optimiser begins to keep while recorded would stay there.
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
        """The batch's positions and their number into the input, by one copy that nobody waits for."""
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
        rates = [group["lr"] for group in trainer.optimizer.param_groups] if self._updates else []
        # and the tensors that it reads or writes to: others may take their place; the noise is the one that is charged
        read = [*trainer.engine.parameters, *self._leaving()]
        key = (trainer.sampling.noise(segment), segment.clip, *rates, *(tensor.data_ptr() for tensor in read))
        if key not in self._made:
            if len(self._made) == MOST:
                self.reason = "its noise, clip norm or learning rate changes too often"
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
        """A step between draw and update, on whatever the input holds."""
        trainer, side = self._trainer, self._trainer.algorithm.side_release
        moving = side.steers | side.keeps if side else frozenset()  # shown as they are before this step moves them
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
        """What the step knows of these rows, of which the first are `present`."""
        passes, wrong = self._passes, None
        # before the norms, which the layers remember
        outputs = next((passes.outputs_at(batch.features, weights) for weights in self._leaving()), None)
        norms = torch.where(present, passes.norms(batch.features, batch.labels), self._infinite)
        if self._counts_errors():
            outputs = passes.outputs_kept if outputs is None else outputs
            assert outputs is not None
            wrong = (self._trainer.wrong(outputs, batch.labels) & present).float()
        groups = batch.groups * present  # nobody is in group 0
        return Padded(norms, wrong, groups, (~present).sum(), passes.weighted_sum)

    def _counts_errors(self) -> bool:
        side = self._trainer.algorithm.side_release
        return side is not None and side.of_errors

    def _leaving(self) -> list[Tensor]:
        """The weights at which errors are counted, where they are others than the parameters."""
        weights = self._trainer.releasing.weights() if self._counts_errors() else None
        return [] if weights is None else [weights]

    def _try(self, made: _Recording, draw: Draw, segment: Segment) -> None:
        """One step both ways from one state; the one afresh counts.

        Both have as many rows: with others a GPU takes other kernels, and TF32 alone would tell them apart.
        """
        trainer, before = self._trainer, self._state()
        total = made.replay().clone()
        replayed = self._state()
        self._restore(before)
        try:
            found = trainer.step_afresh(draw, segment, charged=True, padded=True)
        except BaseException:
            self._draw_on(replayed)  # the next batch must not have its noise
            raise
        afresh = self._state()
        pairs = list(zip(replayed.values, afresh.values, before.values, strict=True))
        if not self._updates:  # then the sum stands for what it moves
            moved = len(trainer.engine.parameters) + len(self._kept())
            pairs[:moved] = [(total, found, torch.zeros_like(found))]
        for one, other, start in pairs:
            room = (other - start).norm() + TOLERANCE * other.norm()
            if not (one - other).norm() <= TOLERANCE * room:
                self.reason, self._failed = "replayed they come to something else than afresh", True
                return
        # else the next replay would draw this one's noise again, which nobody would see
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
        """What the optimiser remembers."""
        kept = (value for state in self._trainer.optimizer.state.values() for value in state.values())
        return [value for value in kept if isinstance(value, Tensor)]

    def _draw_on(self, state: _State) -> None:
        """Noise as it goes on from there."""
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
