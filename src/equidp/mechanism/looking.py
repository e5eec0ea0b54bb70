"""What the loop computes of its records at the current parameters: norms, losses, errors, weights and weighted sums.

All of it is exact, so what comes from training records is private. Parts may ask for some of it (`parts.base.Run`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from equidp.accounting.plan import Plan
from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import all_finite
from equidp.gradients.engine import GradientEngine
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.diagnostics import MOST_NUMBERS, Diagnostics
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.optimizers import moved_by, refuse_asking
from equidp.mechanism.parts import (
    Contributing,
    Draw,
    Public,
    Pursuing,
    Releasing,
    Sampling,
    SideRelease,
    StepFacts,
    per_record,
)
from equidp.mechanism.sampling import Batch, Labelled, Population
from equidp.mechanism.states import global_random, set_global_random

if TYPE_CHECKING:
    from equidp.mechanism.recorded import RecordedSteps

LOOK_BATCH = 1024
"""Units in a chunk where only norms or losses are wanted. The engine's public number of rows comes first, then
`physical_batch_size`, then this number."""


class Looking:
    """The part of the training loop that computes exact values of its records; a base class of `Trainer`."""

    model: nn.Module
    engine: GradientEngine
    population: Population
    random: RandomSource
    contributing: Contributing
    pursuing: Pursuing
    releasing: Releasing
    public_part: Labelled | None
    augmentation: Augmentation | None
    steps_done: int
    plan: Plan
    sampling: Sampling
    diagnostics: Diagnostics | None
    _optimizer: torch.optim.Optimizer
    recorded: RecordedSteps | None = None
    _at_once: int | None
    _leaves: nn.Module | None = None
    """A copy of the model with the weights that leave the run, made when it is first needed."""
    algorithm: Algorithm
    _foreign: bool
    """Whether the contribution or the objective is a class of another package."""
    _ruled: bool = False
    """Whether the weight rule or the side release is a class of another package."""
    alone: bool = True
    """Whether no other process trains together with this one."""
    _zero: Tensor
    _scales: bool
    """Whether the public value `scale`, a factor on weights and bounds, may differ from 1."""
    _asked: tuple[Tensor, Tensor, Tensor] | None = None
    drawn: Iterator[Mapping[str, Tensor]] = iter(())
    """States of torch's generators before the first pass of each chunk that `norms_again` has still to compute."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimiser. Another optimiser of the same `engine.parameters` may be assigned."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, other: torch.optim.Optimizer) -> None:
        if moved_by(other) != set(map(id, self.engine.parameters)):
            raise EquidpError(
                "The optimiser's parameters are not those that are trained: every step would be charged, and none "
                "would reach the model. Make it of trainer.engine.parameters; what is not to be trained is frozen by "
                "requires_grad_(False) before the trainer is made."
            )
        refuse_asking(other)
        self._optimizer = other
        if self.recorded is not None:
            self.recorded.forget()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EquidpError(
            "A trainer can be neither copied nor pickled: two would draw the same noise, and charge it once each. Copy "
            "its model (copy.deepcopy(trainer.model)), or keep trainer.state_dict() and what was charged."
        )

    @torch.no_grad()
    def released_model(self) -> nn.Module:
        """Return the model with the weights that leave the run: the trained model, or a copy with other weights."""
        flat = self.releasing.weights()
        if flat is None:
            return self.model
        if flat.shape != (self.engine.dimension,):
            raise EquidpError(
                f"{self.algorithm.name}: {type(self.releasing).__name__}.weights gives {list(flat.shape)} numbers, and "
                f"the model has [{self.engine.dimension}] that are trained: give one for each."
            )
        if self._leaves is None:
            self._leaves = copy.deepcopy(self.model)
        self._leaves.load_state_dict(self.model.state_dict())  # frozen parameters and buffers are the model's
        copies = dict(self._leaves.named_parameters())
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, values in zip(self.engine.parameters, self.engine.passes.views(flat), strict=True):
            copies[names[parameter]].copy_(values)
        return self._leaves

    def expected_batch(self) -> float:
        """How many units this process draws on average; a public number."""
        return self.plan.batch_size

    @property
    def physical_batch_size(self) -> int | None:
        """The most units in memory at once; None for all. If another number is assigned, the model is tried again."""
        return self._at_once

    @physical_batch_size.setter
    def physical_batch_size(self, most: int | None) -> None:
        self._at_once = most
        # private records may come in several passes: chunks of a batch, or of all units that are looked at
        looked_at = not self.algorithm.acceptance.always or self.algorithm.sampler.budget(self.plan) is not None
        cut = self.engine.rows is not None or most is not None
        self.engine.in_pieces = self.algorithm.private and (cut or looked_at)

    def chunks(self, draw: Draw, size: int | None = None) -> list[Draw]:
        """Split a draw into chunks, which pass through the model one after another.

        A chunk has at most `size` units, by default `physical_batch_size`. If the engine has a public number of rows,
        `size` is not used: a chunk then has at most as many records as a pass has rows (see `packed`).
        """
        rows = self.engine.rows
        if rows is None:
            return draw.split(size or self.physical_batch_size)
        counts = self.population.record_counts(draw.units)
        return draw.split(rows if counts is None else packed(counts.tolist(), rows))

    def batch(self, units: Tensor) -> Batch:
        """Gather the records of `units` (`[u]` positions) with the objective's labels and this step's views, if any."""
        batch = self._labelled(self.population.batch(units))
        if self.augmentation is None:
            return batch
        return self.augmentation.of(batch, self.population.identities(batch.rows), self.steps_done)

    def first_norms(self, batches: Sequence[Batch], release: SideRelease | None) -> list[Tensor]:
        """Return contribution norms `[u]` of each chunk of a batch, which the side release counts.

        Norms of several chunks are computed twice: here, and by `norms_again` before a chunk is weighed. Where the
        release is `tied` to the norms, both must be equal: a record that is counted as short must not be weighed as a
        long one. So `norms_again` draws what a model with dropout drew here. And the model is given copies of the
        records here, because it may write into what it is given.
        """
        tied = len(batches) > 1 and release is not None and release.tied
        states, found = [], []
        for batch in batches:
            seen = batch
            if tied:
                states.append(global_random(self.population.device))
                seen = replace(batch, features=batch.features.clone(), labels=batch.labels.clone())
            found.append(self.norms_of(seen))
        self.drawn = iter(states)
        return found

    def norms_again(self, batch: Batch) -> Tensor:
        """Return contribution norms `[u]` of the next chunk, in the order of `first_norms`; `sum_of` comes after it."""
        if (state := next(self.drawn, None)) is not None:
            set_global_random(state, self.population.device)
        return self.norms_of(batch)

    def norms_of(self, batch: Batch) -> Tensor:
        """Return contribution norms `[u]`, one for each unit.

        Raises:
            EquidpError: for another number of norms. One for each record would bound each record, but not its unit.
        """
        norms = self.contributing.norms(batch)
        if norms.shape != (len(batch),):
            raise EquidpError(
                f"{self.algorithm.name}: {type(self.contributing).__name__}.norms gives another number of norms than "
                "the batch has units. A unit of several records is bounded as a whole, by one norm: `batch.owners` "
                "says whose each record is. So ε would not hold."
            )
        return norms

    def sum_of(self, weights: Tensor) -> Tensor:
        """Return Σ w_i m_i over the units of the last norms, `[d]`, *exact*.

        Raises:
            EquidpError: in a private run, if a contribution or an objective of another package makes it not finite.
        """
        total = self.contributing.weighted_sum(weights)
        if self._foreign and self.algorithm.private and not bool(total.isfinite().all()):
            raise EquidpError(
                f"{self.algorithm.name}: {type(self.contributing).__name__}.weighted_sum is not finite, although a "
                "record without a finite norm has weight 0. Let such a record add nothing, whatever its vector (0 "
                "times what is no number is no number): it would spoil the whole model. So ε would not hold."
            )
        return total

    def norms_of_all(self) -> Tensor:
        """`[n]` contribution norms of every unit of this process at the current parameters; exact, hence private."""
        everyone = Draw(torch.arange(self.population.size, device=self.population.device))
        chunks = self.chunks(everyone, self._look_size())
        return torch.cat([self.norms_of(self.batch(chunk.units)) for chunk in chunks])

    @torch.no_grad()
    def losses(self, units: Tensor) -> Tensor:
        """`[u]` exact loss of each of these training units (the mean over its records); private."""
        chunks = self.chunks(Draw(units), self._look_size())
        parts = [self._unit_losses(self._labelled(self.population.batch(chunk.units))) for chunk in chunks]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.population.device)

    @torch.no_grad()
    def public_loss(self, records: int) -> float:
        """Mean loss of the first `records` public records."""
        assert self.public_part is not None
        size, total = min(records, len(self.public_part.labels)), 0.0
        at_once = self.engine.rows or self._look_size()
        for chunk in torch.arange(size, device=self.public_part.labels.device).split(at_once):
            outputs = self.engine.passes.outputs(self.public_part.features[chunk])
            total += float(self.engine.loss(outputs, self.public_part.labels[chunk]).double().sum())
        return total / size

    def _unit_losses(self, batch: Batch) -> Tensor:
        # A contribution may give the engine one record at a time, and never show that the model mixes records. The
        # losses here are of a whole batch, so the model is tried out on this batch first.
        self.engine.try_out(batch.features, batch.labels)
        outputs = self.engine.outputs(batch.features)
        losses = self.engine.passes.watched(lambda: self.engine.loss(outputs, batch.labels))
        return _mean_of_units(batch, losses.float())

    def norms_and_errors(
        self, batches: Sequence[Batch], release: SideRelease
    ) -> tuple[list[Tensor] | None, list[Tensor]]:
        """Return the norms and the `errors` of each chunk, computed by one forward pass where that is possible.

        It is possible for one chunk with one view, if records contribute their plain gradients and the trained weights
        are those that leave the run. Otherwise the norms are None.
        """
        only = batches[0] if len(batches) == 1 and batches[0].views == 1 else None
        if only is None or type(self.contributing) is not Contributing or self.releasing.weights() is not None:
            return None, [self.errors(batch) for batch in batches]
        norms = self.first_norms(batches, release)
        outputs = self.engine.passes.outputs_kept
        return norms, [self.errors(only) if outputs is None else self._errors(only, outputs)]

    def errors(self, batch: Batch) -> Tensor:
        """`[u]` share of each unit's records that the model classifies wrongly; private.

        The model has the weights that would leave the run now, and stays in its mode (training or evaluation). Ask for
        errors before the norms of the same batch: trying the model out may drop what the engine keeps of these.
        """
        if not len(batch.labels):  # a model might fail on a made-up record, and so tell that the batch was empty
            return torch.zeros(0, device=self.population.device)
        features = batch.features[: len(batch.labels)]  # the first view of each record
        self.engine.try_out(features, batch.labels)
        return self._errors(batch, self.engine.outputs_at(features, self.releasing.weights()))

    def _errors(self, batch: Batch, outputs: Tensor) -> Tensor:
        return _mean_of_units(batch, self.wrong(outputs[: len(batch.labels)], batch.labels).float())

    def wrong(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return `[b]` bool: whether the objective counts each record as classified wrongly.

        Raises:
            EquidpError: for another type or shape, with which one record could spoil the whole count.
        """
        wrong = self.pursuing.wrong(outputs, labels)
        if wrong.dtype is not torch.bool or wrong.shape != labels.shape[:1]:
            raise EquidpError(
                f"{self.algorithm.name}: {type(self.pursuing).__name__}.wrong gives {wrong.dim()} dimensions of "
                f"{wrong.dtype}; it must be one bool for each record, as errors are counted. So ε would not hold."
            )
        return wrong

    def _labelled(self, batch: Batch) -> Batch:
        """Return the batch with the labels that the objective gives to the loss."""
        labels = self.pursuing.labels(batch)
        return batch if labels is batch.labels else replace(batch, labels=labels)

    def _look_size(self) -> int:
        return self.physical_batch_size or LOOK_BATCH

    def weights(
        self, norms: Tensor, groups: Tensor | None, public: Mapping[str, Tensor], *, finite: bool | None = None
    ) -> Tensor:
        """`[u]` weights. A record whose gradient is not finite gets weight 0 (and so adds nothing to the sum).

        `groups` may be None where no public value is per group, `finite` where `all_finite(norms)` is not known.
        """
        rule = self.algorithm.weights
        assert rule is not None
        seen = public if groups is None else per_record({k: public[k] for k in (*rule.reads, "scale")}, groups)
        if all_finite(norms) if finite is None else finite:
            return self._weighed(norms, seen)
        mask, known = self._finite(norms)
        return torch.where(mask, self._weighed(known, seen), self._zero)

    def _weighed(self, norms: Tensor, seen: Public) -> Tensor:
        rule = self.algorithm.weights
        assert rule is not None
        # A rule of others gets copies: Δ is made later, and would follow a value that the rule changed in place.
        weights = rule.weights(norms.clone(), copied(seen)) if self._ruled else rule.weights(norms, seen)
        return weights * seen["scale"] if self._scales else weights

    def _finite(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """`[u]` which norms are finite, and the norms with 0 for the others; kept, because a step asks twice."""
        if self._asked is None or self._asked[0] is not norms:
            mask = norms < torch.inf  # no norm is negative, so one comparison does what `isfinite` needs four for
            self._asked = norms, mask, torch.where(mask, norms, self._zero)
        return self._asked[1:]

    def _observe(
        self, norms: Tensor, weights: Tensor, batch: Batch, public: Mapping[str, Tensor] | None = None
    ) -> None:
        if self.diagnostics is None:
            return
        finite, groups, size = norms.isfinite(), batch.groups, self.plan.groups
        clean = self.contributing.weighted_sum(finite.float())
        self.diagnostics.chunk(norms, weights, groups, size, clean)
        self.diagnostics.observe(self.sampling.diagnostics())
        if not self.random.repeatable:  # a secure run collects no figures of each group
            return
        few = range(size if size * self.engine.dimension <= MOST_NUMBERS else 0)
        sums = [self.contributing.weighted_sum((finite & (groups == k)).float()) for k in few]
        bound = {name: value for name, value in (public or {}).items() if name == "clip_norm"}
        bounds = per_record(bound, groups).get("clip_norm")
        self.diagnostics.group_chunk(norms, groups, size, bounds, sums)

    def _observe_step(self, used: Tensor, facts: StepFacts) -> None:
        if self.diagnostics is not None:
            self.diagnostics.step(used, facts.noise_multiplier * facts.sensitivity * facts.dimension**0.5)

    def _diagnostic_row(self) -> dict[str, float]:
        assert self.diagnostics is not None
        row, self.diagnostics = self.diagnostics.row(), Diagnostics()
        return row


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies, for a part of another package that may change them in place."""
    return {name: value.clone() for name, value in values.items()}


def _mean_of_units(batch: Batch, of_records: Tensor) -> Tensor:
    """`[u]` mean of `[b]` values over each unit's records."""
    if batch.owners is None:
        return of_records
    total = torch.zeros(len(batch), device=of_records.device).index_add_(0, batch.owners, of_records)
    return total / torch.bincount(batch.owners, minlength=len(batch))


def packed(counts: Sequence[int], rows: int) -> list[int]:
    """Return how many units each chunk takes, in order, so that it has at most `rows` records.

    A unit with more than `rows` records has a chunk of its own.

    Args:
        counts: records of each unit.
    """
    sizes: list[int] = []
    room = 0
    for count in counts:
        if sizes and count <= room:
            sizes[-1] += 1
            room -= count
        else:
            sizes.append(1)
            room = rows - count
    return sizes
