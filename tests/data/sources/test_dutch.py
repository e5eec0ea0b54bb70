"""Dutch census: the paper's 35 one-hot columns, and groups told by the file's own codes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.data.sources.tiny import CENSUS_HEADER, write_tiny

from equidp.data.sources import source
from equidp.errors import EquidpError

VALUES = ["male", "6", "1131", "112", "1", "1", "1", "5", "111", "135", "1", "1"]


def test_the_real_file_gives_the_providers_counts(raw_dir: Path) -> None:
    dutch = source("dutch")
    records = dutch.read(dutch.locate(raw_dir))
    assert records.schema.groupings["sex"] == ("female", "male")
    assert torch.bincount(records.groups["sex"]).tolist() == [30_273, 30_147]
    assert torch.bincount(records.labels).tolist() == [31_657, 28_763]
    high_by_sex = torch.bincount(records.groups["sex"][records.labels == 1])
    assert high_by_sex.tolist() == [9_903, 18_860]
    assert torch.bincount(records.groups["age_band"]).min() > 1_000


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"age": False}, 35),
        ({}, 36),
        ({"age": False, "economic_activity": True}, 47),
        ({"economic_activity": True}, 48),
    ],
)
def test_the_options_choose_the_features(tmp_path: Path, options: dict, width: int) -> None:
    dutch = source("dutch", {**write_tiny("dutch", tmp_path), **options})
    records = dutch.read(dutch.locate(tmp_path))
    assert records.features.shape == (200, width)
    assert len(records.schema.feature_names) == width
    assert not any(name.startswith("sex") for name in records.schema.feature_names)


def test_age_bands_follow_the_five_year_codes(tmp_path: Path) -> None:
    dutch = source("dutch", write_tiny("dutch", tmp_path))
    records = dutch.read(dutch.locate(tmp_path))
    codes = (records.features[:, -1] * 17).round().long()
    names = [records.schema.groupings["age_band"][i] for i in records.groups["age_band"].tolist()]
    expected = {4: "under 30", 6: "under 30", 7: "30-39", 8: "30-39", 9: "40-49", 12: "50-59", 13: "60 and over"}
    for code, name in expected.items():
        assert {n for c, n in zip(codes.tolist(), names, strict=True) if c == code} == {name}


def test_encode_takes_rows_with_the_files_names() -> None:
    row = dict(
        zip(
            CENSUS_HEADER.split(","),
            VALUES,
            strict=True,
        )
    )
    features = source("dutch").encode(pd.DataFrame([row]))
    assert features.shape == (1, 36)
    assert float(features.sum()) == pytest.approx(8 + 6 / 17)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("male,4,", "man,4,", r"dutch\.csv, line 2, column 'sex': 'man'\. Did you mean"),
        ("male,4,", "male,18,", r"line 2, column 'age': '18' is out of bounds; give a number from 1 to 17"),
        ("household_size", "size", r"No column 'household_size' in .*dutch\.csv\."),
        ("1,111,13", "1,114,13", r"line 3, column 'economic_status': '114'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    import gzip

    dutch = source("dutch", write_tiny("dutch", tmp_path))
    packed = tmp_path / "dutch" / "dutch.csv.gz"
    text = gzip.decompress(packed.read_bytes()).decode()
    packed.unlink()
    (tmp_path / "dutch" / "dutch.csv").write_text(text.replace(old, new, 1))
    with pytest.raises(EquidpError, match=message):
        dutch.read(dutch.locate(tmp_path))


def test_a_table_without_a_column_names_it(tmp_path: Path) -> None:
    options = write_tiny("dutch", tmp_path)
    (tmp_path / "dutch" / "dutch.csv").write_text(CENSUS_HEADER.replace("occupation", "job") + "\n" + ",".join(VALUES))
    dutch = source("dutch", options)
    with pytest.raises(EquidpError, match=r"No column 'occupation' in .*dutch\.csv"):
        dutch.read(dutch.locate(tmp_path))
