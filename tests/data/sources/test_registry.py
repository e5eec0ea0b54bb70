"""The registry of sources: every dataset reads its tiny files, and misspelt names find the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.data.sources.tiny import CSV_OPTIONS, WRITERS, write_tiny

from equidp.data.encoding import encode
from equidp.data.raw_files import RawFiles
from equidp.data.records import Records
from equidp.data.sources import SOURCES, source
from equidp.data.sources.base import Source
from equidp.data.splitting import split
from equidp.errors import EquidpError, unknown_name
from equidp.parameters import DataSettings, PrivacySettings

DTYPES = {"tabular": torch.float32, "image": torch.uint8, "text": torch.int64}


def test_every_source_has_a_writer_of_tiny_files() -> None:
    assert set(WRITERS) == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_contract_on_tiny_files(name: str, tmp_path: Path) -> None:
    one = source(name, write_tiny(name, tmp_path))
    files = one.locate(tmp_path)
    records = one.read(files)
    assert records.schema.name == one.name == name
    assert records.features.dtype == DTYPES[records.schema.kind]
    if records.schema.classes:
        assert next(iter(records.schema.groupings)) == "class"
        assert records.schema.groupings["class"] == records.schema.classes
        assert torch.equal(records.groups["class"], records.labels)
        assert set(records.labels.tolist()) == set(range(len(records.schema.classes)))
    else:
        assert "class" not in records.schema.groupings
        assert records.labels.dtype == torch.float32
    for grouping, names in records.schema.groupings.items():
        assert len(set(names)) == len(names)
        assert int(records.groups[grouping].min()) >= 0
        assert int(records.groups[grouping].max()) < len(names)
    parts = split(records, seed=0, public_fraction=0.1)
    assert min(len(parts.train), len(parts.test), len(parts.public)) > 0


@pytest.mark.parametrize("name", SOURCES)
def test_equal_files_have_equal_fingerprints_and_equal_records(name: str, tmp_path: Path) -> None:
    one = source(name, write_tiny(name, tmp_path))
    first, second = one.locate(tmp_path), one.locate(tmp_path)
    assert first == second
    assert first.fingerprint
    assert torch.equal(one.read(first).features, one.read(second).features)


def test_misspelt_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(EquidpError, match=r"Unknown dataset 'mnst'\. Did you mean 'mnist'"):
        source("mnst")
    with pytest.raises(EquidpError, match=r"Unknown data option of dataset 'adult': 'verfy'\. Did you mean 'verify'"):
        source("adult", {"verfy": False})
    with pytest.raises(EquidpError, match=r"data option of dataset 'adult' 'verify' is not valid: .*given: 'maybe'"):
        source("adult", {"verify": "maybe"})


def test_a_name_with_a_comma_is_listed_in_quotes_as_it_would_read_as_two() -> None:
    assert unknown_name("ward", "ENT", ["ENT, eyes", "surgery"]).message.endswith("Valid: 'ENT, eyes', surgery.")


def test_capitals_hide_no_name() -> None:
    assert unknown_name("algorithm", "DPSGD_F", ["dpsgd", "dpsgd_f", "sgd"]).message.startswith(
        "Unknown algorithm 'DPSGD_F'. Did you mean 'dpsgd_f'?"
    )
    assert "Did you mean 'Age'?" in unknown_name("column", "age", ["Sex", "Age", "AGE_1"]).message


def test_of_a_thousand_names_those_most_like_the_given_one_are_shown() -> None:
    told = unknown_name("network", "net_7x", [f"net_{i}" for i in range(1_000)]).message
    assert "Did you mean 'net_7'? Valid: net_7, " in told
    assert told.endswith(" and 990 more.")
    assert len(told) < 200


def test_a_source_that_names_no_files_is_told_what_it_lacks(tmp_path: Path) -> None:
    class Made(Source):
        name = "made"

        def read(self, files: RawFiles) -> Records:
            raise NotImplementedError

    with pytest.raises(EquidpError, match=r"Source 'made' names no files: give its class `layouts`, or a `search`"):
        Made().locate(tmp_path)


def test_split_levels_have_the_datasets_own_words() -> None:
    assert source("mnist").split_level("data.split_by", "image") == "record"
    assert source("adult").split_level("data.split_by", "record") == "record"
    with pytest.raises(EquidpError, match=r"Unknown value of data\.split_by for source 'adult': 'lesion'"):
        source("adult").split_level("data.split_by", "lesion")


def test_units_of_ones_own_table_are_called_as_their_column() -> None:
    table = source("csv", {**CSV_OPTIONS, "unit": "patient"})
    assert [table.split_level("privacy.unit", word) for word in ("patient", "unit", "record")] == [
        "unit",
        "unit",
        "record",
    ]
    words = (
        r"Unknown value of privacy\.unit for source 'csv': 'unit'\. Valid: record\. For .* ids: data\.options\.unit\."
    )
    with pytest.raises(EquidpError, match=words):
        source("csv", {**CSV_OPTIONS, "unit": ""}).split_level("privacy.unit", "unit")


@pytest.mark.parametrize("name", SOURCES)
def test_a_datasets_word_for_its_units_protects_units(name: str, tmp_path: Path) -> None:
    one = source(name, write_tiny(name, tmp_path))
    for word in ("record", *one.words()):
        by_unit = one.split_level("privacy.unit", word) == "unit"
        assert PrivacySettings(noise_multiplier=1.0, unit=word).by_unit == by_unit
        assert (DataSettings(split_by=word).split_unit == "unit") == by_unit


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_feature_that_is_no_finite_number_is_refused_before_it_weighs_nothing(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = write_tiny("adult", tmp_path)
    records, _ = encode("adult", "adult", options, raw_folder=tmp_path, cache=tmp_path / "kept")
    assert records.features.isfinite().all()
    records.features[7, 0] = value
    monkeypatch.setattr(SOURCES["adult"], "read", lambda self, files: records)
    with pytest.raises(
        EquidpError, match="Record 7 of dataset 'adult', counted from 0, has a feature that is not a finite"
    ):
        encode("adult", "adult", options, raw_folder=tmp_path, cache=tmp_path / "anew")
