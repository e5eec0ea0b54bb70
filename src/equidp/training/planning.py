"""The public facts of a run, fixed before its first step; a part that breaks its promise is refused here."""

from __future__ import annotations

import torch
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.accounting.trials import Trials
from equidp.data.records import Records
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.float32 import SMALLEST
from equidp.mechanism.parts import Public, WeightRule, scheduled, tensors
from equidp.mechanism.sampling import Population
from equidp.parameters import PrivacySettings, TrainingSettings

ROUNDING = 1e-5
"""How far rounding in float32 may carry a weighted norm beyond its bound."""


def plan_run(
    algorithm: Algorithm, *, units: int, groups: int, privacy: PrivacySettings, training: TrainingSettings
) -> Plan:
    """Fix the run's public facts, solving for the noise where a target ε is given.

    Args:
        algorithm: the combination of parts.
        units: declared number of privacy units in the training part.
        groups: K of the partition used in training.

    Raises:
        EquidpError: where the target cannot be met, the batch exceeds the data, an optimiser or average is asked for
            beside the algorithm's own, a part does not do what it promises, or settings are given in place of the
            algorithm they build.
    """
    if not isinstance(algorithm, Algorithm):
        raise EquidpError(
            f"{algorithm!r} is no algorithm: build one, such as "
            "algorithm_settings('dpsgd', {'clip_norm': 1.0}).build()."
        )
    algorithm.averaged(training.average).optimizer_beside(training.descent)
    plan = Plan(
        records=units,
        batch_size=training.batch_size,
        epochs=training.epochs,
        groups=groups,
        delta=privacy.delta,
        noise_multiplier=(privacy.noise_multiplier or 0.0) if algorithm.private else 0.0,
        trials=privacy.trials if algorithm.private else Trials(),
    )
    adapted = algorithm.adapt(plan)
    _refuse_broken_promises(algorithm, adapted)
    if algorithm.private and privacy.epsilon is not None:
        return algorithm.calibrated(plan, privacy.epsilon, published=privacy.epsilon_as == "published")
    return adapted


def _refuse_broken_promises(algorithm: Algorithm, plan: Plan) -> None:
    """What ε is computed from, tried out: a part of one's own must not train before its tests are written.

    Some norms, at the values of the first step; the contract tests go through more of both.
    """
    segments = algorithm.schedule.segments(plan)
    if (steps := sum(segment.steps for segment in segments)) != plan.steps:
        raise EquidpError(
            f"{algorithm.name}: the segments of the schedule {type(algorithm.schedule).__name__} come to {steps} steps "
            f"where the run has {plan.steps}; make them add up to plan.steps."
        )
    rule, public = algorithm.weights, tensors(algorithm.initial, "cpu")
    if rule is None or not rule.reads <= public.keys():  # the sampler's values come with the first epoch
        return
    if broken := _broken_promise(rule, scheduled(public, segments[0])):
        raise EquidpError(
            f"{algorithm.name}: the weight rule {type(rule).__name__} {broken}. With it ε would not hold: mend it."
        )


def _broken_promise(rule: WeightRule, public: Public) -> str:
    """What is wrong with a rule's weights; empty where nothing is found."""
    norms = torch.logspace(-9, 9, 55)
    weights = rule.weights(norms, public)
    if weights.shape != norms.shape:
        return f"gives weights of shape {tuple(weights.shape)} for {len(norms)} records, and must give one for each"
    if not (weights >= 0).all():
        return "gives weights that are below 0, or no numbers"
    alone = torch.cat([rule.weights(norm, public) for norm in norms.split(1)])
    if not torch.allclose(weights, alone, rtol=1e-4, atol=0.0):
        return "weighs a record by the others of its batch, and may look at its own norm and public values alone"
    added = weights.double() * norms * (weights > SMALLEST)  # below, float32 has few digits left
    if float(added.max()) > float(rule.bound(public)) * (1 + ROUNDING):
        return f"lets a record add {added.max():.6g}, more than the {float(rule.bound(public)):.6g} of its `bound`"
    return ""


def groups_of(algorithm: Algorithm, records: Records, grouping: str) -> tuple[Tensor, tuple[str, ...]]:
    """Group ids `[N]` and names of the partition that the algorithm is told.

    Raises:
        EquidpError: where it needs the classes, and the grouping is another.
    """
    ids, names = records.grouping(grouping)
    if algorithm.objective.by_class and names != records.schema.classes:
        raise EquidpError(
            f"{algorithm.name} allows for how rare each class is, so its groups have to be the classes, not "
            f"{grouping!r}: put class first in data.groups."
        )
    return ids, names


def units_in(train: Records, privacy: PrivacySettings) -> int:
    """N, the declared number of privacy units in the training part.

    Where each record's own hash says whether it trains, it is the expected number: rates, steps and noise must not tell
    how many there are. Else it is how many there are, and taken as public.
    """
    there = Population(train, train.labels, by_unit=privacy.by_unit).size
    planned = None if train.membership is None else train.membership.expects(by_unit=privacy.by_unit)
    return there if planned is None else planned
