"""Figures that were released with noise, as sentences and tables of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equidp.data.records import MIN_TEST_RECORDS
from equidp.data.sources import unit_noun
from equidp.evaluation.noised import FIGURES
from equidp.reporting.rendering import PageTable, TableCell
from equidp.reporting.statement_sections import delta_text, epsilon_text
from equidp.reporting.titles import METRIC_TITLES

HIDDEN = "hidden by noise"


def released_page(document: Mapping[str, Any], *, beside_exact: bool = True) -> tuple[list[str], list[PageTable]]:
    """Sentences and tables of `metrics_release.json`; `beside_exact` says that the page has exact figures too."""
    unit = unit_noun(document["unit"])  # a unit with several records counts once
    units = f"{unit}s"
    sentences = [
        f"From one histogram of the {document['part']} part with Gaussian noise: ε = "
        f"{epsilon_text(document['epsilon'])} at δ = {delta_text(document['delta'])} for each {unit} of that part. "
        "Behind each figure stands its 95 % interval, which holds sampling and noise; – is a value that noise hides. "
        "Worst groups and differences are "
        f"over the groups known to have {MIN_TEST_RECORDS} {units} or more; their intervals hold for all of these "
        "groups together." + (" All other figures of this page are exact." if beside_exact else ""),
        *document["notes"],
    ]
    every = (of for groups in document["intervals"]["groups"].values() for of in groups.values())
    intervals = (document["intervals"]["overall"], *every)
    names = [name for name in FIGURES if any(of.get(name) is not None for of in intervals)]
    alone = {"": document["overall"]}, {"": document["intervals"]["overall"]}
    grids = [_grid(f"All {units}", names, *alone, units=units)]
    for grouping, groups in document["groups"].items():
        grids.append(_grid(f"By {grouping}", names, groups, document["intervals"]["groups"][grouping], units=units))
    rows = []
    for grouping, worst in document["worst"].items():
        left_out = document["left_out"][grouping]
        rows.append((f"worst {grouping}", str(worst["group"] or HIDDEN), worst["accuracy"], worst["interval"]))
        rows.append((f"gap over {grouping}", "accuracy", *_pair(document["gap"][grouping])))
        rows += [
            (f"gap over {grouping}", name.replace("_", " "), *_pair(of))
            for name, of in document["disparity"].get(grouping, {}).items()
        ]
        if left_out:
            rows.append((f"left out of {grouping}", ", ".join(left_out), None, None))
    if rows:
        cells = tuple((TableCell.of(a), TableCell.of(b), _figure(value, ends)) for a, b, value, ends in rows)
        grids.append(PageTable("Between groups", (("", False), ("", False), ("value", True)), cells))
    return sentences, grids


def _pair(spread: Mapping[str, Any]) -> tuple[float | None, Sequence[float] | None]:
    return spread["difference"], spread["interval"]


def _grid(
    caption: str, names: Sequence[str], rows: Mapping[str, Any], intervals: Mapping[str, Any], *, units: str
) -> PageTable:
    titles = METRIC_TITLES | {"records": units}
    header = (("group", False), *((titles.get(name, name), True) for name in names))
    cells = tuple(
        (
            TableCell.of(group),
            *(_figure(figures[name], intervals[group][name], count=name == "records") for name in names),
        )
        for group, figures in rows.items()
    )
    return PageTable(caption, header if len(rows) > 1 else (("", False), *header[1:]), cells)


def _figure(value: float | None, interval: Sequence[float] | None, *, count: bool = False) -> TableCell:
    if interval is None:
        return TableCell("–", None)
    form = ",.0f" if count else ".3f"
    shown = "–" if value is None else f"{value:{form}}"
    return TableCell(f"{shown} ({interval[0]:{form}} to {interval[1]:{form}})", value)
