"""Run an audit: canaries against the claimed ε, and membership inference per group, before and after privacy.

Results are findings, not guarantees. A bound below the claim does not refute the claim; a bound above it refutes it at
the stated level. The figures are computed from exact training data and are outside the guarantee.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equidp.accounting.accounted import Accounted
from equidp.accounting.epsilon import epsilon_of
from equidp.accounting.trials import Trials
from equidp.audit.canaries import Verdict, coins, gradient_scores, input_scores, joined, seeded, verdict
from equidp.audit.membership import alike, at_most, exposure, exposure_per_group, halves, reference_scores
from equidp.audit.one_run import epsilon_lower_bound
from equidp.audit.setup import TrainingSetup, losses
from equidp.data.records import Records, Split
from equidp.errors import EquidpError
from equidp.mechanism.noise import derived_seed
from equidp.parameters import AuditSettings

REMEDY = (
    "Audit it at a smaller privacy.epsilon, or with more canaries and guesses (audit.gradient_canaries, audit.guesses)."
)
"""What to do if even an attack without an error could not have refuted the claim."""


FALSE_ALARMS = (0.01, 0.03, 0.1, 0.3)
"""Rates of false alarms at which the canaries' results are compared with the trade-off curve."""


def run(
    split: Split,
    setup: TrainingSetup,
    settings: AuditSettings,
    *,
    seed: int,
    groupings: Sequence[str] = ("class",),
    progress: bool = False,
) -> dict[str, Any]:
    """Audit one algorithm on one dataset.

    Args:
        split: training and test part; the public part is `setup.public`.
        setup: how to train.
        settings: which attacks, and how large.
        seed: of coins, labels, batches and noise.
        groupings: groupings for whose groups membership inference is reported. The attacked records are drawn from each
            group of the first one.
        progress: whether a bar is shown.

    Returns:
        Plain JSON types: `algorithm`, `seed`, `confidence`, `claim`, `training` (public facts that identify the
        audited training), `gradient_canaries`, `input_canaries` (each None if left out) and `membership` (per model
        `sgd` and the algorithm, per attack, `overall` and `groups`).

    Raises:
        EquidpError: the run claims no ε, test records take part in it, or every attack is left out.
    """
    if not setup.algorithm.private:
        raise EquidpError(
            f"{setup.algorithm.name} claims no ε, so there is nothing to audit: choose another algorithm."
        )
    if setup.algorithm.acceptance.on_test:
        raise EquidpError(
            f"{setup.algorithm.name}: energy=test trains with the test records, and an audit needs records that had no "
            "part in the training. Audit it with energy=public or energy=private."
        )
    if not (settings.gradient_canaries or settings.input_canaries or settings.membership):
        raise EquidpError(
            "Every attack is left out: give audit.gradient_canaries or audit.input_canaries, or audit.membership=true."
        )
    plan = setup.algorithm.adapt(setup.plan)
    findings: dict[str, Any] = {
        "algorithm": setup.algorithm.name,
        "seed": seed,
        "confidence": settings.confidence,
        "claim": {"epsilon": claimed(setup, plan.delta), "delta": plan.delta, "trade_off": claimed_curve(setup)},
        "training": {
            "records": plan.records,
            "expected_batch_size": plan.batch_size,
            "steps": plan.steps,
            "noise_multiplier": plan.noise_multiplier,
        },
        "gradient_canaries": None,
        "input_canaries": None,
        "membership": {},
    }
    if settings.gradient_canaries:
        findings["gradient_canaries"] = _gradient(split.train, setup, settings, seed, progress)
    if settings.input_canaries:
        findings["input_canaries"] = _input(split.train, setup, settings, seed)
    if settings.membership:
        findings["membership"] = _membership(split, setup, settings, seed, groupings)
    return findings


def claimed(setup: TrainingSetup, delta: float) -> float:
    """Return the ε that the setup's training claims at δ, from its events or its budget."""
    return _claim(setup).epsilon(delta).value


def claimed_curve(setup: TrainingSetup) -> dict[str, Any] | None:
    """Return the trade-off curve that the setup's training claims; None if none is known."""
    curve = _claim(setup).trade_off()
    return curve.to_dict() if curve else None


def _claim(setup: TrainingSetup) -> Accounted:
    """Return what a single training costs, even if the statement's ε is for several trials.

    The audit trains once. Compared with the ε of all trials together, this training could have almost no noise and not
    be refuted.
    """
    algorithm, plan = setup.algorithm, setup.algorithm.adapt(setup.plan)
    budget, events = algorithm.budget(plan), algorithm.events(plan)
    if budget is not None:
        alone = epsilon_of(budget.total, budget.order, plan.delta)
        budget = dataclasses.replace(budget, trials=1, epsilon=alone)
    return Accounted(dataclasses.replace(plan, trials=Trials()), events, events, budget)


def achieved(scores: Tensor, included: Tensor) -> list[list[float]]:
    """Return the shares of canaries accused wrongly and recognised, by thresholds at some rates of false alarms.

    A new canary that is out exceeds the k-th largest of n such canaries with probability k/(n + 1). The rate among
    these n, (k − 1)/n, is too small, because the threshold is one of them: an attack that sees nothing would lie above
    blind guessing.
    """
    members, others = scores[included], scores[~included].sort(descending=True).values
    points = []
    for rate in FALSE_ALARMS:
        if (accused := round(rate * len(others))) > 0:
            share = float((members > others[accused - 1]).double().mean())
            points.append([accused / (len(others) + 1), share])
    return points


def audited_delta(setup: TrainingSetup, settings: AuditSettings, canaries: int) -> float:
    """Return δ of the audit. A fixed list of events claims an ε at every δ; a budget only at the δ it was made for."""
    return settings.delta_of(canaries) if setup.algorithm.fixed else setup.plan.delta


def _gradient(
    train: Records, setup: TrainingSetup, settings: AuditSettings, seed: int, progress: bool
) -> dict[str, Any]:
    included = coins(settings.gradient_canaries, seed, "gradient")
    random = seeded(setup, seed, "gradient")
    scores = gradient_scores(setup, train, included, random, progress=progress)
    return _judged(scores, included, setup, settings)


def _input(train: Records, setup: TrainingSetup, settings: AuditSettings, seed: int) -> dict[str, Any]:
    count = min(settings.input_canaries, len(train) // 2)
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(derived_seed(seed, "audit/chosen")))[
        :count
    ]
    included = coins(count, seed, "input")
    scores = input_scores(setup, train, chosen, included, seeded(setup, seed, "input"), seed=seed)
    return _judged(scores, included, setup, settings)


def _judged(scores: Tensor, included: Tensor, setup: TrainingSetup, settings: AuditSettings) -> dict[str, Any]:
    """Return the verdict beside the claim at the same δ, and the most that any guesses could have shown."""
    canaries = len(scores)
    found: Verdict = verdict(
        scores,
        included,
        guesses=settings.guesses_of(canaries),
        delta=audited_delta(setup, settings, canaries),
        confidence=settings.confidence,
    )
    claim = claimed(setup, found.delta)
    every = epsilon_lower_bound(canaries, found.guesses, found.guesses, found.delta, confidence=found.confidence)
    return dataclasses.asdict(found) | {
        "epsilon_claimed": claim,
        "epsilon_within_reach": every,
        "consistent": found.epsilon_lower_bound <= claim,
        "refutable": every > claim,
        "achieved": achieved(scores, included),
    }


def _membership(
    split: Split, setup: TrainingSetup, settings: AuditSettings, seed: int, groupings: Sequence[str]
) -> dict[str, Any]:
    partition = split.train.grouping(groupings[0])[0], split.test.grouping(groupings[0])[0]
    members, others = (
        part.take(at_most(groups, settings.membership_records, seed))
        for part, groups in zip((split.train, split.test), partition, strict=True)
    )
    plain = dataclasses.replace(setup, algorithm=setup.baseline)
    attacked = {
        name: [losses(model, part, setup.loss) for part in (members, others)]
        for name, model in (
            (kind.algorithm.name, kind.train(split.train, seeded(kind, seed, "membership"))) for kind in (plain, setup)
        )
    }
    scores = {name: {"loss": (-inside, -outside)} for name, (inside, outside) in attacked.items()}
    if settings.reference_models:
        references, seen = _references(members, others, plain, settings.reference_models, seed)
        for name, both in attacked.items():
            joined = reference_scores(torch.cat(both), references, seen)
            scores[name]["reference"] = (joined[: len(members)], joined[len(members) :])
    return {
        name: {attack: _exposures(sides, members, others, settings, seed, groupings) for attack, sides in found.items()}
        for name, found in scores.items()
    }


def _references(
    members: Records, others: Records, plain: TrainingSetup, count: int, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses on members and others of models trained on halves of them, and the half of each model."""
    pool = joined(members, others)
    masks = halves(len(pool), count // 2, seed)
    plan = dataclasses.replace(plain.plan, records=len(pool) // 2)
    plan = dataclasses.replace(plan, batch_size=min(plan.batch_size, plan.records))
    shadow = dataclasses.replace(plain, plan=plan, by_unit=False)
    found = []
    for number, mask in enumerate(masks):
        model = shadow.train(pool.take(mask), seeded(shadow, seed, f"reference/{number}"))
        found.append(losses(model, pool, plain.loss))
    return found, masks


def _exposures(
    sides: tuple[Tensor, Tensor],
    members: Records,
    others: Records,
    settings: AuditSettings,
    seed: int,
    groupings: Sequence[str],
) -> dict[str, Any]:
    how: dict[str, Any] = {"resamples": settings.resamples, "confidence": settings.confidence, "seed": seed}
    first, *_ = groupings
    whole = list(zip(sides, (members, others), strict=True))
    # records were drawn by groups of the first grouping; all other figures need equal shares of these on both sides
    equal = alike(members.grouping(first)[0], others.grouping(first)[0], seed)
    mixed = [(scores[rows], part.take(rows)) for (scores, part), rows in zip(whole, equal, strict=True)]
    groups = {}
    for grouping in groupings:
        (inside, one), (outside, other) = whole if grouping == first else mixed
        ids, names = one.grouping(grouping)
        groups[grouping] = exposure_per_group(
            inside, outside, ids, other.grouping(grouping)[0], names, _units(one, other), **how
        )
    (inside, one), (outside, other) = mixed
    return {"overall": exposure(inside.numpy(), outside.numpy(), _units(one, other), **how), "groups": groups}


def _units(one: Records, other: Records) -> tuple[np.ndarray, np.ndarray] | None:
    return None if one.unit is None or other.unit is None else (one.unit.numpy(), other.unit.numpy())
