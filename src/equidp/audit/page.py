"""The page of an audit: verdict, bounds beside claims, and exposure of groups, in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from equidp.algorithms import BASELINE
from equidp.audit.figures import CANARIES, MEASURES, bounds_beside_claims, exposure_by_group
from equidp.audit.membership import FEWEST
from equidp.audit.run import REMEDY
from equidp.data.records import MIN_TEST_RECORDS
from equidp.reporting.attack import ATTACKS, lower_text
from equidp.reporting.figures import trade_off_figure
from equidp.reporting.page import MAX_FIGURE_GROUPS
from equidp.reporting.rendering import PageTable, TableCell, render
from equidp.reporting.statement_sections import delta_text, epsilon_text

WARNING = (
    "The findings of an audit are computed from exact training data and are outside the privacy guarantee: keep this "
    "page with the data, do not publish it with the model."
)

READING = (
    (
        "What the canaries show",
        "Canaries are records of the auditor's own, each put in or left out by a fair coin. Guessing the coins from "
        "what the run released is the attack: whoever guesses right too often proves that ε is at least so much "
        "(Steinke, Nasr and Jagielski 2023; the number of guesses is fixed in advance). Gradient canaries attack the "
        "mechanism in the place where it is weakest; mislabelled records are what an outsider could plant.",
    ),
    (
        "A bound below its claim proves nothing",
        "It only fails to refute: even an optimal attack shows less than the ε there is, and this one, in a single "
        "run, finds half the noise missing often but not always. That the noise is what the ledger says is shown by "
        "the tests of the mechanism, not by this page.",
    ),
    (
        "A bound above its claim refutes it",
        "Each bound is wrong with at most the probability that is left of its confidence, and there is one for each "
        "kind of canaries. Of twenty honest audits with two bounds at 95 % two may accuse: repeat it with another seed "
        "before you believe it, and then do not release the model.",
    ),
    (
        "What membership inference shows",
        "Whether the attack tells training records from test records, group by group. The loss threshold is what "
        "anyone can do; reference models remove how hard each record is, and assume an attacker who has such data. "
        "The true positive rate at 1 % false positives is how many are recognised with hardly a false accusation, "
        "which is what exposes a person; the AUC is an average over all thresholds and can hide it.",
    ),
    (
        "Before trusting a difference between groups",
        "Small groups have wide intervals, and among many groups some interval misses the blind guess by chance alone. "
        "If training and test part are not draws of one distribution, an attack distinguishes them without any leak: "
        "then what a model that cannot leak would show is not 0.5.",
    ),
)


def audit_report(title: str, findings: Mapping[str, Any], settings: Mapping, provenance: Mapping) -> str:
    """Return the page of `audit.json` as the text of one HTML file; the other arguments are those of `render`."""
    return render(
        "audit.html.j2",
        title=title,
        drawn=_figures(findings),
        settings={"": settings},
        provenance=provenance,
        warnings=[WARNING],
        verdict=verdict_sentence(findings),
        cards=_cards(findings),
        bounds=_bounds(findings),
        algorithm=findings["algorithm"],
        groups=list(_exposures(findings)),
        interval=f"{findings['confidence']:.0%}",
        fewest={"auc": MIN_TEST_RECORDS, "tpr": FEWEST},
        reading=READING,
    )


def verdict_sentence(findings: Mapping[str, Any]) -> str:
    """Return the verdict on the claim, in words."""
    found = _attacks(findings)
    if not found:
        return "No canaries were run: the claimed ε was not tested."
    refuting = [name for name, one in found.items() if not one["consistent"]]
    if not refuting:
        beyond = [name for name, one in found.items() if not one["refutable"]]
        if len(beyond) == len(found):
            most = " and ".join(f"ε ≥ {lower_text(one['epsilon_within_reach'])}" for one in found.values())
            return (
                f"Not tested: with every guess right {' and '.join(found)} would have shown {most}, no more "
                f"than {findings['algorithm']} claims. {REMEDY}"
            )
        return (
            f"Not refuted: {' and '.join(found)} showed no more than the ε that {findings['algorithm']} claims. "
            + (f"{beyond[0].capitalize()} could not have shown more with every guess right. " if beyond else "")
            + "That is no proof that the claim holds."
        )
    shown = " and ".join(
        f"{name} show ε ≥ {lower_text(found[name]['epsilon_lower_bound'])} where "
        f"{epsilon_text(found[name]['epsilon_claimed'])} is claimed (at δ = {delta_text(found[name]['delta'], 2)})"
        for name in refuting
    )
    # a bound at 95 % is wrong in one of twenty honest audits; if there are two bounds, one of them is wrong in two
    confidence = max(0.0, 1 - len(found) * (1 - findings["confidence"]))
    return f"REFUTED at {confidence:.0%} confidence: {shown}. Do not release this model."


def _attacks(findings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the results of the canaries that were run, by their names in words."""
    return {name: findings[key] for key, name in CANARIES.items() if findings[key]}


def _cards(findings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the claim, of the bounds that were shown, and of the most exposed groups."""
    claim = findings["claim"]
    at = f"at δ = {delta_text(claim['delta'], 2)}"
    cards = [("claimed by the run", f"ε ≤ {epsilon_text(claim['epsilon'])}", at)]
    for name, found in _attacks(findings).items():
        claimed = f"of {epsilon_text(found['epsilon_claimed'])} claimed at δ = {delta_text(found['delta'], 2)}"
        cards.append((f"shown by {name}", f"ε ≥ {lower_text(found['epsilon_lower_bound'])}", claimed))
    for when, model in (("before", BASELINE), ("after", findings["algorithm"])):
        if attacks := findings["membership"].get(model):
            cards.append(_exposed_most(when, *list(attacks.items())[-1]))
    return cards


def _exposed_most(when: str, attack: str, found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the card of the first grouping's group whose members the attack recognises best, if it recognises any."""
    grouping, groups = next(iter(found["groups"].items()))
    significant = {
        name: one["auc"] for name, one in groups.items() if one["auc"] is not None and one["auc_interval"][0] > 0.5
    }
    if not significant:
        return f"{grouping} exposed most, {when}", "none", f"no AUC's interval is above 0.5 ({ATTACKS[attack]})"
    most = max(significant, key=lambda name: significant[name])
    (low, high), known = groups[most]["auc_interval"], sum(one["auc"] is not None for one in groups.values())
    best = f"AUC {significant[most]:.3f} ({low:.3f} to {high:.3f}), the largest of {known}, by {ATTACKS[attack]}"
    return f"{grouping} exposed most, {when}", most, best


def _bounds(findings: Mapping[str, Any]) -> PageTable | None:
    shown = f"ε shown ({findings['confidence']:.0%})"
    numbers = ((name, True) for name in ("canaries", "guesses", "right", "δ", shown, "ε claimed"))
    header = (("attack", False), *numbers, ("verdict", False))
    rows = tuple(
        (
            TableCell.of(name),
            *(TableCell(f"{found[key]:,}", found[key]) for key in ("canaries", "guesses", "correct")),
            TableCell(delta_text(found["delta"], 2), found["delta"]),
            TableCell(f"≥ {lower_text(found['epsilon_lower_bound'])}", found["epsilon_lower_bound"]),
            TableCell(f"≤ {epsilon_text(found['epsilon_claimed'])}", found["epsilon_claimed"]),
            TableCell.of(
                "REFUTED" if not found["consistent"] else "not refuted" if found["refutable"] else "out of reach"
            ),
        )
        for name, found in _attacks(findings).items()
    )
    return PageTable("", header, rows) if rows else None


def _exposures(findings: Mapping[str, Any]) -> Iterator[PageTable]:
    """Give a table for each grouping and attack: AUC and TPR of everyone and each group, before and after privacy."""
    models = findings["membership"]
    if not models:
        return
    before, after = models[BASELINE], models[findings["algorithm"]]
    for grouping in next(iter(before.values()))["groups"]:
        for attack in reversed(before):
            sides = (before[attack], after[attack])
            header = [(grouping, False), ("members", True), ("non-members", True)]
            header += [(f"{measure} {when}", True) for measure in ("AUC", "TPR") for when in ("before", "after")]
            rows = [_exposure("everyone", [side["overall"] for side in sides])]
            rows += [
                _exposure(name, [side["groups"][grouping][name] for side in sides])
                for name in sides[0]["groups"][grouping]
            ]
            yield PageTable(f"By {grouping}: {ATTACKS[attack]}", tuple(header), tuple(rows))


def _exposure(name: str, sides: list[Mapping[str, Any]]) -> tuple[TableCell, ...]:
    counts = (TableCell(f"{sides[0][key]:,}", sides[0][key]) for key in ("members", "non_members"))
    figures = (_with_interval(side, measure) for measure in MEASURES for side in sides)
    return (TableCell.of(name), *counts, *figures)


def _with_interval(found: Mapping[str, Any], measure: str) -> TableCell:
    value = found[measure]
    if value is None:
        return TableCell("–", None)
    low, high = found[f"{measure}_interval"]
    return TableCell(f"{value:.3f} [{low:.3f}, {high:.3f}]", value)


def _figures(findings: Mapping[str, Any]) -> Iterator[tuple[go.Figure, str]]:
    """Give the figures with captions: bounds, trade-off curve, and exposure by groupings with few enough groups."""
    if _attacks(findings):
        yield (
            bounds_beside_claims(findings),
            "Lower bound beside the ε claimed at the same δ. A bound above its claim would refute it.",
        )
    if curve := findings["claim"].get("trade_off"):
        yield (
            trade_off_figure({findings["algorithm"]: curve}, points(findings)),
            "The curve is the most that any attack can achieve on the claimed ledger; the points are what these "
            "attacks achieved. Points above it refute the claim, unless chance put them there.",
        )
    caption = f"With {findings['confidence']:.0%} intervals, before (sgd) and after privacy. Dotted: blind guessing. "
    caption += "No mark: too few members, or others."
    attacks = findings["membership"].get(BASELINE, {})
    for grouping, groups in next(iter(attacks.values()), {"groups": {}})["groups"].items():
        if len(groups) <= MAX_FIGURE_GROUPS:
            for measure in MEASURES:
                yield exposure_by_group(findings, grouping, measure), caption


def points(findings: Mapping[str, Any]) -> dict[str, list[Sequence[float]]]:
    """Return what each attack on the private model achieved: pairs (share accused wrongly, share recognised)."""
    found = {name: list(one["achieved"]) for name, one in _attacks(findings).items() if one.get("achieved")}
    for attack, exposure in findings["membership"].get(findings["algorithm"], {}).items():
        if (share := exposure["overall"]["tpr_at_1_percent_fpr"]) is not None:
            found[ATTACKS[attack]] = [(0.01, share)]
    return found
