"""Tracked runs as frames for the figures: what `mlflow.search_runs()` returns, without MLflow's prefixes.

No MLflow is needed here: any frame with its column names will do.
"""

from __future__ import annotations

from ast import literal_eval

import pandas as pd

from equidp.evaluation.metrics import METRICS, unique_slugs


def runs_frame(tracked: pd.DataFrame) -> pd.DataFrame:
    """One row per run: `algorithm`, `dataset`, `seed`, `epsilon`, `noise_multiplier`, overall metrics, settings.

    Args:
        tracked: the result of `mlflow.search_runs()`; runs without an algorithm's tag are left out.

    Returns:
        Test metrics under their names, settings under their dotted names, and the options of a run's own algorithm as
        `options.<name>`. Settings that are numbers are numbers. `noise_multiplier` is the one that was trained with.
    """
    mine = tracked[tracked["tags.algorithm"].notna()] if "tags.algorithm" in tracked else tracked.iloc[:0]
    columns = {"algorithm": mine.get("tags.algorithm"), "dataset": mine.get("tags.dataset")}
    columns |= {"seed": _numbers(mine["tags.seed"]) if len(mine) else None, "epsilon": mine.get("metrics.epsilon")}
    columns |= {metric: mine.get(f"metrics.test/{metric}") for metric in METRICS}
    names = [c.removeprefix("params.") for c in mine.columns if c.startswith("params.")]
    settings = {name: _numbers(mine[f"params.{name}"]) for name in names}
    columns |= {name: values for name, values in settings.items() if ".options." not in name and name not in columns}
    columns |= _own_options(mine, settings)
    columns["noise_multiplier"] = settings.get("resolved.noise_multiplier")
    return pd.DataFrame({k: v for k, v in columns.items() if v is not None}, index=mine.index)


def group_costs(tracked: pd.DataFrame, grouping: str, metric: str = "accuracy") -> pd.DataFrame:
    """The rows of `runs_frame` once per group of a grouping, with the columns `group` and `cost`.

    Args:
        tracked: the result of `mlflow.search_runs()`.
        grouping: its name, `sex*race` for a product.
        metric: whose cost of privacy.
    """
    runs = runs_frame(tracked)
    long = [runs.iloc[:0].assign(group="", cost=float("nan"))]
    told = runs["data.groups"] if "data.groups" in runs else pd.Series(str([grouping]), index=runs.index)
    for text, mine in runs.groupby(told):
        # a grouping's slug depends on the run's other ones: two may share one
        prefix = f"metrics.cost_of_privacy/{metric}/{unique_slugs(literal_eval(str(text))).get(grouping)}:"
        columns = {c.removeprefix(prefix): c for c in tracked.columns if c.startswith(prefix)}
        long += [mine.assign(group=group, cost=tracked.loc[mine.index, c]) for group, c in columns.items()]
    return pd.concat(long, ignore_index=True).dropna(subset=["cost"])


def _own_options(mine: pd.DataFrame, settings: dict[str, pd.Series]) -> dict[str, pd.Series]:
    """`dpsgd.options.clip_norm` of the runs of dpsgd and the like, as one column `options.clip_norm`."""
    options: dict[str, pd.Series] = {}
    for name, values in settings.items():
        owner, _, option = name.partition(".options.")
        if option:
            own = values.where(mine["tags.algorithm"] == owner)
            before = options.get(f"options.{option}")
            options[f"options.{option}"] = own if before is None else before.where(before.notna(), own)
    return options


def _numbers(values: pd.Series) -> pd.Series:
    """Numbers where all that is known is a number: MLflow keeps settings as text."""
    known = values[values.notna() & (values != "None")]
    try:
        return pd.to_numeric(known).reindex(values.index)
    except (ValueError, TypeError):
        return values
