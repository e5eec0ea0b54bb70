"""The privacy statement of a finished run (`privacy.json`): what is guaranteed, for whom, at what ε."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from equidp.accounting.accounted import Accounted
from equidp.accounting.events import beyond, counted, merged
from equidp.accounting.plan import Plan
from equidp.algorithms import of_a_paper
from equidp.data.membership import size_sentence, split_sentence
from equidp.data.records import Membership
from equidp.data.sources import unit_noun
from equidp.errors import EquidpError
from equidp.evaluation.histogram import figures_event, sensitivity, tables
from equidp.mechanism.algorithm import Algorithm, Outcome
from equidp.mechanism.parts import Part
from equidp.mechanism.parts.base import listed, of_others
from equidp.parameters import DataSettings, PrivacySettings, TrainingSettings
from equidp.training.planning import declares_records

LEFT = (
    "The loop was interrupted within a step, or went back to an earlier state. Steps that are taken again have other "
    "noise, and both count, whether or not they have been taken again: ε is larger than of a loop without a break. It "
    "holds if neither the break nor the decision to go on followed from what the loop had shown."
)

REPEATED = (
    "The run was interrupted. Steps since its last checkpoint were taken again, with other noise, and both count: ε is "
    "larger than of a run without a break. It holds if neither the break nor the decision to go on followed from what "
    "the run had shown."
)


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
    grouping: str = "",
    left: bool = False,
) -> dict[str, Any]:
    """Return privacy.json: what is guaranteed, for whom, at what ε; it is enough to recompute ε.

    Args:
        grouping: the partition of the algorithm's groups; the releases then name it.
        left: whether a loop may have been left before the plan's end. ε is of the whole plan then, too.

    Raises:
        EquidpError: if the ledger holds fewer or other events than the plan for which ε was computed.
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
        "trials": plan.trials.to_dict(),
    }
    if not algorithm.private:
        return base | {
            "epsilon": None,
            "epsilon_rdp": None,
            "epsilon_pld": None,
            "epsilon_published": None,
            "epsilon_replace_one": None,
            "trade_off": None,
            "ledger": [],
            "notes": ["Non-private baseline: nothing computed from it carries a guarantee."],
        }
    accounted = accounted_for(algorithm, plan, outcome, left=left)
    spent, published = accounted.epsilon(), algorithm.published_epsilon(plan, outcome)
    assert published is not None
    # the published figure is of one training without repeated steps: for more it is no bound
    bounds = published.guarantee and plan.trials.single and accounted.run == accounted.planned
    declared, curve = declares_records(algorithm, plan), accounted.trade_off()
    return base | {
        "records_declared": declared or _by_declared_sizes(membership, plan, privacy),
        "membership": membership_facts(membership),
        "epsilon": spent.value,
        "epsilon_rdp": spent.rdp,
        "epsilon_pld": spent.pld if math.isfinite(spent.pld or 0.0) else None,  # infinite where δ is below its grid
        "epsilon_published": dataclasses.asdict(published) | {"guarantee": bounds, "paper": of_a_paper(algorithm.name)},
        "epsilon_replace_one": accounted.replace_one(),
        "epsilon_fixed_before_training": algorithm.fixed,
        "target_epsilon": privacy.epsilon,
        "target_epsilon_as": privacy.epsilon_as if privacy.epsilon is not None else None,
        "noise_multiplier": plan.noise_multiplier,
        "adjacency": _adjacency(privacy, declared=declared),
        "sampling": algorithm.sampler.description(unit_noun(privacy.unit)),
        "sampling_rate": algorithm.sampler.sampling_rate(plan),
        "ledger": [event.to_dict() for event in outcome.events],
        **accounted.statement_entries(fixed=algorithm.fixed, ledger=merged(outcome.events)),
        "trade_off": curve.to_dict() if curve else None,
        "accepted_steps": outcome.accepted_steps,
        "releases": ["The model after every step.", *_released(algorithm, plan, grouping)],
        "public_records": public if algorithm.needs_public else 0,  # if unused, their number would only tell N
        **({"test_records_decide": True} if algorithm.acceptance.on_test else {}),
        "diagnostics_published": ["nonprivate/*"] if training.diagnostics else [],
        "assumptions": _assumptions(algorithm, plan, privacy, membership, declared=declared),
        **({} if accounted.run == accounted.planned else {"steps_repeated": True}),
        "notes": [] if accounted.run == accounted.planned else [LEFT if left else REPEATED],
    }


def _released(algorithm: Algorithm, plan: Plan, grouping: str) -> list[str]:
    """What is released besides the model: a sentence for each part that releases something."""
    untold = [part for part in (algorithm.side_release, *_charging(algorithm, plan)) if part and not part.released]
    words = [part.released for part in algorithm.parts if part.released]
    words += [f"Noised values of {type(part).__name__}, which does not say what they are." for part in untold]
    return [*words, f"Groups are those of {grouping}."] if grouping and algorithm.of_groups else words


def _charging(algorithm: Algorithm, plan: Plan) -> list[Part]:
    """The parts that have events of their own."""
    sampler, acceptance = algorithm.sampler, algorithm.acceptance
    found = [(sampler, sampler.releases(plan) or sampler.budget(plan)), (acceptance, acceptance.candidate_events(plan))]
    return [part for part, events in found if events]


def _of_others(algorithm: Algorithm, plan: Plan) -> list[str]:
    """What ε rests on if parts are not this package's, because nobody has proved their promises."""
    charging = _charging(algorithm, plan)
    told = {
        "Parts of others hold what they promise: {}. Trials found no fault, which proves nothing.": algorithm.parts,
        "Their own events cover all that these make of the records, which nobody has tried: {}.": charging,
    }
    named = {words: [type(part).__name__ for part in parts if of_others(part)] for words, parts in told.items()}
    return [words.format(listed(names)) for words, names in named.items() if names]


def _assumptions(
    algorithm: Algorithm, plan: Plan, privacy: PrivacySettings, membership: Membership | None, *, declared: bool
) -> list[str]:
    """The assumptions of ε; the sentence on the split is last but one, the sentence on trials last."""
    unit = unit_noun(privacy.unit)
    size = size_sentence(membership, unit, plan.records, by_unit=privacy.by_unit)
    if declared:
        size = f"The declared number of {unit}s ({plan.records}; how many there are is protected, too)"
    return [
        f"{size}, the batch size, the number of steps, the schema, the number of groups and all hyper-parameters are "
        "public.",
        "What the model starts from is public and was not computed from these records: initial weights, and pretrained "
        "weights, word vectors or feature maps read from files.",
        *_of_others(algorithm, plan),
        split_sentence(membership, unit, exposed=_exposed(algorithm, plan)),
        _trials(plan, membership)
        + ("" if privacy.secure else " Runs of one seed share batches and noise, and do not even compose."),
    ]


def _exposed(algorithm: Algorithm, plan: Plan) -> str:
    """Name the parts of the data, besides the training part, that the model or its choice depends on without noise."""
    parts = {
        "the test part": algorithm.acceptance.on_test,
        "the public part": algorithm.needs_public,
        "a part whose exact figures chose": plan.trials.law is not None,
    }
    return " or ".join(part for part, looked_at in parts.items() if looked_at)


def membership_facts(membership: Membership | None) -> dict[str, str | bool] | None:
    """How the training part was drawn, and by which public key, as in privacy.json.

    `given` says that the test part was not drawn, but given.
    """
    if membership is None:
        return None
    # for a split by the provider, `how` says it already
    given = {"given": True} if membership.given and membership.how == "hash" else {}
    return {"how": membership.how, "key": membership.key, **given}


def figures_entry(privacy: PrivacySettings, data: DataSettings) -> dict[str, Any]:
    """Entries of privacy.json on the evaluated part.

    `evaluated_on` is there if this is not the test part. `evaluation` is there if figures with noise are asked for, and
    says what they cost the part's records. It is separate from the model's ε, because no record is in both parts. It is
    announced before training, and charged whether or not the figures are made.
    """
    asked, trials = privacy.evaluation, privacy.trials
    part = {} if data.evaluate_on == "test" else {"evaluated_on": data.evaluate_on}
    if asked.epsilon is None:
        return part
    delta = privacy.figures_delta
    event = figures_event(asked.epsilon, delta, trials)
    return part | {
        "evaluation": {
            "part": data.evaluate_on,
            "epsilon": trials.epsilon((event,), delta).value,
            "delta": delta,
            "unit": privacy.unit,
            "adjacency": added_or_removed(privacy),
            "mechanism": event.to_dict(),
            "sensitivity": sensitivity(data.groups),
            "tables": list(tables(data.groups)),
            "bins": asked.bins,
            "trials": trials.to_dict(),
        }
    }


def added_or_removed(privacy: PrivacySettings) -> str:
    """The adjacency for figures of a part, whose size is protected, too."""
    return f"add or remove one {unit_noun(privacy.unit)}" + (" with all its records" if privacy.by_unit else "")


def _adjacency(privacy: PrivacySettings, *, declared: bool) -> str:
    """Say which training parts are neighbours."""
    if declared:
        return added_or_removed(privacy)
    unit, whole = unit_noun(privacy.unit), " with all its records" if privacy.by_unit else ""
    return f"zero-out, the slot of one {unit}{whole} is emptied while the number of {unit}s stays"


def _trials(plan: Plan, membership: Membership | None) -> str:
    trials = plan.trials
    moved = ""
    if membership is not None and (membership.how == "strata" or membership.key.startswith("seed=")):
        mend = "data.membership=hash and " if membership.how == "strata" else ""
        moved = (
            " Trials of other seeds have other training and test records. Exact figures of these reveal records that "
            f"this trial protects: give all trials {mend}one data.key."
        )
    if trials.single:
        return "ε holds for this run alone: publishing several runs composes their ledgers."
    if trials.law is None:
        return (
            f"At most {trials.cap} trainings on these records were declared before the first of them, each with what "
            "this run was planned to be charged: the same sampling rate, noise and steps, or the same budget. ε is "
            f"that of all of them together, published or not; of others it may be more.{moved}"
        )
    return (
        f"The number of trainings was drawn before the first of them, from the {trials.law} law of mean "
        f"{trials.mean:g}, and the settings of each at random from one list, whatever the others had. Each is charged "
        "what this run was planned to be: the same sampling rate, noise and steps. Nothing but the chosen one is ever "
        "shown, and what chose it was private itself, or measured on records that none of them trains on: ε is that of "
        f"the choice and the chosen model together.{moved}"
    )


def _by_declared_sizes(membership: Membership | None, plan: Plan, privacy: PrivacySettings) -> bool:
    """Whether N is the number that declared sizes let one expect."""
    if membership is None or not membership.declares(by_unit=privacy.by_unit):
        return False
    return membership.expects(by_unit=privacy.by_unit) == plan.records


def accounted_for(algorithm: Algorithm, plan: Plan, outcome: Outcome, *, left: bool = False) -> Accounted:
    """Return what the ε of a run is of: its plan, cap or budget, or its ledger if a crash made it charge more.

    Args:
        left: as for `privacy_statement`.

    Raises:
        EquidpError: if neither plan, cap nor budget covers the ledger.
    """
    planned, budget = algorithm.events(plan), algorithm.budget(plan)
    due, charged = counted(planned), counted(outcome.events)
    if left and algorithm.fixed:
        until = algorithm.events_until(plan, outcome.steps)
        # the sampler's own releases may not have been charged yet
        taken = counted(until) - counted(algorithm.sampler.releases(algorithm.adapt(plan)))
        if taken <= charged and charged.keys() <= due.keys():
            # When the loop was left may follow from what it had shown. So all steps of the plan count, and in addition
            # the steps that were taken again.
            return Accounted(plan, merged((*planned, *beyond(outcome.events, until))), planned, None)
    if algorithm.covers(plan, outcome.events, outcome.steps):
        return Accounted(plan, planned, planned, budget)
    if budget is not None:
        raise EquidpError(f"The ledger holds more than the budget of {algorithm.name}, which its ε is of.")
    if algorithm.fixed and due <= charged and due.keys() == charged.keys():
        return Accounted(plan, outcome.events, planned, None)  # repeated steps of a resumed run, each charged again
    if algorithm.acceptance.may_stop and charged.keys() <= due.keys():
        # the last process may have taken as many candidates as the cap allows, whenever it stopped; earlier ones took
        # at most what is charged
        return Accounted(plan, merged((*planned, *outcome.events)), planned, None)
    raise EquidpError(
        "The ledger differs from the plan that ε was computed for; the run is not covered by its ε. "
        "If the algorithm is your own, its noise, its steps or its end follow from what it drew, and must follow from "
        "the plan; if you gave a ledger, it must be of this run alone; else this is a bug: please report it with the "
        "settings."
    )
