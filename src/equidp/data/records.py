"""Records: the data that every source produces and everything downstream takes.

A `Records` holds features, labels and group ids of N records next to a `Schema` of public facts about them.
The schema never depends on the records themselves: categories, bounds, image size and class names come from the
provider's documentation, so it costs no privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from equidp.data.products import PRODUCT, factors_of
from equidp.errors import EquidpError, refuse_unknown

Kind = Literal["tabular", "image", "text"]

MIN_TEST_RECORDS = 10
"""A group with fewer test records has no reliable figures: one record changes its accuracy by 10 points."""


@dataclass(frozen=True)
class Schema:
    """Public facts about a dataset: declared, never learnt from the records.

    Attributes:
        name: the dataset's registry name.
        kind: `tabular` (float features in [0, 1]), `image` (uint8, channels first) or `text` (token ids).
        shape: shape of one record's features, such as `(40,)`, `(1, 28, 28)` or `(80,)`.
        classes: class names, in label order; empty where the task has none.
        groupings: group names of each grouping, in id order; `class` among them where there are classes.
        feature_names: one per column, tabular data only.
        mean, sd: published per-channel constants of images on the 0..1 scale; models apply `(x/255 − mean)/sd`.
        vocabulary: number of token ids, text only (id 0 is padding).
        words: words of a public list, for the ids 2, 3, … (1 is any other word); empty for hashed ids.
        tokenizer: digest of the pretrained tokenizer, if token ids are its ids plus 1; empty where there is none.
        sizes: declared number of records of each class: of the provider's training part where there is one, else of the
            whole; empty where none is declared.
        unit_sizes: likewise the declared number of units of each class.
        task: what is predicted, a name of `equidp.tasks.TASKS`.
        targets: names of the predicted columns, where there are no classes.
        bounds: smallest and largest value of a predicted number, in its own unit.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    groupings: Mapping[str, tuple[str, ...]]
    feature_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    sd: tuple[float, ...] = ()
    vocabulary: int = 0
    words: tuple[str, ...] = ()
    tokenizer: str = ""
    sizes: tuple[int, ...] = ()
    unit_sizes: tuple[int, ...] = ()
    task: str = "classification"
    targets: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """What each column of predictions stands for: a class, or a target."""
        return self.classes or self.targets

    @property
    def outputs(self) -> int:
        """Number of a model's outputs. Ordered classes have one less: whether a record is above each but the last."""
        return len(self.output_names) - (self.task == "ordinal")

    def to_dict(self) -> dict:
        """Plain JSON types; `from_dict` reads it back."""
        facts = dataclasses.asdict(self)
        facts["groupings"] = {name: list(names) for name, names in self.groupings.items()}
        return facts

    @classmethod
    def from_dict(cls, facts: Mapping) -> Schema:
        """Rebuild a schema from `to_dict`'s result."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
        values["groupings"] = {name: tuple(names) for name, names in facts["groupings"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Membership:
    """How a training part was drawn: public facts alone.

    Attributes:
        how: `hash`; `strata`; `provider`, where the data give each record's part and nothing was drawn.
        key: what the public key was made of, such as `seed=0`.
        records, units: expected number in the training part; None where the actual number is used.
        records_declared, units_declared: whether these numbers follow from settings and declared sizes, and so are the
            same for any table.
        keeps: whether `data.keep` makes classes rare.
        given: whether the data name the test records, which then do not follow from identity and key.
        class_sizes: training records of each class by declared sizes, before the public share is taken from all classes
            alike; empty where none are declared.
    """

    how: Literal["hash", "strata", "provider"]
    key: str = ""
    records: int | None = None
    units: int | None = None
    records_declared: bool = False
    units_declared: bool = False
    keeps: bool = False
    given: bool = False
    class_sizes: tuple[float, ...] = ()

    def declares(self, *, by_unit: bool) -> bool:
        """Whether the expected number is the same for any table."""
        return self.units_declared if by_unit else self.records_declared

    def expects(self, *, by_unit: bool) -> int | None:
        """The expected number of records, or of units."""
        return self.units if by_unit else self.records


TEST_PART = 1
"""`Records.part` of a test record."""

OPTIONAL = ("part", "unit", "identity", "unit_identity")
"""Columns of Records that not every data set has."""


@dataclass(frozen=True)
class Records:
    """N records with their public schema.

    Attributes:
        features: `[N, *schema.shape]`; float32 (tabular), uint8 (images) or int64 (token ids).
        labels: `[N]` int64 in `0..len(classes)-1`; without classes, float32 `[N]` for one target or `[N, targets]` for
            several.
        groups: by grouping, `[N]` int64 group ids.
        schema: the public schema.
        part: `[N]` uint8, the provider's own split (0 train, 1 test), or None where there is none.
        unit: `[N]` int64, an id shared by the records of one person or lesion, or None where records are units.
        identity: `[N, 2]` int64, each record's identity, which depends on no other record (`membership.identities`);
            None if it follows from the content.
        unit_identity: likewise the identity of each record's unit; None if it follows from the number in `unit`.
        membership: how the records were drawn, if they are a training part.
        remarks: sentences on rows that were left out and numbers that were changed. They have exact counts, so they are
            as confidential as the records.
    """

    features: Tensor
    labels: Tensor
    groups: Mapping[str, Tensor]
    schema: Schema
    part: Tensor | None = None
    unit: Tensor | None = None
    identity: Tensor | None = None
    unit_identity: Tensor | None = None
    membership: Membership | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_columns()
        self._check_features()
        if set(self.groups) != set(self.schema.groupings):
            raise self._unlike(f"groupings are {sorted(self.groups)}, the schema says {sorted(self.schema.groupings)}")
        if self.schema.classes:
            self._check_ids("labels", self.labels, len(self.schema.classes))
        else:
            self._check_targets()
        for grouping, ids in self.groups.items():
            self._check_ids(f"groups[{grouping}]", ids, len(self.schema.groupings[grouping]))

    def _check_columns(self) -> None:
        """Refuse columns that are no tensors, or have no row for each record."""
        n = len(self.labels)
        for name, ids in (("identity", self.identity), ("unit_identity", self.unit_identity)):
            if ids is not None and (ids.dtype != torch.int64 or tuple(ids.shape) != (n, 2)):
                raise self._unlike(f"{name} is {ids.dtype} of shape {tuple(ids.shape)}, and must be int64 ({n}, 2)")
        columns = {"features": self.features, "labels": self.labels}
        columns |= {f"groups[{grouping}]": ids for grouping, ids in self.groups.items()}
        columns |= {k: v for k, v in (("part", self.part), ("unit", self.unit)) if v is not None}
        for name, column in columns.items():
            if not isinstance(column, Tensor):
                raise self._unlike(f"{name} are of type {type(column).__name__}, and must be a torch.Tensor")
            several = name == "labels" and len(self.schema.targets) > 1
            if name != "features" and column.dim() != (2 if several else 1):
                raise self._unlike(f"{name} have shape {tuple(column.shape)}, and must be one number per record")
            if len(column) != n:
                raise self._unlike(f"{name} has {len(column)} rows, labels have {n}")

    def _check_features(self) -> None:
        found = tuple(self.features.shape[1:])
        if found != self.schema.shape:
            raise self._unlike(f"features have shape {found}, the schema says {self.schema.shape}")
        if self.features.dtype == torch.float64:  # NumPy's default
            raise self._unlike("features are float64, and must be float32 (images uint8, token ids int64)")

    def _check_ids(self, name: str, ids: Tensor, names: int) -> None:
        """Refuse ids of classes or groups that are not 0 to `names` - 1."""
        if ids.dtype != torch.int64:
            raise self._unlike(f"{name} are {str(ids.dtype).removeprefix('torch.')}, and must be int64")
        # Records are made on the CPU, and checked there. On another device a check would wait for each answer
        if len(ids) and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < names:
            raise self._unlike(f"{name} are from {ids.min()} to {ids.max()}, and must be from 0 to {names - 1}")

    def _check_targets(self) -> None:
        """Refuse targets of another type or number, or beyond their bounds."""
        labels, wanted = self.labels, self.schema.targets
        if labels.dtype != torch.float32 or labels[:1].numel() != len(labels[:1]) * len(wanted):
            raise self._unlike(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}, and must be float32, one for each of "
                f"{len(wanted)} targets"
            )
        low, high = self.schema.bounds or (0.0, 1.0)
        if len(self) and labels.device.type == "cpu" and not bool(((labels >= low) & (labels <= high)).all()):
            raise self._unlike(f"labels are from {labels.min():g} to {labels.max():g}, not in {low:g} to {high:g}")

    def _unlike(self, what: str) -> EquidpError:
        return EquidpError(f"Records of dataset {self.schema.name!r} do not fit together: {what}; correct its source.")

    def __repr__(self) -> str:
        """Only shapes, because a notebook keeps what its cells show, and the values are data of persons."""
        columns = {"features": self.features, "labels": self.labels, **self.optional}
        shapes = [f"{name} {list(column.shape)}" for name, column in columns.items()]
        return f"<{len(self)} Records of {self.schema.name}: {', '.join(shapes)}, groups {', '.join(self.groups)}>"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_ids(self) -> Tensor:
        """`[N]` int64: each record's class; 0 for all where there are no classes."""
        return self.labels if self.schema.classes else self.labels.new_zeros(len(self), dtype=torch.int64)

    @property
    def optional(self) -> dict[str, Tensor]:
        """The columns of `OPTIONAL` that these records have."""
        return {name: column for name in OPTIONAL if (column := getattr(self, name)) is not None}

    def take(self, index: Tensor) -> Records:
        """The records at `index` (int64 positions or a boolean mask), in that order, without `membership`."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        return dataclasses.replace(self._each(lambda column: column[index]), membership=None)

    def to(self, device: torch.device | str) -> Records:
        """The same records on another device."""
        return self._each(lambda column: column.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Records:
        """Return the records with `change` applied to every column."""
        changed: dict[str, Any] = {name: change(column) for name, column in self.optional.items()}
        changed |= {"features": change(self.features), "labels": change(self.labels)}
        return dataclasses.replace(self, groups={name: change(ids) for name, ids in self.groups.items()}, **changed)

    def grouping(self, name: str) -> tuple[Tensor, tuple[str, ...]]:
        """Group ids `[N]` and group names of a grouping, or of a product such as `sex*race`.

        Raises:
            EquidpError: the schema has no such grouping.
        """
        factors = factors_of(name)
        if len(set(factors)) != len(factors):
            raise EquidpError(f"Grouping {name!r} names one grouping twice.")
        ids, names = torch.zeros_like(self.class_ids), cast("tuple[str, ...]", ("",))
        refuse_unknown(f"grouping of dataset {self.schema.name!r}", factors, self.schema.groupings)
        for factor in factors:
            inner = self.schema.groupings[factor]
            ids = ids * len(inner) + self.groups[factor]
            names = tuple(f"{a}{PRODUCT}{b}" if a else b for a in names for b in inner)
        return ids, names


@dataclass(frozen=True)
class Split:
    """The three disjoint parts of a dataset. `public` is empty unless an algorithm asked for one."""

    train: Records
    test: Records
    public: Records
