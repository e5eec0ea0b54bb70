"""Splitting by strata: disjoint, seeded, exact, whole units, classes cut down; every impossible wish is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equidp.data import splitting
from equidp.data.records import Records, Schema
from equidp.data.splitting import keep_classes, strata
from equidp.errors import EquidpError

split = partial(splitting.split, membership="strata")

CLASSES = ("cat", "dog")


def make(n: int = 400, *, part: bool = False, unit_size: int = 0) -> Records:
    """Records whose single feature is their position, so that a split can be read off it."""
    positions = torch.arange(n)
    unit = positions // unit_size if unit_size else None
    labels = (unit if unit_size else positions) % 5 == 0
    schema = Schema("zoo", "tabular", (1,), CLASSES, {"class": CLASSES, "sex": ("f", "m")})
    return Records(
        features=positions.float().unsqueeze(1),
        labels=labels.long(),
        groups={"class": labels.long(), "sex": (positions % 4 == 0).long()},
        schema=schema,
        part=(positions >= n * 3 // 4).to(torch.uint8) if part else None,
        unit=unit,
    )


def positions(records: Records) -> set[int]:
    return set(records.features.squeeze(1).long().tolist())


@pytest.mark.parametrize(
    ("kind", "how", "digest"),
    [
        ({}, {}, "d19c21f908b36a0c"),
        ({}, {"keep": {"dog": 20, "cat": 0.5}, "public_fraction": 0.1}, "be4a6c20e1b467e7"),
        ({"unit_size": 5}, {"split_by": "unit", "public_fraction": 0.1}, "609abebe8de0f92c"),
        ({}, {"evaluate_on": "validation", "keep": {"dog": 30}}, "fe683da54736efb0"),
        ({"part": True}, {"keep": {"dog": 20}, "public_fraction": 0.05}, "1069106d6ce3b305"),
    ],
)
def test_strata_are_drawn_as_when_the_tables_were_made(kind: dict, how: dict, digest: str) -> None:
    """Digests of the code before membership by hash: docs/results.md is of these parts."""
    parts = split(make(**kind), seed=3, **how)
    order = [part.features.squeeze(1).long().tolist() for part in (parts.train, parts.test, parts.public)]
    assert hashlib.sha256(repr(order).encode()).hexdigest()[:16] == digest


@given(seed=st.integers(0, 2**31), public=st.sampled_from([0.0, 0.05, 0.3]), part=st.booleans())
@settings(max_examples=20)
def test_the_parts_are_disjoint_and_complete(seed: int, public: float, part: bool) -> None:
    parts = split(make(part=part), seed=seed, public_fraction=public)
    sets = [positions(p) for p in (parts.train, parts.test, parts.public)]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 400


def test_the_test_part_is_a_fifth_of_every_stratum() -> None:
    records = make()
    parts = split(records, seed=3)
    whole, test = torch.bincount(strata(records)), torch.bincount(strata(parts.test))
    assert test.tolist() == [round(0.2 * count) for count in whole.tolist()]


def test_the_providers_split_is_used_where_there_is_one() -> None:
    assert positions(split(make(part=True), seed=0).test) == set(range(300, 400))


def test_equal_seeds_give_equal_parts_and_others_do_not() -> None:
    first, again, other = (split(make(), seed=seed) for seed in (1, 1, 2))
    assert positions(first.test) == positions(again.test) != positions(other.test)


def test_a_public_part_does_not_move_the_test_part() -> None:
    without, with_public = split(make(), seed=5), split(make(), seed=5, public_fraction=0.05)
    assert positions(without.test) == positions(with_public.test)
    assert positions(with_public.public) < positions(without.train)
    assert len(with_public.public) == pytest.approx(0.05 * len(without.train), abs=2)


def test_the_public_part_is_taken_after_classes_are_cut_down() -> None:
    parts = split(make(), seed=5, keep={"dog": 20}, public_fraction=0.5)
    assert torch.bincount(parts.train.labels)[1] + torch.bincount(parts.public.labels)[1] == 20


@pytest.mark.parametrize("membership", ["strata", "hash"])
def test_units_stay_whole(membership: Literal["strata", "hash"]) -> None:
    parts = splitting.split(make(unit_size=5), seed=0, split_by="unit", public_fraction=0.1, membership=membership)
    units = [set(p.unit.tolist()) for p in (parts.train, parts.test, parts.public)]
    assert sum(map(len, units)) == 80
    assert len(set.union(*units)) == 80


def test_a_providers_split_that_divides_a_unit_is_refused() -> None:
    with pytest.raises(EquidpError, match="1 units with records in both its training and its test part"):
        split(make(unit_size=7, part=True), seed=0, split_by="unit")
    assert len(split(make(unit_size=5, part=True), seed=0, split_by="unit").test) == 100


def test_split_by_unit_needs_units() -> None:
    with pytest.raises(EquidpError, match=r"data\.split_by=unit: dataset 'zoo' has no units; use split_by=record"):
        split(make(), seed=0, split_by="unit")


@pytest.mark.parametrize(("wanted", "left"), [(7, 7), (0.25, 16), (0, 0), (0.0, 0), (30.0, 30)])
def test_keep_cuts_a_training_class_and_no_other(wanted: float, left: int) -> None:
    full, cut = split(make(), seed=2), split(make(), seed=2, keep={"dog": wanted})
    assert torch.bincount(full.train.labels).tolist() == [256, 64]
    assert torch.bincount(cut.train.labels, minlength=2).tolist() == [256, left]
    assert positions(cut.test) == positions(full.test)


def test_keep_takes_a_label_as_well_as_a_name() -> None:
    by_name, by_label = (split(make(), seed=2, keep={key: 9}) for key in ("dog", "1"))
    assert positions(by_name.train) == positions(by_label.train)


def test_cutting_a_second_class_leaves_the_first_as_it_was() -> None:
    records, index = make(), torch.arange(400)
    one, both = (keep_classes(records, index, keep, seed=0) for keep in ({"dog": 9}, {"cat": 5, "dog": 9}))
    dogs = records.labels.bool()
    assert one[dogs[one]].tolist() == both[dogs[both]].tolist()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"dgo": 3}, r"Unknown class in data\.keep 'dgo'\. Did you mean 'dog'"),
        ({"2": 3}, r"Unknown class in data\.keep '2'"),
        ({"dog": 65}, r"data\.keep\.dog=65: the training part has 64 records of that class"),
        ({"dog": 2.5}, r"data\.keep\.dog=2\.5: .*give a whole number up to 64, or a fraction below 1"),
        ({"dog": -1}, r"data\.keep\.dog=-1: give a count"),
        ({"dog": True}, r"data\.keep\.dog=True: give a count"),
        ({"dog": "many"}, r"data\.keep\.dog='many': give a count"),
        ({"dog": float("nan")}, r"data\.keep\.dog=nan: give a count"),
        ({"dog": 0, "cat": 0}, r"The train part of dataset 'zoo' is empty"),
    ],
)
def test_an_impossible_keep_is_refused(keep: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        split(make(), seed=2, keep=keep)


def test_an_empty_part_is_refused() -> None:
    records = dataclasses.replace(make(), part=torch.zeros(400, dtype=torch.uint8))
    with pytest.raises(EquidpError, match="The test part of dataset 'zoo' is empty"):
        split(records, seed=0)
    with pytest.raises(EquidpError, match="The public part of dataset 'zoo' is empty"):
        split(make(), seed=0, public_fraction=0.0001)


@pytest.mark.parametrize("name", ["public_fraction", "test_fraction"])
def test_a_fraction_outside_0_to_1_is_refused(name: str) -> None:
    with pytest.raises(EquidpError, match=rf"data\.{name}=1\.5: give a number from 0 to below 1"):
        split(make(), seed=0, **{name: 1.5})


@pytest.mark.parametrize("part", [True, False])
def test_validation_never_looks_at_the_test_part(part: bool) -> None:
    """Settings chosen on it are chosen without test records, and training loses what evaluation gains."""
    usual, tuning = split(make(part=part), seed=5), split(make(part=part), seed=5, evaluate_on="validation")
    assert not positions(usual.test) & (positions(tuning.train) | positions(tuning.test))
    assert positions(tuning.train) | positions(tuning.test) == positions(usual.train)
    assert not positions(tuning.train) & positions(tuning.test)
    assert len(tuning.test) == pytest.approx(0.2 * len(usual.train), abs=2)


def test_validation_keeps_whole_units_and_the_wanted_counts() -> None:
    parts = split(make(unit_size=8), seed=1, split_by="unit", evaluate_on="validation", keep={"dog": 30})
    assert not set(parts.train.unit.tolist()) & set(parts.test.unit.tolist())
    assert int((parts.train.labels == 1).sum()) == 30


def test_parts_know_each_record_by_its_content() -> None:
    """What is drawn of a record later, such as its views, may not follow from its row, which others move."""
    whole = make()
    parts = splitting.split(whole, seed=0)
    fewer = splitting.split(whole.take(torch.arange(1, len(whole))), seed=0)
    assert parts.train.identity is not None
    known = {int(f): i.tolist() for f, i in zip(parts.train.features, parts.train.identity, strict=True)}
    assert fewer.train.identity is not None
    assert all(known[int(f)] == i.tolist() for f, i in zip(fewer.train.features, fewer.train.identity, strict=True))
