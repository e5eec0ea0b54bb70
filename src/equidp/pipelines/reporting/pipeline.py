"""metrics, privacy, history → figures and HTML pages."""

from collections.abc import Callable, Sequence
from typing import Any

from kedro.pipeline import Pipeline

from equidp.algorithms import BASELINE
from equidp.pipelines import given, wired
from equidp.pipelines.reporting import nodes, tracked
from equidp.reporting.figures import clip_norms

RESULTS = ("metrics", "privacy", "history")


def create_pipeline(algorithm: str) -> Pipeline:
    """Figures, the privacy statement and the page of one algorithm."""
    page = ["groups", "provenance", "settings"]
    metrics, privacy, history = results = [f"{algorithm}.{name}" for name in RESULTS]
    rows: list[tuple[Callable, Any, str, str]] = [
        (nodes.accuracy_figure, [metrics, "settings"], "accuracy_figure", "draw_accuracy"),
        (nodes.run_report, [*page, f"{algorithm}.metrics_release", *results], "report", "write_report"),
    ]
    if algorithm != BASELINE:
        rows += [
            (nodes.cost_figure, [metrics, "settings"], "cost_figure", "draw_cost_of_privacy"),
            (clip_norms, history, "clip_norm_figure", "draw_clip_norms"),
        ]
    named = [
        (given(f, algorithm=algorithm), read, f"{algorithm}.{made}", f"{n}_{algorithm}") for f, read, made, n in rows
    ]
    if algorithm != BASELINE:
        made = f"{algorithm}.statement"
        named.append((nodes.statement, [privacy, "settings"], made, f"write_statement_{algorithm}"))
    return wired(named, "reporting")


def create_comparison(algorithms: Sequence[str]) -> Pipeline:
    """The page and the table that put several algorithms side by side."""
    read = ["groups", "provenance", "settings", *(f"{a}.{name}" for name in RESULTS for a in algorithms)]
    compare, made = given(nodes.compare_algorithms, algorithms=algorithms), ["comparison.report", "comparison.table"]
    return wired([(compare, read, made, "compare_algorithms")], "reporting")


def create_ledger() -> Pipeline:
    """The figure of what all runs on the data set have spent."""
    return wired([(nodes.draw_ledger, ["privacy_ledger", "settings"], "ledger_figure", "draw_ledger")], "reporting")


def create_report() -> Pipeline:
    """The page that compares tracked runs, whenever they were made."""
    made = ["tracked.report", "tracked.table"]
    return wired([(tracked.compare_tracked_runs, "settings", made, "compare_tracked_runs")], "reporting")
