"""The evaluation checklist: the topics of NIST SP 800-226, in our own words, each answered by the run or open.

The publication stacks what a claim of differential privacy rests on: the parameters on top, below them the algorithm
and its usefulness, below these security and trust, and at the bottom how data are collected. Each layer is worth what
the layers below it are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equidp.data.sources import record_words, unit_noun
from equidp.reporting.attack import recognised, share_text
from equidp.reporting.release.facts import SOFTWARE, Facts
from equidp.reporting.release.lines import Document, Line, document, stated
from equidp.reporting.release.registry import (
    accounting,
    preprocessing,
    randomness,
    together,
    together_value,
    trials,
    unprotected,
)
from equidp.reporting.statement_sections import delta_text, epsilon_text, evaluated


def checklist(facts: Facts) -> Document:
    """The checklist."""
    return document(
        facts,
        "Evaluation checklist",
        "By the topics of NIST SP 800-226, in words of our own. A line is answered by the run or by the curator, or it "
        "is open. An answer may be a bad one: read it.",
        {
            "Parameters and unit": _parameters(facts),
            "Algorithm": _algorithm(facts),
            "Utility and bias": _utility(facts),
            "Security and side channels": _security(facts),
            "Trust": _trust(facts),
            "Data collection": _collection(facts),
        },
    )


def _parameters(facts: Facts) -> list[Line]:
    privacy = facts.privacy
    return [
        Line(
            "definition",
            "Is it differential privacy, and which kind?",
            f"Yes: (ε, δ)-differential privacy in the central model. Neighbouring data sets: {privacy['adjacency']}.",
            {"kind": "approximate", "adjacency": privacy["adjacency"]},
        ),
        _epsilon(privacy),
        _delta(privacy["delta"], privacy["records"]),
        _unit(privacy["unit"]),
        trials(facts),
    ]


def _epsilon(privacy: Mapping[str, Any]) -> Line:
    epsilon, caught = privacy["epsilon"], recognised(privacy, 0.01)
    worth = "At this ε that says little." if caught > 0.5 else "Blind guessing recognises 1 %."
    return Line(
        "epsilon",
        "Is ε small enough to mean something?",
        f"ε = {epsilon_text(epsilon)}. At 1 % false alarms an attacker recognises at most {share_text(caught)}. "
        f"{worth}",
        {"epsilon": epsilon, "recognised_at_1_percent": caught},
    )


def _delta(delta: float, units: int) -> Line:
    small = delta < 1 / units
    return Line(
        "delta",
        "Is δ below one over the number of units?",
        f"δ = {delta_text(delta)}, {'below' if small else 'NOT below'} 1/N = {1 / units:.2g}."
        + ("" if small else " Publishing one record outright could satisfy it. Choose a smaller δ."),
        {"delta": delta, "below_one_over_n": small},
    )


def _unit(unit: str) -> Line:
    named = unit if unit == unit_noun(unit) else f"value of the column {unit!r}"
    several = (
        f"A person with several {unit}s has a weaker guarantee. The curator knows whether there are such people."
        if unit in record_words()
        else "Records of other units are not protected by it, if a person is behind several units."
    )
    return Line("unit", "Whom does one unit stand for?", f"The unit is one {named}. {several}", unit)


def _algorithm(facts: Facts) -> list[Line]:
    privacy = facts.privacy
    audit = facts.audit and facts.audit["gradient_canaries"]
    tested = "The code's own tests attack every algorithm and plant faults that must be found."
    if others := [name for name in facts.software if name not in SOFTWARE]:
        tested += f" They do not know what {', '.join(others)} brings to this model: that package's authors answer."
    if audit:
        verdict = "did not refute" if audit["consistent"] else "REFUTED"
        tested += f" An audit of a training with the same plan {verdict} the claim (reidentification.md)."
    return [
        Line(
            "bounded",
            "Is every unit's influence bounded?",
            f"Yes: each {unit_noun(privacy['unit'])}'s gradient is weighted so that its contribution has a bound that "
            "depends on public values only. The noise is proportional to that bound.",
        ),
        Line(
            "sampling",
            "Does the sampling match the accounting?",
            f"Yes: {privacy['sampling']}; sums are divided by the expected batch size, and empty batches are charged.",
            {"sampling_rate": privacy["sampling_rate"], "expected_batch_size": privacy["expected_batch_size"]},
        ),
        accounting(facts),
        preprocessing(
            facts,
            "Did preprocessing look at the records?",
            "No: it follows a schema that was declared in advance. Whoever wrote the schema must not have taken it "
            "from these records.",
        ),
        Line(
            "split",
            "Does a record's place in the training part depend on other records?",
            _split(privacy),
            (privacy.get("membership") or {}).get("how"),
            open=not privacy.get("membership"),
        ),
        Line("tests", "Was the implementation tested?", tested, None if audit is None else audit["consistent"]),
    ]


def _split(privacy: Mapping[str, Any]) -> str:
    match (privacy.get("membership") or {}).get("how"):
        case "hash":
            return "No: each record's part follows from the record itself and a public key."
        case "provider":
            return "No: the data say it of each record."
        case "strata":
            return "Yes: the draw moves other records when one is added. ε holds for the training part as it was drawn."
        case _:
            return "The statement takes the split as given: ε compares training parts that differ in one unit."


def _utility(facts: Facts) -> list[Line]:
    tuned = bool(facts.privacy.get("tuning"))  # it makes no exact figures, and trains no baseline
    if facts.metrics:
        text = "Figures are in README.md, released with noise."
    elif facts.exact_metrics:
        text = "Figures are in README.md, exact and without protection for the test records."
    elif tuned:
        text = (
            "This run measured nothing on test records. Setting privacy.evaluation.epsilon releases figures with noise."
        )
    else:
        text = (
            f"Measured inside, on private {evaluated(facts.privacy)} records: exact figures of them are not published "
            "here."
        )
    shown = facts.metrics or facts.exact_metrics
    return [
        Line("utility", "How good is the model?", text, dict(shown) if shown else None, open=not shown),
        Line(
            "groups",
            "Whom does the noise cost most?",
            (
                f"Measured inside for the groups by {', '.join(facts.compared)}, exactly, and not published here."
                if facts.compared
                else "This run made no comparison with a model without noise."
            )
            + (" README.md has the model's own figures of groups." if shown else ""),
            open=not shown,
        ),
        Line(
            "cost_of_privacy",
            "What did privacy cost against a model without it?",
            "Measured inside, as far as the model without it has learnt. The comparison is an exact function of the "
            "training records, so it cannot be published."
            if facts.compared
            else "Not measured by this run: the settings were tuned without training such a model."
            if tuned
            else "Not measured by this run.",
            open=not facts.compared,
        ),
        stated("bias", "Bias of the data and of people who use the model", facts.curator, "No run can tell."),
    ]


def _security(facts: Facts) -> list[Line]:
    exact = bool(facts.privacy.get("diagnostics_published"))
    beside = ", and what a model without noise learnt" if facts.compared else ""
    return [
        randomness(facts),
        Line(
            "diagnostics",
            "Were exact figures of training records recorded?",
            (
                "Yes, inside the curator's systems: gradient norms and the like, sizes of groups"
                if exact
                else "This run recorded none of the training with noise. Inside the curator's systems are group sizes"
            )
            + f"{beside}. None of it is in this folder.",
            exact,
        ),
        Line(
            "timing",
            "Can time or memory reveal records?",
            "How long a step takes depends on the size of its batch. The folder holds no times, and its files were "
            "written without their dates. Whoever can watch the training learns more.",
        ),
        Line(
            "intermediate",
            "Are intermediate states released?",
            "No, the final weights alone. The guarantee would cover the model after every step.",
        ),
        stated("security", "Security of the raw data, checkpoints and logs", facts.curator),
    ]


def _trust(facts: Facts) -> list[Line]:
    return [
        Line(
            "model",
            "Who must be trusted?",
            "The curator, who holds the records, and the machines that train. Nobody who receives the release.",
            "central",
        ),
        unprotected(facts),
        Line(
            "queries",
            "Are queries limited?",
            "They need not be: the weights themselves are released, and any number of queries is covered by ε.",
        ),
        stated("access", "Who may receive the release", facts.curator),
        stated("license", "Licence of the weights", facts.curator, "None was stated: README.md says `unknown`."),
    ]


def _collection(facts: Facts) -> list[Line]:
    names = facts.schema.get("feature_names") or ()
    features = f"The model uses {len(names)} declared features (config.json)." if names else "Declared in config.json."
    if facts.mapped:
        features = "The model uses what a fixed public map makes of each record as a whole."
    return [
        stated("data_origin", "Whose data, how collected, on what ground", facts.curator),
        Line(
            "minimised",
            "Are no more data used than needed?",
            f"{features} Whether it needs them all is open.",
            open=True,
        ),
        Line(
            "elsewhere",
            "Are the same people in other releases?",
            f"ε of several releases about one person adds up, whoever publishes them. {together(facts)} Of releases "
            "that no run of this project made the curator knows.",
            together_value(facts),
            open=True,
        ),
    ]
