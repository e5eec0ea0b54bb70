"""Trials of parts that come from another package, on private records, before anything made of these is released.

A trial checks what the bound and the ε rest on. A part must not exceed what it states. What it makes of a record must
not follow from the batch's other records, nor from those of earlier batches. Parts are tried in the first step, and
again as the run goes on, because a part may begin later to mix records or to keep them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.engine import Looks
from equidp.gradients.refusals import same
from equidp.mechanism.coins import Coins
from equidp.mechanism.float32 import SMALLEST
from equidp.mechanism.looking import Looking, copied
from equidp.mechanism.parts import (
    Draw,
    Public,
    Pursuing,
    Running,
    SideRelease,
    StepFacts,
    Tossed,
    draws_plainly,
    per_record,
)
from equidp.mechanism.states import global_random, set_global_random

TRIED, LABELLED = 3, 32
"""How many units a trial takes: `TRIED` for contributions, `LABELLED` for labels, losses, second coins, weights and
statistics."""

ROUNDING = 1e-5
"""By which share of its bound a weighted norm, or a squared shift, may exceed it, because float32 rounds."""


class Trying(Looking):
    """The part of the training loop that tries parts of other packages; a base class of `Trainer`."""

    public: dict[str, Tensor]
    _coins: Coins
    _tossed: Tossed
    _judged: bool
    """Whether the sampler comes from another package."""
    _trials: Looks
    _second_coins: Looks
    _weighings: Looks
    _counts: Looks
    """When the contribution, the sampler's second coin, the weight rule and the side release are tried."""

    @property
    def draws_on_host(self) -> bool:
        """Whether the host draws batches.

        A sampler of another package must then draw as `PoissonSampling` does, because batches of the host are not
        judged.
        """
        return self.sampling.on_host and (not self._judged or draws_plainly(self.sampling))

    def judge(self, draw: Draw) -> None:
        """Refuse batches that independent coins of the charged rate do not give, or coins that are not the run's.

        Raises:
            EquidpError: with what was found.
        """
        sampler = self.algorithm.sampler
        budgeted = sampler.budget(self.plan) is not None
        wrong = self._coins.unlike(draw.units, None if budgeted else self.sampling.rate)
        if not wrong and self.sampling.rate < 1 and not (budgeted or sampler.releases(self.plan) or self._tossed.asked):
            wrong = (
                "coins that are not the run's: whoever knows how foretells who is in a batch. Take them from "
                "run.random (bernoulli or uniform)"
            )
        if wrong:
            part = type(self.sampling).__name__
            raise EquidpError(f"{self.algorithm.name}: {part} draws {wrong}. So ε would not hold.")

    def kept(self, draw: Draw, norms: Tensor) -> Tensor | None:
        """Return `[u]` bool: which units of these norms the sampler's second coin keeps; None keeps all.

        Raises:
            EquidpError: if a sampler of another package decides on a record by the others of its batch: one record
                would then add its own vector and take another's away. If it keeps the norms that it is told, and
                charges nothing for them. If it gives anything but one bool for each unit, or None.
        """
        tried = self._judged and len(norms) > 0 and self._second_coins.due()
        before = self._sampler_tells() if tried else {}
        mask = self.sampling.kept(draw, norms)
        told = isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.shape == norms.shape
        if self._judged and mask is not None and not told:
            raise EquidpError(
                f"{self.algorithm.name}: {type(self.sampling).__name__}.kept must give one bool for each unit, a "
                "tensor [u], or None."
            )
        if tried and not (self.algorithm.sampler.releases(self.plan) or self.algorithm.sampler.budget(self.plan)):
            now = self._sampler_tells()
            if changed := [name for name in now if name not in before or not _unchanged(before[name], now[name])]:
                raise EquidpError(
                    f"{self.algorithm.name}: {type(self.sampling).__name__}.kept changes {changed[0]!r}, and charges "
                    "nothing for what it is told of the norms: what follows from them would not be private."
                )
        if mask is None or not tried:
            if tried:
                self._second_coins.held()
            return mask
        streams, global_state = self.random.state_dict(), global_random(self.population.device)
        some = draw.units[:LABELLED]
        asked, self._tossed.asked = self._tossed.asked, False
        few = Draw(some, None if draw.coins is None else draw.coins[: len(some)])
        alone = [self.sampling.kept(*one) for one in zip(few.split(1), norms[: len(some)].split(1), strict=True)]
        twice = self.sampling.kept(draw, norms)
        tossed, self._tossed.asked = self._tossed.asked, asked or self._tossed.asked
        self.random.set_back(streams)
        # A coin that `kept` itself draws may fall otherwise for a record alone. And in a batch of few units coins may
        # fall alike twice by chance, so it is the generators that tell whether any were drawn.
        fixed = not (self._drew(global_state) or tossed) and twice is not None and torch.equal(twice, mask)
        if fixed and any(one is None or bool(one) != bool(mask[at]) for at, one in enumerate(alone)):
            raise EquidpError(
                f"{self.algorithm.name}: {type(self.sampling).__name__}.kept decides on a record by the others of its "
                "batch, and may look at its own norm and coin, and at public values alone. So ε would not hold."
            )
        self._second_coins.held()
        return mask

    def _sampler_tells(self) -> dict[str, Any]:
        """Return copies of the sampler's attributes, and of what its `public` and `shown` give."""
        told = {"public()": copied(self.sampling.public()), "shown()": dict(self.sampling.shown())}
        return kept_of(self.sampling) | told

    def try_weights(self, norms: Tensor, weights: Tensor, groups: Tensor | None, public: Public) -> None:
        """Refuse a weight rule of another package that weighs records by one another, or beyond its bound.

        The rule was tried before the run. But the public values have changed since, and the rule may have changed, too.
        """
        if not (self._ruled and len(norms) and self._weighings.due()):
            return
        rule, before, wrong = self.algorithm.weights, global_random(self.population.device), ""
        assert rule is not None
        few = self._some(len(norms))
        of_groups = [None] * len(few) if groups is None else groups[few].split(1)
        alone = torch.cat([self.weights(*one, public) for one in zip(norms[few].split(1), of_groups, strict=True)])
        bounds = rule.bound(copied(public)) * public["scale"]
        most = bounds if groups is None or bounds.numel() == 1 else bounds.index_select(0, groups)
        added = weights.double() * torch.where(norms.isfinite() & (weights > SMALLEST), norms, self._zero)
        if not bool((weights >= 0).all()):
            wrong = "gives weights that are below 0, or no numbers"
        elif bool((added > most * (1 + ROUNDING)).any()):
            wrong = "lets a record add more than its `bound`"
        elif not (self._drew(before) or torch.allclose(weights[few], alone, rtol=1e-4, atol=0.0)):
            wrong = "weighs a record by the others of its batch, or of earlier ones"
        if wrong:
            name = type(rule).__name__
            raise EquidpError(f"{self.algorithm.name}: the weight rule {name} {wrong}. So ε would not hold.")
        self._weighings.held()

    @torch.no_grad()
    def try_statistic(self, norms: Tensor, groups: Tensor, public: Public, facts: StepFacts) -> None:
        """Refuse a side release of another package if a unit moves its statistic too far, or if it keeps units.

        It keeps something if `consequences` of one noised value change with the batch that `statistic` was given last.
        """
        release = self.algorithm.side_release
        if release is None or not (self._ruled and len(norms) and self._counts.due()):
            return
        before, seen = global_random(self.population.device), self._finite(norms)[1]
        everyone = torch.arange(len(seen), device=seen.device)

        def told(of: Tensor) -> Tensor:
            return release.statistic(seen[of], groups[of], copied(public), self.plan).double()

        def made() -> list[Tensor]:
            found = release.consequences(noised.clone(), copied(self.public), copied(public), facts)
            return [value.clone() for values in found for value in values.values()]

        whole, few = told(everyone), self._some(len(seen))
        moved = torch.stack([(whole - told(everyone[everyone != one])).norm() for one in few])
        room = _most(release, seen, groups, public)[few] * (1 + 1e-3) + 1e-5 * whole.norm()  # float32 sums round
        noised = torch.linspace(3, 1, len(whole), device=seen.device)
        told(everyone)
        first = made()
        told(everyone[:0])
        wrong = ""
        if not bool((moved <= room).all()):
            wrong = "lets a unit of a batch move its statistic by more than its `sensitivity` or `added` says"
        elif not all(map(same, first, made())):
            wrong = "makes of a noised value what follows from records that it was told of before"
        if not self._drew(before) and wrong:
            name = type(release).__name__
            raise EquidpError(f"{self.algorithm.name}: the side release {name} {wrong}. So ε would not hold.")
        self._counts.held()

    def _some(self, size: int) -> Tensor:
        """Return at most `LABELLED` positions below `size`, others at another step."""
        return (torch.arange(min(size, LABELLED), device=self.population.device) + self.steps_done) % size

    def try_contribution(self, draws: Sequence[Draw]) -> None:
        """Refuse a contribution or an objective of another package that does not hold what it says.

        No vector may be longer than its norm: every bound is a bound of norms. And a record's vector, norm, label and
        loss must not follow from other records. In a step that is cut into chunks, no more units are tried together
        than a chunk has.
        """
        first, streams = draws[0].units, self.random.state_dict()
        halves = first[:LABELLED].tensor_split(2) if len(draws) == 1 else [draw.units[:LABELLED] for draw in draws[:2]]
        apart = torch.cat([draw.units[:TRIED] for draw in draws[:TRIED]])[:TRIED]
        wrong = (
            self._relabelled(first[:LABELLED])
            or self._kept_losses(*halves)
            or self._untrue_of(first[:TRIED])
            or self._keeps_vectors(apart)
        )
        self.random.set_back(streams)  # a resumed run tries its parts at other steps, and must draw the same numbers
        if wrong:
            beside = "" if type(self.pursuing) is Pursuing else f" beside {type(self.pursuing).__name__}"
            part = type(self.contributing).__name__ + beside
            raise EquidpError(
                f"{self.algorithm.name}: {part} does not hold what it says: {wrong}. So ε would not hold."
            )
        self._trials.held()

    def _relabelled(self, units: Tensor) -> str:
        """Return what is wrong if a record's label, as the loss takes it, follows from others of its batch; else "".

        Where the side release counts errors, whether a record is classified wrongly must not follow from others either.
        """
        if type(self.pursuing) is Pursuing:
            return ""
        before = global_random(self.population.device)
        alone = torch.cat([self._labelled(self.population.batch(unit)).labels for unit in units.split(1)])
        together = self._labelled(self.population.batch(units)).labels
        drawn = self._drew(before)
        alike = drawn or (alone.shape == together.shape and _alike(alone, together))
        if not alike:
            return "the label of a record changes with the others of its batch"
        side = self.algorithm.side_release
        return self._misjudged(units) if side is not None and side.of_errors else ""

    @torch.no_grad()
    def _misjudged(self, units: Tensor) -> str:
        """Return what is wrong if the others of a batch change whether a record is classified wrongly; else ""."""
        batch, before = self._labelled(self.population.batch(units)), global_random(self.population.device)
        outputs = self.engine.outputs(batch.features)
        together = self.wrong(outputs, batch.labels)
        alone = [self.wrong(*one) for one in zip(outputs.split(1), batch.labels.split(1), strict=True)]
        self._drew(before)
        alike = torch.equal(torch.cat([*alone, together[:0]]), together)
        return "" if alike else "whether a record counts as classified wrongly changes with the others of its batch"

    @torch.no_grad()
    def _kept_losses(self, some: Tensor, others: Tensor) -> str:
        """Return what is wrong if a record's loss follows from earlier batches; else "".

        On a CPU every digit must agree, because small differences of many records add up.
        """
        if type(self.pursuing) is Pursuing or not (len(some) and len(others)):
            return ""
        before = global_random(self.population.device)
        outputs = [self.engine.outputs(self.population.batch(part).features) for part in (some, others)]
        self._drew(before)  # set back what dropout drew: only draws of the loss itself count below
        first, _, again = self._lost(some, outputs[0]), self._lost(others, outputs[1]), self._lost(some, outputs[0])
        # on a GPU the same computation may round differently from one time to the next
        alike = self._drew(before) or (same if first.device.type == "cpu" else _alike)(first, again)
        return "" if alike else "the loss of a record changes with the records of earlier batches"

    def _lost(self, units: Tensor, outputs: Tensor) -> Tensor:
        """`[b]` losses of these units at given outputs."""
        batch = self._labelled(self.population.batch(units))
        return self.engine.passes.watched(lambda: self.engine.loss(outputs, batch.labels))

    def _untrue_of(self, few: Tensor) -> str:
        """Return what the contribution states wrongly of these units; "" if nothing."""
        before = global_random(self.population.device)
        ones = torch.ones(len(few), device=few.device)
        alone, vectors_alone = [], []
        for unit in few.split(1):
            alone.append(self.norms_of(self.batch(unit)))
            vectors_alone.append(self.contributing.weighted_sum(ones[:1]))
        norms = self.norms_of(self.batch(few))
        vectors = torch.stack([self.contributing.weighted_sum(weights) for weights in ones.diag()])
        together = self.contributing.weighted_sum(ones)
        drawn = self._drew(before)
        if not bool(norms.isfinite().all()):
            return ""
        room = 0.02 * norms.max() + 1e-12  # in half precision a batch of another size rounds differently
        # On a CPU norms and vectors come from one pass, with the same precision. So the tolerance is a share of each
        # record's own norm, and finds records with short gradients too.
        longer = room if norms.is_cuda else 1e-3 * norms + 1e-5 * norms.max() + 1e-12
        if bool((vectors.norm(dim=1) > norms + longer).any()):
            return "the vector of a record is longer than its norm"
        if bool((together - vectors.sum(0)).norm() > len(few) * room):
            return "`weighted_sum` is no sum of the records' vectors"
        if not drawn and bool(((torch.cat(alone) - norms).abs() > room).any()):
            return "the norm of a record changes with the others of its batch"
        if not drawn and bool(((torch.stack(vectors_alone) - vectors).norm(dim=1) > 2 * room).any()):
            return "the vector of a record changes with the others of its batch"
        return ""

    def _keeps_vectors(self, few: Tensor) -> str:
        """Return what is wrong if a unit's vector follows from earlier batches; else "". Units are tried alone."""
        if len(few) < TRIED or not self.contributing.remembers:
            return ""
        before = global_random(self.population.device)
        kept = self._remembered(few)
        alike = self._drew(before) or not kept
        return "" if alike else "the vector of a record changes with the records of earlier batches"

    def _drew(self, before: Mapping[str, Tensor]) -> bool:
        """Whether torch's generators have drawn since they had these states; sets them back to these."""
        now = global_random(self.population.device)
        set_global_random(before, self.population.device)
        return any(not torch.equal(before[name], state) for name, state in now.items())

    def _remembered(self, few: Tensor) -> bool:
        """Whether a unit's vector after a step with a second unit alone differs from that after a step with a third."""
        one, *others = few.split(1)
        running, taken = self.contributing, self.engine.flatten()
        before, found = kept_of(running), []
        for other in others:
            running.norms(self.batch(other))
            running.weighted_sum(torch.ones(1, device=few.device))
            running.advance(taken + 1e-3)  # as if both steps had moved the parameters alike
            running.norms(self.batch(one))
            found.append(running.weighted_sum(torch.ones(1, device=few.device)))
            vars(running).clear()  # attributes that it has begun to keep go, too
            vars(running).update(before)
            before = kept_of(running)
        # Both vectors come from the same calls, which round alike in half precision too. Only what the contribution
        # has kept can make them differ.
        return bool((found[0] - found[1]).norm() > 1e-3 * found[0].norm() + 1e-12)


def _most(release: SideRelease, norms: Tensor, groups: Tensor, public: Public) -> Tensor:
    """Return `[u]`: by how much a unit of each norm may move the statistic, as the release says."""
    most = torch.full_like(norms, release.sensitivity())
    if type(release).joint_noise is not SideRelease.joint_noise:  # its charge may not rest on `added`
        return most
    for piece in reversed(release.added()):
        if piece.upto == math.inf:
            most = torch.full_like(norms, piece.most)
        elif piece.unit in public:
            edges = piece.upto * per_record({piece.unit: public[piece.unit]}, groups)[piece.unit]
            most = torch.where(norms <= edges, piece.most, most)
    return most


def _alike(alone: Tensor, together: Tensor) -> bool:
    """Whether labels or losses agree: whole numbers exactly, others to 1 % of the largest one.

    A model that makes labels rounds differently in a batch of another size.
    """
    if not alone.is_floating_point():
        return torch.equal(alone, together)
    room = 0.01 * float(alone.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(alone, together, rtol=0.0, atol=room, equal_nan=True)


def kept_of(running: Running) -> dict[str, Any]:
    """Return a running part's attributes, with copies of those that a step may change in place."""
    return {name: _copied(value) for name, value in vars(running).items()}


def _unchanged(before: Any, now: Any) -> bool:
    """Whether an attribute has the value that it had."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and same(before, now)
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return np.array_equal(before, now, equal_nan=before.dtype.kind in "fc" and now.dtype.kind in "fc")
    if isinstance(before, Number) and isinstance(now, Number):  # NumPy's, too; NaN is the same as NaN
        return bool(before == now or (before != before and now != now))
    if type(before) is type(now) and isinstance(before, dict):
        return before.keys() == now.keys() and all(_unchanged(value, now[name]) for name, value in before.items())
    if type(before) is type(now) and isinstance(before, (list, tuple, deque)):
        return len(before) == len(now) and all(map(_unchanged, before, now))
    return before is now or (before == now) is True


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is deque:
        return deque(map(_copied, value), value.maxlen)
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    return copy(value) if isinstance(value, (list, dict, set, deque)) else value
