"""The HTML page: one self-contained file for one run or a comparison of runs; it loads nothing from anywhere.

Names from data reach the page in three places, each made inert in its own way: HTML text by Jinja's autoescape, Plotly
labels by `style.label`, JSON inside `<script>` by `_json_for_script`. A content security policy that allows only this
file's own scripts, by hash, and no request at all stands behind the three.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

import jinja2
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from equidp.reporting import figures
from equidp.reporting.privacy_report import Section, privacy_sections, research_mode
from equidp.reporting.tables import BASELINE, groupings_of, results_table, with_baseline

MAX_FIGURE_GROUPS = 40
"""Groupings with more groups than this are tabulated, not drawn."""


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, and what it is sorted by (None sorts last)."""

    text: str
    key: float | str | None


@dataclass(frozen=True)
class Chart:
    """A figure on the page: its id, what it shows in a sentence for those who cannot see it, and its JSON."""

    id: str
    caption: str
    json: Markup


def html_report(
    title: str,
    documents: Mapping[str, Mapping],
    privacy: Mapping[str, Mapping],
    histories: Mapping[str, pd.DataFrame],
    settings: Mapping,
    provenance: Mapping,
    group_table: pd.DataFrame,
) -> str:
    """The report as the text of one HTML file.

    Args:
        title: heading, and the browser's title.
        documents: `metrics.json` by algorithm: one with its baseline, or several to compare.
        privacy: `privacy.json` by algorithm; algorithms without one are taken as not private.
        histories: `history.parquet` by algorithm.
        settings: resolved settings, nested or flat.
        provenance: commit, data checksums, versions; nested or flat.
        group_table: columns `grouping`, `group`, and a count per part (`train`, `test`, …); may be empty.
    """
    table = results_table(documents, privacy)
    charts = list(_charts(documents, privacy, histories, group_table))
    plotly, script = get_plotlyjs(), _asset("report.js")
    return _template().render(
        title=title,
        policy=_policy(plotly, script),
        style=Markup(_asset("report.css")),
        plotly=Markup(plotly),
        script=Markup(script),
        warnings=_warnings(privacy),
        cards=_cards(documents, privacy),
        overview_header=_overview_header(table),
        overview=[_overview_row(name, row) for name, row in table.iterrows()],
        group_header=_group_header(documents, group_table),
        group_rows=list(_group_rows(documents, group_table)),
        charts=charts,
        statements={name: _statement(name, privacy) for name in documents},
        settings=list(_flat(settings)),
        provenance=list(_flat(provenance)),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    return resources.files("equidp.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"


def _json_for_script(figure: go.Figure) -> Markup:
    """A figure's JSON that no HTML parser can mistake for the end of its `<script>` element."""
    text = json.dumps(json.loads(figure.to_json()), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _charts(
    documents: Mapping[str, Mapping],
    privacy: Mapping[str, Mapping],
    histories: Mapping[str, pd.DataFrame],
    group_table: pd.DataFrame,
) -> Iterator[Chart]:
    drawn = list(_figures(documents, privacy, histories, group_table))
    for number, (chart, caption) in enumerate(drawn, start=1):
        yield Chart(f"figure-{number}", caption, _json_for_script(chart))


def _figures(
    documents: Mapping[str, Mapping],
    privacy: Mapping[str, Mapping],
    histories: Mapping[str, pd.DataFrame],
    group_table: pd.DataFrame,
) -> Iterator[tuple[go.Figure, str]]:
    """Every figure that the given data can fill, with its caption."""
    sizes = {g: max(len(d["groups"].get(g, {})) for d in documents.values()) for g in groupings_of(documents)}
    drawn = [grouping for grouping, size in sizes.items() if size <= MAX_FIGURE_GROUPS]
    candidates = [
        *((figures.metric_per_group(documents, g), f"Accuracy on the test records of each {g} group.") for g in drawn),
        *(
            (
                figures.cost_per_group(documents, g),
                f"Accuracy minus the baseline's, by {g}: below zero is what privacy cost.",
            )
            for g in drawn
        ),
        *(
            (figures.clip_norms(history, name), f"Clip norms of {name}, as released with noise during training.")
            for name, history in histories.items()
        ),
        (figures.test_curve(histories), "Test accuracy after each epoch."),
        (figures.test_curve(histories, over="epsilon"), "Test accuracy against the ε spent so far."),
        *(
            (figures.epsilon_over_epochs(history, privacy[name]), f"ε of {name} after each epoch.")
            for name, history in histories.items()
            if privacy.get(name, {}).get("private")
        ),
    ]
    if not group_table.empty:
        candidates += [
            (figures.group_counts(group_table, g), f"Number of records of each {g} group.")
            for g in drawn
            if (group_table["grouping"] == g).any()
        ]
    yield from ((chart, caption) for chart, caption in candidates if chart.data)


def _warnings(privacy: Mapping[str, Mapping]) -> list[str]:
    found = [warning for facts in privacy.values() if (warning := research_mode(facts))]
    return list(dict.fromkeys(found))


def _cards(documents: Mapping[str, Mapping], privacy: Mapping[str, Mapping]) -> list[tuple[str, str, str]]:
    """The handful of figures on top: (name, value, remark)."""
    private = [name for name in documents if name != BASELINE]
    if len(private) != 1:
        return []
    name = private[0]
    document, facts = documents[name], privacy.get(name, {})
    cards = [("privacy", f"ε = {_number(facts.get('epsilon'))}", f"at δ = {facts.get('delta')}")]
    cost = document.get("cost_of_privacy", {}).get("overall", {}).get("accuracy")
    cards.append(("accuracy", _number(document["overall"]["accuracy"]), f"{_signed(cost)} against the baseline"))
    for grouping, worst in list(document.get("worst", {}).items())[:2]:
        if worst["group"] is not None:
            cards.append((f"worst {grouping}", _number(worst["accuracy"]), str(worst["group"])))
    return cards


def _overview_header(table: pd.DataFrame) -> list[str]:
    names = {
        "epsilon": "ε",
        "epsilon_published": "ε as published",
        "cost": "cost of privacy",
        "worst_group": "worst group",
        "worst_accuracy": "its accuracy",
        "gap": "gap",
    }
    return ["algorithm", *(names.get(column, column) for column in table.columns)]


def _overview_row(name: object, row: pd.Series) -> list[Cell]:
    return [Cell(str(name), str(name)), *(_cell(value, signed=column == "cost") for column, value in row.items())]


def _group_header(documents: Mapping[str, Mapping], group_table: pd.DataFrame) -> list[str]:
    names = list(with_baseline(documents))
    private = [name for name in names if "cost_of_privacy" in documents.get(name, {})]
    parts = [f"{c} records" for c in _parts(group_table)]
    return [
        "grouping", "group", *parts, "tested", *(f"accuracy {n}" for n in names), *(f"Δ accuracy {n}" for n in private),
        *(f"Δ loss {n}" for n in private), *(f"AUROC {n}" for n in names),
    ]  # fmt: skip


def _parts(group_table: pd.DataFrame) -> list[str]:
    return [c for c in group_table.columns if c not in ("grouping", "group", "test")]


def _group_rows(documents: Mapping[str, Mapping], group_table: pd.DataFrame) -> Iterator[list[Cell]]:
    every = with_baseline(documents)
    private = [name for name in every if "cost_of_privacy" in documents.get(name, {})]
    counts = {} if group_table.empty else group_table.set_index(["grouping", "group"]).to_dict("index")
    for grouping in groupings_of(documents):
        for group in dict.fromkeys(g for d in every.values() for g in d["groups"].get(grouping, {})):
            figures_of = {n: d["groups"].get(grouping, {}).get(group, {}) for n, d in every.items()}
            costs = {n: every[n]["cost_of_privacy"]["groups"].get(grouping, {}).get(group, {}) for n in private}
            yield [
                Cell(grouping, grouping),
                Cell(group, group),
                *(_cell(counts.get((grouping, group), {}).get(part)) for part in _parts(group_table)),
                _cell(next((f["count"] for f in figures_of.values() if "count" in f), None)),
                *(_cell(figures_of[n].get("accuracy")) for n in every),
                *(_cell(costs[n].get("accuracy"), signed=True) for n in private),
                *(_cell(costs[n].get("excess_loss"), signed=True) for n in private),
                *(_cell(figures_of[n].get("auroc")) for n in every),
            ]


def _statement(name: str, privacy: Mapping[str, Mapping]) -> tuple[Section, ...]:
    return privacy_sections(privacy.get(name, {"algorithm": name, "private": False}))


def _flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)


def _cell(value: object, *, signed: bool = False) -> Cell:
    if value is None or pd.isna(value):
        return Cell("–", None)
    if isinstance(value, str):
        return Cell(value, value)
    return Cell(_signed(value) if signed else _number(value), float(value))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() and abs(value) >= 2 else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}"
