"""Warnings at the top of a page, such as research mode or a baseline that failed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from equidp.errors import listed_names
from equidp.evaluation.metrics import diverged, guessing, outdone
from equidp.reporting import tables
from equidp.reporting.privacy_report import NO_GUARANTEE, research_mode, understated


def privacy_facts(name: str, privacy: Mapping[str, Mapping]) -> Mapping:
    """An algorithm's `privacy.json`; one without is not private."""
    return {"private": True, **privacy[name]} if name in privacy else {"algorithm": name, "private": False}


def page_warnings(documents: Mapping[str, Mapping], privacy: Mapping[str, Mapping]) -> list[str]:
    found = [research_mode(facts) for facts in privacy.values()]
    if not any(privacy_facts(name, privacy)["private"] for name in documents):
        found.append(NO_GUARANTEE)
    doubtful = {name: warning for name, facts in privacy.items() if (warning := understated(facts))}
    found += [_doubtful_rules(doubtful, privacy)] if len(doubtful) > 1 else doubtful.values()
    if others := tables.other_baseline(documents):
        found.append(f"Costs of privacy of {', '.join(others)} refer to another baseline than the sgd row shown here.")
    guesses = {name: said for name, document in documents.items() if (said := guessing(document.get("baseline") or {}))}
    found += [
        f"The non-private baseline of {name} {said}. Beside it privacy seems to be free: ignore costs and gaps near 0."
        for name, said in guesses.items()
    ]
    if weak := [name for name, document in documents.items() if outdone(document) and name not in guesses]:
        found.append(
            f"{', '.join(weak)} did better than the non-private baseline, by more than chance: that baseline can be "
            "trained better (a learning rate of its own: sgd.options.learning_rate). Costs and gaps beside it are too "
            "small."
        )
    found += [
        f"The model of {name} {said}. Its accuracy is then that of the most frequent class."
        for name, document in documents.items()
        if (said := guessing(document))
    ]
    baselines = {name: document["baseline"] for name, document in documents.items() if "baseline" in document}
    if lost := [name for name, baseline in baselines.items() if diverged(baseline)]:
        found.append(
            f"The non-private baseline of {', '.join(lost)} diverged: its scores are not finite, and every prediction "
            "counts as wrong. No cost of privacy is known: give it a smaller learning rate (sgd.options.learning_rate)."
        )
    if lost := [name for name, document in documents.items() if diverged(document)]:
        found.append(
            f"The model of {', '.join(lost)} diverged: its scores are not finite, and every prediction counts as "
            "wrong. Its figures are meaningless: give it a smaller learning rate."
        )
    of_classes = [of for document in documents.values() for of in document["groups"].get("class", {}).items()]
    if absent := dict.fromkeys(name for name, figures in of_classes if not figures["count"]):
        found.append(f"No test record is of class {listed_names(absent)}: the figures say nothing about it.")
    for name, document in documents.items():
        if seeds := document.get("diverged"):
            found.append(
                f"In {seeds} of the seeds of {name} the non-private baseline diverged: they count neither in its mean "
                "nor in the cost of privacy."
            )
    validated = [name for name, document in documents.items() if "evaluated_on" in document]
    if validated and len(validated) == len(documents):
        found.append(
            "These are figures of the validation part, held back from the training records: where this page says "
            "test, it means that part. The test part was not used."
        )
    elif validated:
        found.append(
            f"The figures of {', '.join(validated)} are of the validation part, held back from the training records, "
            "those of the others of the test part: do not compare the two."
        )
    return list(dict.fromkeys(warning for warning in found if warning))


def _doubtful_rules(names: Collection[str], privacy: Mapping[str, Mapping]) -> str:
    """One sentence for several algorithms: whose published ε is below ours, and whose leaves out releases only."""
    lower = [name for name in names if privacy[name]["epsilon_published"]["value"] < privacy[name]["epsilon"]]
    other = [name for name in names if name not in lower]
    faults = [f"understate it in {', '.join(lower)}"] if lower else []
    faults += [f"leave out releases in {', '.join(other)}"] if other else []
    return f"The papers' rules for ε {' and '.join(faults)}: quote ε, not ε as published."
