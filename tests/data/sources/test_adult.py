"""Adult: the paper's 45,222 rows and 40 features, and a clear error for each kind of bad row."""

from __future__ import annotations

import socket
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.data.sources.tiny import adult_rows, write_tiny

from equidp.data.sources import source
from equidp.data.sources.adult import NAMES
from equidp.errors import EquidpError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny("adult", tmp_path)
    return tmp_path / "adult"


def read(folder: Path):
    adult = source("adult", {"verify": False, "download": False})
    return adult.read(adult.locate(folder.parent))


def test_the_real_files_give_the_papers_counts(raw_dir: Path) -> None:
    adult = source("adult")
    records = adult.read(adult.locate(raw_dir))
    sex, names = records.grouping("sex")
    assert names == ("Female", "Male")
    assert torch.bincount(sex).tolist() == [14_695, 30_527]
    assert torch.bincount(records.labels).tolist() == [34_014, 11_208]
    assert records.features.shape == (45_222, 40)
    assert len(records.schema.feature_names) == 40
    assert float(records.features.min()) >= 0
    assert float(records.features.max()) <= 1


def test_incomplete_rows_are_dropped_and_both_files_joined(folder: Path) -> None:
    records = read(folder)
    assert len(records) == 240
    assert records.part is None


def test_features_follow_the_declared_bounds(folder: Path) -> None:
    records = read(folder)
    names = records.schema.feature_names
    first = dict(zip(names, records.features[0].tolist(), strict=True))
    assert first["age"] == pytest.approx(18 / 90)
    assert first["fnlwgt"] == pytest.approx(77516 / 1.5e6)
    assert first["workclass=Private"] == 1
    assert sum(value for name, value in first.items() if name.startswith("occupation=")) == 1
    assert not any(name.startswith(("sex", "race")) for name in names)


def test_encode_takes_rows_with_the_providers_names(folder: Path) -> None:
    row = adult_rows(1)[0].split(", ")
    frame = pd.DataFrame([row], columns=NAMES)
    assert torch.equal(source("adult").encode(frame)[0], read(folder).features[0])
    with pytest.raises(EquidpError, match=r"No column 'age' in the given table\. .*It has: capital-gain"):
        source("adult").encode(frame.drop(columns="age"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Sales", "Saless", r"adult\.data, line 1, column 'occupation': 'Saless'\. Did you mean 'Sales'"),
        ("18, ", "old, ", r"adult\.data, line 1, column 'age': 'old' is not a number; give a number from 0 to 90"),
        ("18, ", "180, ", r"line 1, column 'age': '180' is out of bounds; give a number from 0 to 90"),
        (">50K", "50K", r"line 1, column 'income': '50K'\. Did you mean '>50K'"),
        (", 40, ", ", ", r"adult\.data, line 1: 14 fields where 15 are expected"),
    ],
)
def test_a_bad_row_is_named(folder: Path, old: str, new: str, message: str) -> None:
    data = folder / "adult.data"
    data.write_text(data.read_text().replace(old, new, 1))
    with pytest.raises(EquidpError, match=message):
        read(folder)


def test_an_empty_file_says_so(folder: Path) -> None:
    (folder / "adult.data").write_text("\n")
    with pytest.raises(EquidpError, match=r"adult\.data holds no rows"):
        read(folder)


def test_a_missing_file_says_where_from_and_where_to(folder: Path) -> None:
    (folder / "adult.data").unlink()
    with pytest.raises(EquidpError) as error:
        source("adult", {"download": False}).locate(folder.parent)
    for part in (
        "adult/adult.data, plain or as .gz, is missing",
        "archive.ics.uci.edu",
        "sha256 5b00264637dbfec3",
        "download is off",
    ):
        assert part in error.value.message


def test_another_providers_file_is_refused_until_verify_is_off(folder: Path) -> None:
    with pytest.raises(EquidpError, match=r"adult\.data is not the provider's file.*verify=false"):
        source("adult", {"download": False}).locate(folder.parent)
    assert source("adult", {"download": False, "verify": False}).locate(folder.parent).paths


def test_a_truncated_gzip_is_named(folder: Path) -> None:
    packed = folder / "adult.test.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(EquidpError, match=r"adult\.test\.gz is truncated or corrupt .*download it again"):
        read(folder)


def test_a_missing_file_is_fetched_with_scikit_learns_client(tmp_path: Path, monkeypatch) -> None:
    import sklearn.datasets

    frame = pd.DataFrame([row.split(", ") for row in adult_rows(30)], columns=NAMES).rename(columns={"income": "class"})
    frame.loc[3, "occupation"] = None
    asked = {}

    def fetch(name, **how):
        asked.update(how, name=name)
        return type("Bunch", (), {"frame": frame})

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    adult = source("adult")
    records = adult.read(adult.locate(tmp_path))
    assert (asked["name"], asked["version"]) == ("adult", 2)
    assert len(records) == 29
    assert [path.name for path in (tmp_path / "adult").iterdir()] == ["adult.openml.csv"]


def test_a_failed_download_ends_in_the_advice(tmp_path: Path, monkeypatch) -> None:
    import sklearn.datasets

    def fetch(*_, **__):
        raise OSError("no route to host\nsecond line")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    with pytest.raises(EquidpError, match=r"is missing.*the automatic download failed: OSError: no route to host\)"):
        source("adult").locate(tmp_path)


def test_without_a_network_the_client_itself_ends_in_the_advice(tmp_path: Path, monkeypatch, recwarn) -> None:
    def refused(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    with pytest.raises(EquidpError, match=r"is missing.*the automatic download failed: URLError: .*no network"):
        source("adult").locate(tmp_path)
    assert not list(recwarn)


def test_a_joined_table_without_a_column_names_it(tmp_path: Path) -> None:
    table = tmp_path / "adult" / "adult.openml.csv"
    table.parent.mkdir()
    table.write_text("\n".join([",".join(NAMES).replace("income", "class"), *adult_rows(3)]))
    with pytest.raises(EquidpError, match=r"No column 'income' in .*adult\.openml\.csv\. .*It has: age"):
        read(table.parent)
