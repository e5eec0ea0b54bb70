"""Diabetes: the 442 patients inside scikit-learn, and how their disease progressed in a year; no file is needed.

The provider gives names and units of the columns, and the target's range, 25 to 346 (scikit-learn's page "Diabetes
dataset"). It gives no bounds of the features in their own units. The bounds here are ours: they are wide and hold for
adults in general, and a number beyond a bound becomes the bound. `diabetes_bands` has the target in four bands, cut at
round numbers near the quarters of its range. scikit-learn also offers scaled features. They are not used, because their
means and deviations were learnt from the records. The provider writes sex as 1 and 2, and does not say which is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from equidp.data.columns import Bounded, Named, Numeric, band_ids, bands, feature_names
from equidp.data.raw_files import RawFiles
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source

TARGET = Bounded(minimum=25, maximum=346)
EDGES = (100, 180, 260)
SEX = Named(column="sex", categories=("1", "2"))
AGE_BAND = Named(column="age", edges=(40, 50, 60), maximum=120)
FEATURES = {
    "age": Numeric(maximum=100, clip=True),  # years
    "bmi": Numeric(minimum=10, maximum=60, clip=True),  # kg/m²
    "bp": Numeric(minimum=40, maximum=160, clip=True),  # mean arterial blood pressure, mmHg
    "s1": Numeric(minimum=50, maximum=400, clip=True),  # cholesterol in serum, mg/dl
    "s2": Numeric(maximum=300, clip=True),  # low-density lipoproteins, mg/dl
    "s3": Numeric(maximum=150, clip=True),  # high-density lipoproteins, mg/dl
    "s4": Numeric(maximum=15, clip=True),  # cholesterol over high-density lipoproteins
    "s5": Numeric(minimum=2, maximum=8, clip=True),  # logarithm of triglycerides
    "s6": Numeric(minimum=30, maximum=300, clip=True),  # blood sugar, mg/dl
}
SCHEMA = Schema(
    name="diabetes",
    kind="tabular",
    shape=(len(FEATURES),),
    classes=(),
    groupings={"sex": SEX.names, "age_band": bands(AGE_BAND.edges)},
    feature_names=feature_names(FEATURES),
    task="regression",
    targets=("progression",),
    bounds=(TARGET.minimum, TARGET.maximum),
)


class Diabetes(Source):
    """Disease progression after a year; groupings sex and age band."""

    name = "diabetes"
    tasks = ("regression",)
    sizes: ClassVar[tuple[int, ...]] = (442,)

    def locate(self, raw_dir: Path) -> RawFiles:
        """No file is needed: the table is part of scikit-learn."""
        return RawFiles({}, "embedded")

    def read(self, files: RawFiles) -> Records:
        """442 patients, float32 `[442, 9]`."""
        from sklearn.datasets import load_diabetes  # slow to import, and only needed here

        where = "the table of scikit-learn"
        frame, target = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
        return Records(
            features=self.encode(frame),
            labels=TARGET.values(target, where).float(),
            groups={"sex": SEX.ids(frame["sex"], where), "age_band": AGE_BAND.ids(frame["age"], where)},
            schema=SCHEMA,
        )

    @property
    def columns(self) -> Mapping[str, Named | Numeric]:
        """The columns that are features, in their own units."""
        return FEATURES


class DiabetesBands(Diabetes):
    """The progression as ordered classes."""

    name = "diabetes_bands"
    tasks = ("ordinal",)
    sizes = (147, 139, 103, 53)

    def read(self, files: RawFiles) -> Records:
        """The same patients, each with the band of its progression."""
        found, classes = super().read(files), bands(EDGES)
        schema = replace(SCHEMA, name=self.name, task="ordinal", classes=classes, targets=(), bounds=())
        schema = replace(schema, groupings={"class": classes, **SCHEMA.groupings})
        labels = band_ids(found.labels, EDGES)
        return Records(found.features, labels, {"class": labels, **found.groups}, schema)
