"""The training data as privacy units, and the batches of them.

A `Population` is the training data seen as independent privacy units: records, or lesions with several images each.
Batches are Poisson samples of units: every unit enters on its own coin, so the batch size varies and may be 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.packing import SEVERAL, Packing, Several

logger = logging.getLogger(__name__)

NUMBERS = 1 << 24
"""How many numbers are searched at once for some that are not finite: records may be wide, and lie in a large file."""


@dataclass(frozen=True)
class Batch:
    """A sample of units.

    Attributes:
        units: `[u]` int64 positions of the sampled units in the population.
        features, labels: of the units' records, `[b, …]` and `[b]`.
        owners: `[b]` int64, which of the `u` units each record belongs to; None where units are records.
        find_groups: gives the groups of these units alone, because no part of an algorithm may know those of others.
        rows: `[b]` int64 positions of the records among all of the population.
        views: m, where features are `[m·b, …]`: m views (augmented copies) of each record (`augmentation.py`).
    """

    units: Tensor
    features: Tensor
    labels: Tensor
    owners: Tensor | None
    find_groups: Callable[[], Tensor]
    rows: Tensor
    views: int = 1

    @cached_property
    def groups(self) -> Tensor:
        """`[u]` int64 group of each unit; gathered when asked for, because most algorithms do not ask."""
        return self.find_groups()

    def __len__(self) -> int:
        return len(self.units)


class Labelled(Protocol):
    """What is trained on: `equidp.data.records.Records`, or `Examples`."""

    @property
    def features(self) -> Tensor:
        """`[N, …]`."""

    @property
    def labels(self) -> Tensor:
        """`[N, …]`."""

    @property
    def unit(self) -> Tensor | None:
        """`[N]` int64, an id shared by the records of one unit; None where records are units."""


@dataclass(frozen=True, init=False)
class Examples:
    """Records without a schema, for a training loop of your own.

    Attributes:
        features, labels: `[N, …]` each. Labels are whatever the loss takes: amounts, or one for every place of a text.
        unit: `[N]` int64, an id shared by the records of one unit, or None where records are units.
        packing: how several tensors are packed into the features; None for one tensor.
    """

    features: Tensor
    labels: Tensor
    unit: Tensor | None
    packing: Packing | None

    def __init__(
        self,
        features: Tensor | Several,
        labels: Tensor,
        unit: Tensor | None = None,
        *,
        packing: Packing | None = None,
    ) -> None:
        """Take the columns; several tensors of features, by name in a dict or in order in a tuple, become one.

        Raises:
            EquidpError: if a column is no tensor, is sparse or has no dimension; if features or labels are float64; if
                labels are whole numbers of few bits (int8 to int32); if units are not `[N]` int64, because unknown
                ones (NaN) would each be a unit of its own; if several tensors cannot be packed.
        """
        if isinstance(features, Mapping | tuple):
            packing = Packing.of(features)
            features = packing.pack(features)
        given = {"features": features, "labels": labels, "unit": unit, "packing": packing}
        for name, value in given.items():
            object.__setattr__(self, name, value)  # it is frozen from here on
        self._refuse_other_kinds()

    def _refuse_other_kinds(self) -> None:
        """Refuse types that a network or a loss would refuse less clearly, and units that are not `[N]` int64."""
        for name, column in self._columns().items():
            if not (torch.is_tensor(column) or (name == "unit" and column is None)):
                table = ".to_numpy()" if hasattr(column, "to_numpy") else ""  # torch takes no DataFrame
                more = f" Features may be {SEVERAL}." if isinstance(column, list) and name == "features" else ""
                raise EquidpError(
                    f"The examples' {name}: give a tensor (torch.as_tensor({name}{table})), no "
                    f"{type(column).__name__}.{more}"
                )
            if column is not None and column.layout != torch.strided:
                raise EquidpError(f"The examples' {name} are sparse, and rows are taken of them: {name}.to_dense().")
            if column is not None and not column.dim():
                raise EquidpError(f"The examples' {name} are a single number: give one for each record, [N, …].")
        wrong = [
            ("features", self.features, "float", (torch.float64,)),
            ("labels", self.labels, "float", (torch.float64,)),
            ("labels", self.labels, "long", (torch.int32, torch.int16, torch.int8)),
        ]
        for name, column, call, kinds in wrong:
            if column.dtype in kinds:
                kind = str(column.dtype).removeprefix("torch.")
                raise EquidpError(f"The examples' {name} are {kind}, which layers do not take: {name}.{call}().")
        if self.unit is not None and (self.unit.dtype != torch.int64 or self.unit.dim() != 1):
            raise EquidpError(
                f"The examples' units are {self.unit.dtype} {list(self.unit.shape)}: give each record its unit's "
                "number, [N] int64."
            )

    def __repr__(self) -> str:
        """Shapes alone: a notebook's file keeps what its cells show, and the values are data of persons."""
        shapes = [f"{name} {list(column.shape)}" for name, column in self._columns().items() if column is not None]
        return f"<Examples: {', '.join(shapes)}>"

    def _columns(self) -> dict[str, Tensor | None]:
        return {"features": self.features, "labels": self.labels, "unit": self.unit}

    def to(self, device: torch.device) -> Examples:
        """The same on another device."""
        unit = None if self.unit is None else self.unit.to(device)
        return Examples(self.features.to(device), self.labels.to(device), unit, packing=self.packing)


class Population:
    """Training data as N units of privacy, resident on one device.

    Args:
        records: the training part.
        groups: `[records]` int64 group ids of the partition that group-aware algorithms use.
        by_unit: units are `records.unit` (a person, a lesion) instead of single records.

    Raises:
        EquidpError: if units are asked for and there are none, or there is not one row of each for every record.
    """

    def __init__(self, records: Labelled, groups: Tensor, *, by_unit: bool = False) -> None:
        self.records = records
        self.device = records.labels.device
        columns = {"features": records.features, "groups": groups, "units": records.unit if by_unit else None}
        for name, column in columns.items():
            if column is not None and len(column) != len(records.labels):
                raise EquidpError(
                    f"The population has {len(records.labels)} labels, and {len(column)} rows of {name}: give one for "
                    "each record."
                )
        for name, column in (("features", records.features), ("labels", records.labels)):
            _warn_of_non_finite(name, column)
        if groups.dtype != torch.int64:
            raise EquidpError(f"The population's groups are {groups.dtype}: give each record an int64 id from 0 on.")
        if not by_unit:
            self._members, self._starts, self.groups = None, None, groups
            self.size = len(records.labels)
            return
        if records.unit is None:
            schema = getattr(records, "schema", None)
            whose = "These examples have" if schema is None else f"Dataset {schema.name!r} has"
            raise EquidpError(f"{whose} no units beyond records: set privacy.unit=record.")
        _, unit = torch.unique(records.unit, return_inverse=True)
        self._members = torch.argsort(unit, stable=True)
        counts = torch.bincount(unit)
        self._starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.size = len(counts)
        # a unit's group is a function of that unit alone: the group of its first record
        self.groups = groups[self._members[self._starts[:-1]]]

    def __repr__(self) -> str:
        return f"<Population of {self.size} {'records' if self.of_records else 'units'} on {self.device}>"

    def batch(self, units: Tensor) -> Batch:
        """Gather the records of `units` (`[u]` positions)."""
        rows, owners = self._rows(units)
        # `index_select` copies whole rows where indexing copies element by element
        features, labels = (part.index_select(0, rows) for part in (self.records.features, self.records.labels))
        return Batch(units, features, labels, owners, partial(self.groups.index_select, 0, units), rows)

    def identities(self, rows: Tensor) -> Tensor:
        """`[b]` int64 of the records in these rows: half of a record's identity, or its row where records have none."""
        known = getattr(self.records, "identity", None)
        return rows if known is None else known[rows, 0]

    def record_counts(self, units: Tensor) -> Tensor | None:
        """`[u]` records of each of these units; None where units are records."""
        return None if self._starts is None else self._starts[units + 1] - self._starts[units]

    @property
    def of_records(self) -> bool:
        """Whether units are records."""
        return self._members is None

    def refuse_other_groups(self, groups: int) -> None:
        """Refuse ids of groups that a plan with `groups` groups does not have.

        As in `Records`, ids on a GPU are not checked, because that would wait for the device.

        Raises:
            EquidpError: for an id that is not from 0 to `groups` − 1.
        """
        ids = self.groups
        if len(ids) and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < groups:
            raise EquidpError(
                f"The population's groups are from {ids.min()} to {ids.max()}, and the plan has {groups}: plan with as "
                "many (`groups` of `plan_run`), and number them from 0 on."
            )

    def refuse_other_classes(self, classes: int) -> None:
        """Refuse labels that are not those of `classes` classes; as with groups, not on a GPU.

        Raises:
            EquidpError: for a label that is not from 0 to `classes` − 1.
        """
        labels = self.records.labels
        if len(labels) and labels.device.type == "cpu" and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise EquidpError(
                f"The labels are from {labels.min()} to {labels.max()}, and the groups of the plan stand for {classes} "
                "classes, from 0 on: give the classes as groups, or classes within groups and their number (`classes` "
                "of `plan_run`)."
            )

    def _rows(self, units: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._members is None or self._starts is None:
            return units, None
        lengths = self.record_counts(units)
        assert lengths is not None
        owners = torch.repeat_interleave(torch.arange(len(units), device=units.device), lengths)
        offsets = torch.arange(len(owners), device=units.device) - (lengths.cumsum(0) - lengths)[owners]
        return self._members[self._starts[units][owners] + offsets], owners


def _warn_of_non_finite(name: str, column: Tensor) -> None:
    """Warn of records with values that are not finite, whose gradients will be NaN.

    This is no error: such a record has weight 0 in every step, so the run goes on as if it were not there. A run that
    failed would tell what one record holds. Declared data are refused where they are read. Records are searched
    part by part, because a mask of all may not fit into memory.
    """
    if not column.is_floating_point() or column.is_meta:
        return
    rows = column.unsqueeze(1) if column.dim() == 1 else column.flatten(1)
    parts = rows.split(max(1, NUMBERS // max(1, rows.shape[1])))
    spoilt = torch.cat([~part.isfinite().all(1) for part in parts])
    if count := int(spoilt.sum()):
        logger.warning(
            "The %s of %d of %d records, such as record %d (from 0), are not finite: their gradients count as 0, and "
            "the budget is spent on nothing for them. Leave them out, or give missing numbers a public constant.",
            name, count, len(column), int(spoilt.int().argmax()),
        )  # fmt: skip
