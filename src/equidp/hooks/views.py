"""Views: named views of the experiment in MLflow, with the columns and charts that a user needs first.

MLflow keeps a view as a tag of the experiment and offers it under “Views”. A view that exists is not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Experiment

TAG = "mlflow.sharedViewState."
MEANS, RUNS, NOISED = "equidp-means", "equidp-runs", "equidp-released"
"""The views' ids, as in addresses: `…/#/experiments/1/runs?viewStateShareKey=equidp-means`."""

MAIN = "test/accuracy", "test/worst_group_accuracy", "cost_of_privacy/accuracy", "cost_of_privacy/gap"
OTHERS = "mae", "label_accuracy"
"""The main figures of runs whose task is not plain classification; their columns are to the right of `MAIN`."""
NOTE = (
    "A run is one training and its non-private baseline. Under **Views**: *Means over seeds* of sweeps, with half of "
    "their 95 % interval, *Data set → algorithm → seed*, and *Figures with noise* of runs that release them "
    "(`privacy.evaluation.epsilon`). **Group by** the tag `algorithm` averages "
    "other runs. Figures of every group are in a run's `metrics.json` and on its `report.html`."
)


def add_views(client: MlflowClient, experiment: Experiment) -> None:
    """Add the views and the description that the experiment does not have yet."""
    wanted = {f"{TAG}{key}": json.dumps(view, separators=(",", ":")) for key, view in _views().items()}
    for tag, value in (wanted | {"mlflow.note.content": NOTE}).items():
        if tag not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, tag, value)


def _views() -> dict[str, dict[str, Any]]:
    means = {"epsilon": 85} | dict.fromkeys(("overall", "worst group", "cost of privacy", "gap"), 125) | {"seeds": 60}
    runs = {"epsilon": 85} | dict(zip(MAIN, (105, 175, 165, 140), strict=True))
    runs |= {f"{of}{name}": 150 for name in OTHERS for of in ("test/", "test/worst_group_", "cost_of_privacy/")}
    noised = {"epsilon": 85, "released/epsilon": 130, "released/accuracy": 140, "released/auroc": 130}
    best = {"orderByKey": f"metrics.`{MAIN[1]}`", "orderByAsc": False}  # if not ordered by time, no tree is shown
    return {
        MEANS: _view(
            "Means over seeds",
            {"searchFilter": "tags.summary = 'seeds'", **best, **_columns("tags", means), **_charts(lines=False)},
        ),
        NOISED: _view(
            "Figures with noise",
            {"searchFilter": "metrics.`released/epsilon` > 0", **_columns("metrics", noised), **_charts(lines=False)},
        ),
        RUNS: _view("Data set → algorithm → seed", {**_columns("metrics", runs), **_charts(lines=True)}),
    }


def _view(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "createdAt": 0, "updatedAt": 0, "state": json.dumps(state, separators=(",", ":"))}


def _columns(kind: str, widths: Mapping[str, int]) -> dict[str, Any]:
    """Return the columns beside a run's name, in order. With MLflow's own columns they fit a window of 1400 pixels."""
    named = {f"{'metrics' if name == 'epsilon' else kind}.`{name}`": width for name, width in widths.items()}
    fixed = {"1": 73, "attributes.`Run Name`": 190, "runDateAndNestInfo": 130, "duration": 70}
    return {"selectedColumns": [*named], "columnOrder": [*fixed, *named], "columnWidths": fixed | named}


def _charts(*, lines: bool) -> dict[str, Any]:
    """Return the charts: the four main figures, the worst group's accuracy against ε, and curves over the epochs."""
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
        "isAccordionReordered": True,  # otherwise MLflow sorts these below its own charts of every metric
        "compareRunSections": [{"uuid": "equidp", "name": "What privacy costs", "display": True, "isReordered": False}],
        "compareRunCharts": [{"uuid": f"equidp-{number}", **shared, **chart} for number, chart in enumerate(charts)],
    }
