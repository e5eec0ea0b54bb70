"""The entry for a registry of deployments of differential privacy, by its three tiers of transparency.

Tier 1 says who releases what and why, tier 2 the guarantee, tier 3 the details that let somebody check it. The entry
names the tier that its answered lines reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from equidp.data.sources import record_words, unit_named, unit_noun
from equidp.reporting.privacy_report import but_repeated, recomputed
from equidp.reporting.release.facts import Facts
from equidp.reporting.release.lines import Document, Line, document, stated
from equidp.reporting.statement_sections import delta_text, epsilon_text, noise_text, steps_text

BASICS, GUARANTEE, DETAILS = "Tier 1: what is released", "Tier 2: the guarantee", "Tier 3: details"

COUNTED_BY = (
    "Which runs these are follows from exact digests of the raw files, which no ε covers: beside what is known of the "
    "other runs, their number and total may tell whether two files are equal."
)
"""Why runs are counted by digests: else a copy of a file would pass for other records, and the total be too small."""


BEYOND_TRIALS = (
    "It does not cover what was learnt from these records to declare them. Other releases from the same records add to "
    "it."
)
"""Trials are declared before they run, but perhaps after somebody has looked at the records."""


def registry_entry(facts: Facts) -> Document:
    """The entry."""
    topics = {BASICS: _basics(facts), GUARANTEE: _guarantee(facts), DETAILS: _details(facts)}
    answered = [all(not line.open for line in lines) for lines in topics.values()]
    return document(
        facts,
        "Registry entry",
        "For a public registry of deployments of differential privacy. A tier is reached when its lines, and those of "
        "the tiers before it, are answered.",
        topics,
        tier=[*answered, False].index(False),
    )


def _basics(facts: Facts) -> list[Line]:
    schema, stated_by = facts.schema, facts.curator
    product = (
        f"Weights of a {facts.words.model} ({facts.network['name']}, {facts.parameters:,} parameters) of "
        f"{'what a public map makes of records' if facts.mapped else schema['kind'] + ' data'} {facts.words.into}, "
        "with its documents."
    )
    return [
        stated("curator", "Who releases it", stated_by, "The run does not know its curator."),
        stated("purpose", "Intended use", stated_by, "The run does not know what the model is for."),
        Line("product", "Data product", product, {"type": "machine learning model", "parameters": facts.parameters}),
        Line("dataset", "Data", f"The dataset is called {facts.dataset}.", facts.dataset),
        stated("data_origin", "Whose data, and how collected", stated_by),
        stated("published_on", "Date of publication", stated_by, "A run records no date here."),
    ]


def _guarantee(facts: Facts) -> list[Line]:
    privacy = facts.privacy
    several = (
        "One person may be behind several of them."
        if privacy["unit"] in record_words()
        else "All its records together."
    )
    return [
        Line("flavour", "Flavour", "(ε, δ)-differential privacy, approximate.", "approximate"),
        Line("adjacency", "Neighbouring data sets", f"{privacy['adjacency']}.", privacy["adjacency"]),
        Line("unit", "Privacy unit", f"One {unit_named(privacy['unit'])}. {several}", privacy["unit"]),
        _loss(privacy),
        Line(
            "model", "Deployment model", "Central: the curator holds the records and is trusted with them.", "central"
        ),
        Line("release_type", "Kind of release", "Static: one release of the final weights and documents.", "static"),
    ]


def _loss(privacy: Mapping[str, Any]) -> Line:
    """Say what the run costs the records of each part."""
    value: dict[str, Any] = {"epsilon": privacy["epsilon"], "delta": privacy["delta"]}
    text = f"ε = {epsilon_text(privacy['epsilon'])} at δ = {delta_text(privacy['delta'])}"
    others = {}
    if held := (privacy.get("tuning") or {}).get("validation"):
        others["validation"] = held, "which chose the settings"
    if figures := privacy.get("evaluation"):
        others[figures["part"]] = figures, "of which figures with noise are here"
    if others:
        text += f" for one {unit_noun(privacy['unit'])} of the training part"
        value["other_parts"] = {}
    for part, (of, why) in others.items():
        value["other_parts"][part] = {"epsilon": of["epsilon"], "delta": of["delta"]}
        pair = f"ε = {epsilon_text(of['epsilon'])} at δ = {delta_text(of['delta'])}"
        text += f"; {pair} for one of the {part} part, {why}"
    return Line("parameters", "Privacy loss", f"{text}.", value)


def _details(facts: Facts) -> list[Line]:
    releases = list(facts.privacy["releases"])
    return [
        Line(
            "domain",
            "Data domain",
            "Declared in advance in config.json: kind, shape, classes or targets, groups and features.",
            {"kind": facts.schema["kind"], "shape": facts.schema["shape"]},
        ),
        _mechanism(facts),
        Line("releases", "What the guarantee covers", " ".join(releases), releases),
        unprotected(facts),
        accounting(facts),
        trials(facts),
        Line("together", "All runs on these records", together(facts), together_value(facts), open=not facts.listed),
        Line(
            "post_processing",
            "Post-processing",
            "Whatever is computed from the released weights alone is covered by the same ε: predictions, any number of "
            "queries, further training on other data.",
        ),
        preprocessing(
            facts,
            "Preprocessing",
            "Scaling, categories and vocabulary come from the declared schema. The run learnt nothing from the records "
            "before training.",
        ),
        randomness(facts),
        Line(
            "implementation",
            "Implementation",
            ", ".join(f"{name} {version}" for name, version in facts.software.items()) + ".",
            dict(facts.software),
        ),
        stated("rationale", "Why this unit, ε and δ", facts.curator, "The run knows the numbers, not the reasons."),
        stated("security", "Security of the raw data", facts.curator, "The run does not know who can reach them."),
    ]


def _mechanism(facts: Facts) -> Line:
    privacy = facts.privacy
    return Line(
        "mechanism",
        "Mechanism",
        f"{facts.algorithm}: in every step a sample is drawn ({privacy['sampling']}), each "
        f"{unit_noun(privacy['unit'])}'s gradient is bounded, the sum gets Gaussian noise, and the model takes a step. "
        f"Noise multiplier of the sum {noise_text(privacy)}, steps: {steps_text(privacy)}.",
        {key: privacy[key] for key in ("noise_multiplier", "sampling_rate", "steps", "expected_batch_size")},
    )


def unprotected(facts: Facts) -> Line:
    """Quantities that go out, or are taken as public, without the guarantee."""
    privacy = facts.privacy
    units = f"{unit_noun(privacy['unit'])}s"
    if privacy.get("records_declared"):
        size = f"the declared number of training {units}"
    elif (privacy.get("membership") or {}).get("how") == "hash":
        where = "the provider's training part" if privacy["membership"].get("given") else "the table"
        size = f"the number of {units} in {where}, and so the expected number of training {units}"
    else:
        size = f"the number of training {units}"
    quantities = [
        f"{size}, {privacy['records']:,}",
        "batch size, number of steps and all settings",
        "the schema, with names of classes or targets, and of groups",
    ]
    if privacy.get("public_records"):
        quantities.append(f"{privacy['public_records']:,} records used as public data")
    if privacy.get("test_records_decide"):
        quantities.append("the test records: their exact losses decided which steps were taken")
    if facts.exact_metrics:
        quantities.append("the exact figures of the test records, which the curator chose to publish")
    if facts.audit and any(facts.audit[kind] for kind in ("gradient_canaries", "input_canaries", "membership")):
        quantities.append("what an audit found: figures that the curator chose to publish, or that ε was refuted")
    if facts.counted:
        quantities.append("which runs the ledger counts on these records, by digests of the raw files")
    return Line(
        "unprotected",
        "Unprotected quantities",
        f"Public, or taken as public: {'; '.join(quantities)}. No more is here.",
        quantities,
    )


def preprocessing(facts: Facts, question: str, answer: str) -> Line:
    """Say what preparing the data cost: `answer`, unless a query or an entry may have made rows depend on others."""
    if not facts.across:
        return Line("preprocessing", question, answer)
    several = (
        f"The rows come from {facts.across}: a row that it gives may depend on others. ε is for rows as they are "
        "given, and one row more where they come from may change many. The curator knows how they are made."
    )
    return Line("preprocessing", question, several, open=True)


def accounting(facts: Facts) -> Line:
    """Say how ε was computed, and how to check it."""
    privacy = facts.privacy
    if "law" in (privacy.get("trials") or {}):
        how = "that of the choice among a random number of trials and of the chosen model, by Rényi DP"
    elif privacy.get("epsilon_fixed_before_training", True):
        how = (
            "the smaller of Rényi DP and privacy loss distributions over all events, which were fixed before training"
            f"{but_repeated(privacy)}"
        )
    else:
        how = (
            f"that of a cap or a budget fixed before training{but_repeated(privacy)}, as the events depended on outputs"
        )
    return Line(
        "accounting",
        "Accounting",
        f"ε is {how}: {recomputed(privacy)}",
        {key: privacy.get(key) for key in ("epsilon_rdp", "epsilon_pld", "epsilon_fixed_before_training")},
    )


def trials(facts: Facts) -> Line:
    """Say what the choice of settings cost."""
    privacy = facts.privacy
    found = privacy["trials"]
    question = "Choice of settings, and other releases"
    if found == {"max": 1}:
        return Line(
            "trials",
            question,
            "One training was charged. If settings were chosen by other trainings on these records, "
            "ε does not cover the choice; nor does it cover other releases from the same records. The curator knows.",
            found,
        )
    if "law" not in found:
        text = (
            f"At most {found['max']} trainings were declared before the first, this one included; ε covers all of them"
        )
        return Line("trials", question, f"{text}. {BEYOND_TRIALS}", found)
    declared = ", ".join(f"{name} {value}" for name, value in found.items() if name != "orders")
    text = f"It was chosen from several trainings, declared before the first ({declared}); ε covers the choice."
    return Line("trials", question, f"{text} {BEYOND_TRIALS}", found)


def together(facts: Facts) -> str:
    """Say what the data set's ledger counts by now: the number of runs and their total ε, without names."""
    counted, unit = facts.counted, unit_noun(facts.privacy["unit"])
    if not facts.listed:
        return (
            "The ledger that was read for this document does not list this run: it tells neither the number of the "
            "runs on these records nor their total ε. The curator has to count them."
        )
    if counted is None:
        return "The curator's ledger lists every training on these records; the pipeline `ledger` tells their total ε."
    text = f"When this was written the curator's ledger counted {_runs(counted.secure, 'secure ')} on these records"
    if counted.secure:
        text += (
            f", published or not. Together they cost one {unit} at most ε = {epsilon_text(counted.epsilon)} at "
            f"δ = {delta_text(counted.delta)}"
        )
    text += "."
    if counted.limit is not None:
        text += (
            f" No run is begun with which they would cost more than {counted.limit}, as was fixed before the first. "
            "That limit is the guarantee, also where later runs follow from what earlier ones released. Exact figures, "
            "baselines and audits are no such releases: no ε covers a choice of later runs by these."
        )
    elif counted.secure > 1:
        text += (
            " That bounds runs whose number and settings were fixed before the first; where later ones follow from "
            "what earlier ones released, it is what was spent, and no guarantee at that ε."
        )
    if counted.others:
        text += f" Of {_runs(counted.others, 'secure ')} more, which protect another unit, the ε have no total with it."
    if counted.research:
        text += (
            f" It also lists {_runs(counted.research)} in research mode and counts none of them: no ε covers what "
            "leaves the curator's systems of these, or what was learnt from them."
        )
    return f"{text} {COUNTED_BY}"


def together_value(facts: Facts) -> dict[str, Any] | None:
    """The figures behind `together`."""
    counted = facts.counted
    if counted is None:
        return None
    found: dict[str, Any] = {
        "secure_runs": counted.secure,
        "research_runs": counted.research,
        "other_units": counted.others,
    }
    if counted.limit is not None:
        found["limit"] = {"epsilon": counted.limit.epsilon, "delta": counted.limit.delta, "order": counted.limit.order}
    return found | {"epsilon": counted.epsilon if math.isfinite(counted.epsilon) else None, "delta": counted.delta}


def _runs(count: int, kind: str = "") -> str:
    return f"{count or 'no'} {kind}run{'' if count == 1 else 's'}"


def randomness(facts: Facts) -> Line:
    """Say where the noise came from."""
    secure = bool(facts.privacy.get("secure"))
    text = (
        "A cryptographic generator under a key of the operating system that was never stored. No seed exists. "
        "Values and noise are added on a public grid, so that no digit of what is released tells how their sum was "
        "rounded. The exact sums are formed in float32 before that, and ε does not count how these were rounded."
        if secure
        else "An ordinary generator with a seed, without protection against floating-point attacks: ε does not hold "
        "against whoever recomputes the noise."
    )
    value = {"cryptographic": secure, "floating_point_protected": secure}
    return Line("randomness", "Source of randomness", text, value)
