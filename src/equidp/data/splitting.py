"""Splitting: who trains, who tests, who is public, and which classes are made rare. Pure and seeded.

Which records are drawn depends on the seed and on the strata sizes, and counts as public (docs/privacy.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from equidp.data.records import Records, Split
from equidp.errors import EquidpError, unknown_name

TEST_PART = 1


def split(
    records: Records,
    *,
    seed: int,
    keep: Mapping[str, int | float] | None = None,
    split_by: Literal["record", "unit"] = "record",
    public_fraction: float = 0.0,
    test_fraction: float = 0.2,
    evaluate_on: Literal["test", "validation"] = "test",
) -> Split:
    """Divide records into training, test and public parts.

    The provider's own test part is used where there is one; else each stratum (label × first sensitive grouping)
    gives `test_fraction` of its records. Training classes are then cut down to `keep`, and `public_fraction` of what
    is left is set aside, so that all algorithms of a comparison train on the same records.

    Args:
        records: the whole dataset.
        seed: of every draw made here.
        keep: per class name, how many training records stay (a count, or a fraction below 1).
        split_by: `unit` keeps all records of a unit (a lesion's images) in one part.
        public_fraction: share of the training part that is never trained on, 0 for none.
        test_fraction: share of a dataset without a provider's split that is held out.
        evaluate_on: `validation` leaves the test part out altogether and holds `test_fraction` of the training part
            back in its place: for choosing settings.

    Raises:
        EquidpError: a part would be empty, `keep` asks for what does not exist, or the provider's split divides a unit
            that is to be kept whole.
    """
    _check_fractions(public_fraction, test_fraction)
    units = _units(records, split_by)
    if records.part is not None:
        held_out = records.part == TEST_PART
        _refuse_divided(units, held_out)
    else:
        held_out = _drawn(units, strata(records), test_fraction, _generator(seed, "test"))
    train_index, test_index = (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)
    if evaluate_on == "validation":
        back = _drawn(units[train_index], strata(records)[train_index], test_fraction, _generator(seed, "validation"))
        train_index, test_index = train_index[~back], train_index[back]
    train_index = keep_classes(records, train_index, keep or {}, seed)
    set_aside = _drawn(units[train_index], records.labels[train_index], public_fraction, _generator(seed, "public"))
    parts = Split(
        train=records.take(train_index[~set_aside]),
        test=records.take(test_index),
        public=records.take(train_index[set_aside]),
    )
    _check_not_empty(parts, public_fraction)
    return parts


def keep_classes(records: Records, train_index: Tensor, keep: Mapping[str, int | float], seed: int) -> Tensor:
    """Positions in `train_index` that stay when classes are cut down, in their order.

    Args:
        records: the whole dataset.
        train_index: int64 positions of the training part.
        keep: per class name (or label), a count, or a fraction below 1.
        seed: of the draw.

    Raises:
        EquidpError: an unknown class, a negative number, or more records than the class has.
    """
    stays = torch.ones(len(train_index), dtype=torch.bool)
    labels = records.labels[train_index]
    for name, wanted in keep.items():
        label = _label(records, name)
        members = (labels == label).nonzero().squeeze(1)
        count = _count(wanted, len(members), name)
        # One generator per class: cutting a second class leaves the first one's records as they were.
        order = torch.randperm(len(members), generator=_generator(seed, f"keep {label}"))
        stays[members[order[count:]]] = False
    return train_index[stays]


def strata(records: Records) -> Tensor:
    """Stratum of each record, int64 `[N]`: its label crossed with the first grouping that is not the class."""
    sensitive = next((name for name in records.schema.groupings if name != "class"), None)
    if sensitive is None:
        return records.labels
    return records.labels * len(records.schema.groupings[sensitive]) + records.groups[sensitive]


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
    """Test metrics are exact: a protected unit with a record in the test part would be in them."""
    both = units[held_out][torch.isin(units[held_out], units[~held_out])].unique()
    if len(both):
        raise EquidpError(
            f"data.split_by=unit: the dataset's own split has {len(both)} units with records in both its training and "
            "its test part; give a split that keeps each unit whole, or leave the part out to have one drawn."
        )


def _generator(seed: int, purpose: str) -> torch.Generator:
    """One stream per purpose: asking for a public part must not change who is in the test part."""
    salt = int.from_bytes(purpose.encode()[:6].ljust(6), "big")
    return torch.Generator().manual_seed((int(seed) * 1_000_003 + salt) % 2**63)


def _label(records: Records, name: str) -> int:
    classes = records.schema.classes
    if str(name) in classes:
        return classes.index(str(name))
    if str(name).isdecimal() and int(name) < len(classes):
        return int(name)
    raise unknown_name("class in data.keep", name, classes)


def _count(wanted: int | float, available: int, name: str) -> int:
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not wanted >= 0:
        raise EquidpError(f"data.keep.{name}={wanted!r}: give a count (500) or a fraction below 1 (0.1).")
    if wanted < 1:
        return round(wanted * available)
    if wanted != int(wanted) or wanted > available:
        raise EquidpError(
            f"data.keep.{name}={wanted}: the training part has {available} records of that class; "
            f"give a whole number up to {available}, or a fraction below 1."
        )
    return int(wanted)


def _check_fractions(public_fraction: float, test_fraction: float) -> None:
    for name, value in (("public_fraction", public_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise EquidpError(f"data.{name}={value}: give a number from 0 to below 1.")


def _check_not_empty(parts: Split, public_fraction: float) -> None:
    wanted = {"train": True, "test": True, "public": public_fraction > 0}
    for name, needed in wanted.items():
        if needed and not len(getattr(parts, name)):
            raise EquidpError(
                f"The {name} part of dataset {parts.train.schema.name!r} is empty: it needs more records, "
                "or other values of data.keep, data.public_fraction or data.test_fraction."
            )
