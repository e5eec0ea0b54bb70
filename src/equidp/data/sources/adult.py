"""Adult: the 1994 census income data of the UCI repository, income above 50,000 dollars or not.

The two files are joined, incomplete rows dropped (45,222 remain) and split anew, as the papers do. The declared
categories follow the provider's `adult.names`; `Never-worked` is absent because such rows have no occupation and are
therefore incomplete. 40 features, without the protected attributes, as in the DPSGD-F paper.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from equidp.data.cells import codes, numbers, require
from equidp.data.columns import Categorical, Numeric, band_ids, bands, encode, feature_names
from equidp.data.raw_files import PublishedFile, RawFiles
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source
from equidp.data.tables import read_rows
from equidp.system.files import replacing

PAGE = "https://archive.ics.uci.edu/dataset/2/adult"
MISSING = "?"
CLASSES = ("<=50K", ">50K")
AGE_EDGES = (30, 40, 50, 60)
NAMES = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
WORKCLASS = ("Federal-gov", "Local-gov", "Private", "Self-emp-inc", "Self-emp-not-inc", "State-gov", "Without-pay")
MARITAL_STATUS = (
    "Divorced", "Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent", "Never-married", "Separated",
    "Widowed",
)  # fmt: skip
OCCUPATION = (
    "Adm-clerical", "Armed-Forces", "Craft-repair", "Exec-managerial", "Farming-fishing", "Handlers-cleaners",
    "Machine-op-inspct", "Other-service", "Priv-house-serv", "Prof-specialty", "Protective-serv", "Sales",
    "Tech-support", "Transport-moving",
)  # fmt: skip
RELATIONSHIP = ("Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife")
RACE = ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White")
SEX = ("Female", "Male")
FEATURES: Mapping[str, Categorical | Numeric] = {
    "workclass": Categorical(categories=WORKCLASS),
    "marital-status": Categorical(categories=MARITAL_STATUS),
    "occupation": Categorical(categories=OCCUPATION),
    "relationship": Categorical(categories=RELATIONSHIP),
    "age": Numeric(maximum=90),
    "fnlwgt": Numeric(maximum=1.5e6),
    "education-num": Numeric(maximum=16),
    "capital-gain": Numeric(maximum=1e5),
    "capital-loss": Numeric(maximum=4356),
    "hours-per-week": Numeric(maximum=99),
}
SCHEMA = Schema(
    name="adult",
    kind="tabular",
    shape=(40,),
    classes=CLASSES,
    groupings={"class": CLASSES, "sex": SEX, "race": RACE, "age_band": bands(AGE_EDGES)},
    feature_names=feature_names(FEATURES),
)


class Adult(Source):
    """UCI Adult; groupings class, sex, race, age band."""

    name = "adult"
    sizes = (34_014, 11_208)
    layouts = (
        (
            PublishedFile("adult/adult.data", PAGE, "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
            PublishedFile("adult/adult.test", PAGE, "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
        ),
        (PublishedFile("adult/adult.openml.csv", "https://www.openml.org/d/1590"),),
    )

    def read(self, files: RawFiles) -> Records:
        """45,222 complete rows with 40 features."""
        frames = [(str(path), _complete(path)) for path in files.paths.values()]
        labels = [codes(frame["income"], CLASSES, where) for where, frame in frames]
        groups = [_groups(frame, where) for where, frame in frames]
        joined = {name: torch.cat([part[name] for part in groups]) for name in groups[0]}
        return Records(
            features=torch.cat([encode(frame, FEATURES, where) for where, frame in frames]),
            labels=torch.cat(labels),
            groups={"class": torch.cat(labels), **joined},
            schema=SCHEMA,
        )

    @property
    def columns(self) -> Mapping[str, Categorical | Numeric]:
        """The provider's columns that are features."""
        return FEATURES

    def download(self, raw_dir: Path) -> None:
        """Fetch the joined table from OpenML with scikit-learn's client."""
        from sklearn.datasets import fetch_openml

        with warnings.catch_warnings():
            # the client tries again at least once, and would warn of it on lines before the one sentence that helps
            warnings.filterwarnings("ignore", message="A network error occurred")
            frame = fetch_openml("adult", version=2, as_frame=True, parser="auto", n_retries=1).frame
        target = Path(raw_dir) / "adult" / "adult.openml.csv"
        with replacing(target) as part:
            frame.rename(columns={"class": "income"})[list(NAMES)].to_csv(part, index=False, na_rep=MISSING)


def _complete(path: Path) -> pd.DataFrame:
    names = None if ".csv" in path.suffixes else NAMES
    frame = read_rows(path, names, skip="|")
    require(frame, (*FEATURES, "race", "sex", "income"), str(path))
    frame = frame[(frame != MISSING).all(axis=1)]
    # The provider's test file ends its labels with a full stop.
    return frame.assign(income=frame["income"].str.removesuffix("."))


def _groups(frame: pd.DataFrame, where: str) -> dict[str, Tensor]:
    return {
        "sex": codes(frame["sex"], SEX, where),
        "race": codes(frame["race"], RACE, where),
        "age_band": band_ids(numbers(frame["age"], 0, 90, where), AGE_EDGES),
    }
