"""The page of a tuning, one self-contained HTML file: what was declared and chosen, and what it costs each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equidp.data.sources import unit_noun
from equidp.options import as_typed, dotted, listed
from equidp.reporting.privacy_report import privacy_sections, research_mode
from equidp.reporting.released import released_page
from equidp.reporting.rendering import PageTable, TableCell, render
from equidp.reporting.statement_sections import LAWS, delta_text, epsilon_text

EXACT = (
    "Settings were chosen without privacy (tune.exact), for research: the score is exact, and no guarantee holds for "
    "the validation records. Do not publish this page or the choice."
)

INSIDE = (
    "This page stays inside: its digests of raw files are exact, and so are figures of trials, if it has any. What "
    "may go out is in the folder release/."
)


def tuning_page(
    title: str,
    choice: Mapping[str, Any],
    privacy: Mapping[str, Any],
    released: Mapping[str, Any],
    trials: Mapping[str, Any],
    settings: Mapping,
    provenance: Mapping,
) -> str:
    """The page as the text of one HTML file; `title`, `settings` and `provenance` as of `render`.

    Args:
        choice: `tune.json`.
        privacy: `privacy.json` of the chosen model.
        released: `metrics_release.json`, or an empty dict.
        trials: all trials, which must stay inside, or an empty dict.
    """
    warnings = [EXACT] if choice["exact"] else []
    mode = research_mode(privacy)
    return render(
        "tune.html.j2",
        title=title,
        drawn=iter(()),
        settings={"": settings},
        provenance=provenance,
        warnings=[*warnings, mode or INSIDE],
        cards=_cards(choice),
        declared=_table("Declared before the first trial", _declared(choice, privacy)),
        chosen=_table("Chosen", [(name, as_typed(value)) for name, value in choice["chosen"].items()]),
        exact=choice["exact"],
        trials=_every(trials),
        released=released_page(released, beside_exact=False) if released else None,
        statement=privacy_sections(privacy),
    )


def _cards(choice: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    held, score = choice["validation"], choice["score"].replace("_", " ")
    at = f"choice and model, δ = {delta_text(choice['delta'])}"
    found = [("training part", f"ε = {epsilon_text(choice['epsilon'])}", at)]
    if held:
        cost = f"ε = {epsilon_text(held['epsilon'])}"
        found.append(("validation part", cost, f"choice and scores, δ = {delta_text(held['delta'])}"))
    return [*found, (score, f"{choice['value']:.4f}", "of the validation part, with noise" if held else "exact")]


def _declared(choice: Mapping[str, Any], privacy: Mapping[str, Any]) -> list[tuple[str, Any]]:
    law, held = choice["trials"], choice["validation"]
    rows = [("algorithm", choice["algorithm"])]
    rows += [(name, ", ".join(map(as_typed, listed(of)))) for name, of in dotted(choice["grid"]).items()]
    for name, (low, high, *log) in choice["box"].items():
        rows.append((name, f"{low} to {high}{', logarithmic' * bool(log)}"))
    rows.append(("combinations", choice["points"]))
    if held is None:
        return [*rows, ("trials", "every combination once"), ("score", f"exact {choice['score'].replace('_', ' ')}")]
    cost = f"{epsilon_text(held['epsilon'])} at δ = {delta_text(held['delta'])}"
    return [
        *rows,
        ("number of trials", f"drawn from {LAWS[law['law']]}, mean {law['mean']:g}"),
        ("score", f"{choice['score'].replace('_', ' ')} of the validation part, by a histogram with Gaussian noise"),
        *([] if privacy["target_epsilon"] is None else [("target of ε", privacy["target_epsilon"])]),
        (
            f"ε of choice and model, for a training {unit_noun(privacy['unit'])}",
            epsilon_text(choice["epsilon_declared"]),
        ),
        (f"ε of choice and scores, for a validation {unit_noun(held['unit'])}", cost),
        ("noise of the histogram, over its sensitivity", f"{held['mechanism']['noise_multiplier']:.6g}"),
    ]


def _table(caption: str, rows: Sequence[tuple[str, Any]]) -> PageTable:
    cells = tuple(tuple(map(TableCell.of, row)) for row in rows)
    return PageTable(caption, (("", False), ("", False)), cells)


def _every(trials: Mapping[str, Any]) -> PageTable | None:
    if not trials:
        return None
    names = list(trials["trials"][0]["settings"])
    rows = tuple(
        (
            TableCell(str(k), k),
            *(TableCell.of(as_typed(one["settings"][name])) for name in names),
            TableCell(f"{one['score']:.4f}", one["score"]),
        )
        for k, one in enumerate(trials["trials"])
    )
    header = (("trial", True), *((name, False) for name in names), ("score", True))
    return PageTable("nonprivate/trials", header, rows)
