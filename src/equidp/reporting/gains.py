"""What a sweep's page says of the gains of its runs over the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from equidp.reporting.titles import METRIC_TITLES
from equidp.tasks.base import Task

MOST_DRAWN = 60
"""The most runs that are drawn; more are only tabulated."""

NO_STATEMENT = (
    "This is no privacy statement: gains are of exact figures, outside the guarantee, and no ε on this page covers the "
    "choice of an algorithm by them (privacy.max_trials)."
)


def gains_table(compared: pd.DataFrame, task: type[Task]) -> pd.DataFrame:
    """The comparison as a table for readers; `compared` is as of `figures.gains`."""
    title = METRIC_TITLES[task.main]
    columns = {"gain": f"gain in {title}", "worst_gain": "gain of the worst group"}
    shown = compared[["run", "reference"]].rename(columns={"reference": "over"})
    for name, heading in columns.items():
        shown[heading] = compared[name].astype(float)
        shown[f"{heading}±"] = compared[f"{name}±"].astype(float)
        if name == "gain" or (compared["gain_seeds"] != compared["worst_gain_seeds"]).any():
            shown["seeds" if name == "gain" else "seeds of the worst group"] = compared[f"{name}_seeds"]
    return shown


def gains_caption(compared: pd.DataFrame, task: type[Task]) -> str:
    """Say what the figure's points and lines are."""
    if not compared[["gain±", "worst_gain±"]].notna().any(axis=None):
        return "Points are of a single seed, or of seeds that agree: no interval is known."
    cut = ", cut at −1 and 1" if task.most == 1 else ""
    lone = " An open point has no interval: a single seed, or seeds that agree."
    known = compared[["gain", "worst_gain"]].notna().to_numpy() == compared[["gain±", "worst_gain±"]].notna().to_numpy()
    return f"Lines are 95 % intervals over seeds of the differences within each seed{cut}.{'' if known.all() else lone}"


def gains_notes(compared: pd.DataFrame, task: type[Task]) -> Iterator[str]:
    """Say what the gains are, how many, and what they are not; `attrs["remarks"]` are sentences of the sweep."""
    if len(compared):
        title, lowest = METRIC_TITLES[task.main], task.best.get(task.main) == "lowest"
        better = f"{'smaller' if lowest else 'larger'} {title} is better, and a gain above 0 is for the better"
        yield (
            f"Gain: how much better a run's {title} is than that of the run in the next column, the reference: a "
            f"{better}. It is the mean of the differences within each seed, ± half of their 95 % interval over seeds "
            "(Student's t). Runs of one seed share the test part and initial weights, and mostly their batches: this "
            "interval is mostly narrower than those of the two means tell. The worst group is each seed's worst, "
            "which may be another one in the two runs. Seeds: those in which both runs have the figure."
        )
    if len(compared) > MOST_DRAWN:
        yield f"More than {MOST_DRAWN} runs are not drawn."
    made = int(compared[["gain", "worst_gain"]].notna().sum().sum()) if len(compared) else 0
    if made > 1 and compared[["gain±", "worst_gain±"]].notna().any(axis=None):
        yield (
            f"{made} comparisons are made here at once. Each interval holds at 95 % by itself, and nothing is adjusted "
            "for their number: of twenty, one is expected to miss, and the largest gain of many is partly luck."
        )
    yield from compared.attrs.get("remarks", ())
    if len(compared):
        yield NO_STATEMENT
