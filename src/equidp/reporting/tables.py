"""Tables of results: one row per algorithm for the terminal, one row per group for the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from equidp.algorithms import BASELINE
from equidp.data.records import MIN_TEST_RECORDS
from equidp.reporting.privacy_report import research_mode
from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.titles import COST_MEANS, METRIC_TITLES, cost_title, figure_text, interval_text, task_in
from equidp.tasks import CLASSIFICATION, TASKS
from equidp.tasks.base import Task

PARTS = ("train", "public", "test")
"""Parts of a split, as columns of a group table."""

INTERVAL = "95 % of cost"
"""Column of the interval of a cost of privacy."""

FEW = "†"
"""Marks groups with so few test records that their figures are not reliable."""

FEW_MEANS = (
    f"{FEW} fewer than {MIN_TEST_RECORDS} test records: too few to be evaluated, and left out of worst group and "
    "gap where two groups have enough."
)

WIDTH = 100
"""Columns of the table printed at the end of a run."""

LONGEST_CELL = 16
"""Longer names are cut on the terminal, to this length or to the length at which they still differ."""

MAX_GROUPS = 4
"""The most groups that a results table shows by name; of more, those that privacy cost most."""

_HEADINGS = {"epsilon": "ε", "delta": "δ", "epsilon_published": "ε publ."}


def with_baseline(documents: Mapping[str, Mapping]) -> dict[str, Mapping]:
    """Return the documents with the baseline's figures first, as algorithm `sgd`, if all runs have the same baseline.

    If there are several baselines, none is added, because each row's cost is relative to its own baseline.
    """
    if BASELINE in documents:
        return {BASELINE: documents[BASELINE], **{k: v for k, v in documents.items() if k != BASELINE}}
    first, *others = [document["baseline"] for document in documents.values() if "baseline" in document] or [None]
    alike = first is not None and all(other["overall"] == first["overall"] for other in others)
    return {BASELINE: first, **documents} if alike else dict(documents)


def other_baseline(documents: Mapping[str, Mapping]) -> list[str]:
    """Algorithms whose cost of privacy is relative to another baseline than the shown one."""
    shown = with_baseline(documents).get(BASELINE)
    costs = {name: d["baseline"]["overall"] for name, d in documents.items() if "baseline" in d}
    return [name for name, overall in costs.items() if shown and overall != shown["overall"]]


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
        grouping: the grouping whose groups to show; the first one by default.
        max_groups: the most group columns. If there are more groups, those with the highest cost of privacy of any
            algorithm are kept, in their own order.

    Returns:
        A frame indexed by `algorithm` with the columns `epsilon`, `delta` where there are several, `epsilon_published`,
        `accuracy`, `cost` (against the baseline), `<grouping>:<group>` (accuracy), `worst_group`,
        `worst_accuracy`, `spread` (of accuracy over the groups) and `gap` (of cost). Undefined values are NaN.
        Names are those of the data; `with_marks` adds the marks that readers see.
        For other tasks the main metric takes the place of accuracy, in the columns' names too.
        If documents are means over seeds, the number of seeds comes first, as `seeds`. With several seeds `accuracy±`,
        `cost±`, `worst_accuracy±` and `gap±` come last: half of each 95 % interval over seeds.
    """
    documents = with_baseline(documents)
    task, groupings = task_in(documents), groupings_of(documents)
    grouping = grouping or (groupings[0] if groupings else None)
    chosen_by, first = _costliest_first(documents, grouping, task) if grouping else ("", [])
    kept = first[:max_groups]
    shown = [group for group in _groups_of(documents, grouping) if group in kept] if grouping else []
    rows = [_row(document, epsilons.get(name, {}), grouping, shown, task) for name, document in documents.items()]
    frame = pd.DataFrame(rows, index=pd.Index(documents, name="algorithm"))
    if frame["delta"].nunique() < 2:  # with one δ the ε can be compared without it
        frame = frame.drop(columns="delta")
    frame = frame.astype({c: "Int64" if c == "seeds" else float for c in frame.columns if c != "worst_group"})
    if grouping:
        tested = _tested(documents, grouping)
        small = marked(tested)
        frame.attrs["few"] = {group: name for group, name in small.items() if group != name}
        frame.attrs["costliest_first"], frame.attrs["chosen_by"] = kept, chosen_by
        frame.attrs["groups"] = sum(count > 0 for count in tested.values())
    frame.attrs["research"] = [name for name in documents if research_mode(epsilons.get(name) or {"private": False})]
    frame.attrs["task"] = task.name
    frame.attrs["part"] = next((one["evaluated_on"] for one in documents.values() if "evaluated_on" in one), "test")
    return frame


def _row(document: Mapping, privacy: Mapping, grouping: str | None, shown: Sequence[str], task: type[Task]) -> dict:
    groups = document["groups"].get(grouping, {})
    # over several seeds the worst value is the mean of each seed's worst, which does not follow from the groups' means
    worst = document.get("worst", {}).get(grouping) or task.worst_of(groups)
    cost, main = document.get("cost_of_privacy", {}), task.main
    return {
        **({"seeds": document["seeds"]} if "seeds" in document else {}),
        "epsilon": privacy.get("epsilon"),
        "delta": privacy.get("delta") if privacy.get("epsilon") is not None else None,
        "epsilon_published": (privacy.get("epsilon_published") or {}).get("value"),
        main: document["overall"][main],
        "cost": cost.get("overall", {}).get(main),
        **{f"{grouping}:{group}": groups.get(group, {}).get(main) for group in shown},
        "worst_group": worst["group"],
        f"worst_{main}": worst[main],
        "spread": document.get("spread", {}).get(grouping),
        "gap": cost.get("gap", {}).get(grouping, {}).get(main),
        **(_halves(document, grouping, main) if document.get("seeds", 1) > 1 else {}),
    }


def _halves(document: Mapping, grouping: str | None, main: str) -> dict[str, float | None]:
    """Half widths of the intervals over seeds."""
    own, cost = (of.get("intervals") or {} for of in (document, document.get("cost_of_privacy") or {}))
    ends = {
        f"{main}±": own.get("overall"),
        "cost±": cost.get("overall"),
        f"worst_{main}±": own.get("worst", {}).get(grouping),
        "gap±": cost.get("gap", {}).get(grouping),
    }
    return {name: (pair[1] - pair[0]) / 2 if pair else None for name, pair in ends.items()}


def _costliest_first(documents: Mapping[str, Mapping], grouping: str, task: type[Task]) -> tuple[str, list[str]]:
    """Order groups by the most that any algorithm has lost in them, or by the main metric if no cost is known.

    The first value says in words which of the two decided.
    """
    private = [document["cost_of_privacy"] for document in documents.values() if "cost_of_privacy" in document]
    costs, main = [_of_groups(cost, grouping, task.main) for cost in private], task.main
    paid = any(cost is not None for of in costs for cost in of.values())
    figures = costs if paid else [_of_groups(document, grouping, main) for document in documents.values()]
    high_is_bad = paid or task.best.get(main) == "lowest"

    tested = _tested(documents, grouping)

    def lowest(group: str) -> tuple[bool, float]:
        known = (figure for of in figures if (figure := of.get(group)) is not None)
        worst = min((-figure if high_is_bad else figure for figure in known), default=float("inf"))
        return tested[group] < MIN_TEST_RECORDS, worst  # small groups come last, because their figures are chance

    by = f"of the {'highest' if high_is_bad else 'lowest'} {METRIC_TITLES[main]}"
    return "that paid most" if paid else by, sorted(_groups_of(documents, grouping), key=lowest)


def _groups_of(documents: Mapping[str, Mapping], grouping: str) -> list[str]:
    return list(dict.fromkeys(g for d in documents.values() for g in d["groups"].get(grouping, {})))


def _tested(documents: Mapping[str, Mapping], grouping: str) -> dict[str, int]:
    """Return how many test records each group has."""
    every = [document["groups"].get(grouping, {}) for document in documents.values()]
    return {g: max(of.get(g, {}).get("count", 0) for of in every) for g in _groups_of(documents, grouping)}


def with_marks(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a `results_table` with its small groups marked, in headings and as worst groups."""
    few = frame.attrs.get("few", {})

    def heading(column: str) -> str:
        grouping, colon, group = column.partition(":")
        return f"{grouping}:{few[group]}" if colon and group in few else column

    shown = frame.rename(columns=heading)
    return shown.assign(worst_group=shown["worst_group"].map(lambda name: few.get(name, name)))


def print_table(frame: pd.DataFrame, console: Console) -> None:
    """Print a `results_table` within 100 columns, or the console's width where that is smaller.

    A number is never cut. If there is not enough room, columns are left out, the least important first. Groups with the
    highest cost stay longest among the groups.
    """
    width = min(WIDTH, console.width)
    frame = with_marks(frame).dropna(axis="columns", how="all")
    spare = [c for c in ("epsilon_published", "gap", "spread", "cost") if c in frame]
    few = frame.attrs.get("few", {})
    order = [few.get(group, group) for group in frame.attrs.get("costliest_first", ())]
    named = [c for c in frame.columns if ":" in c]
    first = sum(c in frame for c in ("epsilon_published", "gap"))  # a spread needs no baseline: it stays longest
    spare[first:first] = sorted(named, key=lambda c: -order.index(c.split(":", 1)[1]))
    while spare and _rich(frame).__rich_measure__(console, console.options).maximum > width:
        frame = frame.drop(columns=spare.pop(0))
    console.print(_rich(frame), width=width)


def left_out(frame: pd.DataFrame) -> str:
    """Say how a `results_table`'s groups were chosen, if it does not show all of them."""
    shown, every = sum(":" in column for column in frame.columns), frame.attrs.get("groups", 0)
    which, verb = ("the one", "is") if shown == 1 else (f"the {shown}", "are")
    return f"Of {every} groups {which} {frame.attrs['chosen_by']} {verb} shown." if 0 < shown < every else ""


def _rich(frame: pd.DataFrame) -> Table:
    task = TASKS[frame.attrs.get("task", CLASSIFICATION)]
    title, worst_of_all = METRIC_TITLES[task.main], f"worst_{task.main}"
    headline = title[:1].upper() + title[1:]
    names = dict.fromkeys(c.split(":", 1)[0] for c in frame.columns if ":" in c)
    part = frame.attrs.get("part", "test")
    table = Table(
        title=f"{headline} on the {part} records, overall and by {escape(', '.join(names))}" if names else headline,
        caption=" ".join(filter(None, _notes(frame, title))),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("algorithm", no_wrap=True)
    shown = [column for column in frame.columns if column != "worst_group"]
    known = {task.main: "overall", worst_of_all: "worst group", **_HEADINGS}
    headings = {column: known.get(column, column.split(":", 1)[-1]) for column in shown}
    worst = frame["worst_group"].dropna() if "worst_group" in frame else ()
    short = shortened([*headings.values(), *worst], LONGEST_CELL)
    for column in shown:
        mode = "research\nmode\n" if column == "epsilon" and _research_note(frame) else ""
        table.add_column(Text(mode + short[headings[column]]), justify="right", no_wrap=True)
    for name, row in frame.iterrows():
        cells = {column: _cell(column, row[column]) for column in shown}
        if isinstance(row.get("worst_group"), str):
            cells[worst_of_all] = f"{short[row['worst_group']]} {cells[worst_of_all]}"
        table.add_row(Text(str(name)), *map(Text, cells.values()))
    return table


def _notes(frame: pd.DataFrame, title: str) -> Iterator[str]:
    """Say what the columns mean, and which rows and groups are special. A sentence without content is empty."""
    yield _research_note(frame)
    if "cost" in frame:
        yield f"Cost of privacy: {COST_MEANS.format(title)}."
    ten = f"ten {frame.attrs.get('part', 'test')} records"
    if "gap" in frame:
        yield f"Gap: largest minus smallest cost, over groups of {ten} or more, where there are two."
    if "spread" in frame:
        over = ", over the same" if "gap" in frame else f" over groups of {ten} or more"
        yield f"Spread: largest minus smallest {title}{over}."
    if any(FEW in str(name) for name in (*frame.columns, *frame.get("worst_group", ()))):
        yield f"{FEW}: fewer than {ten}."
    yield left_out(frame)


def _research_note(frame: pd.DataFrame) -> str:
    """Say that ε is of research mode, and in which rows, if only in some."""
    research = [name for name in frame.attrs.get("research", ()) if name in frame.index]
    private = frame.index[frame["epsilon"].notna()] if "epsilon" in frame else ()
    if not research:
        return ""
    of = "" if len(research) == len(private) else f" of {', '.join(map(str, research))}"
    return f"ε{of}: research mode, seeded noise, not for publication until privacy.secure=true."


def _cell(column: str, value: object) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and pd.isna(value)):
        return "–"
    assert isinstance(value, float)
    if column.startswith("epsilon"):
        return epsilon_text(value, 3)
    if column == "delta":
        return f"{value:g}"
    return figure_text(value, 3, "+" if column == "cost" else "")


def shortened(names: Iterable[str], longest: int) -> dict[str, str]:
    """Cut every name in its middle to `longest` characters, because names of groups and settings differ at both ends.

    Names that would then be equal get as much more room as they need to differ.
    """
    shown = {name: _cut(name, longest) for name in names}
    while alike := [name for name, short in shown.items() if list(shown.values()).count(short) > 1]:
        longest += 8
        shown |= {name: _cut(name, longest) for name in alike}
    return shown


def _cut(name: str, longest: int) -> str:
    tail = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[: longest - 1 - tail]}…{name[-tail:]}"


def metrics_table(documents: Mapping[str, Mapping]) -> pd.DataFrame:
    """Every overall metric, one row per algorithm, the baseline first. Undefined values are NaN."""
    every = with_baseline(documents)
    metrics = task_in(every).metrics
    rows = [[document["overall"].get(metric) for metric in metrics] for document in every.values()]
    titles = [METRIC_TITLES[metric] for metric in metrics]
    return pd.DataFrame(rows, index=pd.Index(every, name="algorithm"), columns=titles, dtype=float)


def groups_table(documents: Mapping[str, Mapping], grouping: str, counts: pd.DataFrame) -> pd.DataFrame:
    """One row per group of a grouping: its size, and every algorithm's figures and cost of privacy there.

    `counts` has columns `grouping`, `group` and the sizes `train` and `public`; it may be empty.

    Returns:
        A frame indexed by `group`, with small groups marked. Columns without a single value are left out. Groups
        without a test record are kept.
    """
    every = with_baseline(documents)
    tested = _tested(every, grouping)
    groups = list(tested)
    sizes = counts[counts["grouping"] == grouping].set_index("group") if len(counts) else pd.DataFrame()
    parts = [part for part in ("train", "public") if part in sizes and sizes[part].any()]
    whole = all(float(count).is_integer() for count in tested.values())  # else a mean over seeds
    columns = {part: sizes[part].reindex(groups) for part in parts}
    columns["tested" if whole else "tested (mean)"] = pd.Series({g: round(count) for g, count in tested.items()})
    for title, values in _group_columns(every, grouping):
        columns[title] = pd.Series({g: values.get(g) for g in groups}, dtype=object if title == INTERVAL else float)
    # All columns are added at once: a page of many settings has hundreds, and pandas warns of each that is added alone
    frame = pd.DataFrame(columns, index=pd.Index(groups, name="group")).rename(index=marked(tested))
    return frame.dropna(axis="columns", how="all")


def marked(tested: Mapping[str, int]) -> dict[str, str]:
    """Return the names of groups as they are shown, given their numbers of test records."""
    return {group: f"{group} {FEW}" if count < MIN_TEST_RECORDS else group for group, count in tested.items()}


def has_small_groups(documents: Mapping[str, Mapping], groupings: Sequence[str]) -> bool:
    """Whether some group of these groupings is marked."""
    groups = (document["groups"].get(grouping, {}) for document in documents.values() for grouping in groupings)
    return any(of["count"] < MIN_TEST_RECORDS for group in groups for of in group.values())


def _group_columns(documents: Mapping[str, Mapping], grouping: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield titles and values by group: main metrics, costs of privacy, then other metrics, fewer in a comparison."""
    private = {name: d for name, d in documents.items() if "cost_of_privacy" in d}
    task = task_in(documents)
    for name, document in documents.items():
        yield f"{METRIC_TITLES[task.main]} {name}", _of_groups(document, grouping, task.main)
    for metric in task.costs:
        title = cost_title(metric)
        for name, document in private.items():
            yield f"{title} {name}", _of_groups(document["cost_of_privacy"], grouping, metric)
        if metric == task.main and len(private) == 1:  # a comparison has its intervals in the figure
            (ends,) = group_intervals({n: d["cost_of_privacy"] for n, d in private.items()}, grouping).values()
            texts = {g: interval_text(pair, -task.most, task.most, "+") for g, pair in ends.items() if pair}
            yield INTERVAL, {group: text.replace(" ", "\N{NO-BREAK SPACE}") for group, text in texts.items()}
    several = len(documents) > 2
    for metric in task.beside if several else task.metrics[1:]:
        if metric == "balanced_accuracy" and grouping == "class":
            continue  # within one class it is the accuracy
        for name, document in (documents if several else private or documents).items():
            yield f"{METRIC_TITLES[metric]} {name}", _of_groups(document, grouping, metric)


def _of_groups(document: Mapping, grouping: str, metric: str) -> dict[str, float | None]:
    return {group: values.get(metric) for group, values in document["groups"].get(grouping, {}).items()}


def group_intervals(figures: Mapping[str, Mapping], grouping: str) -> dict[str, Mapping[str, Sequence[float] | None]]:
    """Return the ends of the main metric's intervals by algorithm and group; groups without one may be missing.

    `figures` are results of `evaluate`, or costs of privacy, by algorithm.
    """
    return {name: of.get("intervals", {}).get("groups", {}).get(grouping, {}) for name, of in figures.items()}


def disparity_table(documents: Mapping[str, Mapping]) -> pd.DataFrame:
    """Differences between the groups of every grouping, one row per grouping and algorithm.

    Columns: the worst group and its accuracy, the spread of accuracy, the gap of the cost of privacy, and Fairlearn's
    measures (not for the grouping `class`). Columns without a single value are left out.
    """
    rows, main = [], task_in(documents).main
    for grouping in groupings_of(documents):
        for name, document in with_baseline(documents).items():
            worst = document.get("worst", {}).get(grouping, {})
            rows.append(
                {
                    "grouping": grouping,
                    "algorithm": name,
                    "worst group": worst.get("group"),
                    f"its {METRIC_TITLES[main]}": worst.get(main),
                    f"spread of {METRIC_TITLES[main]}": document.get("spread", {}).get(grouping),
                    "gap": document.get("cost_of_privacy", {}).get("gap", {}).get(grouping, {}).get(main),
                    **{k.replace("_", " "): v for k, v in document.get("disparity", {}).get(grouping, {}).items()},
                }
            )
    return pd.DataFrame(rows).dropna(axis="columns", how="all") if rows else pd.DataFrame()


def group_figures(documents: Mapping[str, Mapping], metrics: Sequence[str] = ("accuracy",)) -> pd.DataFrame:
    """One row per algorithm and group, the frame behind the per-group table and figures.

    Returns:
        Columns `algorithm`, `grouping`, `group`, `count`, every metric, and `cost/<metric>` (`cost/excess_loss` for the
        loss) where the document has a baseline.
    """
    names = {metric: "excess_loss" if metric == "loss" else metric for metric in metrics}
    columns = ["algorithm", "grouping", "group", "count", *metrics, *(f"cost/{name}" for name in names.values())]
    rows = []
    for algorithm, document in with_baseline(documents).items():
        costs = document.get("cost_of_privacy", {}).get("groups", {})
        for grouping, groups in document["groups"].items():
            for group, values in groups.items():
                cost = costs.get(grouping, {}).get(group, {})
                own, lost = (values.get(m) for m in metrics), (cost.get(n) for n in names.values())
                rows.append([algorithm, grouping, group, values["count"], *own, *lost])
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[4:], float))
