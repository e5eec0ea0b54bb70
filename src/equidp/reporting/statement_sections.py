"""Sections of the privacy statement: what an attacker can do at most, and what several trials cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equidp.reporting.attack import share_text

FALSE_ALARMS = 0.01
"""The rate of false accusations at which the attacker of the statement operates."""


@dataclass(frozen=True)
class Section:
    """A heading, its paragraphs, and a table as header and rows (empty if none)."""

    title: str
    paragraphs: tuple[str, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def curve_section(privacy: Mapping) -> Section | None:
    curve = privacy.get("trade_off")
    if not curve:
        return None
    source = "the privacy loss distribution" if curve["bound"] == "pld" else "Rényi divergences, which is looser"
    lines = [
        "An attacker who accuses more records wrongly recognises more of those that were used. The curve says how many "
        f"at most, for any attack: it follows from {source}, and says more than a single ε. privacy.json has it as "
        "trade_off: rates of false alarms beside the smallest possible rates of misses, and every figure is rounded "
        "in the attacker's favour.",
    ]
    if curve["mu"] is not None:
        lines.append(
            f"It lies above that of one Gaussian release with μ = {curve['mu']:.3f} (μ-GDP), for rates of at least "
            f"{curve['mu_from']:g}: below δ nothing is guaranteed."
        )
    rates = list(zip(curve["false_alarms"], curve["misses"], strict=True))
    rows = [(FALSE_ALARMS, 1 - curve["recognised_at_1_percent"])]
    # every one of these rates stands in the curve, unless δ is larger
    rows += [(alarm, missed) for alarm, missed in rates if alarm in (0.05, 0.1, 0.5)]
    shown = tuple((f"{100 * alarms:.3g} %", share_text(1 - missed)) for alarms, missed in rows)
    return Section("What an attacker can do at most", tuple(lines), ("accused wrongly", "recognised at most"), shown)


_SCORE = (
    "The score which chose must have been private itself, or measured on records that none of them trained on: not on "
    "test parts that each one's seed drew anew, nor on a validation part (data.evaluate_on=validation) that went back "
    "into this training."
)


_LAWS = {
    "geometric": "the geometric law",
    "negative_binomial": "the truncated negative binomial law",
    "poisson": "the Poisson law, drawn again while it is 0",
}


def trials_section(privacy: Mapping) -> Section | None:
    """The number of trials that was declared; None for a single one."""
    trials = privacy.get("trials") or {}
    if trials.get("max") == 1 or not trials:
        return None
    alike = "" if privacy.get("secure") else " No two trials may have one seed: their noise would be the same."
    if "law" not in trials:
        text = (
            f"At most {trials['max']} trainings on these records, this one included, were declared before the first of "
            "them. ε is that of all their events together, so all of them may be published. Every trial has at most "
            f"this run's ledger.{alike}"
        )
        return Section("Several trials", (text,))
    shape = f", η = {trials['shape']:g}" if "shape" in trials else ""
    text = (
        f"The number of trainings was drawn before the first of them from {_LAWS[trials['law']]}, with mean "
        f"{trials['mean']:g}{shape} (Papernot and Steinke 2022). ε is that of the choice and the chosen model, "
        "provided that nothing else about the trials is ever shown, not even their number, and that every trial has at "
        f"most this run's ledger.{alike} {_SCORE}"
    )
    return Section("Several trials", (text,))
