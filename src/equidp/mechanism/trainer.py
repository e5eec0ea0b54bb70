"""The loop: sample → ledger → norms → side release → weights → noisy mean → update. Written once for all algorithms."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan, Segment, segment_at
from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import all_finite
from equidp.gradients.engine import GradientEngine, Looks
from equidp.gradients.losses import Loss
from equidp.gradients.recording import Recorder
from equidp.gradients.shape import public_rows
from equidp.mechanism.algorithm import Algorithm, Outcome
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.coins import Coins
from equidp.mechanism.diagnostics import Diagnostics
from equidp.mechanism.float32 import refuse_vanishing
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.noising import Noising, unforeseen
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.parts import Draw, StepFacts, Tossed, draws_plainly, known_sensitivity, seen_by, tensors
from equidp.mechanism.parts.base import of_others
from equidp.mechanism.recorded import RecordedSteps
from equidp.mechanism.sampling import Batch, Labelled, Population
from equidp.mechanism.states import checked, columns, global_random, joined, moved, one_at_a_time, set_global_random
from equidp.system.progress import frames

OnStep = Callable[[], None]
EpochCallback = Callable[[dict[str, float], nn.Module], Mapping[str, float] | None]
"""Called after every epoch with its row so far, which may be shown, and the model; may return further columns of it."""


class Trainer(Noising):
    """Trains one model under one algorithm.

    Args:
        model: the model, already on the device of the data.
        loss: `(outputs [b, …], labels [b]) -> [b]` loss of each record on its own.
        algorithm: the combination of parts.
        plan: the run's public facts.
        population: the training data.
        random: the streams for sampling and noise.
        ledger: receives every event before the step becomes visible.
        learning_rate: of the update, which is post-processing of the noisy mean.
        optimizer: a name, or a `Descent` with settings and a schedule. The attribute `optimizer` is torch's optimiser.
            Another one of `engine.parameters` may replace it. Without a schedule, one of torch's may set its rate.
        physical_batch_size: most units in memory at once (records, if the engine has public rows); None for all.
        precision: `bf16` runs the model under autocast, on a GPU; norms and sums stay in float32.
        new_recorder: records whole steps (`recorded.py`), or at least the model's passes (`recording.py`), to replay
            them; None: they are computed afresh.
        record_passes: whether the passes are recorded where whole steps cannot be.
        diagnostics: collect exact training figures (outside the guarantee).
        public: records without any guarantee, disjoint from training and test, for an algorithm that asks for them.
        augmentation: a record's gradient is the mean over random views of it; None: of the record itself.

    Raises:
        EquidpError: for an unknown optimiser, groups that the plan does not have, or no public records where the
            algorithm needs some.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        algorithm: Algorithm,
        plan: Plan,
        population: Population,
        random: RandomSource,
        ledger: Ledger,
        learning_rate: float,
        optimizer: str | Descent | None = None,
        physical_batch_size: int | None = None,
        precision: Literal["float32", "bf16"] = "float32",
        new_recorder: Callable[[], Recorder] | None = None,
        record_passes: bool = True,
        diagnostics: bool = False,
        public: Labelled | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.descent = optimizer if isinstance(optimizer, Descent) else Descent(optimizer)
        make_optimizer = algorithm.optimizer_beside(self.descent)
        if algorithm.needs_public and not (public is not None and len(public.labels)):
            raise EquidpError(
                f"{algorithm.name} needs public records: give some as `public` (in a project data.public_fraction)."
            )
        population.refuse_other_groups(plan.groups)
        if algorithm.objective.by_class:
            population.refuse_other_classes(plan.classes_each)
        self.model, self.algorithm, self.plan = model, algorithm, algorithm.adapt(plan)
        self.combination, self.sampling_rate = algorithm.combination, algorithm.sampler.sampling_rate(self.plan)
        self.population, self.random, self.ledger, self.public_part = population, random, ledger, public
        self.pursuing = algorithm.objective.start(loss, self.plan, population.device)
        on_gpu = population.device.type == "cuda" or new_recorder is not None
        # rounding depends on the number of rows, and can carry a record across a threshold of norms or a model's kink
        exact = algorithm.private and not random.repeatable
        rows = public_rows(self.expected_batch(), physical_batch_size, on_cpu=not on_gpu) if on_gpu or exact else None
        self.engine = GradientEngine(model, self.pursuing.loss, precision=precision, rows=rows, exact=exact)
        self.learning_rate, self.augmentation = learning_rate, augmentation
        self.optimizer = make_optimizer(self.engine.parameters, learning_rate)
        self.physical_batch_size = physical_batch_size
        self.public: dict[str, Tensor] = tensors(algorithm.initial, population.device)
        self.segments = algorithm.schedule.segments(self.plan)
        refuse_vanishing(algorithm, self.plan, self.segments, self.engine.dimension)
        self.steps_done, self.epochs_begun, self.process = 0, 0, os.getpid()
        self.shown: dict[str, Tensor | float] = {}  # public values of the last step: publishable, as they were noised
        self.diagnostics = Diagnostics() if diagnostics else None
        self._event = lru_cache(maxsize=2)(partial(algorithm.step_event, self.plan))  # most steps repeat an event
        self._release_steps = algorithm.release_steps(self.plan)
        self._last = algorithm.acceptance.cap(self.plan, self.sampling_rate)  # ε covers no more steps
        self.given: dict[str, Tensor] = {}  # values of the last side release, for the steps until the next one
        self._zero, self._coins = torch.zeros((), device=population.device), Coins(population.size)
        self._scales = "scale" in set(algorithm.initial).union(*(part.gives | part.steers for part in algorithm.parts))
        self._side_noise: tuple[float, float] | None = None  # Δ, and the noise in multiples of it
        if (side := algorithm.side_release) is not None:
            self._side_noise = side.sensitivity(), side.noise(self.plan) / side.sensitivity()
            self.engine.passes.keeps_outputs = side.of_errors
        run = weakref.proxy(self)  # without a proxy, only the garbage collector would free a run's memory
        self._tossed = Tossed(random)
        self.sampling = algorithm.sampler.start(seen_by(algorithm.sampler, run, self.plan, self._tossed))
        self.contributing = algorithm.contribution.start(seen_by(algorithm.contribution, run, self.plan))
        # parts of this package are not tried: they have tests, and a trial waits for the GPU
        self._foreign = of_others(algorithm.contribution, self.contributing, self.pursuing)
        self._ruled = of_others(*(part for part in (algorithm.weights, algorithm.side_release) if part is not None))
        self._trials, self._second_coins, self._weighings, self._counts = Looks(), Looks(), Looks(), Looks()
        self._judged = of_others(algorithm.sampler, self.sampling)
        self.updating = algorithm.update.start(seen_by(algorithm.update, run, self.plan))
        self._led = of_others(algorithm.update, self.updating)
        self.accepting = algorithm.acceptance.start(seen_by(algorithm.acceptance, run, self.plan))
        self.releasing = algorithm.released_weights.start(seen_by(algorithm.released_weights, run, self.plan))
        self.recorded = None if new_recorder is None else RecordedSteps(run, new_recorder, passes=record_passes)

    # ------------------------------------------------------------------------------------------------------ epochs

    def train(
        self, on_epoch: EpochCallback | None = None, *, on_step: OnStep | None = None, progress: bool = True
    ) -> list[dict[str, float]]:
        """Run the remaining epochs; returns one history row per epoch that was begun.

        `on_step` is called after every step, when the run may be saved or left.
        """
        history = []
        left, name = self.plan.steps - self.steps_done, self.algorithm.name
        with tqdm(total=left, unit="step", desc=name, disable=not progress, leave=False, **frames(first=True)) as bar:

            def taken() -> None:
                bar.update()
                if on_step is not None:
                    on_step()

            for epoch, segments in self._epochs():
                if self.finished:
                    break
                row = self._epoch(epoch, segments, taken)
                if on_epoch is not None:
                    row |= on_epoch(row, self.released_model()) or {}
                history.append(row)
                spent = f", ε ≤ {row['epsilon_rdp'] + 5e-4:.3f} by RDP" if self.algorithm.private else ""  # rounded up
                bar.set_postfix_str(f"{epoch + 1} of {self.plan.epochs} epochs{spent}", refresh=False)
        return history

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end: its last step, or an earlier one where a part has ended it."""
        return self.steps_done >= self._last or self.accepting.finished or self.sampling.exhausted

    @one_at_a_time
    @unforeseen
    def run_steps(self, count: int) -> None:
        """Take the next `count` steps, without history rows; fewer if a part ends the run, because ε covers no more.

        Raises:
            EquidpError: for more steps than the plan has.
        """
        for _ in range(count):
            if self.steps_done >= self.plan.steps:
                raise EquidpError(
                    f"The run has taken all {self.plan.steps} steps of its plan, and its ε is of no more: plan more "
                    "epochs, or take steps only while not `finished`."
                )
            if self.finished:
                return
            self.begin_epoch(self.plan.epoch(self.steps_done))
            if self.finished:  # to begin an epoch may cost so much that the budget holds none of its steps
                return
            self.step(segment_at(self.segments, self.steps_done))

    def outcome(self) -> Outcome:
        """Events, and steps taken, so far."""
        taken = self.steps_done if self.accepting.accepted is None else self.accepting.accepted
        return Outcome(self.ledger.events, taken, self.steps_done)

    def _epochs(self) -> Iterator[tuple[int, list[Segment]]]:
        """Remaining epochs with the segment of each of their remaining steps."""
        every = [segment for segment in self.segments for _ in range(segment.steps)]
        start = 0
        for epoch, length in enumerate(self.plan.epoch_lengths()):
            steps = every[max(start, self.steps_done) : start + length]
            start += length
            if steps:
                yield epoch, steps

    def begin_epoch(self, epoch: int) -> None:
        if epoch >= self.epochs_begun:
            self.sampling.begin_epoch(epoch)
            self.epochs_begun = epoch + 1

    @one_at_a_time
    @unforeseen
    def _epoch(self, epoch: int, segments: list[Segment], on_step: OnStep | None = None) -> dict[str, float]:
        self.engine.train()
        self.begin_epoch(epoch)
        for segment in segments:
            if self.finished:
                break
            self.step(segment)
            if on_step is not None:
                on_step()
        row: dict[str, float] = {"epoch": float(epoch + 1)}
        if self.algorithm.private:
            row |= {"epsilon_rdp": self._epsilon_so_far(), **columns(self.shown)}
            row |= self.sampling.shown() | self.accepting.shown()
        if self.diagnostics is not None:
            row |= self._diagnostic_row()
        return row

    def _epsilon_so_far(self) -> float:
        """ε by RDP of the events charged so far; if the run has a budget, the ε of that budget from the start."""
        budget = self.algorithm.sampler.budget(self.plan)
        live = self.plan.trials.live_epsilon
        return live(self.ledger.done, self.plan.delta) if budget is None else budget.epsilon

    # -------------------------------------------------------------------------------------------------------- step

    def step(self, segment: Segment) -> None:
        """One step, as docs/algorithms.md has it: everything released is noised, and charged before it is seen."""
        if self.recorded is None:
            self.step_afresh(self.draw(), segment)
        else:
            self.recorded.step(segment)

    def step_afresh(self, draw: Draw, segment: Segment, *, charged: bool = False, padded: bool = False) -> Tensor:
        """Take a step on these units, launched operation by operation; return its noisy sum, `[d]`.

        `charged`: the step's event is in the ledger already. `padded`: take the public number of rows (`shape.py`)
        without privacy, too, as a recording does.
        """
        draws = self.chunks(draw)
        batches = [self.batch(draw.units) for draw in draws]
        rollback = None if self.algorithm.acceptance.always else self._rollback()
        before = self.engine.flatten() if rollback or self.contributing.remembers else None
        self.accepting.begin()
        if self.algorithm.private:
            total, facts = self._noisy_sum(draws, batches, segment, charged=charged)
        else:
            total = self._plain_sum(batches, padded=padded)
            facts = self._facts(0.0, torch.zeros((), device=self.population.device))
        self._observe_step(total, facts)
        self.set_gradient(self.updating.direction(total, facts))
        self.set_rate()
        self.optimizer.step()
        self.steps_done += 1
        if rollback is not None and not self.accepting.accept():
            assert before is not None
            self.engine.load_(before)
            rollback()
        else:
            if before is not None:
                self.contributing.advance(before)
            self.releasing.follow()
        self.tell_objective()
        return total

    def set_gradient(self, direction: Tensor) -> None:
        """Give the optimiser a direction `[d]`, divided by the *expected* batch size, because the actual is private."""
        self.engine.apply_gradient(direction, over=self.plan.batch_size)

    def set_rate(self) -> None:
        """Set the schedule's learning rate. It follows from the step's number, so a resumed run needs nothing else."""
        if self.descent.schedule != "constant":
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * self.descent.factor(self.steps_done / self.plan.steps)

    def tell_objective(self) -> None:
        """Give the objective the values that it reads, as copies: autograd takes no tensors made in inference mode."""
        self.pursuing.follow({name: self.public[name].clone() for name in self.algorithm.objective.reads})

    def draw(self) -> Draw:
        """The units of the next batch."""
        draw = self.sampling.draw()
        if self._judged and not draws_plainly(self.sampling):
            self.judge(draw)
        return draw

    def _noisy_sum(
        self, draws: list[Draw], batches: list[Batch], segment: Segment, *, charged: bool
    ) -> tuple[Tensor, StepFacts]:
        """Σ w_i·g_i + σ·Δ·ξ, flat `[d]`, and the step's facts; charges the step's event first."""
        rule, release = self.algorithm.weights, self.algorithm.side_release
        assert rule is not None
        noise_multiplier = self.sampling.noise(segment) if charged else self.charge(segment)
        public = self.public_values(segment)
        norms, finite = None, None
        self.drawn = iter(())  # an interrupted step may have left some
        if self._foreign and len(draws[0].units) and self._trials.due():
            self.try_contribution(draws)
        if self.steps_done not in self._release_steps:
            public |= self.given
        else:
            if release is not None and release.of_errors:
                norms, errors = self.norms_and_errors(batches, release)
                together, counted = joined(errors), True
            else:
                norms = self.first_norms(batches, release)
                together = joined(norms)
                counted = finite = all_finite(together)
            facts = self._facts(noise_multiplier, known_sensitivity(rule, public))
            groups = joined([b.groups for b in batches])
            self.try_statistic(together, groups, public, facts)
            public |= self._side_release(together, groups, public, facts, finite=counted)
        total = self.weighted_sum(batches, public, norms, draws, finite=finite)
        noised, delta = self._noised(self.reduce(total), public, noise_multiplier)
        # Δ may be the tensor of the next step's bound, so an update of others gets a copy
        return noised, self._facts(noise_multiplier, delta.clone() if self._led else delta)

    def weighted_sum(
        self,
        batches: list[Batch],
        public: Mapping[str, Tensor],
        norms: list[Tensor] | None = None,
        draws: list[Draw] | None = None,
        *,
        finite: bool | None = None,
    ) -> Tensor:
        """Σ w_i·g_i over the chunks, flat `[d]`, *exact*: it must be noised before anything else sees it.

        A second forward pass of each chunk is needed only if weights had to wait for the whole batch. `finite` is
        `all_finite` of the norms, where that is known.
        """
        total: Tensor | None = None
        kept = len(batches) == 1 and norms is not None
        grouped = any(value.dim() for value in public.values())
        for index, batch in enumerate(batches):
            fresh = norms[index] if kept and norms is not None else self.norms_again(batch)
            known = finite if kept else None
            weights = self.weights(fresh, batch.groups if grouped else None, public, finite=known)
            self.try_weights(fresh, weights, batch.groups if grouped else None, public)
            if draws is not None and (mask := self.kept(draws[index], fresh)) is not None:
                weights = torch.where(mask, weights, 0.0)
            part = self.sum_of(weights)
            total = part if total is None else total + part
            self._observe(fresh, weights, batch, public)
        assert total is not None  # an empty batch is one empty chunk
        return total

    def _plain_sum(self, batches: list[Batch], *, padded: bool = False) -> Tensor:
        """Σ g_i by ordinary automatic differentiation: the non-private baseline."""
        total = torch.zeros(self.engine.dimension, device=self.population.device)
        for batch in batches:
            total += self.engine.plain_sum(
                batch.features, batch.labels, owners=batch.owners, views=batch.views, padded=padded
            )
            if self.diagnostics is not None:
                norms = self.contributing.norms(batch)
                self._observe(norms, torch.ones_like(norms), batch)
        return self.reduce(total)

    def _rollback(self) -> Callable[[], None]:
        """Return a function that restores what a refused step must leave as it was, besides the parameters."""
        optimizer, updating = copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.updating.state_dict())

        def restore() -> None:
            self.optimizer.load_state_dict(optimizer)
            self.updating.load_state_dict(updating)

        return restore

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-identical continuation needs, except the ledger, in tensors and plain JSON values."""
        seldom = {"given": self.given, "releasing": self.releasing.state_dict()}
        optimizer = self.optimizer.state_dict()
        return copy.deepcopy(
            {
                "steps_done": self.steps_done,
                "epochs_begun": self.epochs_begun,
                "model": dict(self.model.state_dict()),
                "optimizer": optimizer | {"state": {str(k): v for k, v in optimizer["state"].items()}},  # JSON's keys
                "public": self.public,
                "shown": self.shown,
                "random": self.random.state_dict(),
                # a secure run seeds these generators anew: who reads a saved state could foretell what dropout draws
                "global_random": global_random(self.population.device) if self.random.repeatable else {},
                "sampling": self.sampling.state_dict(),
                "contributing": self.contributing.state_dict(),
                "updating": self.updating.state_dict(),
                "accepting": self.accepting.state_dict(),
                "diagnostics": None if self.diagnostics is None else vars(self.diagnostics),
            }
            | {name: value for name, value in seldom.items() if value}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Later steps that this trainer has begun stay charged, and it draws other noise.

        Raises:
            EquidpError: if the ledger does not hold what was charged for the steps taken, and as `checked`.
        """
        state = checked(state, self.model)
        charged, taken = self.ledger.count, int(state["steps_done"])
        if self.algorithm.private and charged < taken:
            raise EquidpError(
                f"The state is of {taken} steps, and the ledger holds {charged} events: give the trainer the ledger of "
                "the run that it continues, such as Ledger(events)."
            )
        if self.recorded is not None:
            self.recorded.forget()
        if self.random.repeatable and self.steps_begun > taken:
            self.random.renew(-charged)  # later steps may have been seen: the same noise on other sums would cancel
        self.random.load_state_dict(state["random"])  # first, because it refuses the state of another device
        self.steps_done, self.epochs_begun = int(state["steps_done"]), int(state["epochs_begun"])
        self.model.load_state_dict(state["model"])
        numbered = {int(k): v for k, v in state["optimizer"]["state"].items()}
        self.optimizer.load_state_dict(state["optimizer"] | {"state": numbered})
        device = self.population.device
        self.public, self.shown = moved(state["public"], device), dict(state["shown"])
        self.tell_objective()
        self._tossed.asked = True  # the state may hold coins that were asked for earlier
        if not self.random.renewed:
            set_global_random(state.get("global_random", {}), device)
        for name in ("sampling", "contributing", "updating", "accepting"):
            getattr(self, name).load_state_dict(moved(state[name], device))
        self.given = moved(state.get("given", {}), device)
        if "releasing" in state:
            self.releasing.load_state_dict(moved(state["releasing"], device))
        if self.diagnostics is not None and state["diagnostics"] is not None:
            self.diagnostics = Diagnostics(**moved(state["diagnostics"], device))
