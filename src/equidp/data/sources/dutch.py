"""Dutch: an extract of the Dutch census of 2001, prestigious occupation or not (60,420 rows, 12 coded columns).

Encoded as 35 one-hot columns (the paper's count; 47 with the current economic activity, which nearly determines the
occupation) and age/17. In the paper's table the group called M is this file's `female`: compare by group size.
"""

from __future__ import annotations

from collections.abc import Mapping

from equidp.data.cells import codes, numbers, require
from equidp.data.columns import Categorical, Numeric, band_ids, encode, feature_names
from equidp.data.raw_files import PublishedFile, RawFiles
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.tables import read_rows

FILE = PublishedFile(
    "dutch/dutch.csv",
    "https://github.com/tailequy/fairness_dataset (experiments/data/dutch.csv)",
    "c0e1df7e2ca07fa84aa99b5565c7b782a381e2fab377648a6d920174d04ce090",
)
CLASSES = ("low", "high")
CODES = ("0", "1")
SEX = ("female", "male")
OLDEST = 17
# Age is coded in five-year bands: 4 is 15-19, 17 is 80 and over.
AGE_EDGES = (7, 9, 11, 13)
AGE_BANDS = ("under 30", "30-39", "40-49", "50-59", "60 and over")
AGE = {"age": Numeric(maximum=OLDEST)}
ACTIVITY = {
    "cur_eco_activity": Categorical(
        categories=("111", "122", "124", "131", "132", "133", "134", "135", "136", "137", "138", "139")
    )
}
ONE_HOT: Mapping[str, Categorical] = {
    "household_position": Categorical(categories=("1110", "1121", "1122", "1131", "1132", "1140", "1210", "1220")),
    "household_size": Categorical(categories=("111", "112", "113", "114", "125", "126")),
    "prev_residence_place": Categorical(categories=("1", "2")),
    "citizenship": Categorical(categories=("1", "2", "3")),
    "country_birth": Categorical(categories=("1", "2", "3")),
    "edu_level": Categorical(categories=("0", "1", "2", "3", "4", "5")),
    "economic_status": Categorical(categories=("111", "112", "120")),
    "marital_status": Categorical(categories=("1", "2", "3", "4")),
}


class DutchOptions(SourceOptions):
    """Options of `dutch`.

    Attributes:
        age: age/17 is a feature.
        economic_activity: the 12 categories of `cur_eco_activity` are features.
    """

    age: bool = True
    economic_activity: bool = False


class Dutch(Source):
    """Dutch census 2001; groupings class, sex, age band."""

    name = "dutch"
    sizes = (31_657, 28_763)
    Options = DutchOptions
    layouts = ((FILE,),)

    @property
    def columns(self) -> dict[str, Categorical | Numeric]:
        """The columns that are features, by the options."""
        activity = ACTIVITY if self.options.economic_activity else {}
        return {**ONE_HOT, **activity, **(AGE if self.options.age else {})}

    def read(self, files: RawFiles) -> Records:
        """60,420 rows, float32 `[N, 36]` with the default options."""
        path = files.paths[FILE.path]
        frame, where = read_rows(path, None), str(path)
        require(frame, (*self.columns, "sex", "age", "occupation"), where)
        labels = codes(frame["occupation"], CODES, where)
        sex = codes(frame["sex"], SEX, where)
        age = band_ids(numbers(frame["age"], 1, OLDEST, where), AGE_EDGES)
        names = feature_names(self.columns)
        schema = Schema(
            name=self.name,
            kind="tabular",
            shape=(len(names),),
            classes=CLASSES,
            groupings={"class": CLASSES, "sex": SEX, "age_band": AGE_BANDS},
            feature_names=names,
        )
        features = encode(frame, self.columns, where)
        return Records(features, labels, {"class": labels, "sex": sex, "age_band": age}, schema)
