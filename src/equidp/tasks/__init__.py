"""Tasks: what a model is trained for. A new task is one file and one line here.

- `base`: what a task is: a loss for each record, predictions from outputs, and figures of these.
- `classification`, `regression`, `counts`, `multilabel`, `ordinal`: one each.

It imports `evaluation` and what stands below it. A task's file is imported when it is first asked for, so that names
alone cost nothing, and `evaluation` may ask which task a document is of.
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
    """The task that a result of `Task.evaluate`, or a `metrics.json`, is of."""
    return TASKS[figures.get("task", CLASSIFICATION)]
