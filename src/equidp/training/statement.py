"""The privacy statement of a finished run (`privacy.json`): what is guaranteed, for whom, at what ε."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from equidp.accounting.ledger import Epsilon, Event, counted, epsilon, merged
from equidp.accounting.plan import Plan
from equidp.data.membership import told, told_size
from equidp.data.records import Membership
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm, Outcome
from equidp.parameters import PrivacySettings, TrainingSettings


def privacy_statement(
    algorithm: Algorithm,
    plan: Plan,
    outcome: Outcome,
    *,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int,
    public: int = 0,
    membership: Membership | None = None,
) -> dict[str, Any]:
    """privacy.json: what is guaranteed, for whom, at what ε; enough to recompute ε from.

    Raises:
        EquidpError: if the ledger holds less, or other things, than the plan that ε was computed for.
    """
    plan = algorithm.adapt(plan)
    base = {
        "algorithm": algorithm.name,
        "private": algorithm.private,
        "delta": plan.delta,
        "records": plan.records,
        "expected_batch_size": plan.batch_size,
        "steps": plan.steps,
        "epochs": plan.epochs,
        "groups": plan.groups,
        "seed": None if privacy.secure else seed,
        "secure": privacy.secure and algorithm.private,
        "unit": privacy.unit,
        "trials": privacy.trials,
    }
    if not algorithm.private:
        return base | {
            "epsilon": None,
            "epsilon_rdp": None,
            "epsilon_pld": None,
            "epsilon_published": None,
            "ledger": [],
            "notes": ["Non-private baseline: nothing computed from it carries a guarantee."],
        }
    spent, published = _spent(algorithm, plan, outcome), algorithm.published_epsilon(plan, outcome)
    assert published is not None
    declared = _declares_records(algorithm, plan)
    size = told_size(membership, privacy.unit, plan.records, by_unit=privacy.by_unit)
    if declared:
        size = f"The declared number of {privacy.unit}s ({plan.records}; how many there are is protected, too)"
    return base | {
        "records_declared": declared or _by_declared_sizes(membership, plan, privacy),
        "membership": None if membership is None else {"how": membership.how, "key": membership.key},
        "epsilon": spent.value,
        "epsilon_rdp": spent.rdp,
        "epsilon_pld": spent.pld if math.isfinite(spent.pld or 0.0) else None,  # a tiny δ is below its grid
        "epsilon_published": dataclasses.asdict(published),
        "epsilon_fixed_before_training": algorithm.fixed,
        "target_epsilon": privacy.epsilon,
        "target_epsilon_as": privacy.epsilon_as if privacy.epsilon is not None else None,
        "noise_multiplier": plan.noise_multiplier,
        "adjacency": f"add or remove one {privacy.unit}" + (" with all its records" if privacy.by_unit else ""),
        "sampling": algorithm.sampler.told(privacy.unit),
        "sampling_rate": algorithm.sampler.sampling_rate(plan),
        "ledger": [event.to_dict() for event in outcome.events],
        **_spent_otherwise(algorithm, plan, outcome),
        "accepted_steps": outcome.accepted_steps,
        "releases": ["The model after every step.", *(part.released for part in algorithm.parts if part.released)],
        "public_records": public if algorithm.needs_public else 0,  # else unused: their number would only tell N
        "diagnostics_published": ["nonprivate/*"] if training.diagnostics else [],
        "assumptions": [
            f"{size}, the batch size, the number of steps, the schema, the number of groups and all hyper-parameters "
            "are public.",
            "What the model starts from is public and was not computed from these records: initial weights, and "
            "pretrained weights, word vectors or feature maps read from files.",
            told(membership, privacy.unit),
            "ε holds for this run alone: publishing several runs composes their ledgers."
            + ("" if privacy.secure else " Runs of one seed share batches and noise, and do not even compose."),
        ],
        "notes": [],
    }


def _declares_records(algorithm: Algorithm, plan: Plan) -> bool:
    """Whether N is a setting, the same for any data."""
    return algorithm.adapt(dataclasses.replace(plan, records=plan.records + 1)).records == plan.records


def _by_declared_sizes(membership: Membership | None, plan: Plan, privacy: PrivacySettings) -> bool:
    """Whether N is what is expected of declared sizes."""
    if membership is None or not membership.declares(by_unit=privacy.by_unit):
        return False
    return membership.expects(by_unit=privacy.by_unit) == plan.records


def _spent_otherwise(algorithm: Algorithm, plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """What ε is of, where it is not the ledger's: a Rényi budget, or the cap of a run that might have gone on."""
    if budget := algorithm.sampler.budget(plan):
        return {"filter_order": budget.order, "filter_total": budget.total}
    if algorithm.fixed:
        return {}
    return {"capped_ledger": [event.to_dict() for event in _capped(algorithm, plan, outcome)]}


def _capped(algorithm: Algorithm, plan: Plan, outcome: Outcome) -> tuple[Event, ...]:
    """The most that a run which may stop early can have charged, whenever it stopped.

    The last life may have taken as many candidates as the cap allows; earlier lives took at most what is charged.
    """
    alone = algorithm.covers(plan, outcome.events, outcome.steps)
    return algorithm.events(plan) if alone else merged((*algorithm.events(plan), *outcome.events))


def _spent(algorithm: Algorithm, plan: Plan, outcome: Outcome) -> Epsilon:
    """ε of a finished run: that of its plan, cap or budget; of its ledger, where a crash made it charge more."""
    if algorithm.covers(plan, outcome.events, outcome.steps):
        return algorithm.epsilon(plan)
    planned, charged = counted(algorithm.events(plan)), counted(outcome.events)
    if algorithm.fixed and planned <= charged and planned.keys() == charged.keys():
        return epsilon(outcome.events, plan.delta)  # repeated steps of a resumed run, each charged again
    if algorithm.acceptance.may_stop and charged.keys() <= planned.keys():
        return epsilon(_capped(algorithm, plan, outcome), plan.delta)
    raise EquidpError(
        "The ledger differs from the plan that ε was computed for; the run is not covered by its ε. "
        "This is a bug: please report it with the settings."
    )
