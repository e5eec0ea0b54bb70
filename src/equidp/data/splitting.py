"""Splitting: which records are for training, for testing or public, and which classes are made rare. Pure and seeded.

By hash, each record's part depends on that record alone (`membership`). By strata the parts have exact sizes, but one
more record changes the draw of its whole stratum (docs/splits.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from equidp.data.membership import (
    check_wanted,
    class_shares,
    declared_sizes,
    expected_records,
    expected_units,
    identified,
    key_text,
    label_of,
    numbers,
)
from equidp.data.records import TEST_PART, Membership, Records, Split
from equidp.errors import EquidpError


def split(
    records: Records,
    *,
    seed: int,
    keep: Mapping[str, int | float] | None = None,
    split_by: Literal["record", "unit"] = "record",
    public_fraction: float = 0.0,
    test_fraction: float = 0.2,
    evaluate_on: Literal["test", "validation"] = "test",
    membership: Literal["hash", "strata"] = "hash",
    key: str = "",
) -> Split:
    """Divide records into training, test and public parts.

    The provider's own test part is used where there is one. Training classes are cut down to `keep`, and
    `public_fraction` of the records left is set aside, so that all algorithms of a comparison train on the same
    records.

    Args:
        records: the whole dataset.
        seed: for every draw made here.
        keep: by class name, how many training records stay (a count, or a fraction below 1).
        split_by: `unit` keeps all records of a unit (a lesion's images) in one part.
        public_fraction: share of the training part that is never trained on, 0 for none.
        test_fraction: share of a dataset without a provider's split that is held out.
        evaluate_on: `validation` is for choosing settings: it leaves the test part out, and holds back `test_fraction`
            of the training part in its place.
        membership: `hash` decides on each record, or unit, by its identity and a public key alone. A share is then a
            probability, and a count is divided by the class's declared size. `strata` draws exact shares of each
            stratum (label × first sensitive grouping).
        key: what the public key is made of, instead of the seed.

    Raises:
        EquidpError: a part would be empty, `keep` asks for a class or for records that do not exist, or the provider's
            split divides a unit that must stay whole.
    """
    for name, value in (("public_fraction", public_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise EquidpError(f"data.{name}={value}: give a number from 0 to below 1.")
    records = identified(records)  # so that all later draws for a record, such as its views, follow from it alone
    units, keep = _units(records, split_by), keep or {}
    validation = test_fraction if evaluate_on == "validation" else 0.0
    draw: Selection
    training = (1 - validation) * (1.0 if records.part is not None else 1 - test_fraction)
    if membership == "hash":
        stay = class_shares(records.schema, keep, training)
        draw = Hash(records, stay, key_text(seed, key), whole_units=split_by == "unit")
        how = draw.plan(training * (1 - public_fraction) * stay)
    else:
        draw, how = Strata(records, units, keep, seed), Membership("strata")
    if not (records.part is None or validation or keep or public_fraction):
        how = replace(how, how="provider")
    how = replace(how, keeps=bool(keep), class_sizes=declared_sizes(records.schema, keep, training))
    if records.part is not None:
        held_out = records.part == TEST_PART
        _refuse_divided(units, held_out)
    else:
        held_out = draw.taken("test", torch.arange(len(records)), test_fraction)
    train_index, test_index = (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)
    if validation:
        back = draw.taken("validation", train_index, validation)
        train_index, test_index = train_index[~back], train_index[back]
    train_index = train_index[draw.kept(train_index)]
    set_aside = draw.taken("public", train_index, public_fraction)
    parts = Split(
        train=replace(records.take(train_index[~set_aside]), membership=how),
        test=records.take(test_index),
        public=records.take(train_index[set_aside]),
    )
    _check_not_empty(parts, public_fraction)
    return parts


class Selection(Protocol):
    """Decides which records are taken from a part, and which are kept of the classes that are made rare."""

    def taken(self, use: str, index: Tensor, fraction: float) -> Tensor:
        """Boolean mask over `index`, the positions of the records to draw from: those that are taken."""

    def kept(self, index: Tensor) -> Tensor:
        """Boolean mask over `index`, the training part's positions: those that stay."""


class Hash:
    """Selects each record, or each unit, by its own numbers; `stay` is `[classes]`, the kept share of each class."""

    def __init__(self, records: Records, stay: Tensor, key: str, *, whole_units: bool) -> None:
        known = identified(records)
        identity = known.unit_identity if whole_units else known.identity
        assert identity is not None
        self.numbers = numbers(identity, key)
        self.records, self.stay, self.key, self.whole_units = records, stay, key, whole_units

    def taken(self, use: str, index: Tensor, fraction: float) -> Tensor:
        return self.numbers[use][index] < fraction

    def kept(self, index: Tensor) -> Tensor:
        return self.numbers["keep"][index] < self.stay[self.records.class_ids[index]]

    def plan(self, shares: Tensor) -> Membership:
        """Return the expected sizes of the training part, which has the `[classes]` shares of the records."""
        schema, unit = self.records.schema, self.records.unit
        labels = self.records.class_ids
        if self.records.part is not None:
            pool = self.records.part != TEST_PART
            labels, unit = labels[pool], None if unit is None else unit[pool]
        return Membership(
            "hash",
            key=self.key,
            records=expected_records(schema, labels, shares),
            units=None if unit is None else expected_units(schema, labels, unit, shares, whole=self.whole_units),
            records_declared=bool(schema.sizes),
            units_declared=bool(schema.unit_sizes) and self.whole_units,
            given=self.records.part is not None,
        )


class Strata:
    """Selects exact shares of whole units of each stratum, by a seeded permutation."""

    def __init__(self, records: Records, units: Tensor, keep: Mapping[str, int | float], seed: int) -> None:
        self.records, self.units, self.keep, self.seed = records, units, keep, seed
        self.strata = strata(records)

    def taken(self, use: str, index: Tensor, fraction: float) -> Tensor:
        stratum = self.records.class_ids if use == "public" else self.strata
        return _drawn(self.units[index], stratum[index], fraction, _generator(self.seed, use))

    def kept(self, index: Tensor) -> Tensor:
        return torch.isin(index, keep_classes(self.records, index, self.keep, self.seed))


def keep_classes(records: Records, train_index: Tensor, keep: Mapping[str, int | float], seed: int) -> Tensor:
    """Return the positions in `train_index` that stay when classes are cut down, in their order.

    Args:
        records: the whole dataset.
        train_index: int64 positions of the training part.
        keep: by class name (or label), a count, or a fraction below 1.
        seed: for the draw.

    Raises:
        EquidpError: an unknown class, a negative number, or more records than the class has.
    """
    stays = torch.ones(len(train_index), dtype=torch.bool)
    labels = records.class_ids[train_index]
    for name, wanted in keep.items():
        label = label_of(records.schema, name)
        members = (labels == label).nonzero().squeeze(1)
        count = _count(wanted, len(members), name)
        # One generator per class: cutting a second class leaves the first one's records as they were.
        order = torch.randperm(len(members), generator=_generator(seed, f"keep {label}"))
        stays[members[order[count:]]] = False
    return train_index[stays]


def strata(records: Records) -> Tensor:
    """Return the stratum of each record, int64 `[N]`: label crossed with the first grouping that is not the class."""
    sensitive = next((name for name in records.schema.groupings if name != "class"), None)
    if sensitive is None:
        return records.class_ids
    return records.class_ids * len(records.schema.groupings[sensitive]) + records.groups[sensitive]


def _drawn(units: Tensor, strata: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Boolean mask `[N]` of a stratified draw of whole units; a unit belongs to its first record's stratum."""
    _, inverse = torch.unique(units, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1 if len(inverse) else 0,), len(units), dtype=torch.int64)
    first.scatter_reduce_(0, inverse, torch.arange(len(units)), reduce="amin")
    stratum = strata[first]
    taken = torch.zeros(len(first), dtype=torch.bool)
    for value in torch.unique(stratum):
        members = (stratum == value).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        taken[members[order[: round(fraction * len(members))]]] = True
    return taken[inverse]


def _units(records: Records, split_by: str) -> Tensor:
    if split_by == "record":
        return torch.arange(len(records))
    if records.unit is None:
        raise EquidpError(f"data.split_by=unit: dataset {records.schema.name!r} has no units; use split_by=record.")
    return records.unit


def _refuse_divided(units: Tensor, held_out: Tensor) -> None:
    """Refuse a split that divides units: test metrics are exact, and would show a unit that training protects."""
    both = units[held_out][torch.isin(units[held_out], units[~held_out])].unique()
    if len(both):
        raise EquidpError(
            f"data.split_by=unit: the dataset's own split has {len(both)} units with records in both its training and "
            "its test part; give a split that keeps each unit whole, or leave the part out to have one drawn."
        )


def _generator(seed: int, purpose: str) -> torch.Generator:
    """Return one stream per purpose, so that a public part does not change which records are in the test part."""
    salt = int.from_bytes(purpose.encode()[:6].ljust(6), "big")
    return torch.Generator().manual_seed((int(seed) * 1_000_003 + salt) % 2**63)


def _count(wanted: int | float, available: int, name: str) -> int:
    check_wanted(name, wanted)
    if wanted < 1:
        return round(wanted * available)
    if wanted != int(wanted) or wanted > available:
        raise EquidpError(
            f"data.keep.{name}={wanted}: the training part has {available} records of that class; "
            f"give a whole number up to {available}, or a fraction below 1."
        )
    return int(wanted)


def _check_not_empty(parts: Split, public_fraction: float) -> None:
    wanted = {"train": True, "test": True, "public": public_fraction > 0}
    for name, needed in wanted.items():
        if needed and not len(getattr(parts, name)):
            raise EquidpError(
                f"The {name} part of dataset {parts.train.schema.name!r} is empty: it needs more records, "
                "or other values of data.keep, data.public_fraction or data.test_fraction."
            )
