"""Writes docs/results.md from MLflow: every figure there is a finished cell of a sweep, none is typed by hand.

    kedro sweep dpsgd_f_table              # and the other sweeps that tables.yml names
    python benchmarks/reproduce/page.py    # seconds; `--check` only says what is missing

`tables.yml` holds what is not ours: the papers' printed figures and the words around the tables. Cells are found by
their key, a digest of all their settings, so a figure that was made with other settings cannot slip in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient
from mlflow.entities import Run
from pydantic import BaseModel, ConfigDict

from equidp.evaluation.seeds import Interval, mean_interval, paired_difference
from equidp.sweep.grid import choose_grid, params_text
from equidp.sweep.project import Cell, Project, by_seed

ROOT = Path(__file__).resolve().parents[2]
TABLES, PAGE = Path(__file__).with_name("tables.yml"), ROOT / "docs" / "results.md"
BASELINE = "sgd"


class Strict(BaseModel):
    """Refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Table(Strict):
    """One table of the page.

    Attributes:
        sweep: its name in sweeps.yml.
        title, text: what stands above it.
        dataset: which of the sweep's datasets.
        where: overrides that its cells have; a value null stands for cells without that override.
        baseline, runs: family of metrics (`test`, `baseline`, `cost_of_privacy`) that the baseline's row and the
            other rows show.
        columns: heading → metric below that family.
        against: an algorithm; a last column gives the first column's difference to it, seed by seed.
        printed: algorithm → the paper's figures, in the order of the columns; null where it prints none.
        differ: why ours and the paper's differ.
    """

    sweep: str
    title: str
    dataset: str
    text: str = ""
    where: Mapping[str, Any] = {}
    baseline: str = "baseline"
    runs: str = "test"
    columns: Mapping[str, str]
    against: str = ""
    printed: Mapping[str, Sequence[float | None]] = {}
    differ: str = ""


class Page(Strict):
    """The whole page: words, tables, words."""

    head: str
    tables: Sequence[Table]
    foot: str


@dataclass(frozen=True)
class Row:
    """Cells that differ in their seed alone, with their runs."""

    cells: Sequence[Cell]
    runs: Sequence[Run]

    @property
    def name(self) -> str:
        """The algorithm, and what tells it from others of the same name."""
        return self.cells[0].algorithm

    @property
    def overrides(self) -> dict[str, Any]:
        """What its cells were given, seed aside."""
        return {name: value for name, value in self.cells[0].overrides.items() if name != "seed"}

    def by_seed(self, metric: str) -> dict[int, float]:
        """A metric's value in every run that has it, by seed."""
        return {
            cell.seed: run.data.metrics[metric]
            for cell, run in zip(self.cells, self.runs, strict=True)
            if metric in run.data.metrics
        }

    def values(self, metric: str) -> list[float]:
        """The values alone."""
        return list(self.by_seed(metric).values())


def main() -> None:
    """Write the page, or say what is missing."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="only say which cells are missing")
    check = arguments.parse_args().check
    bootstrap_project(ROOT)
    page = Page.model_validate(yaml.safe_load(TABLES.read_text(encoding="utf-8")))
    project = Project(ROOT)
    store, experiment = project.store()
    client = MlflowClient(store)
    grids = project.grids()
    # once per sweep: resolving a cell's settings takes longer than all else here
    cells = {name: project.cells(choose_grid(grids, name, {})) for name in dict.fromkeys(t.sweep for t in page.tables)}
    parts, missing = [page.head.strip()], []
    for table in page.tables:
        rows, absent = rows_of(table, cells[table.sweep], client, experiment)
        missing += absent
        parts.append(section(table, rows))
    for cell in dict.fromkeys(missing):
        print(f"not finished: {cell}", file=sys.stderr)
    if check:
        sys.exit(bool(missing))
    PAGE.write_text("\n\n".join([*parts, page.foot.strip()]) + "\n", encoding="utf-8")
    print(PAGE)


def rows_of(table: Table, cells: Sequence[Cell], client: MlflowClient, experiment: str) -> tuple[list[Row], list[str]]:
    """The table's rows, in the sweep's order, and the cells that have no finished run."""
    shown = [
        cell
        for cell in cells
        if cell.dataset == table.dataset and all(cell.overrides.get(k) == v for k, v in table.where.items())
    ]
    rows, absent = [], []
    for group in by_seed(shown):
        found = [(cell, run_of(cell, client, experiment)) for cell in group]
        absent += [str(cell) for cell, run in found if run is None]
        done = [(cell, run) for cell, run in found if run is not None]
        if done:
            rows.append(Row([cell for cell, _ in done], [run for _, run in done]))
    return rows, absent


def run_of(cell: Cell, client: MlflowClient, experiment: str) -> Run | None:
    """The newest finished run of a cell."""
    wanted = f"tags.run_label = '{cell.key}' and attributes.status = 'FINISHED'"
    found = client.search_runs([experiment], wanted, max_results=1)
    return found[0] if found else None


# ---------------------------------------------------------------------------------------------------------- markdown


def section(table: Table, rows: Sequence[Row]) -> str:
    """Heading, words, table, and the command of every row."""
    lines = [f"## {table.title}", "", table.text.strip(), ""] if table.text else [f"## {table.title}", ""]
    lines += [f"`kedro sweep {table.sweep}`", ""]
    if not rows:
        return "\n".join([*lines, "Not run yet."])
    names = labels(rows)
    headings = [*table.columns, *([f"{next(iter(table.columns))}, against `{table.against}`"] if table.against else [])]
    reference = next((row for row in rows if row.name == table.against), None)
    lines += [
        "| | seeds | sound ε | ε as published | " + " | ".join(headings) + " |",
        "|---|---|---|---|" + "---|" * len(headings),
        line(BASELINE, rows[0], table, table.baseline, table.printed.get(BASELINE, ()), None),
        *(
            line(names[i], row, table, table.runs, table.printed.get(row.name, ()), reference)
            for i, row in enumerate(rows)
        ),
        "",
        "Mean ± half of the 95 % interval over the seeds"
        + ("; in brackets what the paper prints." if table.printed else "."),
    ]
    if table.differ:
        lines += ["", table.differ.strip()]
    lines += ["", "<details><summary>Every row's command</summary>", "", "```sh"]
    for row in rows:
        seeds = ", ".join(str(cell.seed) for cell in row.cells)
        lines.append(f"kedro run --pipeline={row.name} --params={params_text(row.overrides)},seed=…   # {seeds}")
    return "\n".join([*lines, "```", "", "</details>"])


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


def line(name: str, row: Row, table: Table, family: str, printed: Sequence[float | None], reference: Row | None) -> str:
    """One row of the table."""
    private = family != table.baseline
    figures = [
        figure(row.values(f"{family}/{metric}"), printed[i] if i < len(printed) else None, family)
        for i, metric in enumerate(table.columns.values())
    ]
    if table.against:
        metric = f"{family}/{next(iter(table.columns.values()))}"
        figures.append("–" if reference is None or reference is row else difference(row, reference, metric))
    epsilons = [epsilon(row.values(kind)) if private else "–" for kind in ("epsilon", "epsilon_published")]
    label = name if private else f"`{name}`"
    return "| " + " | ".join([label, str(len(row.runs)), *epsilons, *figures]) + " |"


def difference(row: Row, reference: Row, metric: str) -> str:
    """The metric's difference over the seeds that both rows have: splits and starts are then the same."""
    first, second = row.by_seed(metric), reference.by_seed(metric)
    return shown(paired_difference(first, second), "+") if first.keys() & second.keys() else "–"


def epsilon(values: Sequence[float]) -> str:
    """The highest of the seeds: it holds for each of them."""
    return f"{max(values):.2f}" if values else "–"


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
