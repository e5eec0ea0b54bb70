"""Membership: which part a record is in, as a function of its own identity and a public key alone.

    u = H(key, identity) in [0, 1);   test if u < f, train otherwise

Further hashes of the same identity decide whether it is held back for validation, whether it is public, and whether it
is kept where its class is made rare. H is keyed BLAKE2b.

Let T(D) be the training part of a table D. For every key, T(D + x) is T(D) + x, or T(D) if x goes to another part: no
other record moves. So a mechanism that is (ε, δ)-differentially private for its training part is so for the table, *for
every single key*. That is why a public key suffices: the guarantee needs no secret. The key only has to spread records
over the parts independently of their content. It must not be chosen by looking at records or results. Whoever knows
somebody's identity and the key can compute in which part this person would be, but not whether the person is in the
table. Records of the test and the public part are not protected, as always.

Identity is the id that a column declares, or the unit's id where units stay whole, or else the record's content and its
occurrence number among equal records. One more copy takes the next number, and the other copies keep their numbers.

Parts have random sizes. Therefore N, from which q, T and noise follow, is the expected number of training records and
not the actual one. It is computed from the declared sizes of classes. Without these it is computed from the table's own
sizes, which are then taken as public.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from equidp.data.records import Membership, Records, Schema
from equidp.errors import EquidpError, unknown_name

USES = ("test", "validation", "keep", "public")
"""What a record's four numbers are used for; each number is 8 bytes of one hash, so they are independent."""

SIZE = 16
"""Bytes of an identity: enough that no two different records have the same one, even if somebody chose the records."""


def identities(names: Iterable[str]) -> Tensor:
    """Identity of each id, int64 `[N, 2]`: 16 bytes that depend on the id alone."""
    return _tensor(blake2b(name.encode(), digest_size=SIZE, person=b"equidp id").digest() for name in names)


def identified(records: Records) -> Records:
    """Return the records with their identities and, if there are units, their units' identities. Given ones stay."""
    units = records.unit_identity
    if units is None and records.unit is not None:
        units = identities(f"unit {unit}" for unit in records.unit.tolist())
    records = replace(records, unit_identity=units)
    return records if records.identity is not None else replace(records, identity=_by_content(records))


def _by_content(records: Records) -> Tensor:
    """Return identities made from everything that training and evaluation see of a record, and its occurrence number.

    Records that differ in their unit or in their provider's part are not copies of each other.
    """
    small = [records.class_ids, *(records.groups[name] for name in records.schema.groupings)]
    small += [] if records.part is None else [records.part]
    columns = [torch.stack([column.long() for column in small], dim=1), records.features]
    if not records.schema.classes:
        columns.append(records.labels.reshape(len(records), -1))
    if records.unit_identity is not None:
        columns.append(records.unit_identity)
    if not len(records):
        return torch.empty((0, 2), dtype=torch.int64)
    rows = [column.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy() for column in columns]
    flat = [(memoryview(row.reshape(-1).data), row.shape[1]) for row in rows]  # slices of these cost least
    content = [_digest([row[i * width : (i + 1) * width] for row, width in flat]) for i in range(len(records))]
    same = pd.factorize(np.array(content, dtype=object))[0]
    copy = pd.Series(same).groupby(same).cumcount().to_numpy()
    for i in np.flatnonzero(copy):
        content[i] = _digest([content[i], int(copy[i]).to_bytes(8, "little")])
    return _tensor(content)


def _digest(pieces: Iterable[bytes | memoryview]) -> bytes:
    found = blake2b(digest_size=SIZE, person=b"equidp content")
    for piece in pieces:
        found.update(piece)
    return found.digest()


def _tensor(digests: Iterable[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype="<i8").reshape(-1, 2).copy())


def key_text(seed: int, key: str = "") -> str:
    """Return the text of the public key, made from `data.key` if it is given, else from the seed."""
    return f"key={key}" if key else f"seed={seed}"


def numbers(identity: Tensor, key: str) -> dict[str, Tensor]:
    """Return for each of `USES` float64 `[N]` in [0, 1): uniform, and independent between uses and between identities.

    Args:
        identity: int64 `[N, 2]`.
        key: the public key's text.
    """
    hashed_key = blake2b(key.encode(), digest_size=32, person=b"equidp key").digest()
    rows = identity.contiguous().view(torch.uint8).numpy().tobytes()
    hashed = b"".join(
        blake2b(rows[at : at + SIZE], key=hashed_key, digest_size=8 * len(USES)).digest()
        for at in range(0, len(rows), SIZE)
    )
    uniform = (np.frombuffer(hashed, dtype="<u8").reshape(-1, len(USES)) >> np.uint64(11)) * 2.0**-53
    return {use: torch.from_numpy(uniform[:, i].copy()) for i, use in enumerate(USES)}


def class_shares(schema: Schema, keep: Mapping[str, int | float], training_share: float) -> Tensor:
    """Return float64 `[classes]`, or `[1]` without classes: the share of each class that stays in the training part.

    Args:
        schema: its declared sizes turn counts into shares; the records themselves are not looked at.
        keep: by class name (or label), a count, or a fraction below 1.
        training_share: which share of the records that the declared sizes count is in the training part.

    Raises:
        EquidpError: an unknown class, an invalid number, more records than are declared, or a count where no size is
            declared.
    """
    shares = torch.ones(max(1, len(schema.classes)), dtype=torch.float64)
    for name, wanted in keep.items():
        label = label_of(schema, name)
        check_wanted(name, wanted)
        if wanted < 1:
            shares[label] = wanted
            continue
        if not schema.sizes:
            raise EquidpError(
                f"data.keep.{name}={wanted:g}: dataset {schema.name!r} declares no sizes of classes, and with counted "
                "sizes each record would affect the part of the others: give a fraction below 1 (0.1), or declare "
                "data.options.sizes, or set data.membership=strata."
            )
        declared = schema.sizes[label] * training_share
        if wanted > declared:
            raise EquidpError(
                f"data.keep.{name}={wanted:g}: by its declared size the training part has {declared:.0f} records of "
                "that class; give no more, or a fraction below 1."
            )
        shares[label] = wanted / declared
    return shares


def declared_sizes(schema: Schema, keep: Mapping[str, int | float], share: float) -> tuple[float, ...]:
    """Return the expected number of each class's records in a part, by declared sizes alone; empty without these.

    Args:
        schema: has the declared sizes.
        keep: as in `class_shares`.
        share: which share of the records that the sizes count is in the part, if all are kept.
    """
    sizes = [size * share for size in schema.sizes] if schema.classes else []
    for name, wanted in keep.items() if sizes else ():
        label = label_of(schema, name)
        sizes[label] = wanted if wanted >= 1 else wanted * sizes[label]
    return tuple(sizes)


def label_of(schema: Schema, name: str) -> int:
    """Return the label of a class, given its name or its label as text.

    Raises:
        EquidpError: there is no such class.
    """
    if str(name) in schema.classes:
        return schema.classes.index(str(name))
    if str(name).isdecimal() and int(name) < len(schema.classes):
        return int(name)
    raise unknown_name("class in data.keep", name, schema.classes)


def check_wanted(name: str, wanted: object) -> None:
    """Refuse a value that is neither a count nor a fraction."""
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not wanted >= 0:
        raise EquidpError(f"data.keep.{name}={wanted!r}: give a count (500) or a fraction below 1 (0.1).")


def expected_records(schema: Schema, labels: Tensor, shares: Tensor) -> int:
    """Return how many records are expected in the training part.

    Args:
        schema: its declared sizes are used, if there are some.
        labels: int64 `[N]` of all records except those of a provider's test part; counted if no sizes are declared.
        shares: float64 `[classes]`, the probability with which a record of each class is in the training part.
    """
    sizes = torch.tensor(schema.sizes) if schema.sizes else torch.bincount(labels, minlength=len(shares))
    return round(float((sizes * shares).sum()))


def expected_units(schema: Schema, labels: Tensor, unit: Tensor, shares: Tensor, *, whole: bool) -> int:
    """Return how many units are expected to have at least one record in the training part.

    Args:
        schema: as of `expected_records`.
        labels: as of `expected_records`.
        unit: int64 `[N]`.
        shares: as of `expected_records`.
        whole: whether all records of a unit share one draw.
    """
    if schema.unit_sizes and whole:
        return round(float((torch.tensor(schema.unit_sizes) * shares).sum()))
    names, unit = torch.unique(unit, return_inverse=True)
    if whole:
        return round(float(shares.new_zeros(len(names)).scatter_reduce_(0, unit, shares[labels], "amax").sum()))
    absent = shares.new_zeros(len(names)).scatter_add_(0, unit, torch.log1p(-shares[labels])).exp()
    return round(float((1 - absent).sum()))


def size_sentence(membership: Membership | None, unit: str, size: int, *, by_unit: bool) -> str:
    """Say what is public about the number of training records, as the subject of a sentence."""
    if membership is None or membership.expects(by_unit=by_unit) != size:
        return f"The number of training {unit}s ({size})"
    if membership.declares(by_unit=by_unit):
        return (
            f"The expected number of training {unit}s ({size}, by declared sizes; how many there are is protected, too)"
        )
    if membership.how != "hash":
        return f"The number of training {unit}s ({size})"
    of_classes = ", of each class too," if membership.keeps else ""
    where = "the provider's training part" if membership.given else "the table"
    return f"The number of {unit}s in {where}{of_classes} and so the expected number of training {unit}s ({size})"


def split_sentence(
    membership: Membership | None, unit: str, *, exposed: str = "", how: str = "nothing protects"
) -> str:
    """Say what the split means for the guarantee, in one or two sentences of the privacy statement.

    Args:
        exposed: parts besides the training part that the model depends on, in words; empty where there are none.
        how: how their records are protected, as the end of a sentence.
    """
    match membership.how if membership is not None else "given":
        case "hash":
            assert membership is not None
            unless = f", unless the key puts that {unit} into {exposed}, which {how}" if exposed else ""
            which = "Which part a record is in"
            if membership.given:
                which = "The data say which records are test records (the provider's split). Which other part one is in"
            return (
                f"{which} depends on its own identity and the public key {membership.key} alone "
                f"(data.membership=hash): tables that differ in one {unit} give training parts that differ in that "
                f"{unit} at most, so that ε holds for tables too{unless}."
            )
        case "strata":
            return (
                "The parts were drawn by strata (data.membership=strata), from all records at once: one row more in "
                "the table exchanges many training records (191 of 1,000 in one example), and ε says nothing about two "
                f"tables that differ in one row. It compares training parts that differ in one {unit}."
            )
        case "provider":
            return (
                "The data contain each record's part (the provider's split): one record more moves no "
                f"other, and ε compares training parts that differ in one {unit}."
            )
        case _:
            return f"The split is taken as given: ε compares training parts that differ in one {unit}."
