"""The results of a sweep: one row per combination of settings, over its seeds, and one page per dataset."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from equidp.algorithms import BASELINE
from equidp.errors import EquidpError
from equidp.evaluation.metrics import numbered
from equidp.evaluation.seeds import Interval, over_seeds
from equidp.reporting.page import html_report, training_warnings
from equidp.reporting.rendering import linked
from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.titles import METRIC_TITLES
from equidp.sweep.gains import columns_of, gains_of, remarks
from equidp.sweep.printed import shown_figure
from equidp.sweep.project import Cell, by_seed, differing, row_key
from equidp.sweep.tracked import Means
from equidp.system.files import replacing
from equidp.tasks import kind_of

if TYPE_CHECKING:
    from equidp.tasks.base import Task

Key = TypeVar("Key", bound=Hashable)

INTERVAL = frozenset({"mean", "low", "high", "seeds"})


@dataclass(frozen=True)
class Row:
    """Cells that differ in their seed alone.

    Attributes:
        label: algorithm and those settings in which the rows of one dataset differ.
        metrics: `metrics.json` by seed.
        privacy: `privacy.json` over the seeds, see `of_seeds`.
        key: names its settings, see `row_key`.
    """

    dataset: str
    algorithm: str
    label: str
    metrics: Mapping[int, Mapping[str, Any]]
    privacy: Mapping[str, Any]
    settings: Mapping[str, Any]
    key: str

    @property
    def task(self) -> type[Task]:
        """The task that the row's figures belong to."""
        return kind_of(next(iter(self.metrics.values())))

    @property
    def part(self) -> str:
        """The part of the data that the row's figures are of: test or validation."""
        return next(iter(self.metrics.values())).get("evaluated_on", "test")

    def overall(self) -> dict[int, float | None]:
        """The main metric by seed."""
        return {seed: one["overall"][self.task.main] for seed, one in self.metrics.items()}

    def worst(self) -> dict[int, float | None]:
        """The main metric of each seed's worst group by the first grouping; seeds may differ in their worst group."""
        documents, task = settled(self.algorithm, self.metrics), self.task
        grouping = next(iter(next(iter(documents.values()))["groups"]), "")
        return {seed: task.worst_of(one["groups"].get(grouping, {}))[task.main] for seed, one in documents.items()}


def rows_of(cells: Sequence[Cell], planned: Sequence[Cell] = ()) -> list[Row]:
    """Return one row per combination of settings; `cells` are the finished ones.

    Labels come from all `planned` cells, so that a row's label also differs from those of rows whose cells failed.
    """
    labels = labels_of(planned or cells)
    return [_row(group, labels[group[0].key]) for group in by_seed(cells)]


def labels_of(cells: Sequence[Cell]) -> dict[str, str]:
    """Labels of the rows, by each cell's key: algorithm and the settings in which the rows of one dataset differ."""
    groups, differences = by_seed(cells), differing(cells)
    rows: dict[str, dict[str, tuple[str, dict[str, Any]]]] = defaultdict(dict)
    for first, *_ in groups:
        own = {k: v for k, v in differences[first.key].items() if "." not in k or _concerns(k, first)}
        rows[first.dataset][first.key] = first.algorithm, own
    labels = {key: label for mine in rows.values() for key, label in row_labels(mine).items()}
    return {cell.key: labels[group[0].key] for group in groups for cell in group}


def row_labels(rows: Mapping[Key, tuple[str, Mapping[str, Any]]]) -> dict[Key, str]:
    """A label of its own for every row: its algorithm and its settings.

    A setting is named by the last part of its name (`model.name` by `model`), or by its whole name if another setting
    of the algorithm ends the same. Rows that still have the same label (values are shown to six digits) are numbered.
    """
    lasts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for algorithm, settings in rows.values():
        for name in settings:
            lasts[algorithm][_short(name)].add(name)

    def label(key: Key) -> str:
        algorithm, settings = rows[key]
        names = {name: name if len(lasts[algorithm][_short(name)]) > 1 else _short(name) for name in settings}
        return " ".join([algorithm, *(f"{names[name]}={_plain(value)}" for name, value in settings.items())])

    return numbered(rows, label, " #")


def _row(cells: Sequence[Cell], label: str) -> Row:
    first = cells[0]
    metrics = {cell.seed: _json(cell.outputs["metrics"]) for cell in cells}
    settings = {name: value for name, value in first.settings.items() if name != "audited"}  # for audits and tunings
    return Row(
        first.dataset,
        first.algorithm,
        label,
        metrics,
        of_seeds([_json(cell.outputs["privacy"]) for cell in cells]),
        {**settings, "seed": sorted(metrics)},
        row_key(first),
    )


def _concerns(name: str, cell: Cell) -> bool:
    """Whether a setting has an effect on this cell: another algorithm's options have none, nor has ε on sgd."""
    block, _, rest = name.partition(".")
    return block in cell.settings and (block != "privacy" or rest.partition(".")[0] in cell.settings["privacy"])


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(name: str) -> str:
    return {"privacy.epsilon": "ε"}.get(name, name.removesuffix(".name").rpartition(".")[2])


def of_seeds(statements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `privacy.json` with the highest ε, which holds for each of the runs; `seed` names the seeds of them all."""
    seeds = [str(seed) for seed in sorted({one["seed"] for one in statements if one.get("seed") is not None})]
    named = {"seed": f"{', '.join(seeds[:-1])} or {seeds[-1]}"} if len(seeds) > 1 else {}
    highest = max(statements, key=lambda one: one.get("epsilon") or 0.0)
    return {**highest, **named}


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EquidpError(f"{path} cannot be read ({error}): delete its folder and call the sweep again.") from error


# ------------------------------------------------------------------------------------------------------------ table


def table_of(
    rows: Sequence[Row],
    against: Mapping[str, Sequence[str]] = MappingProxyType({}),
    doubts: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> pd.DataFrame:
    """One line per row: ε, and means with the half-width of their 95 % interval over seeds.

    Args:
        rows: of the finished cells.
        against: `counterparts` of all cells.
        doubts: sentences on cells that are missing, or mixed, by data set.

    Returns:
        Columns `dataset`, `run`, `algorithm`, `seeds`, `epsilon`, `epsilon_published`, `metric`, `part`, then per
        figure (`accuracy`, `cost`, `worst`, `spread`, `gap`) its mean, `<figure>_seeds`, the number of seeds that
        have it (where the baseline diverged there is no cost), and `<figure>±`; costs and gaps are paired by seed.
        Undefined values are NaN. `part` says of which records figures are, test or validation. `worst` is the mean
        over seeds of the worst group's accuracy, of the first grouping. Of other tasks than classification the main
        metric stands in the place of `accuracy`; `metric` names it, because all these figures are in it. Then
        `reference`, the run that this one is compared with, and in the same way `gain` and `worst_gain`: how much
        better the main metric, overall and of the worst group, is than the reference's, paired by seed.
        `attrs["parts"]` names, per dataset, the parts that figures are of; `attrs["remarks"]`, where there are any,
        has sentences on its gains, and `attrs["doubts"]` the given ones.
    """
    found = gains_of(rows, against)
    lines = [_line(row) | found[row.key] for row in rows]
    table, parts = pd.DataFrame(lines), defaultdict[str, dict[str, None]](dict)
    for row in rows:
        parts[row.dataset] |= {row.part: None}
    table.attrs |= {"remarks": remarks(rows, against), "doubts": dict(doubts)}
    table.attrs["parts"] = {dataset: list(names) for dataset, names in parts.items()}
    return table


def _line(row: Row) -> dict[str, Any]:
    documents = settled(row.algorithm, row.metrics)
    seen = over_seeds(documents)
    grouping = next(iter(seen["groups"]), "")
    cost, main = seen.get("cost_of_privacy") or {}, row.task.main
    worst = over_seeds({seed: {main: value} for seed, value in row.worst().items()})
    line: dict[str, Any] = {
        "dataset": row.dataset,
        "run": row.label,
        "algorithm": row.algorithm,
        "seeds": len(row.metrics),
        "epsilon": row.privacy.get("epsilon"),
        "epsilon_published": (row.privacy.get("epsilon_published") or {}).get("value"),
        "metric": main,
        "part": row.part,
    }
    figures = {
        main: seen["overall"][main],
        "cost": (cost.get("overall") or {}).get(main),
        "worst": worst[main],
        "spread": (seen.get("spread") or {}).get(grouping),
        "gap": ((cost.get("gap") or {}).get(grouping) or {}).get(main),
    }
    for name, figure in figures.items():
        line |= columns_of(name, Interval(**figure) if figure else None)
    return line


def means_of(cells: Sequence[Cell], row: Row, line: Mapping[str, Any], runs: Mapping[str, str]) -> Means:
    """Return the figures of a row under the names that a run's own figures have in MLflow.

    Args:
        cells: the row's cells.
        row: the row.
        line: the row's line of `table_of`.
        runs: MLflow's id of each cell's run, by the cell's key.
    """
    main = kind_of(next(iter(row.metrics.values()))).main
    names = {  # in MLflow, and in words
        main: (f"test/{main}", "overall"),
        "worst": (f"test/worst_group_{main}", "worst group"),
        "cost": (f"cost_of_privacy/{main}", "cost of privacy"),
        "gap": ("cost_of_privacy/gap", "gap"),
    }
    known = {column: of for column, of in names.items() if not pd.isna(line[column])}
    figures = {name: line[column] for column, (name, _) in known.items()}
    figures |= {f"plus_minus/{column}": line[f"{column}±"] for column in known}
    figures |= {name: line[name] for name in ("epsilon", "epsilon_published")}
    metrics = {name: float(value) for name, value in figures.items() if not pd.isna(value)}
    shown = {words: shown_figure(pd.Series(line), column) for column, (_, words) in known.items()}
    text = ", ".join(
        f"{f'{row.part} {METRIC_TITLES[main]}' if words == 'overall' else words} {figure}"
        for words, figure in shown.items()
    )
    several = line["seeds"] > 1
    seeds = f"mean ± half of the 95 % interval over {line['seeds']} seeds" if several else "of a single seed"
    private = f"ε = {epsilon_text(metrics['epsilon'])}, research mode" if "epsilon" in metrics else "Not private"
    return Means(
        key=row_key(cells[0]),
        dataset=row.dataset,
        algorithm=row.algorithm,
        label=row.label,
        metrics=metrics | {"seeds": float(line["seeds"])},
        shown=shown | {"seeds": str(line["seeds"])},
        note=f"{private}; {text} ({seeds})",
        cells=[runs[cell.key] for cell in cells],
    )


# ------------------------------------------------------------------------------------------------------------ pages


def write_summary(
    rows: Sequence[Row], table: pd.DataFrame, folder: Path, title: str, library: Path | None = None
) -> list[Path]:
    """Write `table.csv` and one page per dataset into `folder`; return the files.

    If `library` is given, the pages share one copy of Plotly with all other pages below that folder.
    """
    written = [folder / "table.csv"]
    with replacing(written[0]) as part:
        table.to_csv(part, index=False)
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = [row for row in rows if row.dataset == dataset]
        page = folder / f"{dataset}.html"
        with replacing(page) as part:
            doubts = table.attrs.get("doubts", {}).get(dataset, [])
            text = _page(mine, f"{title} on {dataset}", _compared(table, dataset), doubts)
            part.write_text(text if library is None else linked(text, page, library), encoding="utf-8")
        written.append(page)
    return written


def _compared(table: pd.DataFrame, dataset: str) -> pd.DataFrame | None:
    """Return a data set's lines that have a reference, with remarks on gains; None without any lines and remarks."""
    lines = table[(table["dataset"] == dataset) & table["reference"].notna()].copy()
    lines.attrs = {"remarks": table.attrs.get("remarks", {}).get(dataset, [])}
    return lines if len(lines) or lines.attrs["remarks"] else None


def _page(rows: Sequence[Row], title: str, compared: pd.DataFrame | None, remarks: Sequence[str]) -> str:
    documents = {row.label: averaged(row.algorithm, row.metrics) for row in rows}
    counts = sorted({len(row.metrics) for row in rows})
    seeds = " or ".join(map(str, counts))
    return html_report(
        f"{title}: means over {seeds} seed{'s' if counts != [1] else ''}",
        documents,
        {row.label: row.privacy for row in rows},
        {},
        {row.label: row.settings for row in rows},
        {"runs": sum(len(row.metrics) for row in rows)},
        pd.DataFrame(columns=["grouping", "group"]),
        remarks,
        compared=compared,
    )


def trained_badly(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return, by data set, the pages' sentences on baselines and models that learnt nothing or were trained badly."""
    documents = defaultdict[str, dict[str, Any]](dict)
    for row in rows:
        documents[row.dataset][row.label] = averaged(row.algorithm, row.metrics)
    return {dataset: said for dataset, of in documents.items() if (said := list(training_warnings(of)))}


def averaged(algorithm: str, documents: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over seeds in the shape of one run's document, with the number of seeds, for the baseline too.

    Intervals are over seeds; a single seed keeps its run's own intervals over test records. `diverged` is the number
    of seeds whose baseline diverged, if any. If only some of the seeds have it, `lost` is the number of seeds whose own
    model diverged, and `guessed` the number of seeds whose baseline has learnt nothing.
    """
    kept = settled(algorithm, documents)
    seen = over_seeds(kept)
    page = means(seen) | {"seeds": len(kept)}
    own = next(iter(kept.values())) if len(kept) == 1 else {}
    main = kind_of(next(iter(kept.values()))).main
    page["intervals"] = own.get("intervals") or _intervals(seen, main)
    for name in ("baseline", "cost_of_privacy"):
        if page.get(name):
            page[name]["intervals"] = own.get(name, {}).get("intervals") or _intervals(seen[name], main)
    converged = len(kept) if algorithm == BASELINE else sum("baseline" in document for document in kept.values())
    if "baseline" in page:
        page["baseline"]["seeds"] = converged
    page |= {"diverged": len(documents) - converged} if converged < len(documents) else {}
    return page | {name: count for name, count in _in_some(algorithm, kept).items() if 0 < count < len(kept)}


def _in_some(algorithm: str, documents: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Count the seeds in which a private model diverged, and in which its baseline guessed: a mean does not show it."""
    task = kind_of(next(iter(documents.values())))
    baselines = [one["baseline"] for one in documents.values() if one.get("baseline")]
    guessed = sum(task.guessing(baseline) is not None for baseline in baselines)
    return {
        "lost": 0 if algorithm == BASELINE else sum(map(task.diverged, documents.values())),
        "guessed": guessed if any(map(task.measures, baselines)) else 0,
    }


def _intervals(figures: Mapping[str, Any], main: str) -> dict[str, Any]:
    """Return the main metric's intervals over seeds, in the shape of a run's own intervals; also of worst and gap."""

    def ends(of: Mapping[str, Any] | None) -> list[float] | None:
        found = (of or {}).get(main)
        return [found["low"], found["high"]] if found and found["low"] is not None else None

    groups = figures["groups"].items()
    between = {name: figures.get(name) or {} for name in ("worst", "gap")}
    return {
        "overall": ends(figures["overall"]),
        "groups": {grouping: {group: ends(values) for group, values in of.items()} for grouping, of in groups},
        **{name: {grouping: ends(values) for grouping, values in of.items()} for name, of in between.items()},
    }


def settled(algorithm: str, documents: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return documents by seed without baselines that diverged: costs against these are unknown, and distort a mean.

    If the baseline diverged in every seed, its own row shows that, as for a single run.
    """
    task = kind_of(next(iter(documents.values())))
    if algorithm == BASELINE:
        return {seed: one for seed, one in documents.items() if not task.diverged(one)} or dict(documents)
    return {
        seed: {k: v for k, v in one.items() if k != "baseline" or not task.diverged(v)}
        for seed, one in documents.items()
    }


def means(value: Any) -> Any:
    """A document over seeds with every interval replaced by its mean, in the shape of one run's."""
    if isinstance(value, Mapping):
        if value.keys() == INTERVAL:
            mean = value["mean"]
            return int(mean) if float(mean).is_integer() and abs(mean) >= 2 else mean
        return {key: means(inner) for key, inner in value.items()}
    return ", ".join(map(str, value)) if isinstance(value, list) else value
