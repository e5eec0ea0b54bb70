"""The node of an audit: what it hands on from the settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equidp.data.records import Records, Schema
from equidp.parameters import resolve
from equidp.pipelines.audit import nodes


@pytest.mark.parametrize(
    ("algorithm", "groups", "grouping"),
    [
        ("dpsgd_level", ["sex"], "class"), ("dpsgd_minimax", ["class*sex"], "sex*class"),
        ("dpsgd_f", ["sex"], "sex"),
    ],
)  # fmt: skip
def test_records_are_grouped_as_the_training_groups_them(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, groups: list[str], grouping: str
) -> None:
    """Two sexes stood for two classes, and five for two was an error."""
    schema = Schema(
        name="made", kind="tabular", shape=(2,), classes=("a", "b", "c"), feature_names=("x", "y"),
        groupings={"class": ("a", "b", "c"), "sex": ("f", "m")},
    )  # fmt: skip
    labels, sex = torch.arange(60) % 3, torch.arange(60) % 2
    records = Records(features=torch.rand(60, 2), labels=labels, groups={"class": labels, "sex": sex}, schema=schema)
    settings = resolve(
        {
            "dataset": "digits", "algorithm": algorithm, "data": {"source": "digits", "groups": groups},
            "privacy": {"noise_multiplier": 1.0}, "training": {"batch_size": 20}, "model": {"name": "logistic"},
        }
    )  # fmt: skip
    seen: dict[str, Any] = {}
    monkeypatch.setattr(nodes.audit, "run", lambda split, setup, *_, **__: seen.update(setup=setup) or {"training": {}})
    nodes.audit_algorithm(records, records, records.take(torch.arange(0)), settings)
    assert seen["setup"].grouping == grouping
    assert len(records.grouping(grouping)[1]) == seen["setup"].plan.groups
