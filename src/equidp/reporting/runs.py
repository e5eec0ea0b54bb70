"""Tracked runs as frames for the figures: the result of `mlflow.search_runs()` without MLflow's prefixes.

MLflow itself is not needed here: any frame with the same column names will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from equidp.algorithms import BASELINE
from equidp.reporting.titles import METRIC_TITLES

NOT_SETTINGS = ("seed", "resume", "resolved.", "training.checkpoint_every", "training.evaluate_every")
"""Parameters in which the seeds of one setting may differ: except for `seed`, no result depends on them."""


def runs_frame(tracked: pd.DataFrame) -> pd.DataFrame:
    """One row per run: `algorithm`, `dataset`, `seed`, `epsilon`, `noise_multiplier`, overall metrics, settings.

    Args:
        tracked: the result of `mlflow.search_runs()`. Runs that have not finished and runs that are no training
            (tunings, audits, a sweep's means) are left out. If a seed was run again with the same settings, the newest
            run is taken.

    Returns:
        Test metrics under their names, settings under their dotted names (also the baseline's options, because costs
        depend on them), and the options of a run's own algorithm as `options.<name>`. Numeric settings are numbers.
        `noise_multiplier` is that of the training, not the setting.
    """
    mine = tracked[tracked["tags.algorithm"].notna()] if "tags.algorithm" in tracked else tracked.iloc[:0]
    mine = mine[mine["tags.summary"].isna()] if "tags.summary" in mine else mine  # without a sweep's runs of means
    mine = mine[mine["tags.private"].notna()] if "tags.private" in mine else mine  # only a training has this tag
    mine = _newest(mine[mine["status"] == "FINISHED"] if "status" in mine else mine)
    columns = {"algorithm": mine.get("tags.algorithm"), "dataset": mine.get("tags.dataset")}
    columns |= {"raw_fingerprint": mine.get("tags.raw_fingerprint")}
    columns |= {
        "seed": _numbers(mine["tags.seed"]) if "tags.seed" in mine else None,
        "epsilon": mine.get("metrics.epsilon"),
    }
    columns |= {metric: mine.get(f"metrics.test/{metric}") for metric in METRIC_TITLES}
    names = [c.removeprefix("params.") for c in mine.columns if c.startswith("params.")]
    settings = {name: _numbers(mine[f"params.{name}"]) for name in names}
    shared = [name for name in settings if ".options." not in name or name.startswith(f"{BASELINE}.")]
    columns |= {name: settings[name] for name in shared if name not in columns}
    columns |= _own_options(mine, settings)
    columns["noise_multiplier"] = settings.get("resolved.noise_multiplier")
    return pd.DataFrame({k: v for k, v in columns.items() if v is not None}, index=mine.index)


def group_costs(
    tracked: pd.DataFrame, grouping: str, document: Callable[[str], Mapping[str, Any]], metric: str = "accuracy"
) -> pd.DataFrame:
    """The rows of `runs_frame` once per group of a grouping, with the columns `group` and `cost`.

    Args:
        tracked: the result of `mlflow.search_runs()`, with its column `run_id`.
        grouping: its name, `sex*race` for a product.
        document: gives the `metrics.json` of the run with an id.
        metric: the metric whose cost of privacy is taken.
    """
    runs = runs_frame(tracked)
    rows = []
    for place, run_id in tracked.loc[runs.index, "run_id"].items():
        costs = document(run_id).get("cost_of_privacy", {}).get("groups", {}).get(grouping, {})
        rows += [(place, group, figures[metric]) for group, figures in costs.items()]
    costs = pd.DataFrame(rows, columns=["run", "group", "cost"]).dropna(subset=["cost"])
    return runs.join(costs.set_index("run"), how="inner").reset_index(drop=True)


def _newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Of runs that are alike in algorithm, files, settings and seed, keep the newest. No two secure runs are alike."""
    if "start_time" in runs:
        runs = runs.sort_values("start_time", ascending=False, kind="stable")
    names = [c for c in runs.columns if c.startswith("params.")]
    names = [c for c in names if not c.removeprefix("params.").startswith(NOT_SETTINGS)]
    tags = [c for c in ("tags.algorithm", "tags.raw_fingerprint", "tags.dataset", "tags.seed") if c in runs]
    again = runs[[*names, *tags]].fillna("None").duplicated()
    return runs[~again | (runs["tags.secure"] == "true" if "tags.secure" in runs else False)]


def _own_options(mine: pd.DataFrame, settings: dict[str, pd.Series]) -> dict[str, pd.Series]:
    """Merge each algorithm's own options: `dpsgd.options.clip_norm` of dpsgd's runs goes to `options.clip_norm`."""
    options: dict[str, pd.Series] = {}
    for name, values in settings.items():
        owner, _, option = name.partition(".options.")
        if option:
            own = values.where(mine["tags.algorithm"] == owner)
            before = options.get(f"options.{option}")
            options[f"options.{option}"] = own if before is None else before.where(before.notna(), own)
    return options


def _numbers(values: pd.Series) -> pd.Series:
    """Return numbers if all known values are numbers, because MLflow stores settings as text."""
    known = values[values.notna() & (values != "None")]
    try:
        return pd.to_numeric(known).reindex(values.index)
    except (ValueError, TypeError):
        return values
