"""The annex on re-identification: the evidence that the EDPB's Opinion 28/2024 asks of a claim of anonymity.

The Opinion calls a model anonymous only where it is insignificantly likely that anybody extracts data of the people
behind it, from the weights or by queries, with all means reasonably likely to be used; and it wants that documented.
The annex states what is proven and what was measured. It claims no anonymity: that is the controller's assessment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equidp.data.sources import unit_noun
from equidp.reporting.attack import ALARMS, ATTACKS, factor_text, from_curve, lower_text, recognised, share_text
from equidp.reporting.release.facts import EXACT_TELL, Facts
from equidp.reporting.release.lines import Document, Line, document, stated
from equidp.reporting.statement_sections import delta_text, epsilon_text, evaluated
from equidp.tasks import CLASSIFICATION

OTHER_ATTACKS = Line(
    "other_attacks",
    "Tests of other attacks (attributes, inversion, reconstruction)",
    "This run made none. The bounds above cover them; a controller may want tests besides.",
    open=True,
)
NOT_AUDITED = (
    "No audit of this training is at hand. The pipeline audit makes one, with the run's settings, `run_label` and the "
    "word for the unit included; the pipeline release then writes this folder again."
)
NOT_OF_THIS_TASK = "No audit of this training is at hand: the pipeline audit is for classification."
NOT_OF_A_CHOICE = "No audit is of the choice among trials, or of the training that was chosen."

MEASURED_INSIDE = (
    "Measured inside, if the audit did so: the figures are exact functions of private records, and are left out. The "
    "setting release.unprotected=audit publishes them without protection."
)


def annex(facts: Facts) -> Document:
    """The annex."""
    return document(
        facts,
        "Annex on re-identification",
        "Evidence for the controller's assessment under EDPB Opinion 28/2024. It claims no anonymity.",
        {
            "What is proven": _proven(facts),
            "What was measured": _measured(facts),
            "How the model was made": _made(facts),
            "What the controller documents": _documented(facts),
        },
    )


def _proven(facts: Facts) -> list[Line]:
    privacy = facts.privacy
    unit = unit_noun(privacy["unit"])
    claimed = {"epsilon": privacy["epsilon"], "delta": privacy["delta"]}
    rows = [(rate, recognised(privacy, rate)) for rate in ALARMS]
    beyond = " beyond the ε of their own figures" if privacy.get("evaluation") else ""
    if facts.exact_metrics:
        beyond = f", whose exact figures the curator chose to publish: {EXACT_TELL}"
    source = "the statement's trade-off curve" if from_curve(privacy) else "(ε, δ) alone; the true curve is lower"
    curve = {"trade_off": privacy["trade_off"]} if from_curve(privacy) else {}
    return [
        Line(
            "membership_bound",
            "How well can anybody tell that a person's data were used?",
            f"Whatever the attack, and with all other records known: at most as the table says, from {source}. The "
            f"bound is for one {unit}.",
            {
                "source": "trade-off curve" if from_curve(privacy) else "epsilon and delta",
                "recognised": [{"false_alarms": rate, "at_most": bound} for rate, bound in rows],
                **curve,
            },
            table=(("false alarms", "recognised at most"), *((f"{100 * a:g} %", share_text(b)) for a, b in rows)),
        ),
        Line(
            "extraction_bound",
            "How well can anybody extract or reconstruct a person's data?",
            "Whatever is guessed about a record, by extraction, inversion, inference of attributes or reconstruction, "
            f"is right with at most e^ε = {factor_text(privacy['epsilon'])} times the probability that it would have "
            f"had without that {unit}, plus δ = {delta_text(privacy['delta'])}. It also holds for guesses by queries, "
            "any number of them.",
            claimed,
        ),
        Line(
            "outside",
            "What is not bounded?",
            f"What the model says about a population, and so about anybody like those in it; "
            f"{evaluated(privacy)} records{beyond}; people "
            f"with several {unit}s beyond a bound that grows with their number; other releases from the same records.",
        ),
    ]


def _measured(facts: Facts) -> list[Line]:
    audit = facts.audit
    if audit is None:
        missing = {"audit": "Lower bound on ε by an attack", "membership": "Membership inference per group"}
        said = NOT_OF_A_CHOICE if "tuning" in facts.privacy else NOT_AUDITED
        if facts.schema.get("task", CLASSIFICATION) != CLASSIFICATION:
            said = NOT_OF_THIS_TASK
        return [*(Line(key, question, said, open=True) for key, question in missing.items()), OTHER_ATTACKS]
    planted = "Lower bound on ε by an attack with planted gradients"
    lines = [_canaries("audit", planted, audit["gradient_canaries"], "records of the auditor's own")]
    if audit["input_canaries"]:
        question = "Lower bound on ε by an attack with mislabelled records"
        real = "training records that were given a wrong label"
        lines.append(_canaries("mislabelled", question, audit["input_canaries"], real))
    return [*lines, _membership(audit), OTHER_ATTACKS]


def _canaries(key: str, question: str, found: Mapping[str, Any] | None, whose: str) -> Line:
    if not found:
        return Line(key, question, MEASURED_INSIDE, open=True)
    if "epsilon_lower_bound" not in found:
        refuted = "REFUTED: this attack, on a training with the same plan, showed more than the ε that is claimed."
        return Line(key, question, refuted, dict(found))
    shown = lower_text(found["epsilon_lower_bound"])
    outcome = "does not refute the claim" if found["consistent"] else "REFUTES the claim"
    reach = "" if found["refutable"] else " With every guess right it could not have refuted it: the test is too weak."
    return Line(
        key,
        question,
        f"ε ≥ {shown} at δ = {delta_text(found['delta'], 2)} with confidence {found['confidence']:.0%}, where "
        f"{epsilon_text(found['epsilon_claimed'])} is claimed: {found['correct']} of {found['guesses']} guesses about "
        f"{found['canaries']:,} {whose} were right. That {outcome}.{reach} The audit trained anew "
        "with the same plan; not refuting is no proof.",
        dict(found),
        open=not found["refutable"],
    )


def _membership(audit: Mapping[str, Any]) -> Line:
    question = "Membership inference per group"
    if not audit["membership"]:
        return Line(
            "membership",
            question,
            MEASURED_INSIDE,
            open=True,
        )
    rows = [("attack", "group", "AUC", "recognised at 1 % false alarms")]
    for attack, figures in audit["membership"].items():
        name = ATTACKS.get(attack, attack)
        rows.append((name, "everyone", _interval(figures["overall"], "auc"), _interval(figures["overall"], _TPR)))
        of_groups = ((f"{g}: {group}", of) for g, groups in figures["groups"].items() for group, of in groups.items())
        rows += [(name, group, _interval(of, "auc"), _interval(of, _TPR)) for group, of in of_groups]
    return Line(
        "membership",
        question,
        f"AUC (0.5: blind guessing) and recognised members, with {audit['confidence']:.0%} intervals, of a model that "
        "the audit trained anew with the same settings: not of the one in this folder. These figures are exact and not "
        "protected; the curator chose to publish them. – means too few records to tell.",
        {"attacks": dict(audit["membership"]), "confidence": audit["confidence"]},
        table=tuple(rows),
    )


_TPR = "tpr_at_1_percent_fpr"


def _interval(figures: Mapping[str, Any], measure: str) -> str:
    if figures.get(measure) is None:
        return "–"
    low, high = figures[f"{measure}_interval"]
    return f"{figures[measure]:.3f} ({low:.3f} to {high:.3f})"


def _made(facts: Facts) -> list[Line]:
    return [
        Line(
            "method",
            "Which method limits what the model learns of one person?",
            f"Differential privacy in training: ε = {epsilon_text(facts.privacy['epsilon'])} at "
            f"δ = {delta_text(facts.privacy['delta'])} ({facts.algorithm}; privacy.md).",
            {"epsilon": facts.privacy["epsilon"], "delta": facts.privacy["delta"]},
        ),
        Line(
            "outputs", "What does the model give out?", f"{facts.words.answer}. It generates no text, image or record."
        ),
        Line(
            "means",
            "Which means of an attacker are covered?",
            "Full knowledge of weights, code and settings, any computing power, and all other records.",
        ),
        stated("data_origin", "Selection of the data and their minimisation", facts.curator),
    ]


def _documented(facts: Facts) -> list[Line]:
    advice = "Impact assessment, advice of the data-protection officer"
    return [
        stated("consultation", advice, facts.curator, "Not part of a run."),
        stated("access", "Who receives the model, and under which terms", facts.curator),
        stated("security", "Security of the raw data, checkpoints and logs", facts.curator),
        stated("withdrawal", "What happens if a new attack appears", facts.curator, "Not part of a run."),
    ]
