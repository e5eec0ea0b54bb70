"""Sections of the privacy statement on what was chosen, and on what was released beside the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from equidp.data.sources import unit_noun
from equidp.options import as_typed


@dataclass(frozen=True)
class Section:
    """A heading, its paragraphs, and a table as header and rows (empty if none)."""

    title: str
    paragraphs: tuple[str, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def epsilon_text(value: float | None, decimals: int = 4) -> str:
    """ε rounded up: rounding must not make a guarantee look stronger."""
    if value is None:
        return "–"
    if value >= 1e6:
        return f"{value:.2e}"
    return f"{math.ceil(value * 10**decimals - 1e-9) / 10**decimals:.{decimals}f}"


def delta_text(value: float, digits: int = 6) -> str:
    """δ rounded up, because ε does not hold at a smaller δ."""
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))):.{digits}g}"


def steps_text(privacy: Mapping) -> str:
    """Planned steps, and the number that the model took if a budget ended training or steps were refused.

    Both numbers are in privacy.json, which goes out too.
    """
    planned, taken = privacy["steps"], privacy.get("accepted_steps", privacy["steps"])
    return f"{planned:,}" if taken >= planned else f"{planned:,} planned, of which the model took {taken:,}"


def noise_text(privacy: Mapping) -> str:
    """The noise multiplier σ of the gradients' sum; if it changes by steps, also the range of the ledger's events.

    A schedule, or a sampler that balances its noise, applies factors to σ, so steps may have had less noise. Only
    events with the steps' sampling rate are taken, because other releases (counts, losses) mostly have another rate.
    """
    given, ledger = f"{privacy['noise_multiplier']:.6g}", privacy["ledger"]
    sampled = [event for event in ledger if event["sampling_rate"] < 1]
    steps = [event for event in sampled if event["sampling_rate"] == privacy["sampling_rate"]] or sampled or ledger
    low, high = (f"{of((event['noise_multiplier'] for event in steps), default=0.0):.6g}" for of in (min, max))
    return given if low == high else f"{given} (as set; the steps' events in the ledger have {low} to {high})"


def evaluated(privacy: Mapping) -> str:
    """The part that the run was evaluated on: `test` or `validation`."""
    return str(privacy.get("evaluated_on") or (privacy.get("evaluation") or {}).get("part", "test"))


def released_figures(privacy: Mapping) -> Section | None:
    """Say what figures released with noise cost the evaluated records; None if there are no such figures."""
    entry = privacy.get("evaluation")
    if not entry:
        return None
    unit, part = unit_noun(entry["unit"]), entry["part"]
    several = "" if entry["trials"].get("max") == 1 else " It covers all declared trials."
    again = (
        " Records of the validation part go back into the final training: for them that training's ε is added."
        if part == "validation"
        else ""
    )
    exact = (
        f"The exact figures of the {part} part (metrics.json, accuracy.json, cost_of_privacy.json, history.parquet, "
        "report.html) stay inside, and must decide on nothing that goes out, such as which of several models does: "
        "beside them, or a choice by them, this noise protects nobody."
    )
    return Section(
        f"Figures of the {part} part",
        (
            f"The figures in metrics_release.json follow from one histogram of the {part} part over group, label and "
            f"score bin (tables: {', '.join(entry['tables'])}), to which Gaussian noise was added. For each single "
            f"{unit} of the {part} part (adjacency: {entry['adjacency']}) this is (ε, δ)-differentially private with "
            f"ε = {epsilon_text(entry['epsilon'])} and δ = {delta_text(entry['delta'])}.{several} One {unit} moves the "
            f"histogram by at most {entry['sensitivity']:.4g}; the noise is "
            f"{entry['mechanism']['noise_multiplier']:.6g} times that.",
            _of_both_parts(privacy, entry) + again,
            *([] if privacy.get("tuning") else [exact]),
        ),
    )


def _of_both_parts(privacy: Mapping, entry: Mapping) -> str:
    """Say what the ε of the training and the ε of figures of another part mean together."""
    if (privacy.get("membership") or {}).get("how") == "strata":
        return (
            "The parts were drawn from all records at once (data.membership=strata): one row more in the table "
            "exchanges records between them, and neither figure holds for tables that differ in one row."
        )
    unit, part = unit_noun(entry["unit"]), entry["part"]
    return (
        f"Each {unit} of the training part is protected by ε = {epsilon_text(privacy['epsilon'])}, whatever is "
        f"computed from the model, these figures too. Each {unit} of the {part} part is protected by "
        f"ε = {epsilon_text(entry['epsilon'])}. No {unit} is in both, so the two do not add up. Where "
        f"one {unit} is replaced by another, the two may be in different parts: then both ε count, and they add up."
    )


def tuning(privacy: Mapping) -> Section | None:
    """Say what a choice of settings costs the records of each part; None if none were chosen."""
    entry = privacy.get("tuning")
    if not entry:
        return None
    held, score = entry["validation"], str(entry["score"]).replace("_", " ")
    score = score.replace("worst group", "accuracy of its worst group")
    chosen = ", ".join(f"{name} = {as_typed(value)}" for name, value in (entry.get("chosen") or {}).items())
    chosen = f": {chosen}" if chosen else ""
    if held is None:
        return Section(
            "How the settings were chosen",
            (
                f"Without privacy of the choice, for research (tune.exact): every combination of a declared grid "
                f"({', '.join(entry['grid'])}) was trained, and the best exact {score} of a validation part "
                f"chose{chosen}. The ε above is that of all these trainings together. Records of the validation part "
                "have no guarantee.",
            ),
        )
    return Section(
        "How the settings were chosen",
        (
            f"Every trial drew its settings from a declared grid ({', '.join(entry['grid'])}). The one with the best "
            f"{score} of a validation part was chosen{chosen}. That figure came from a histogram with Gaussian noise, "
            "and nothing of the other trials is shown. The ε above covers choice and model.",
            f"Each {unit_noun(held['unit'])} of the validation part (adjacency: {held['adjacency']}) is protected by "
            f"ε = {epsilon_text(held['epsilon'])} at δ = {delta_text(held['delta'])}, for the choice and the figures "
            f"of the chosen trial. No {unit_noun(held['unit'])} is in two parts.",
        ),
    )


_SCORE = (
    "The score which chose must have been private itself, or measured on records that none of them trained on: not on "
    "test parts that each one's seed drew anew, nor on a validation part (data.evaluate_on=validation) that went back "
    "into this training."
)

_OTHERS = "trainings that differ in these may cost more together, although each states the same ε."

_DRAWN = (
    "The settings of each must have been drawn at random from one list, whatever the others had: if a list is gone "
    "through in order, the chosen settings tell how many trials came before. Every trial must have the sampling rate, "
    "noise and steps of this one."
)

LAWS = {
    "geometric": "the geometric law",
    "negative_binomial": "the truncated negative binomial law",
    "poisson": "the Poisson law, drawn again while it is 0",
}
"""Laws of the number of trials, in words."""


def trials(privacy: Mapping) -> Section | None:
    """The number of trials that was declared; None for a single one."""
    declared = privacy.get("trials") or {}
    if declared.get("max") == 1 or not declared:
        return None
    alike = "" if privacy.get("secure") else " No two trials may have one seed: their noise would be the same."
    if "law" not in declared:
        text = (
            f"At most {declared['max']} trainings on these records, this one included, were declared before the first "
            "of them. ε is that of all their events together, so all of them may be published, if every trial has the "
            f"sampling rate, noise and steps of this one, or its budget: {_OTHERS}{alike}"
        )
        return Section("Several trials", (text,))
    shape = f", η = {declared['shape']:g}" if "shape" in declared else ""
    text = (
        f"The number of trainings was drawn before the first of them from {LAWS[declared['law']]}, with mean "
        f"{declared['mean']:g}{shape} (Papernot and Steinke 2022). ε is that of the choice and the chosen model, "
        "provided that nothing else about the trials is ever shown, not even their number."
        + ("" if privacy.get("tuning") else f" {_DRAWN}{alike} {_SCORE}")
    )
    return Section("Several trials", (text,))
