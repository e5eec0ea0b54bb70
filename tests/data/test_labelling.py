"""Labelling: counts per group and part, with small and empty groups reported rather than hidden."""

from __future__ import annotations

import pytest
import torch

from equidp.data.labelling import group_table
from equidp.data.records import Records, Schema, Split
from equidp.errors import EquidpError

SCHEMA = Schema(
    "zoo", "tabular", (1,), ("cat", "dog"), {"class": ("cat", "dog"), "size": ("small", "large", "huge", "tiny")}
)


def make(labels: list[int], sizes: list[int]) -> Records:
    ids = torch.tensor(labels, dtype=torch.int64)
    groups = {"class": ids, "size": torch.tensor(sizes, dtype=torch.int64)}
    return Records(features=torch.zeros(len(ids), 1), labels=ids, groups=groups, schema=SCHEMA)


@pytest.fixture
def parts() -> Split:
    train = make([0, 0, 1, 1, 1], [0, 1, 1, 2, 2])
    test = make([0] * 12 + [1] * 3, [1] * 12 + [0] * 3)
    return Split(train=train, test=test, public=make([1], [2]))


def test_every_stored_grouping_is_counted_by_part(parts: Split) -> None:
    table = group_table(parts).set_index(["grouping", "group"])
    assert table.loc[("class", "dog"), ["train", "test", "public"]].tolist() == [3, 3, 1]
    assert table.loc[("size", "large"), ["train", "test", "public"]].tolist() == [2, 12, 0]
    for grouping in ("class", "size"):
        assert table.loc[grouping][["train", "test", "public"]].sum().tolist() == [5, 15, 1]


def test_groups_that_cannot_be_evaluated_are_reported(parts: Split) -> None:
    table = group_table(parts, ["size"]).set_index("group")
    assert table["evaluable"].to_dict() == {"small": False, "large": True, "huge": False, "tiny": False}
    assert table.loc["small", "note"] == "only 3 test records: too few to be evaluated"
    assert table.loc["huge", "note"] == "no test record: cannot be evaluated"
    assert table.loc["tiny", "note"] == "no record"
    assert table.loc["large", "note"] == ""


def test_products_are_counted(parts: Split) -> None:
    table = group_table(parts, ["class*size"])
    assert len(table) == 8
    assert table["train"].sum() == 5
    assert table.set_index("group").loc["dog*huge", "train"] == 2


def test_an_unknown_grouping_is_named(parts: Split) -> None:
    with pytest.raises(EquidpError, match=r"Unknown grouping of dataset 'zoo': 'sise'\. Did you mean 'size'"):
        group_table(parts, ["sise"])
