"""Writes docs/results.md from finished cells of sweeps: every figure there was measured, none is typed by hand.

    kedro sweep dpsgd_f_table              # and the other sweeps that tables.yml names
    python benchmarks/reproduce/page.py    # ten minutes of a core; `--check` only says what is missing
    python benchmarks/reproduce/page.py --only dpsgd_f_table    # rows of other sweeps stay; `--only ""`: words alone

First the finished cells of this project's MLflow store are added to `records.jsonl`, which is committed: it holds what
the tables show of every cell, so that seeds can be added on another machine and a third person can compare theirs
(`again.py`). The page is written from it. `tables.yml` holds what is not ours: the papers' printed figures and the
words around the tables. Cells are found by their key, a digest of all their settings, so a figure that was made with
other settings cannot slip in.

A row of the present page that has more seeds than the records know stays as it is: the oldest rows were made before
there were records.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient
from mlflow.entities import Run
from pydantic import BaseModel, ConfigDict, model_validator

from equidp.cli import project_at
from equidp.evaluation.metrics import flat_metrics, metrics_document
from equidp.evaluation.seeds import Interval, mean_interval, paired_difference
from equidp.reporting.statement_sections import epsilon_text
from equidp.sweep.grid import choose_grid, params_text
from equidp.sweep.project import Cell, by_seed

ROOT = Path(__file__).resolve().parents[2]
TABLES, RECORDS = Path(__file__).with_name("tables.yml"), Path(__file__).with_name("records.jsonl")
PAGE = ROOT / "docs" / "results.md"
BASELINE, LIVE_EPSILON = "sgd", "epsilon_rdp"


class Strict(BaseModel):
    """Refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Table(Strict):
    """One table of the page.

    Attributes:
        sweep: its name in sweeps.yml.
        title, text: what stands above it.
        dataset: which of the sweep's datasets.
        also: others of them whose rows stand in the same table, such as one paper's row with another activation.
        where: overrides that its cells have; a value null stands for cells without that override.
        algorithms: which of the sweep's; all where it names none.
        baseline, runs: family of metrics (`test`, `baseline`, `cost_of_privacy`) that the baseline's row and the
            other rows show; no baseline's row where that is empty.
        columns: heading → metric below that family.
        epochs: the runs' rows are given after each of these epochs, as MLflow has them; their ε is by RDP.
        against: an algorithm; a last column gives the first column's difference to it, seed by seed.
        printed: algorithm, or a row's whole label → the paper's figures, in the order of the columns; null where it
            prints none; of costs with the sign of ours, what is lost is positive.
        differ: why ours and the paper's differ.
        setting: network and whose settings these are, where that is not what the page says of the sweep.
        kept: label → command of rows of the present page that stay although the sweep has them no more.
    """

    sweep: str
    title: str
    dataset: str
    also: Sequence[str] = ()
    text: str = ""
    where: Mapping[str, Any] = {}
    algorithms: Sequence[str] = ()
    baseline: str = "baseline"
    runs: str = "test"
    columns: Mapping[str, str]
    epochs: Sequence[int] = ()
    against: str = ""
    printed: Mapping[str, Sequence[float | None]] = {}
    differ: str = ""
    setting: str = ""
    kept: Mapping[str, str] = {}

    @model_validator(mode="after")
    def _pairs_within_one_dataset(self) -> Table:
        if self.against and self.also:
            raise ValueError("against and also: seeds of two datasets are no pairs.")
        return self


class Page(Strict):
    """The whole page: words, tables, words.

    `settings`: network and whose settings, by sweep.
    """

    head: str
    settings: Mapping[str, str] = {}
    tables: Sequence[Table]
    foot: str


class Record(Strict):
    """What the tables show of one finished cell.

    Attributes:
        cell: its key.
        algorithm, dataset, seed: for readers; the key holds all settings.
        commit: of the code that ran it.
        device: that it was trained on, where that was no CPU.
        rounded: its metrics were read from the page, three decimals, since the store of its run is gone.
        metrics: by MLflow's names; `name@n` is what it was after epoch n.
    """

    cell: str
    algorithm: str
    dataset: str
    seed: int
    commit: str = ""
    device: str = ""
    rounded: bool = False
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """Cells that differ in their seed alone, with the records of those that are finished.

    `epoch`: after which the records were taken, where that is not the last.
    """

    cells: Sequence[Cell]
    records: Mapping[int, Record]
    epoch: int | None = None

    @property
    def name(self) -> str:
        """The algorithm, and what tells it from others of the same name."""
        return self.cells[0].algorithm

    @property
    def overrides(self) -> dict[str, Any]:
        """What its cells were given, seed aside."""
        return {name: value for name, value in self.cells[0].overrides.items() if name != "seed"}

    def after(self, epoch: int) -> Row:
        """The row as it stood after an epoch, of the seeds that were looked at then."""
        stood = {}
        for seed, record in self.records.items():
            names = {name: name.removesuffix(f"@{epoch}") for name in record.metrics if name.endswith(f"@{epoch}")}
            metrics = {"epsilon" if new == LIVE_EPSILON else new: record.metrics[old] for old, new in names.items()}
            if metrics:
                stood[seed] = record.model_copy(update={"metrics": metrics})
        return Row(self.cells, stood, epoch)

    def by_seed(self, metric: str) -> dict[int, float]:
        """A metric's value in every record that has it, by seed."""
        return {seed: record.metrics[metric] for seed, record in self.records.items() if metric in record.metrics}

    def values(self, metric: str) -> list[float]:
        """The values alone."""
        return list(self.by_seed(metric).values())


def main() -> None:
    """Write the page, or say what is missing."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="only say which cells are missing")
    arguments.add_argument("--only", help="sweeps, by commas: rows of the others stay as the page has them")
    options = arguments.parse_args()
    bootstrap_project(ROOT)
    page = Page.model_validate(yaml.safe_load(TABLES.read_text(encoding="utf-8")))
    project = project_at(ROOT)
    store, experiment = project.store()
    grids = project.grids()
    # once per sweep: resolving a cell's settings takes longer than all else here
    names = dict.fromkeys(table.sweep for table in page.tables)
    chosen = names if options.only is None else [name for name in names if name in options.only.split(",")]
    cells = {name: project.cells(choose_grid(grids, name, {})) for name in chosen}
    known = read_records()
    for name, some in cells.items():
        metrics = shown_metrics([table for table in page.tables if table.sweep == name])
        known = together(known, collected(some, metrics, store, experiment))
    standing = published(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else {}
    parts, missing = [page.head.strip()], []
    for table in page.tables:
        rows = rows_of(table, cells[table.sweep], known) if table.sweep in cells else None
        missing += [str(cell) for row in rows or () for cell in row.cells if cell.seed not in row.records]
        told = table.model_copy(update={"setting": table.setting or page.settings[table.sweep]})
        parts.append(section(told, rows, standing.get(table.title, {})))
    for cell in dict.fromkeys(missing):
        print(f"no record: {cell}", file=sys.stderr)
    if options.check:
        sys.exit(bool(missing))
    write_records(known)
    PAGE.write_text("\n\n".join([*parts, page.foot.strip()]) + "\n", encoding="utf-8")
    print(PAGE)


def rows_of(table: Table, cells: Sequence[Cell], known: Mapping[str, Record]) -> list[Row]:
    """The table's rows, in the sweep's order, those without a record too."""
    shown = [
        cell
        for cell in cells
        if cell.dataset in (table.dataset, *table.also)
        and all(cell.overrides.get(k) == v for k, v in table.where.items())
        and (not table.algorithms or cell.algorithm in table.algorithms)
    ]
    return [Row(group, {cell.seed: known[cell.key] for cell in group if cell.key in known}) for group in by_seed(shown)]


# ----------------------------------------------------------------------------------------------------------- records


def shown_metrics(tables: Sequence[Table]) -> set[str]:
    """Names of all metrics that some of these tables shows."""
    names = {"epsilon", "epsilon_published"}
    for table in tables:
        names |= {f"{family}/{metric}" for family in (table.baseline, table.runs) for metric in table.columns.values()}
        followed = {LIVE_EPSILON, *(f"{table.runs}/{metric}" for metric in table.columns.values())}
        names |= {f"{name}@{epoch}" for name in followed for epoch in table.epochs}
    return names


def collected(cells: Sequence[Cell], metrics: set[str], store: str, experiment: str) -> dict[str, Record]:
    """Records of the cells that are finished in a MLflow store, by key."""
    client = MlflowClient(store)
    found = ((cell, run_of(cell, client, experiment)) for cell in cells)
    return {
        cell.key: record_of(cell, run, metrics, figures_of(cell, run), curve_of(cell))
        for cell, run in found
        if run is not None
    }


def figures_of(cell: Cell, run: Run) -> dict[str, float]:
    """A cell's figures: those of its files, and ε as MLflow has it. In older files a cost has the other sign."""
    document = json.loads(cell.outputs["metrics"].read_text(encoding="utf-8"))
    return run.data.metrics | flat_metrics(metrics_document(document, document.get("baseline")))


def curve_of(cell: Cell) -> Callable[[str], Mapping[int, float]]:
    """Gives a figure by epoch, from the cell's history."""
    path = cell.folder / "history.parquet"
    history = pd.read_parquet(path).set_index("epoch") if path.is_file() else pd.DataFrame()
    return lambda name: history[name].dropna().to_dict() if name in history else {}


def together(committed: Mapping[str, Record], found: Mapping[str, Record]) -> dict[str, Record]:
    """Both. A committed figure stays, unless it was rounded: another machine's last digits are no news.

    What a record has not is added, from a run on the same kind of device.
    """
    both = {**committed, **found}
    for key in committed.keys() & found.keys():
        old, new = committed[key], found[key]
        if not old.rounded:
            more = new.metrics if new.device == old.device else {}
            both[key] = old.model_copy(update={"metrics": dict(sorted({**more, **old.metrics}.items()))})
    return both


def record_of(
    cell: Cell,
    run: Run,
    metrics: set[str],
    figures: Mapping[str, float],
    curve: Callable[[str], Mapping[int, float]],
) -> Record:
    """What the tables may show of a run, of its `figures` and of their values by epoch, which `curve` gives."""
    known = {name: figures[name] for name in metrics & figures.keys()}
    for name in {name.partition("@")[0] for name in metrics if "@" in name}:
        points = {f"{name}@{epoch}": value for epoch, value in curve(name).items()}
        known |= {one: points[one] for one in metrics & points.keys()}
    return Record(
        cell=cell.key,
        algorithm=cell.algorithm,
        dataset=cell.dataset,
        seed=cell.seed,
        commit=run.data.tags.get("git_commit", ""),
        device=device_of(run),
        metrics={name: value for name, value in sorted(known.items()) if math.isfinite(value)},
    )


def device_of(run: Run) -> str:
    """That it was trained on, where that was no CPU."""
    device = run.data.tags.get("device", "cpu")
    return "" if device == "cpu" else str(device)


def run_of(cell: Cell, client: MlflowClient, experiment: str) -> Run | None:
    """The newest finished run of a cell."""
    wanted = f"tags.run_label = '{cell.key}' and attributes.status = 'FINISHED'"
    found = client.search_runs([experiment], wanted, max_results=1)
    return found[0] if found else None


def read_records() -> dict[str, Record]:
    """The committed records, by key."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.is_file() else []
    return {record.cell: record for record in map(Record.model_validate_json, lines)}


def write_records(known: Mapping[str, Record]) -> None:
    """One line per cell, in an order that keeps changes small."""
    ordered = sorted(known.values(), key=lambda r: (r.dataset, r.algorithm, r.cell))
    lines = [json.dumps(record.model_dump(exclude_defaults=True)) for record in ordered]
    RECORDS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- markdown


Standing = Mapping[str, tuple[str, str]]
"""Rows of one table of a page by their label: the line, and the command under the table (none for the baseline)."""


def published(text: str) -> dict[str, Standing]:
    """The rows of a page, by the title of their table."""
    tables: dict[str, Standing] = {}
    for part in text.split("\n## ")[1:]:
        title, *lines = part.splitlines()
        rows = [line for line in lines if line.startswith("| `")]
        names = [line.split(" | ")[0].removeprefix("| ") for line in rows]
        commands = [line for line in lines if line.startswith("kedro run ")]
        commands = [*[""] * (len(rows) - len(commands)), *commands]  # a baseline's row has none
        tables[title] = dict(zip(names, zip(rows, commands, strict=True), strict=True))
    return tables


def section(table: Table, rows: Sequence[Row] | None, standing: Standing) -> str:
    """Heading, words, table, and the command of every row; without `rows` those that stand."""
    lines = [f"## {table.title}", "", table.text.strip(), ""] if table.text else [f"## {table.title}", ""]
    lines += [f"`kedro sweep {table.sweep}`", ""]
    made = list(standing.values()) if rows is None else entries_of(table, rows, standing)
    made = [one for one in made if one not in [standing.get(label) for label in table.kept]]
    made += [(standing[label][0], command) for label, command in table.kept.items() if label in standing]
    if not made:
        return "\n".join([*lines, "Not run yet."])
    if table.setting:
        lines += [f"**Setting.** {table.setting.strip()} Seeds: {seeds_of(made)}.", ""]
    headings = [*table.columns, *([f"{next(iter(table.columns))}, against `{table.against}`"] if table.against else [])]
    lines += [
        "| | seeds | sound ε | ε as published | " + " | ".join(headings) + " |",
        "|---|---|---|---|" + "---|" * len(headings),
        *(line for line, _ in made),
        "",
        "Mean ± half of the 95 % interval over the seeds"
        + ("; in brackets what the paper prints." if table.printed else "."),
    ]
    if table.differ:
        lines += ["", table.differ.strip()]
    lines += ["", "<details><summary>Every row's command</summary>", "", "```sh"]
    return "\n".join([*lines, *(command for _, command in made if command), "```", "", "</details>"])


def entries_of(table: Table, rows: Sequence[Row], standing: Standing) -> list[tuple[str, str]]:
    """Line and command of the baseline and of every row that is finished."""
    reference = next((row for row in rows if row.name == table.against), None)
    own = [row for row in rows if row.cells[0].dataset == table.dataset]  # another dataset's baseline is another one
    first = max(own, key=lambda row: len(row.records), default=None)
    entries = [entry(f"`{BASELINE}`", first, table, table.baseline, None, standing)] if first and table.baseline else []
    for label, row in zip(labels(rows), rows, strict=True):
        for one in [row.after(epoch) for epoch in table.epochs] or [row]:
            told = label if one.epoch is None else f"{label}, {one.epoch} epochs"
            entries.append(entry(told, one, table, table.runs, reference, standing))
    return [one for one in entries if one is not None]


def seeds_of(made: Sequence[tuple[str, str]]) -> str:
    """How many seeds the lines of a table have, `3` or `1 to 5`."""
    counts = sorted({int(line.split(" | ")[1]) for line, _ in made})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def entry(
    label: str, row: Row, table: Table, family: str, reference: Row | None, standing: Standing
) -> tuple[str, str] | None:
    """A row's line and command: from the records, or as the page has them where it knows more seeds."""
    command = f"kedro run --pipeline={row.name} --params={params_text(row.overrides)},seed=…"
    old = standing.get(label)
    # a row that stands there under another command is another row, whatever it is called
    same = old is not None and (not old[1] or old[1].partition("   #")[0] == command)
    if old is not None and same and int(old[0].split(" | ")[1]) > len(row.records):
        return old
    if not row.records:
        return None
    private = family != table.baseline
    seeds = ", ".join(f"{seed} on a GPU" if record.device else str(seed) for seed, record in row.records.items())
    seeds += f", as after epoch {row.epoch}" if row.epoch else ""
    return line(label, row, table, family, reference), f"{command}   # {seeds}" if private else ""


def labels(rows: Sequence[Row]) -> list[str]:
    """The algorithm, and those of its own settings that tell rows of one algorithm apart."""
    names = []
    for row in rows:
        twins = [other for other in rows if other.name == row.name and other is not row]
        told = [
            f"{name.rpartition('.')[2]} {value:g}" if isinstance(value, float) else f"{name.rpartition('.')[2]} {value}"
            for name, value in row.overrides.items()
            if any(other.overrides.get(name) != value for other in twins)
        ]
        names.append(", ".join([f"`{row.name}`", *told]))
    return names


def line(label: str, row: Row, table: Table, family: str, reference: Row | None) -> str:
    """One row of the table."""
    private = family != table.baseline
    name = row.name if private else BASELINE
    printed = table.printed.get(label.replace("`", ""), table.printed.get(name, ()))
    figures = [
        figure(row.values(f"{family}/{metric}"), printed[i] if i < len(printed) else None, family)
        for i, metric in enumerate(table.columns.values())
    ]
    if table.against:
        metric = f"{family}/{next(iter(table.columns.values()))}"
        figures.append("–" if reference is None or reference is row else difference(row, reference, metric))
    epsilons = [epsilon(row.values(kind), kind) if private else "–" for kind in ("epsilon", "epsilon_published")]
    return "| " + " | ".join([label, str(len(row.records)), *epsilons, *figures]) + " |"


def difference(row: Row, reference: Row, metric: str) -> str:
    """The metric's difference over the seeds that both rows have: splits and starts are then the same."""
    first, second = row.by_seed(metric), reference.by_seed(metric)
    return shown(paired_difference(first, second), "+") if first.keys() & second.keys() else "–"


def epsilon(values: Sequence[float], kind: str) -> str:
    """The highest of the seeds, which holds for each of them; ours rounded up, the paper's as papers round."""
    if not values:
        return "–"
    return epsilon_text(max(values), 2) if kind == "epsilon" else f"{max(values):.2f}"


def figure(values: Sequence[float], printed: float | None, family: str) -> str:
    """`0.812 ± 0.003 (0.810)`."""
    sign = "+" if family == "cost_of_privacy" else ""
    if not values:
        return "–"
    paper = "" if printed is None else f" ({printed:{sign}.3f})".replace("-", "−")
    return shown(mean_interval(values), sign) + paper


def shown(interval: Interval, sign: str) -> str:
    """`0.812 ± 0.003`."""
    half = "" if interval.half_width is None else f" ± {interval.half_width:.3f}"
    return f"{interval.mean:{sign}.3f}{half}".replace("-", "−")


if __name__ == "__main__":
    main()
