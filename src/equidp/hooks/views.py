"""What MLflow shows first: named views of the experiment, with the columns and charts that a user opens first.

MLflow keeps a view as a tag of the experiment and offers it under “Views”. One that exists is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Experiment

TAG = "mlflow.sharedViewState."
MEANS, RUNS = "equidp-means", "equidp-runs"
"""The views' ids, as they stand in an address: `…/#/experiments/1/runs?viewStateShareKey=equidp-means`."""

MAIN = "test/accuracy", "test/worst_group_accuracy", "cost_of_privacy/accuracy", "cost_of_privacy/gap"
NOTE = (
    "A run is one training and its non-private baseline. Under **Views**: *Means over seeds* of sweeps, with half of "
    "their 95 % interval as `plus_minus`, and *Data set → algorithm → seed*. **Group by** the tag `algorithm` averages "
    "other runs. Figures of every group are in a run's `metrics.json` and on its `report.html`."
)


def add_views(client: MlflowClient, experiment: Experiment) -> None:
    """Give the experiment those views and the description that it has not."""
    wanted = {f"{TAG}{key}": json.dumps(view, separators=(",", ":")) for key, view in _views().items()}
    for tag, value in (wanted | {"mlflow.note.content": NOTE}).items():
        if tag not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, tag, value)


def _views() -> dict[str, dict[str, Any]]:
    halves = [f"{name}/plus_minus" for name in MAIN]
    paired = [name for pair in zip(MAIN, halves, strict=True) for name in pair]
    means = _columns(tags=["dataset"], metrics=["seeds", "epsilon", *paired])
    runs = _columns(tags=["dataset", "algorithm", "seed"], metrics=["epsilon", *MAIN])
    only = {"searchFilter": "tags.summary = 'seeds'"}
    return {
        MEANS: _view("Means over seeds", {**only, **_charts(lines=False), "selectedColumns": means}),
        RUNS: _view("Data set → algorithm → seed", {**_charts(lines=True), "selectedColumns": runs}),
    }


def _view(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "createdAt": 0, "updatedAt": 0, "state": json.dumps(state, separators=(",", ":"))}


def _columns(tags: Sequence[str], metrics: Sequence[str]) -> list[str]:
    return [*(f"tags.`{name}`" for name in tags), *(f"metrics.`{name}`" for name in metrics)]


def _charts(*, lines: bool) -> dict[str, Any]:
    """Who pays and how much: the four main figures, accuracy against ε, and over the epochs."""
    charts: list[dict[str, Any]] = [{"type": "BAR", "metricKey": name} for name in MAIN]
    charts.append(
        {
            "type": "SCATTER",
            "xaxis": {"key": "epsilon", "type": "METRIC"},
            "yaxis": {"key": "test/worst_group_accuracy", "type": "METRIC"},
        }
    )
    if lines:
        charts += [
            {"type": "LINE", "metricKey": name, "selectedMetricKeys": [name], "xAxisKey": "step"}
            for name in ("test/accuracy", "epsilon_rdp")
        ]
    shared = {"deleted": False, "isGenerated": False, "runsCountToCompare": 20, "metricSectionId": "equidp"}
    return {
        "compareRunSections": [{"uuid": "equidp", "name": "What privacy costs", "display": True, "isReordered": False}],
        "compareRunCharts": [{"uuid": f"equidp-{number}", **shared, **chart} for number, chart in enumerate(charts)],
    }
