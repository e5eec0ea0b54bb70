"""Warnings at the top of a page, such as research mode or a baseline that failed."""

from __future__ import annotations

from collections.abc import Mapping

from equidp.errors import listed_names
from equidp.evaluation.metrics import diverged, learnt_nothing, outdone
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
    several = (
        f"The papers' rules for ε understate it, or leave out releases, in {', '.join(doubtful)}: quote ε, "
        "not ε as published."
    )
    found += [several] if len(doubtful) > 1 else doubtful.values()
    if others := tables.other_baseline(documents):
        found.append(f"Costs of privacy of {', '.join(others)} refer to another baseline than the sgd row shown here.")
    guessing = [name for name, document in documents.items() if learnt_nothing(document.get("baseline") or {})]
    if guessing:
        found.append(
            f"The non-private baseline of {', '.join(guessing)} has learnt nothing: its MCC is not above 0, as if all "
            "records were put into one class. Beside it privacy seems to be free: ignore costs and gaps near 0."
        )
    if weak := [name for name, document in documents.items() if outdone(document) and name not in guessing]:
        found.append(
            f"{', '.join(weak)} did better than the non-private baseline, by more than chance: that baseline can be "
            "trained better (a learning rate of its own: sgd.options.learning_rate). Costs and gaps beside it are too "
            "small."
        )
    if empty := [name for name, document in documents.items() if learnt_nothing(document)]:
        found.append(
            f"The model of {', '.join(empty)} has learnt nothing: its MCC is not above 0, as if all records were put "
            "into one class. Its accuracy is then that of the most frequent class."
        )
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
