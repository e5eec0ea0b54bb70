"""Tables of results: one row per algorithm for the terminal, one row per group for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

BASELINE = "sgd"
WIDTH = 100
"""The table printed at the end of a run fits this many columns."""

MAX_GROUPS = 4
"""Groups shown by name in a results table; beyond it, those that privacy cost most."""

_HEADINGS = {
    "epsilon": "ε",
    "epsilon_published": "ε publ.",
    "accuracy": "overall",
    "cost": "Δ",
    "worst_group": "worst group",
    "worst_accuracy": "its acc.",
    "gap": "gap",
}


def with_baseline(documents: Mapping[str, Mapping]) -> dict[str, Mapping]:
    """The documents with the baseline's own figures as algorithm `sgd`, first, where a run carries them."""
    if BASELINE in documents:
        return {BASELINE: documents[BASELINE], **{k: v for k, v in documents.items() if k != BASELINE}}
    for document in documents.values():
        if "baseline" in document:
            return {BASELINE: document["baseline"], **documents}
    return dict(documents)


def groupings_of(documents: Mapping[str, Mapping]) -> list[str]:
    """Every grouping that some document has, in the documents' order."""
    return list(dict.fromkeys(grouping for document in documents.values() for grouping in document["groups"]))


def results_table(
    documents: Mapping[str, Mapping],
    epsilons: Mapping[str, Mapping],
    *,
    grouping: str | None = None,
    max_groups: int = MAX_GROUPS,
) -> pd.DataFrame:
    """One row per algorithm: ε, accuracy overall and per group, worst group, cost of privacy and its gap.

    Args:
        documents: `metrics.json` by algorithm. The baseline's row comes from any document that carries it.
        epsilons: `privacy.json` by algorithm; `epsilon` and `epsilon_published` are read.
        grouping: whose groups to show; the first one by default.
        max_groups: at most so many group columns. Where there are more groups, those with the lowest cost of privacy
            of any algorithm (the most accuracy lost) are kept, in their own order.

    Returns:
        A frame indexed by `algorithm` with the columns `epsilon`, `epsilon_published`, `accuracy`, `cost` (against the
        baseline), `<grouping>:<group>` (accuracy), `worst_group`, `worst_accuracy` and `gap`. Undefined values are NaN.
    """
    documents = with_baseline(documents)
    groupings = groupings_of(documents)
    grouping = grouping or (groupings[0] if groupings else None)
    shown = _groups_to_show(documents, grouping, max_groups) if grouping else []
    rows = [_row(document, epsilons.get(name, {}), grouping, shown) for name, document in documents.items()]
    frame = pd.DataFrame(rows, index=pd.Index(documents, name="algorithm"))
    return frame.astype({c: float for c in frame.columns if c != "worst_group"})


def _row(document: Mapping, privacy: Mapping, grouping: str | None, shown: Sequence[str]) -> dict:
    groups = document["groups"].get(grouping, {})
    worst = _worst(groups)
    cost = document.get("cost_of_privacy", {})
    return {
        "epsilon": privacy.get("epsilon"),
        "epsilon_published": (privacy.get("epsilon_published") or {}).get("value"),
        "accuracy": document["overall"]["accuracy"],
        "cost": cost.get("overall", {}).get("accuracy"),
        **{f"{grouping}:{group}": groups.get(group, {}).get("accuracy") for group in shown},
        "worst_group": worst,
        "worst_accuracy": groups[worst]["accuracy"] if worst else None,
        "gap": cost.get("gap", {}).get(grouping, {}).get("accuracy"),
    }


def _worst(groups: Mapping[str, Mapping]) -> str | None:
    known = [group for group, figures in groups.items() if figures["accuracy"] is not None]
    return min(known, key=lambda group: groups[group]["accuracy"], default=None)


def _groups_to_show(documents: Mapping[str, Mapping], grouping: str, limit: int) -> list[str]:
    groups = list(dict.fromkeys(g for d in documents.values() for g in d["groups"].get(grouping, {})))
    if len(groups) <= limit:
        return groups

    def dearest(group: str) -> float:
        """The lowest cost of privacy, or accuracy without a baseline, that any algorithm has in the group."""
        costs = [_cost_or_accuracy(document, grouping, group) for document in documents.values()]
        return min((c for c in costs if c is not None), default=float("inf"))

    kept = sorted(groups, key=dearest)[:limit]
    return [group for group in groups if group in kept]


def _cost_or_accuracy(document: Mapping, grouping: str, group: str) -> float | None:
    if "cost_of_privacy" in document:
        return document["cost_of_privacy"]["groups"].get(grouping, {}).get(group, {}).get("accuracy")
    return document["groups"].get(grouping, {}).get(group, {}).get("accuracy")


def print_table(frame: pd.DataFrame, console: Console) -> None:
    """Print a `results_table` within 100 columns, or the console's width where that is smaller."""
    frame = frame.dropna(axis="columns", how="all")
    names = list(dict.fromkeys(c.split(":", 1)[0] for c in frame.columns if ":" in c))
    table = Table(
        title=f"Accuracy on the test records, overall and by {escape(', '.join(names))}" if names else "Accuracy",
        caption="Δ = accuracy - the non-private baseline's; gap = largest Δ - smallest Δ over all groups.",
        width=None,
        pad_edge=False,
    )
    table.add_column("algorithm", overflow="fold")
    for column in frame.columns:
        words = column == "worst_group"
        heading = _HEADINGS.get(column, column.split(":", 1)[-1])
        table.add_column(
            escape(heading), justify="left" if words else "right", overflow="ellipsis", max_width=18 if words else 11
        )
    for name, row in frame.iterrows():
        table.add_row(escape(str(name)), *(escape(_cell(column, value)) for column, value in row.items()))
    console.print(table, width=min(WIDTH, console.width))


def _cell(column: str, value: object) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and pd.isna(value)):
        return "–"
    if not isinstance(value, float):
        return str(value)
    if column.startswith("epsilon"):
        return f"{value:.3f}"
    return f"{value:+.3f}" if column == "cost" else f"{value:.3f}"


def group_figures(documents: Mapping[str, Mapping], metrics: Sequence[str] = ("accuracy",)) -> pd.DataFrame:
    """One row per algorithm and group, the frame behind the per-group table and figures.

    Args:
        documents: `metrics.json` by algorithm.
        metrics: which figures to take.

    Returns:
        Columns `algorithm`, `grouping`, `group`, `count`, every metric, and `cost/<metric>` (`cost/excess_loss` for the
        loss) where the document has a baseline.
    """
    rows = []
    for algorithm, document in with_baseline(documents).items():
        costs = document.get("cost_of_privacy", {}).get("groups", {})
        for grouping, groups in document["groups"].items():
            for group, figures in groups.items():
                cost = costs.get(grouping, {}).get(group, {})
                names = {m: "excess_loss" if m == "loss" else m for m in metrics}
                rows.append(
                    {
                        "algorithm": algorithm,
                        "grouping": grouping,
                        "group": group,
                        "count": figures["count"],
                        **{m: figures.get(m) for m in metrics},
                        **{f"cost/{name}": cost.get(name) for name in names.values()},
                    }
                )
    columns = ["algorithm", "grouping", "group", "count", *metrics]
    columns += [f"cost/{'excess_loss' if m == 'loss' else m}" for m in metrics]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({c: float for c in columns[4:]})
