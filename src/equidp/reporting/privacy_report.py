"""The privacy statement: `privacy.json` in words a data-protection officer can check.

`privacy_sections` is its content. `privacy_report` writes it as Markdown, the page's template as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from equidp.data.sources import record_words, unit_named, unit_noun
from equidp.reporting.attack import factor_text, from_curve, recognised, share_text
from equidp.reporting.markdown import markdown_table, markdown_text
from equidp.reporting.statement_sections import (
    Section,
    delta_text,
    epsilon_text,
    evaluated,
    released_figures,
    trials,
    tuning,
)

FALSE_ALARMS = 0.01
"""The rate of false accusations at which the attacker of the statement operates."""

ROWS_OF_LEDGER = 8

WHERE_IT_MAY_GO = (
    "This page, and privacy.json, may go wherever the model goes: of the training data they tell what the guarantee "
    "covers, or what is taken as public below, and nothing else. A run's other files tell more."
)

NOT_FOR_RELEASE = (
    "This model was trained in research mode, and is not for release: keep it inside, and these two with it. A model "
    "that goes out is trained with privacy.secure=true."
)

NO_GUARANTEE = (
    "This model was trained without differential privacy. There is no ε. It may reveal training records, and "
    "everything measured on it belongs inside the organisation that holds the data."
)

INSIDE = (
    "This page stays inside: figures of test records, sizes of groups and the baseline are exact. What may go out is "
    "in the folder release/."
)

UNPROTECTED = "The {part} records are not protected at all: figures of them are exact."

UNSEEN = "The test records have no guarantee. This run made no figures of them."

DECIDING = (
    "The test records are not protected at all, and not only where figures of them are shown: their exact losses "
    "decided which steps were taken, so that the model itself reveals something of them. Figures of them follow from "
    "a choice by them, and say nothing about other records."
)


def privacy_report(privacy: Mapping, dataset: str = "") -> str:
    """`privacy.json` as one page of Markdown: the guarantee of a run, its limits, and how to check it."""
    trained = " on ".join(filter(None, (privacy["algorithm"], dataset)))
    parts = [f"# Privacy statement: {markdown_text(trained)}", WHERE_IT_MAY_GO]
    if research_mode(privacy):
        parts.append(NOT_FOR_RELEASE)
    for section in privacy_sections(privacy):
        parts += [f"## {section.title}", *map(markdown_text, section.paragraphs)]
        if section.rows:
            parts.append(markdown_table([section.header, *section.rows]))
    return "\n\n".join(parts) + "\n"


def privacy_sections(privacy: Mapping) -> tuple[Section, ...]:
    """The statement as sections of plain text."""
    if not privacy.get("private", True):
        return (Section("No guarantee", (NO_GUARANTEE,)),)
    parts = (
        _guarantee, _protected, _delta, _figures, _curve, _ledger, _released, released_figures, _outside, trials,
        tuning, _assumptions,
    )  # fmt: skip
    return tuple(section for part in parts if (section := part(privacy)) is not None)


def research_mode(privacy: Mapping) -> str | None:
    """Return a warning if the run's noise can be recomputed or was not protected, else None."""
    if not privacy.get("private", True):
        return None
    if privacy.get("seed") is not None and not privacy.get("secure"):
        return (
            f"Research mode: sampling and noise were drawn from the fixed seed {privacy['seed']}. Whoever knows or "
            "guesses the seed can recompute and subtract the noise, so the stated ε does not hold for a release of "
            "this model."
        )
    if not privacy.get("secure"):
        return (
            "The noise came from an ordinary random generator without protection against floating-point attacks; "
            "train with privacy.secure=true before a release."
        )
    return None


def _guarantee(privacy: Mapping) -> Section:
    epsilon, delta, unit = privacy["epsilon"], privacy["delta"], _unit(privacy)
    named, caught = unit_named(_word(privacy)), recognised(privacy, FALSE_ALARMS)
    source = "the trade-off curve" if from_curve(privacy) else "ε and δ"
    worth = "At this ε that says little." if caught > 0.5 else f"(Blind guessing recognises {FALSE_ALARMS:.0%}.)"
    lines = [
        f"Training was (ε, δ)-differentially private with ε = {epsilon_text(epsilon)} and δ = {delta_text(delta)}. The "
        f"probability of any result computed from what was released differs by a factor of at most "
        f"e^ε = {factor_text(epsilon)}, apart from δ, whether or not any one {named} was used.",
        f"In practice: an attacker who knows everything else, and tests whether a certain {unit} was in the training "
        f"data while accusing wrongly in {FALSE_ALARMS:.0%} of cases, recognises at most {share_text(caught)} of those "
        f"that were, by {source}. {worth}",
    ]
    warning = research_mode(privacy)
    return Section("What is guaranteed", (*lines, *([warning] if warning else [])))


def _protected(privacy: Mapping) -> Section:
    unit, size, public = _unit(privacy), privacy.get("records"), privacy.get("public_records")
    drawn_by_hash = (privacy.get("membership") or {}).get("how") == "hash"
    text = (f" ({size:,} expected)" if drawn_by_hash else f" ({size:,} of them)") if size else ""
    if privacy.get("records_declared"):
        text = f" (declared as {size:,}; how many there are is protected, too)"
    several, k = (f"with k {unit}s", "k") if unit in record_words() else (f"who is several {unit}s", "so many")
    return Section(
        "Who is protected",
        (
            f"Each single {unit} of the training data{text}. Adjacency: {privacy['adjacency']}. "
            f"Batches: {privacy['sampling']}.",
            *_replacing(privacy),
            f"A person {several} in the data has a weaker guarantee: {k} times the ε, and a δ that grows faster.",
            *_test_records(privacy),
            *([f"{public:,} records were used as public data: they have no protection either."] if public else []),
        ),
    )


def _test_records(privacy: Mapping) -> list[str]:
    """Say what holds for records of the evaluated part; nothing if they have an entry of their own."""
    if privacy.get("evaluation"):
        return []
    if privacy.get("test_records_decide"):
        return [DECIDING]
    return [UNSEEN if privacy.get("tuning") else UNPROTECTED.format(part=evaluated(privacy))]


def _replacing(privacy: Mapping) -> list[str]:
    """Say what holds if a record is replaced instead of left out."""
    if "epsilon_replace_one" not in privacy:
        return []
    value, unit = privacy["epsilon_replace_one"], _unit(privacy)
    if value is None:
        return [f"Where one {unit} is replaced by another, no figure is known for this run."]
    return [
        f"Where one {unit} is replaced by another, the noise has to hide at most twice the distance: ε = "
        f"{epsilon_text(value)} at the same δ."
    ]


def _delta(privacy: Mapping) -> Section:
    delta, size = privacy["delta"], privacy.get("records")
    if not size:
        return Section("Is δ small enough?", (f"δ = {delta_text(delta)}; the number of records was not stated.",))
    if delta >= 1 / size:
        verdict = "δ is NOT below 1/N: publishing one record outright could satisfy it. Choose a smaller δ."
    else:
        verdict = "δ is well below 1/N." if delta <= 0.1 / size else "δ is below 1/N, but not by much."
    return Section(
        "Is δ small enough?",
        (
            f"δ = {delta_text(delta)}, 1/N = {1 / size:.2g} for N = {size:,}, so δ·N = {delta * size:.2g}. δ is, "
            f"roughly, the probability with which the bound by ε may fail. {verdict}",
        ),
    )


def _figures(privacy: Mapping) -> Section:
    published = privacy.get("epsilon_published") or {}
    words = published_words(privacy)
    rows = [
        ("guaranteed ε", epsilon_text(privacy["epsilon"]), _basis_of_guarantee(privacy)),
        ("ε by RDP", epsilon_text(privacy.get("epsilon_rdp")), f"Rényi accountant over {_spent_as(privacy)}; sound"),
        ("ε by PLD", epsilon_text(privacy.get("epsilon_pld")), "privacy-loss distributions; sound, usually tighter"),
        (words.title, epsilon_text(published.get("value")), str(published.get("formula") or "no formula given")),
    ]
    if privacy.get("target_epsilon") is not None:
        by_paper = privacy.get("target_epsilon_as") == "published"
        how = "the noise was calibrated to it" + (
            ", by the count of papers, which is not the guarantee" if by_paper else ""
        )
        rows.append(("ε asked for", epsilon_text(privacy["target_epsilon"]), how))
    return Section(
        "The figures for ε, and why they differ",
        (
            "RDP and PLD are two sound upper bounds on the ε of the same run; PLD keeps more detail and is mostly the "
            f"smaller one. {words.whose}; it may use a looser conversion, or leave out releases or steps that cost "
            "privacy, and it is not a guarantee.",
            _published_verdict(privacy),
        ),
        ("figure", "value", "how"),
        tuple(rows),
    )


def _basis_of_guarantee(privacy: Mapping) -> str:
    if "law" in (privacy.get("trials") or {}):
        return "by RDP: the choice among a random number of trials, and the chosen model"
    if _fixed_ledger(privacy):
        return f"the smaller of RDP and PLD: all events were fixed before training{but_repeated(privacy)}"
    return (
        f"a cap fixed before training{but_repeated(privacy)}; what was actually spent is not a guarantee, because it "
        "depended on the data"
    )


def but_repeated(privacy: Mapping) -> str:
    """Say what was not fixed before training, if a crash caused steps to be taken again."""
    return ", but for steps that were taken again after a break" if privacy.get("steps_repeated") else ""


def _spent_as(privacy: Mapping) -> str:
    """Say what ε was computed from."""
    if (privacy.get("trials") or {}).get("max") != 1 and privacy.get("trials"):
        return "all declared trials"
    if _fixed_ledger(privacy):
        return "the whole plan" if "charged" in privacy else "the ledger"  # `charged`: the loop was left before its end
    return "the budget" if "filter_order" in privacy else "the cap"


def recomputed(privacy: Mapping) -> str:
    """Say how to compute the same ε from privacy.json."""
    fixed, trials = _fixed_ledger(privacy), privacy.get("trials") or {}
    text = "privacy.json lists the events one by one"
    if not fixed:
        text += "; their ε is NOT the guarantee, as they depended on outputs"
    if "filter_order" in privacy:
        several = f", times {trials['max']} trials" if trials.get("max", 1) > 1 else ""
        return text + (
            f". That is the Rényi budget they were kept within: {privacy['filter_total']:.6g} at the order "
            f"{privacy['filter_order']:g} (filter_total and filter_order){several}, converted at δ."
        )
    if "law" in trials:
        listed = "those listed as charged" if "charged" in privacy else "these"
        at = ", at the Rényi orders listed with it (trials.orders)" if "orders" in trials else ""
        return text + f". dp_accounting's RepeatAndSelectDpEvent gives ε from {listed} and the declared law{at}."
    if "charged" in privacy:
        whose = _spent_as(privacy) if fixed else "the cap, and of all trials"
        return text + f". The events of {whose} are there as charged: dp_accounting gives ε from those."
    return text + ", and suffices to recompute ε with the dp_accounting library."


def _fixed_ledger(privacy: Mapping) -> bool:
    """Whether ε is that of the listed ledger. If events depended on outputs, it is that of a budget or a cap."""
    if "epsilon_fixed_before_training" in privacy:
        return bool(privacy["epsilon_fixed_before_training"])
    bounds = [privacy[k] for k in ("epsilon_rdp", "epsilon_pld") if privacy.get(k) is not None]
    return bool(bounds) and math.isclose(privacy["epsilon"], min(bounds), rel_tol=1e-3)


class PublishedWords(NamedTuple):
    """What the figure to compare with papers is called, what its formula is called, and whose formula it is."""

    title: str
    formula: str
    whose: str


def published_words(privacy: Mapping) -> PublishedWords:
    """Return these words, which depend on whether a paper has the algorithm. Old statements do not say if none has."""
    if (privacy.get("epsilon_published") or {}).get("paper", True):
        whose = (
            "The figure as published follows the paper's own formula, or one of the gradients alone where its count of "
            "other releases is not known, so that results can be compared with its tables"
        )
        return PublishedWords("ε as published", "the published formula", whose)
    whose = (
        "No paper with this algorithm is known, and so no formula of its own: the figure as papers count follows the "
        "one that they use for similar algorithms, so that results can be compared with their tables"
    )
    return PublishedWords("ε as papers count", "the papers' formula", whose)


def understated(privacy: Mapping) -> str | None:
    """Return a warning if the published figure is below the guarantee, or its rule is known not to hold; else None."""
    published = privacy.get("epsilon_published") or {}
    value, ours = published.get("value"), privacy.get("epsilon")
    if value is None or ours is None or (published.get("guarantee", True) and value >= 0.999 * ours):
        return None
    counted = "declared" if privacy.get("trials", {"max": 1}) != {"max": 1} else None
    if (privacy.get("tuning") or {}).get("exact"):
        counted = "charged"  # the whole grid
    low = f"which is of one training, and not of all that were {counted}" if counted else "which understates"
    fault = low if value < ours else "by a rule that is no guarantee"
    return (
        f"{privacy['algorithm']}: {published_words(privacy).formula} gives ε = {epsilon_text(value)}, {fault}. Do not "
        f"quote it: what is guaranteed is ε = {epsilon_text(ours)}."
    )


def _published_verdict(privacy: Mapping) -> str:
    published = (privacy.get("epsilon_published") or {}).get("value")
    if published is None:
        return "There is no published formula for this combination."
    if warning := understated(privacy):
        return warning
    formula = published_words(privacy).formula
    return f"Here {formula} gives {epsilon_text(published)}: not less than ours, by a looser computation."


_EVENTS = {"poisson_gaussian": "Gaussian noise on a Poisson sample", "gaussian": "Gaussian noise on all records"}


def _ledger(privacy: Mapping) -> Section:
    ledger: Sequence[Mapping] = privacy["ledger"]
    kinds = list(dict.fromkeys(entry["event"] for entry in ledger))
    grouped = [[e for e in ledger if e["event"] == kind] for kind in kinds]
    rows = grouped if len(ledger) > ROWS_OF_LEDGER else [[entry] for entry in ledger]
    return Section(
        "The ledger: every noisy release of the training data",
        (
            f"{sum(e['count'] for e in ledger):,} events. The noise multiplier is the noise's standard deviation "
            f"over the most that one {_unit(privacy)} can change; releases computed from the same sample are one "
            "event, whose multiplier is no larger than any of theirs. " + recomputed(privacy),
        ),
        ("event", "times", "sampling rate", "noise multiplier"),
        tuple(map(_ledger_row, rows)),
    )


def _ledger_row(entries: Sequence[Mapping]) -> tuple[str, ...]:
    kind = entries[0]["event"]
    return (
        _EVENTS.get(kind, kind),
        f"{sum(e['count'] for e in entries):,}",
        _range(e["sampling_rate"] for e in entries),
        _range(e["noise_multiplier"] for e in entries),
    )


def _released(privacy: Mapping) -> Section:
    releases = [str(r) for r in privacy.get("releases", ())]
    text = f"Covered by the guarantee: {' '.join(releases)}" if releases else "Nothing is listed as released."
    return Section(
        "What was released",
        (text + " Anything computed from these alone is covered too.", *map(str, privacy.get("notes", ()))),
    )


def _outside(privacy: Mapping) -> Section:
    tuned, secure = privacy.get("tuning"), privacy.get("secure")
    part = evaluated(privacy)
    diagnostics = [str(d) for d in privacy.get("diagnostics_published", ())]
    logged = f"Exact figures were logged: {', '.join(diagnostics)}. Keep them inside."
    if tuned:
        baseline = "This run trained none. Whatever another run made of one is an exact function of the training data."
        tested = "This run made no exact figures of them. Those of other runs are not protected."
        choice = (
            "The choice among the declared grid is covered, as said below. What was learnt from these records to "
            "declare it is not."
        )
    else:
        baseline = (
            "Its model, its figures, and everything derived from them (cost of privacy, gaps, excess loss) are exact "
            "functions of the training data."
        )
        tested = f"Accuracies, errors, losses and group sizes of the {part} part are exact, and not protected"
        tested += "; those of metrics_release.json have noise." if privacy.get("evaluation") else "."
        choice = (
            "Each training with other settings on the same data spends its own ε; choosing the best by the reused test "
            "set also makes its accuracy too good. Figures of a validation part (data.evaluate_on=validation) are "
            "exact, and the final run trains on its records."
        )
    seeds = (
        " Runs of one seed share batches and noise, and do not even compose. Where the seed draws the test part, runs "
        "of several seeds show records as test records, exactly, that others of them protect."
    )
    rows = (
        ("Diagnostics on training records", logged if diagnostics else "This run logged none."),
        ("The non-private baseline", baseline),
        (f"The {part} records", tested),
        (
            "Sizes of groups",
            "The numbers of training records of each group, where a page or groups.csv shows them, are exact too, and "
            "small ones may reveal who is in the data. So is the digest of the raw files.",
        ),
        ("Choice of settings", choice),
        (
            "Further releases",
            "Publishing k runs on the same data composes k ledgers: the ε of one run is for one run."
            + ("" if secure else seeds),
        ),
        ("The seed", _seed(privacy)),
    )
    return Section("What the guarantee does not cover", (), ("what", "why it matters"), rows)


def _seed(privacy: Mapping) -> str:
    if privacy.get("secure"):
        return "None was fixed: the noise came from a cryptographic generator."
    if privacy.get("seed") is None:
        return "None was fixed, but the generator is not a cryptographic one."
    return f"Fixed to {privacy['seed']}: whoever knows or guesses it can remove the noise."


def _curve(privacy: Mapping) -> Section | None:
    curve = privacy.get("trade_off")
    if not curve:
        return None
    source = "the privacy loss distribution" if curve["bound"] == "pld" else "Rényi divergences, which is looser"
    lines = [
        "An attacker who accuses more records wrongly recognises more of those that were used. The curve says how many "
        f"at most, for any attack: it follows from {source}, and says more than a single ε. privacy.json has it as "
        "trade_off: rates of false alarms beside the smallest possible rates of misses. Every figure is rounded in "
        "the attacker's favour."
    ]
    if curve["mu"] is not None:
        lines.append(
            f"At rates of at least {curve['mu_from']:g} no attacker does better than one who sees a single Gaussian "
            f"release with μ = {curve['mu']:.3f} (μ-GDP). Below that rate, which is δ, nothing is guaranteed."
        )
    rates = list(zip(curve["false_alarms"], curve["misses"], strict=True))
    rows = [(FALSE_ALARMS, 1 - curve["recognised_at_1_percent"])]
    # the curve has each of these rates, unless δ is larger
    rows += [(alarm, missed) for alarm, missed in rates if alarm in (0.05, 0.1, 0.5)]
    shown = tuple((f"{100 * alarms:.3g} %", share_text(1 - missed)) for alarms, missed in rows)
    return Section("What an attacker can do at most", tuple(lines), ("accused wrongly", "recognised at most"), shown)


def _assumptions(privacy: Mapping) -> Section | None:
    assumptions = tuple(str(a) for a in privacy.get("assumptions", ()))
    return Section("Taken as public or assumed", assumptions) if assumptions else None


def _unit(privacy: Mapping) -> str:
    return unit_noun(_word(privacy))


def _word(privacy: Mapping) -> str:
    return str(privacy.get("unit") or "record")


def _range(values: Iterable[float]) -> str:
    known = list(values)
    low, high = min(known), max(known)
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
