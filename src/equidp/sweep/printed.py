"""A sweep's tables in the terminal."""

from __future__ import annotations

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.titles import COST_MEANS, METRIC_TITLES, SAME_TABLE, figure_text
from equidp.tasks import TASKS

WIDTH = 100
READING = (
    "n: seeds. Cost of privacy, paired by seed: {cost}. Gap: largest minus smallest cost, over "
    "groups of ten evaluated records or more, where there are two{spread}. (m): over m of the seeds, as the model or "
    "its baseline diverged in the others, or the baseline guessed. ε holds for each run alone: runs on the same data "
    "compose; those of one seed share batches and noise, and do not even compose. All are in research mode: whoever "
    "knows the seed can subtract the noise."
)
SPREAD = "; spread: largest minus smallest figure, over these"
READING_GAINS = (
    "Gain: how much better than the run it is over, by the difference within each seed; above 0 is for the better. "
    "Intervals are not adjusted for how many gains there are, and no ε covers a choice by them."
)
SIGNED = ("cost", "gain", "worst_gain")
"""Figures that are differences."""


def print_table(table: pd.DataFrame, console: Console) -> None:
    """One table per dataset, and one of gains where runs are compared, within 100 columns; 80 are enough."""
    costs: dict[str, None] = {}
    width = min(WIDTH, console.width)
    names = {"cost": "cost", "worst": "worst group", "spread": "spread", "gap": "gap"}
    if width < WIDTH:
        del names["spread"]
    for dataset, lines in table.groupby("dataset", sort=False):
        task = next(kind for kind in TASKS.values() if kind.main in lines and lines[f"{kind.main}_seeds"].notna().any())
        main = METRIC_TITLES[task.main]
        costs |= {main: None}
        part = " or ".join(table.attrs.get("parts", {}).get(dataset, ["test"]))
        over = "mean ± half of the 95 % interval over seeds" if (lines["seeds"] > 1).any() else "of a single seed"
        shown = _columns(f"{dataset}: {part} {main}, {over}", "n", "ε", "overall", *names.values())
        for _, line in lines.iterrows():
            epsilon = epsilon_text(None if pd.isna(line["epsilon"]) else line["epsilon"], 3)
            _add(shown, line["run"], line["seeds"], epsilon, *(shown_figure(line, of) for of in (task.main, *names)))
        console.print(shown, width=width)
        if len(compared := lines[lines["gain"].notna() | lines["worst_gain"].notna()]):
            gains = _columns(
                f"{dataset}: gain in {main}, paired by seed", "n", "over", "gain", "gain of the worst group"
            )
            for _, line in compared.iterrows():
                figures = (shown_figure(line, of) for of in ("gain", "worst_gain"))
                _add(gains, line["run"], line["seeds"], line["reference"], *figures)
            console.print(gains, width=width)
    reading = READING.format(cost=COST_MEANS.format(" or ".join(costs)), spread=SPREAD if "spread" in names else "")
    if (table["seeds"] > 1).any():
        reading = f"{reading} {SAME_TABLE}"
    if table[["gain", "worst_gain"]].notna().any(axis=None):
        reading = f"{reading} {READING_GAINS}"
    console.print(Text(reading), width=width, style="italic")


def _columns(title: str, *names: str) -> Table:
    """A table whose first column is a run."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for name in names:
        table.add_column(
            name, justify="right", no_wrap=name != "over", overflow="fold" if name == "over" else "ellipsis"
        )
    return table


def _add(table: Table, *words: object) -> None:
    table.add_row(*(Text(str(word)) for word in words))  # else a name could be read as markup


def shown_figure(line: pd.Series, name: str) -> str:
    """A mean of a line and half of its interval, as text, with the number of seeds if it is not that of the line."""
    mean, half = line[name], line[f"{name}±"]
    if mean is None or pd.isna(mean):
        return "–"
    reach = 0.0 if half is None or pd.isna(half) else half
    text = figure_text(mean, 3, "+" if name in SIGNED else "", beside=reach)
    text = text if half is None or pd.isna(half) else f"{text}±{figure_text(half, 3, beside=mean)}"
    seeds = line[f"{name}_seeds"]
    return text if seeds == line["seeds"] else f"{text} ({seeds})"
