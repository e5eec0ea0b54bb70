"""Population: units are gathered wherever their records stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equidp.data.records import Records, Schema
from equidp.errors import EquidpError
from equidp.mechanism.sampling import Examples, Population

LABELS = torch.tensor([0, 1, 1, 0, 1, 0])
SCHEMA = Schema("toy", "tabular", (1,), ("no", "yes"), {"class": ("no", "yes")})


def records(unit: torch.Tensor | None) -> Records:
    """Six records whose feature is their number."""
    return Records(torch.arange(6.0)[:, None], LABELS, {"class": LABELS}, SCHEMA, unit=unit)


def test_a_units_records_need_not_stand_together() -> None:
    population = Population(records(torch.tensor([70, 5, 70, 9, 5, 70])), LABELS, by_unit=True)
    assert population.size == 3  # in the order of their ids: 5, 9, 70
    batch = population.batch(torch.tensor([0, 2]))
    assert batch.owners is not None
    assert batch.features.flatten().tolist() == [1, 4, 0, 2, 5]
    assert batch.labels.tolist() == LABELS[[1, 4, 0, 2, 5]].tolist()
    assert batch.owners.tolist() == [0, 0, 1, 1, 1]
    assert batch.groups.tolist() == [1, 0]  # of each unit's first record


def test_a_batch_knows_nothing_of_who_is_not_in_it() -> None:
    """Else a part could weigh its records by the sizes of the groups, exact ones."""
    batch = Population(records(None), LABELS).batch(torch.tensor([1, 4]))
    assert batch.groups.tolist() == [1, 1]
    assert {len(value) for value in vars(batch).values() if isinstance(value, torch.Tensor)} == {2}


def test_a_unit_is_in_the_group_of_its_first_record() -> None:
    groups = torch.tensor([0, 1, 2, 3, 4, 5])
    population = Population(records(torch.tensor([70, 5, 70, 9, 5, 70])), groups, by_unit=True)
    assert population.groups.tolist() == [1, 3, 0]


def test_nobody_drawn_is_nobody_gathered() -> None:
    batch = Population(records(torch.arange(6) // 2), LABELS, by_unit=True).batch(torch.zeros(0, dtype=torch.int64))
    assert batch.features.shape == (0, 1)
    assert len(batch) == len(batch.groups) == 0


def test_units_are_refused_where_there_are_none() -> None:
    with pytest.raises(EquidpError, match=r"'toy' has no units beyond records: set privacy\.unit=record"):
        Population(records(None), LABELS, by_unit=True)
    with pytest.raises(EquidpError, match="These examples have no units"):
        Population(Examples(torch.zeros(6, 1), LABELS), LABELS, by_unit=True)


def test_labels_without_a_schema_may_be_amounts_or_several() -> None:
    units = torch.arange(6) // 2
    for labels in (torch.rand(6), torch.arange(12.0).reshape(6, 2)):
        batch = Population(Examples(torch.zeros(6, 1), labels, units), LABELS, by_unit=True).batch(torch.tensor([0, 2]))
        assert torch.equal(batch.labels, labels[[0, 1, 4, 5]])


@pytest.mark.parametrize("labels", [LABELS, LABELS.float(), 1 - LABELS, torch.stack([LABELS, LABELS], 1)])
def test_groups_are_ids_whether_or_not_they_are_the_labels(labels: torch.Tensor) -> None:
    population, chosen = Population(Examples(torch.zeros(6, 1), labels), LABELS.clone()), torch.tensor([1, 3, 4])
    assert torch.equal(population.batch(chosen).groups, LABELS[chosen])
    assert population.batch(chosen).groups.dtype == torch.int64  # torch.equal does not ask
    batch = population.batch(chosen)
    batch.labels.mul_(2).sub_(1)  # a loss of one's own may
    assert torch.equal(batch.groups, LABELS[chosen])
    with torch.inference_mode():
        assert torch.equal(population.batch(chosen).groups, LABELS[chosen])


@pytest.mark.parametrize(
    ("features", "groups", "told"),
    [
        (torch.zeros(5, 1), LABELS, "6 labels, and 5 rows of features"),
        (torch.zeros(7, 1), LABELS, "6 labels, and 7 rows of features"),
        (torch.zeros(6, 1), LABELS[:4], "6 labels, and 4 rows of groups"),
        (torch.zeros(6, 1), LABELS.float(), "groups are torch.float32"),
    ],
)
def test_columns_that_do_not_fit_are_refused(features: torch.Tensor, groups: torch.Tensor, told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        Population(Examples(features, LABELS), groups)


@pytest.mark.parametrize("single", ["features", "labels", "unit"])
def test_a_single_number_in_place_of_records_is_refused(single: str) -> None:
    """Its length was asked for, in words of torch's."""
    columns = {"features": torch.zeros(6, 1), "labels": LABELS, "unit": torch.arange(6)}
    with pytest.raises(EquidpError, match=f"examples' {single} are a single number: give one for each record"):
        Examples(**columns | {single: torch.tensor(1)})


def test_types_that_layers_do_not_take_are_refused() -> None:
    with pytest.raises(EquidpError, match=r"features are float64, .*: features\.float\(\)"):
        Examples(torch.zeros(6, 1, dtype=torch.float64), LABELS)
    with pytest.raises(EquidpError, match=r"labels are int32, .*: labels\.long\(\)"):
        Examples(torch.zeros(6, 1), LABELS.int())
    with pytest.raises(EquidpError, match=r"labels are float64, .*: labels\.float\(\)"):
        Examples(torch.zeros(6, 1), LABELS.double())


@pytest.mark.parametrize(
    ("unit", "told"),
    [
        (torch.tensor([0.0, 0.0, 1.0, 1.0, torch.nan, torch.nan]), r"units are torch.float32 \[6\]"),  # two persons?
        (torch.arange(6).unsqueeze(1), r"units are torch.int64 \[6, 1\]"),
        ([0, 0, 1, 1, 2, 2], "unit: give a tensor .*, no list"),
    ],
)
def test_units_are_numbers_one_for_each_record(unit: Any, told: str) -> None:
    with pytest.raises(EquidpError, match=told):
        Examples(torch.zeros(6, 1), LABELS, unit)


def test_a_column_of_units_that_does_not_fit_is_refused_where_it_is_used() -> None:
    examples = Examples(torch.zeros(6, 1), LABELS, torch.arange(5))
    assert Population(examples, LABELS).size == 6
    with pytest.raises(EquidpError, match="6 labels, and 5 rows of units"):
        Population(examples, LABELS, by_unit=True)


@pytest.mark.parametrize("by", [-1, 1])
def test_groups_and_labels_just_beyond_those_of_the_plan_are_refused(by: int) -> None:
    """−1 would be the last group wherever a tensor is read by it."""
    Population(records(None), LABELS).refuse_other_groups(2)
    with pytest.raises(EquidpError, match=f"groups are from {min(by, by + 1)} to {max(by, by + 1)}, and the plan"):
        Population(records(None), LABELS + by).refuse_other_groups(2)
    Population(Examples(torch.zeros(6, 1), LABELS), LABELS).refuse_other_classes(2)
    with pytest.raises(EquidpError, match=f"labels are from {min(by, by + 1)} to {max(by, by + 1)}, and the groups"):
        Population(Examples(torch.zeros(6, 1), LABELS + by), LABELS).refuse_other_classes(2)
