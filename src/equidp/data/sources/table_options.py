"""The options of the source `table`, which declare a table."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from equidp.data.cells import number_in, refuse_alike
from equidp.data.columns import Bounded, Column, Named, Numeric, OfGroup
from equidp.data.groupings import Grouping, check_shown
from equidp.data.products import PRODUCT
from equidp.data.sources.base import SourceOptions
from equidp.errors import listed_names, unknown_name
from equidp.options import HUGE, MARK, Number


def _distinct(classes: tuple[str, ...]) -> tuple[str, ...]:
    refuse_alike(classes, "classes")
    check_shown(classes)
    return classes


def _known_encoding(name: str) -> str:
    try:
        known = codecs.lookup(name).name if name != "utf-8-sig" else name
    except LookupError:
        raise ValueError("Python knows no such encoding; common ones are utf-8, utf-16, latin-1 and cp1252") from None
    return "utf-8-sig" if known == "utf-8" else known  # spreadsheets begin UTF-8 with a mark, which pandas skips too


def _lists_of_texts(given: Any) -> Any:
    """Refuse other kinds of values here, because pydantic's message would name all the kinds that it tried."""
    each = given.values() if isinstance(given, Mapping) else (given,)
    if not all(isinstance(one, list | tuple) and all(isinstance(text, str) for text in one) for one in each):
        raise ValueError('give a list of texts in quotes, such as ["9"], or one for each column: {health: ["9"]}')
    return given


Sign = Annotated[str, Field(min_length=1, max_length=1)]

Sizes = tuple[Annotated[int, Field(ge=1)], ...]
"""Public numbers of records, or units, of each class."""


class Count(Bounded):
    """A label that is a count, from 0 on."""

    minimum: Literal[0] = 0
    maximum: Annotated[int, Field(ge=1)]


ZERO_OR_ONE = Named.model_validate({"map": {"0": ("0", "false", "False"), "1": ("1", "true", "True")}})
"""One of several labels: whether it applies."""

Classes = Annotated[tuple[str, ...], Field(min_length=2), AfterValidator(_distinct)]
"""Names of classes, in label order."""


class TableOptions(SourceOptions):
    """Options of `table`, and of `csv`, which is the same under its older name.

    Attributes:
        path: a file of separated values (plain or .gz), parquet (.parquet, .pq), feather (.feather, .arrow), or with
            `sql` an SQLite database; relative to the raw folder.
        sql: a query that begins with SELECT or WITH. It is run for reading only.
        connection: SQLAlchemy's URL of another database, in place of `path`. It holds no password: parameters are
            logged. A catalog entry `pandas.SQLQueryDataset` takes one from conf/local/credentials.yml.
        catalog: an entry of the Kedro catalog that gives a DataFrame, in place of `path`.
        separator, decimal, thousands, encoding: as for `pandas.read_csv`.
        columns: names of a file without a header row.
        na_values: further texts, or numbers, that mean a missing value: in every column, or a list for each column that
            has some.
        label: column of the label.
        classes: the label's values, in label order; or names of `class_map`, or names for the bands of `class_edges`.
        ordered: the order in which the classes are declared counts (`ordinal`).
        target: in place of `classes`, for a label that is a number to be predicted: its public bounds. With
            `clip: true` a number beyond a bound becomes the bound.
        counts: in place of `classes`, for a label that is a whole number from 0 on: its public maximum, and `clip`.
        labels: in place of `label`, for several labels that are 0 or 1 each: their columns.
        class_map: for each class the values of the label that it stands for.
        class_edges: for a label that is a number: where one class ends and the next begins.
        features: columns that are features, each with categories, a map, edges or bounds, or a grouping by name; none
            where there is `text`.
        text: column of texts, the only feature: as words hashed into `vocabulary` ids, or as tokens of `tokenizer`.
        tokenizer: folder of a pretrained network's tokenizer.
        length: words or tokens kept of each text: its first tokens, or its last words.
        vocabulary: number of ids that words are hashed into, the padding included.
        groups: groupings to report by, each over a column that need not be a feature.
        unit: column whose value is shared by the records of one person; empty where each row is a unit.
        id: column with an id for each row. The id, instead of the row's content, then decides on its part (`data.id`).
        part: column that says `train` or `test`; empty to split at random.
        sizes: public numbers of rows of each class, in label order (one number where there are no classes), known from
            elsewhere and not counted in the table.
            Counts in `data.keep`, the sampling rate and the noise then follow from these.
        unit_sizes: likewise of units.
        missing: `drop` leaves out rows with a missing feature or label; `error` refuses them.
    """

    path: str = ""
    sql: str = ""
    connection: str = ""
    catalog: str = ""
    separator: Sign = ","
    decimal: Sign = "."
    thousands: Literal[""] | Sign = ""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "utf-8-sig"
    columns: tuple[str, ...] = ()
    na_values: Annotated[tuple[str, ...] | dict[str, tuple[str, ...]], BeforeValidator(_lists_of_texts)] = ()
    label: str = ""
    classes: Classes = ()
    class_map: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    class_edges: tuple[Number, ...] = ()
    ordered: bool = False
    target: Bounded | None = None
    counts: Count | None = None
    labels: tuple[str, ...] = ()
    features: dict[str, Column] = Field(default_factory=dict)
    text: str = ""
    tokenizer: str = ""
    length: Annotated[int, Field(ge=1, le=10_000)] = 128
    vocabulary: Annotated[int, Field(ge=2, le=2**24)] = 20_000
    groups: dict[str, Grouping] = Field(default_factory=dict)
    unit: str = ""
    id: str = ""
    part: str = ""
    sizes: Sizes = ()
    unit_sizes: Sizes = ()
    missing: Literal["error", "drop"] = "error"
    paths: ClassVar[tuple[str, ...]] = ("tokenizer",)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_left_to_declare(cls, given: Any) -> Any:
        if isinstance(given, dict) and (left := [name for name, value in given.items() if MARK in str(value)]):
            raise ValueError(
                f"{', '.join(left)} still {'has' if len(left) == 1 else 'have'} {MARK}: put in what the codebook says"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _classes_by_their_map(cls, given: Any) -> Any:
        if isinstance(given, dict) and "classes" not in given and isinstance(named := given.get("class_map"), dict):
            return {**given, "classes": tuple(named)}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> TableOptions:
        check_group_names(self.groups)
        if sum(map(bool, (self.path, self.connection, self.catalog))) != 1:
            raise ValueError("give one of path, connection (with sql) and catalog")
        if bool(self.sql) < bool(self.connection) or (self.sql and self.catalog):
            raise ValueError("sql goes with path (of an SQLite file) or with connection")
        if self.connection:
            _refuse_password(self.connection)
        if self.decimal == self.thousands:
            raise ValueError("decimal and thousands are the same sign")
        self._one_task()
        features = {self.text, *(declared.column or name for name, declared in self.declared.items())}
        for label in self.outcomes:
            if label in features:
                raise ValueError(f"the label {label!r} is also a feature")
        if self.unit and self.unit in features:  # a person's number says nothing of other persons
            raise ValueError(f"the unit {self.unit!r} is also a feature")
        if bool(self.features) == bool(self.text):
            raise ValueError("declare the columns of features, or one column of text")
        if self.tokenizer and not self.text:
            raise ValueError("tokenizer needs text, the column to read")
        check_sizes(self.classes, self.sizes, self.unit_sizes)
        check_ordered(self.classes, ordered=self.ordered)
        self._missing_or_declared()
        return self

    def _missing_or_declared(self) -> None:
        for name, declared in (*self.groups.items(), *self.declared.items(), *self.outcomes.items()):
            column = getattr(declared, "column", "") or name
            given = self.na_values.get(column, ()) if isinstance(self.na_values, dict) else self.na_values
            if isinstance(declared, Named) and (both := [text for text in declared.values if text in given]):
                raise ValueError(
                    f"na_values: {both[0]!r} is also a declared value of {column!r}; where it means a missing value in "
                    f'other columns, name these: na_values: {{OTHER: ["{both[0]}"]}}'
                )
            self._missing_or_declared_as_numbers(column, declared, given)

    def _missing_or_declared_as_numbers(self, column: str, declared: object, given: tuple[str, ...]) -> None:
        """Refuse a code and a category that are one number, where types are guessed: other rows would decide."""
        if not (self.catalog and isinstance(declared, Named)):
            return
        codes = {number: code for code in given if (number := number_in(code)) is not None}
        for text in declared.values:
            if (number := number_in(text)) in codes:
                raise ValueError(
                    f"na_values: {codes[number]!r} and {text!r}, a declared value of {column!r}, are one number, as "
                    "which an entry of the catalog may give them, or not, by what other rows hold; give the entry "
                    f"load_args of dtype: {{{column}: str}}, and the value another name there"
                )

    def _one_task(self) -> None:
        declared = [name for name in ("classes", "target", "counts", "labels") if getattr(self, name)]
        if len(declared) != 1:
            raise ValueError(
                "declare what is predicted by one of classes, target (a number, with its bounds), counts (with their "
                f"maximum) and labels (several of 0 or 1), not by {listed_names(declared) if declared else 'none'}"
            )
        if bool(self.labels) == bool(self.label):
            raise ValueError("labels takes the place of label" if self.labels else "label: name the label's column")
        if not self.classes and (self.class_map or self.class_edges):
            raise ValueError(f"class_map and class_edges are for classes, and {declared[0]} declares none")
        if len(self.labels) == 1:
            raise ValueError("labels: name two columns or more; one label of 0 or 1 is two classes")
        refuse_alike(self.labels, "labels")
        check_shown(self.labels)
        if (of := self.number) is not None:
            largest = max(abs(of.minimum), abs(of.maximum))
            if largest > HUGE or of.maximum - of.minimum < largest / 10_000:  # in float32 all would be one number
                raise ValueError(
                    f"numbers from {of.minimum:g} to {of.maximum:g} cannot be told apart by seven digits: give the "
                    "label in another unit, or as its distance from a public number"
                )

    @property
    def task(self) -> str:
        """The declared task."""
        declared = {"regression": self.target, "counts": self.counts, "multilabel": self.labels}
        return next(
            (task for task, given in declared.items() if given), "ordinal" if self.ordered else "classification"
        )

    @property
    def number(self) -> Bounded | None:
        """The declaration of a label that is a number to be predicted."""
        return self.target or self.counts

    @property
    def outcomes(self) -> dict[str, Named | Bounded]:
        """Every column that is predicted, with its declaration."""
        if self.labels:
            return dict.fromkeys(self.labels, ZERO_OR_ONE)
        return {self.label: self.number or self.classified}

    @property
    def declared(self) -> dict[str, Named | Numeric]:
        """The features with their declarations. A feature that names a grouping has the grouping's declaration."""
        found: dict[str, Named | Numeric] = {}
        for name, column in self.features.items():
            if isinstance(column, OfGroup):
                group = column.group or name
                if group not in self.groups:
                    raise ValueError(unknown_name(f"grouping of the feature {name!r}", group, self.groups).message)
                own = self.groups[group]
                found[name] = own.model_copy(update={"column": own.column or group})
            else:
                found[name] = column
        return found

    @property
    def classified(self) -> Named:
        """The label's declaration."""
        bounds = {"minimum": -HUGE, "maximum": HUGE} if self.class_edges else {}
        return Named.model_validate(
            {"categories": self.classes, "map": self.class_map, "edges": self.class_edges, **bounds}
        )


def _refuse_password(url: str) -> None:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        password = make_url(url).password or "password" in make_url(url).query
    except ArgumentError:
        raise ValueError("connection is not a URL such as postgresql+psycopg://host/database") from None
    if password:
        raise ValueError(
            "a password here would be logged with the run's parameters; put the URL into conf/local/credentials.yml, "
            "and name a catalog entry of type pandas.SQLQueryDataset by `catalog`"
        )


def check_ordered(classes: tuple[str, ...], *, ordered: bool) -> None:
    """Refuse an order of fewer than three classes.

    Raises:
        ValueError: for such classes, to be reported by the settings class.
    """
    if ordered and len(classes) < 3:
        raise ValueError("ordered: an order counts where there are three classes or more; leave it out")


def check_sizes(classes: tuple[str, ...], *given: tuple[int, ...]) -> None:
    """Refuse sizes that are not one for each class.

    Raises:
        ValueError: for such sizes, to be reported by the settings class.
    """
    for sizes in given:
        if sizes and len(sizes) != max(1, len(classes)):
            if not classes:
                raise ValueError("sizes: without classes give one number, of all rows")
            raise ValueError(f"there are {len(sizes)} sizes for {len(classes)} classes; give one for each, in order")


def check_group_names(groups: Mapping[str, Grouping]) -> None:
    """Refuse names with another meaning: `class`, and names with the sign that joins groupings.

    Raises:
        ValueError: for such a name, to be reported by the settings class.
    """
    for name in groups:
        if name == "class" or PRODUCT in name or not name.strip():
            raise ValueError(f"a grouping cannot be called {name!r}")
    check_shown(groups)
