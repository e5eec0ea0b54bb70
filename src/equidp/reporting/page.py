"""The page of one run or of a comparison: its content; `rendering` makes the file."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.algorithms import BASELINE
from equidp.errors import listed_names
from equidp.reporting import figures, tables
from equidp.reporting.figures.drawing import capital
from equidp.reporting.gains import MOST_DRAWN, gains_caption, gains_notes, gains_table
from equidp.reporting.labels import labels_tables
from equidp.reporting.privacy_report import DECIDING, INSIDE, NO_GUARANTEE, privacy_sections, research_mode, understated
from equidp.reporting.rates import rates_tables
from equidp.reporting.released import released_page
from equidp.reporting.rendering import PageTable, TableCell, flat_texts, render
from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.style import label
from equidp.reporting.tables import groupings_of
from equidp.reporting.titles import COST_MEANS, METRIC_TITLES, SAME_TABLE, figure_text, interval_text, task_in
from equidp.tasks.base import TOO_LONG, Task

MAX_FIGURE_GROUPS = 40
"""Groupings with more groups than this are tabulated, not drawn."""

CARD_GROUPINGS = 3
"""The most groupings that have figures at the top of a page."""

MAX_DETAILED = 4
"""Up to this many private algorithms, each has a figure of ε by accountant; with more, all share one figure of ε."""

EXACT_SIZES = "those of the training part are exact, and outside the guarantee."


def html_report(
    title: str,
    documents: Mapping[str, Mapping],
    privacy: Mapping[str, Mapping],
    histories: Mapping[str, pd.DataFrame],
    settings: Mapping,
    provenance: Mapping,
    group_table: pd.DataFrame,
    remarks: Sequence[str] = (),
    released: Mapping[str, Mapping] | None = None,
    compared: pd.DataFrame | None = None,
) -> str:
    """The report as the text of one HTML file; `title` and `provenance` as of `render`.

    Args:
        documents: `metrics.json` by algorithm: one with its baseline, or several to compare. Means over seeds in that
            shape have their number as `seeds`.
        privacy: `privacy.json` by algorithm; algorithms without one are taken as not private.
        histories: `history.parquet` by algorithm.
        settings: resolved settings, nested or flat; or those of each row, by the documents' names.
        group_table: columns `grouping`, `group`, and a count per part (`train`, `public`, `test`); may be empty.
        remarks: further sentences on top of the page.
        released: `metrics_release.json` by algorithm; algorithms without one are left out.
        compared: runs and their gains over a reference, as of `figures.gains`; `attrs["remarks"]` are sentences on it.
    """
    task = task_in(documents)
    against = pd.DataFrame(columns=["run"]) if compared is None else compared
    groups = [(g, tables.groups_table(documents, g, group_table)) for g in groupings_of(documents)]
    overview = tables.with_marks(tables.results_table(documents, privacy))
    empty = [c for c in ("epsilon", "epsilon_published", "cost", "gap") if overview[c].isna().all()]
    halves = [f"{column}±" for column in empty if f"{column}±" in overview]
    disparity = tables.disparity_table(documents)
    return render(
        "report.html.j2",
        title=title,
        task=task,
        main=METRIC_TITLES[task.main],
        cost_means=COST_MEANS.format(METRIC_TITLES[task.main]),
        drawn=_figures(documents, privacy, histories, group_table, against),
        settings=_settings(settings, documents),
        provenance=provenance,
        warnings=[*remarks, *_warnings(documents, privacy)],
        cards=_cards(documents, privacy),
        overview=_grid(overview.drop(columns=[*empty, *halves]).reset_index()),
        costs="cost" not in empty,
        marked=tables.FEW_MEANS if tables.has_small_groups(documents, groupings_of(documents)[:1]) else "",
        left_out=tables.left_out(overview),
        metrics=_grid(tables.metrics_table(documents).reset_index()),
        several=_several(documents),
        same_table=SAME_TABLE,
        single=any(document.get("seeds", 1) == 1 for document in documents.values()),
        gains=_grid(gains_table(against, task)) if len(against) else None,
        gains_notes=[] if compared is None else list(gains_notes(compared, task)),
        groups=[_grid(frame.reset_index(), caption=f"By {grouping}") for grouping, frame in groups],
        labels=[_grid(frame, caption=caption) for caption, frame in labels_tables(documents)],
        sizes=f"Sizes of groups: {EXACT_SIZES}" if any("train" in frame for _, frame in groups) else "",
        few=tables.FEW_MEANS if tables.has_small_groups(documents, groupings_of(documents)) else "",
        disparity=_grid(disparity) if len(disparity) else None,
        fairlearn="demographic parity difference" in disparity,
        rates=[_grid(frame, caption=caption) for caption, frame in rates_tables(documents)],
        positive=next((one["positive_class"] for one in documents.values() if "positive_class" in one), ""),
        released={name: released_page(of) for name, of in (released or {}).items() if of},
        statements={name: privacy_sections(privacy_facts(name, privacy)) for name in documents},
    )


def _figures(
    documents: Mapping[str, Mapping],
    privacy: Mapping[str, Mapping],
    histories: Mapping[str, pd.DataFrame],
    group_table: pd.DataFrame,
    compared: pd.DataFrame,
) -> Iterator[tuple[go.Figure, str]]:
    """Every figure, with its caption."""
    if 0 < len(compared) <= MOST_DRAWN:
        yield figures.gains(compared, task_in(documents)), gains_caption(compared, task_in(documents))
    yield from _group_figures(documents, group_table)
    yield from _training_figures(histories, privacy, task_in(documents).main)
    yield from _diagnostic_figures(histories)


def _several(documents: Mapping[str, Mapping]) -> bool:
    """Whether figures are means over seeds."""
    return any(document.get("seeds", 1) > 1 for document in documents.values())


def _group_figures(documents: Mapping[str, Mapping], counts: pd.DataFrame) -> Iterator[tuple[go.Figure, str]]:
    task = task_in(documents)
    for g in groupings_of(documents):
        if max(len(d["groups"].get(g, {})) for d in documents.values()) > MAX_FIGURE_GROUPS:
            continue
        few = f" {tables.FEW_MEANS}" if tables.has_small_groups(documents, [g]) else ""
        accuracy, cost = figures.metric_per_group(documents, g), figures.cost_per_group(documents, g)
        lines = _lines(accuracy, documents, task, "0")
        yield accuracy, f"{capital(METRIC_TITLES[task.main])} on the test records of each {g} group.{lines}{few}"
        text = f"{_lines(cost, documents, task, '−1')}{few}"
        yield cost, f"{capital(COST_MEANS.format(METRIC_TITLES[task.main]))}.{text}"
        if len(counts) and (counts["grouping"] == g).any():
            sizes = f"Number of records of each {g} group in each part of the split; {EXACT_SIZES}"
            sizes += few if "test" in counts else ""
            yield figures.group_counts(counts, g), sizes


def _lines(chart: go.Figure, documents: Mapping[str, Mapping], task: type[Task], least: str) -> str:
    """Say what the lines on the bars mean, if there are any; `least` is the lowest possible value."""
    if not any(map(_has_intervals, chart.data)):
        return ""
    begin = "On hovering: " if chart.data[0].type == "heatmap" else "Lines are "
    leaving = f" Those of groups with {tables.FEW} may leave the figure." if chart.layout.yaxis.range else ""
    if not _several(documents):
        return f" {begin}95 % intervals over test records.{leaving}"
    single = any(document.get("seeds", 1) == 1 for document in documents.values())
    of_single = ", of a single seed over test records" if single else ""
    cut = f", cut at {least} and 1" if task.most == 1 else ""
    return f" {begin}95 % intervals over seeds{of_single}{cut}.{leaving}"


def _has_intervals(trace: Any) -> bool:
    if trace.type == "heatmap":
        return any("interval" in text for row in trace.hovertext for text in row)
    return trace.error_y.array is not None


def _training_figures(
    histories: Mapping[str, pd.DataFrame], privacy: Mapping[str, Mapping], main: str
) -> Iterator[tuple[go.Figure, str]]:
    yield figures.learning_curve(histories, main), "After each epoch."
    yield figures.learning_curve(histories, "loss"), "After each epoch."
    yield figures.learning_curve(histories, main, over="epsilon"), "After each epoch, against the ε spent until then."
    if drawn := {name: facts["trade_off"] for name, facts in privacy.items() if facts.get("trade_off")}:
        yield (
            figures.trade_off_figure(drawn),
            "The most that any attack can achieve, by the ledger; grey is blind guessing.",
        )
    yield figures.schedules(histories), "Noise multiplier, and the clip norm where there is one for all records."
    for name, history in histories.items():
        if any(str(column).startswith("clip_norm/") for column in history.columns):
            yield figures.clip_norms(history, name), "One per group, derived from releases with noise."
    private = {name: h for name, h in histories.items() if privacy_facts(name, privacy)["private"]}
    if len(private) > MAX_DETAILED:
        yield figures.epsilon_by_algorithm(private), "After each epoch."
        return
    for name, history in private.items():
        chart = figures.epsilon_over_epochs(history, privacy_facts(name, privacy))
        yield chart.update_layout(title_text=f"{chart.layout.title.text}: {label(name)}"), "By accountant."


def _diagnostic_figures(histories: Mapping[str, pd.DataFrame]) -> Iterator[tuple[go.Figure, str]]:
    outside = "Exact figures of training records: outside the guarantee."
    yield figures.diagnostic_distribution(histories), outside
    yield figures.diagnostic_distribution(histories, "cosine"), outside
    for quantity in figures.diagnostics_in(histories):
        yield figures.diagnostic_curve(histories, quantity), outside
    for name, history in histories.items():
        for quantity in figures.GROUP_DIAGNOSTICS:
            yield figures.group_diagnostic(history, name, quantity), outside


def _cards(documents: Mapping[str, Mapping], privacy: Mapping[str, Mapping]) -> list[tuple[str, str, str]]:
    """The few figures at the top of a page about one private model: (name, value, remark)."""
    private = [name for name in documents if name != BASELINE]
    if len(private) != 1:
        return []
    name = private[0]
    document, facts = documents[name], privacy_facts(name, privacy)
    task = task_in(documents)
    main, title = task.main, METRIC_TITLES[task.main]
    mode = ", research mode" if research_mode(facts) else ""
    cards = [("privacy", f"ε = {epsilon_text(facts.get('epsilon'))}", f"at δ = {facts.get('delta')}{mode}")]
    cost = document.get("cost_of_privacy", {})
    cards.append((title, _number(document["overall"][main]), _interval(document, 0.0, task.most)))
    if (change := cost.get("overall", {}).get(main)) is not None:
        ends = _interval(cost, -task.most, task.most, "+")
        cards.append(("cost of privacy", _signed(change), f"in {title}; {ends}".removesuffix("; ")))
    for grouping, worst in list(document.get("worst", {}).items())[:CARD_GROUPINGS]:
        if (group := worst["group"]) is not None:
            tested = document["groups"].get(grouping, {}).get(group, {}).get("count")
            rests_on = "" if tested is None else f", {tested:,.0f} test records"  # over seeds their number is a mean
            cards.append((f"worst {grouping}", _number(worst[main]), f"{group}{rests_on}"))
    for grouping, gap in list(cost.get("gap", {}).items())[:CARD_GROUPINGS]:
        if gap.get(main) is not None:
            cards.append((f"gap over {grouping}", _number(gap[main]), "largest minus smallest cost of privacy"))
        if (spread := document.get("spread", {}).get(grouping)) is not None:
            cards.append((f"spread over {grouping}", _number(spread), f"largest minus smallest {title}"))
    return cards


def _interval(of: Mapping, least: float, most: float, sign: str = "") -> str:
    """The interval over all records of the main metric or its cost, cut at the possible values; empty without one."""
    ends = (of.get("intervals") or {}).get("overall")
    return f"{interval_text(ends, least, most, f'{sign},')} at 95 %" if ends else ""


_HEADINGS = (
    METRIC_TITLES
    | {f"worst_{name}": f"its {title}" for name, title in METRIC_TITLES.items()}
    | {
        "epsilon": "ε",
        "delta": "δ",
        "epsilon_published": "ε as published",
        "cost": "cost of privacy",
        "worst_group": "worst group",
    }
)

_WITH_SIGN = ("cost", "gain", "excess", METRIC_TITLES["mean_error"])


def _grid(frame: pd.DataFrame, *, caption: str = "") -> PageTable:
    """A frame as headings and cells; costs of privacy carry signs, means over seeds their ±."""
    halves = {name: frame[f"{name}±"] for name in map(str, frame.columns) if f"{name}±" in frame}
    frame = frame.drop(columns=[f"{name}±" for name in halves])
    columns = []
    for name in frame.columns:
        if name in halves:
            sign = "+" if str(name).startswith(_WITH_SIGN) else ""
            columns.append([_mean(*pair, sign=sign) for pair in zip(frame[name], halves[name], strict=True)])
        else:
            columns.append([_cell(value, _format(str(name))) for value in frame[name]])
    header = ((_HEADINGS.get(c, str(c)), pd.api.types.is_numeric_dtype(frame[c])) for c in frame.columns)
    return PageTable(caption, tuple(header), tuple(zip(*columns, strict=True)))


def _mean(value: float, half: float, *, sign: str) -> TableCell:
    """A mean over seeds with half of its interval, sorted by the mean. A single seed and seeds that agree have none."""
    reach = 0.0 if pd.isna(half) else half
    text = "" if pd.isna(half) else f" ± {figure_text(half, 3, ',', beside=value)}"
    return _cell(value, lambda mean: f"{figure_text(mean, 3, f'{sign},', beside=reach)}{text}")


def _format(column: str) -> Callable:
    if column.startswith("epsilon"):
        return epsilon_text
    if column == "delta":
        return lambda delta: f"{delta:g}"
    return _signed if column.startswith(_WITH_SIGN) else _number


def _cell(value: Any, shown: Callable) -> TableCell:
    if value is None or pd.isna(value):
        return TableCell("–", None)
    return TableCell(shown(value), float(value)) if isinstance(value, numbers.Real) else TableCell.of(value)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, numbers.Integral) else figure_text(value, 4, ",")


def _signed(value: float | None) -> str:
    return "–" if value is None else figure_text(value, 4, "+,")


def _settings(settings: Mapping, rows: Mapping) -> Mapping[str, Mapping]:
    """Settings by caption: if every row has its own, first the shared ones, then those that differ."""
    if len(rows) < 2 or settings.keys() != rows.keys():
        return {"": settings}
    flat = {row: flat_texts(of) for row, of in settings.items()}
    shared = _common(flat.values())
    own = {row: _without(of, shared) for row, of in flat.items()}
    private = [of for of in own.values() if any(name.startswith("privacy.") for name in of)]
    theirs = _common(private) if 1 < len(private) < len(own) else {}
    own = {
        row: _without(of, (*theirs, *(["algorithm"] if of.get("algorithm") == row else []))) for row, of in own.items()
    }
    return {"In every row": shared, "In every private row": theirs} | own


def _common(settings: Iterable[Mapping]) -> dict[str, Any]:
    """Return the settings that are the same in all of these."""
    first, *others = settings
    return {name: value for name, value in first.items() if all(of.get(name) == value for of in others)}


def _without(settings: Mapping, said: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in said}


def privacy_facts(name: str, privacy: Mapping[str, Mapping]) -> Mapping:
    """Return an algorithm's `privacy.json`. An algorithm without it is not private."""
    return {"private": True, **privacy[name]} if name in privacy else {"algorithm": name, "private": False}


def _warnings(documents: Mapping[str, Mapping], privacy: Mapping[str, Mapping]) -> list[str]:
    """Sentences at the top, each once."""
    found = (*_privacy_warnings(documents, privacy), *training_warnings(documents), *_record_warnings(documents))
    return list(dict.fromkeys(found))


def _privacy_warnings(documents: Mapping[str, Mapping], privacy: Mapping[str, Mapping]) -> Iterator[str]:
    """Say what ε does not mean here."""
    yield from filter(None, map(research_mode, privacy.values()))
    if any(facts.get("secure") for facts in privacy.values()):
        yield INSIDE
    if not any(privacy_facts(name, privacy)["private"] for name in documents):
        yield NO_GUARANTEE
    for name, facts in privacy.items():
        if facts.get("test_records_decide"):
            yield f"{name}: {DECIDING}"
    doubtful = {name: warning for name, facts in privacy.items() if (warning := understated(facts))}
    yield from [_doubtful_rules(doubtful, privacy)] if len(doubtful) > 1 else doubtful.values()


def training_warnings(documents: Mapping[str, Mapping]) -> Iterator[str]:
    """Name baselines and models that learnt nothing, or diverged, or could be trained better."""
    task = task_in(documents)
    if others := tables.other_baseline(documents):
        yield f"Costs of privacy of {', '.join(others)} refer to another baseline than the sgd row shown here."
    baselines = {name: document["baseline"] for name, document in documents.items() if document.get("baseline")}
    guesses = {name: said for name, baseline in baselines.items() if (said := task.guessing(baseline))}
    guesses = {name: said for name, said in guesses.items() if not documents[name].get("guessed")}  # told by its seeds
    for said in _together(guesses):
        yield f"The non-private baseline of {said} Beside it privacy would seem to be free: no cost is stated."
    learnt = [name for name, document in documents.items() if name not in guesses and not task.guessing(document)]
    yield from _together({name: said for name in learnt if (said := task.outdone(documents[name]))})
    if far := {name: said for name, of in baselines.items() if name not in guesses and (said := task.overshot(of))}:
        yield (
            f"The non-private baseline of {', '.join(far)} {next(iter(far.values()))}: give it a smaller learning rate "
            "(sgd.options.learning_rate). Costs and gaps beside it are too small."
        )
    for name, document in documents.items():
        if said := task.guessing(document):
            yield f"The model of {name} {said}. {task.guessed_means}."
    if private := [name for name, of in documents.items() if name != BASELINE and task.overshot(of)]:
        yield f"The test loss of {', '.join(private)} is above that of equal probabilities. {TOO_LONG}."
    yield from _together({name: said for name, of in documents.items() if (said := task.hardly(of))})
    yield from _together({name: said for name, of in documents.items() if (said := task.flawless(of))})
    if lost := [name for name, baseline in baselines.items() if task.diverged(baseline)]:
        yield (
            f"The non-private baseline of {', '.join(lost)} diverged: its scores are not finite, and "
            f"{task.diverged_means}. No cost of privacy is known: give it a smaller learning rate "
            "(sgd.options.learning_rate)."
        )
    if lost := [name for name, document in documents.items() if task.diverged(document)]:
        yield (
            f"The model of {', '.join(lost)} diverged: its scores are not finite, and {task.diverged_means}. "
            "Its figures are meaningless: give it a smaller learning rate."
        )


def _together(sentences: Mapping[str, str]) -> Iterator[str]:
    """Yield each sentence once, after the names of all models that it is about."""
    for said in dict.fromkeys(sentences.values()):
        yield f"{', '.join(name for name, of in sentences.items() if of == said)} {said}."


def _record_warnings(documents: Mapping[str, Mapping]) -> Iterator[str]:
    """Say which records and seeds the figures are of."""
    of_classes = [of for document in documents.values() for of in document["groups"].get("class", {}).items()]
    if absent := dict.fromkeys(name for name, figures in of_classes if not figures["count"]):
        yield f"No test record is of class {listed_names(absent)}: the figures say nothing about it."
    for name, document in documents.items():
        if seeds := document.get("diverged"):
            yield (
                f"In {seeds} of the seeds of {name} the non-private baseline diverged: they count neither in its mean "
                "nor in the cost of privacy."
            )
    yield from _of_some_seeds(documents)
    validated = [name for name, document in documents.items() if "evaluated_on" in document]
    if validated and len(validated) == len(documents):
        yield (
            "These are figures of the validation part, held back from the training records: where this page says "
            "test, it means that part. The test part was not used."
        )
    elif validated:
        yield (
            f"The figures of {', '.join(validated)} are of the validation part, held back from the training records, "
            "those of the others of the test part: do not compare the two."
        )


def _of_some_seeds(documents: Mapping[str, Mapping]) -> Iterator[str]:
    """Say what happened in only some of a row's seeds, because no mean shows it."""
    task = task_in(documents)
    for name, document in documents.items():
        of = f"of the {document.get('seeds')} seeds of {name}"
        if seeds := document.get("lost"):
            yield (
                f"In {seeds} {of} the model diverged: there {task.diverged_means}. Means leave out what is undefined, "
                "which favours it: give it a smaller learning rate."
            )
        if seeds := document.get("guessed"):
            yield (
                f"In {seeds} {of} the non-private baseline has learnt nothing: cost of privacy and gap are means over "
                "the others."
            )


def _doubtful_rules(names: Collection[str], privacy: Mapping[str, Mapping]) -> str:
    """One sentence on several algorithms: whose published ε is below ours, and whose rule gives no guarantee."""
    lower = [name for name in names if privacy[name]["epsilon_published"]["value"] < privacy[name]["epsilon"]]
    other = [name for name in names if name not in lower]
    faults = [f"understates it in {', '.join(lower)}"] if lower else []
    faults += [f"is no guarantee in {', '.join(other)}"] if other else []
    return f"Quote ε, not ε as published, which {' and '.join(faults)}."
