"""Tasks: what a model is trained for. A new task is one file and one line here.

- `base`: the interface: a loss for each record, predictions from outputs, and figures of predictions.
- `classification`, `regression`, `counts`, `multilabel`, `ordinal`: one task each.

Tasks import `evaluation` and the layers below it. A task's file is imported when the task is first asked for. So names
alone cost nothing, and `evaluation` may ask which task a document belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from equidp.registry import Registry

if TYPE_CHECKING:
    from equidp.data.records import Schema
    from equidp.tasks.base import Task

CLASSIFICATION, ORDINAL = "classification", "ordinal"

TASKS: Registry[type[Task]] = Registry(
    "equidp.tasks",
    {
        CLASSIFICATION: "classification:Classification",
        "regression": "regression:Regression",
        "counts": "counts:Counts",
        "multilabel": "multilabel:MultiLabel",
        "ordinal": "ordinal:Ordinal",
    },
    "base:Task",
)


def task_of(schema: Schema) -> Task:
    """The task of a dataset."""
    return TASKS[schema.task](schema)


def kind_of(figures: Mapping[str, Any]) -> type[Task]:
    """Return the task that a result of `Task.evaluate`, or a `metrics.json`, belongs to."""
    return TASKS[figures.get("task", CLASSIFICATION)]
