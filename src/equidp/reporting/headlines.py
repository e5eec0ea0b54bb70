"""The dozen figures that stand for a run where runs are compared. All other figures are in the run's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equidp.tasks import kind_of

LEFT_TO_FILES = ("count", "mcc", "calibration_error")
"""Metrics over all test records that do not stand for a run."""


def headline_metrics(document: Mapping[str, Any]) -> dict[str, float]:
    """The headlines of a `metrics.json`; undefined ones are left out.

    For example `test/accuracy`, `test/auroc`, `test/worst_group_accuracy`, `baseline/accuracy`,
    `cost_of_privacy/accuracy` and `cost_of_privacy/gap`; the worst group and the gap are of the first grouping.
    """
    main, cost = kind_of(document).main, document.get("cost_of_privacy") or {}
    grouping = next(iter(document["groups"]), None)
    found = {f"test/{name}": value for name, value in document["overall"].items() if name not in LEFT_TO_FILES}
    found |= {
        f"test/worst_group_{main}": document["worst"].get(grouping, {}).get(main),
        f"baseline/{main}": document.get("baseline", {}).get("overall", {}).get(main),
        f"cost_of_privacy/{main}": cost.get("overall", {}).get(main),
        "cost_of_privacy/gap": cost.get("gap", {}).get(grouping, {}).get(main),
    }
    return overall(found)


def overall(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Figures of all records, without those of single groups (`…/sex:Female`, `clip_norm/8`)."""
    known = {name: float(value) for name, value in figures.items() if value is not None}
    families = ("test/", "baseline/", "cost_of_privacy/", "released/")
    return {n: v for n, v in known.items() if ":" not in n and ("/" not in n or n.startswith(families))}
