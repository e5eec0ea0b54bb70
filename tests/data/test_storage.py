"""Storage: what is saved is loaded, and nothing damaged or half-written passes for Records."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from equidp.data import storage
from equidp.data.raw_files import RawFiles
from equidp.data.records import Records, Schema
from equidp.data.sources import source
from equidp.errors import EquidpError


@pytest.fixture
def records() -> Records:
    digits = source("digits").read(RawFiles({}, "embedded"))
    return dataclasses.replace(digits, part=torch.zeros(1797, dtype=torch.uint8), unit=torch.arange(1797))


def test_a_round_trip_gives_equal_records(records: Records, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.safetensors"
    storage.save(records, path)
    loaded = storage.load(path)
    assert loaded.schema == records.schema
    for name in ("features", "labels", "part", "unit"):
        assert torch.equal(getattr(loaded, name), getattr(records, name)), name
        assert getattr(loaded, name).dtype == getattr(records, name).dtype
    assert torch.equal(loaded.groups["class"], records.groups["class"])


def test_empty_records_and_absent_columns_survive(records: Records, tmp_path: Path) -> None:
    path = tmp_path / "records.safetensors"
    none = dataclasses.replace(records, part=None, unit=None).take(torch.zeros(0, dtype=torch.int64))
    storage.save(none, path)
    loaded = storage.load(path)
    assert len(loaded) == 0
    assert loaded.part is None
    assert loaded.unit is None
    assert loaded.schema == Schema.from_dict(records.schema.to_dict())


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_nobody_else_reads_a_copy_of_private_records(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw files may be closed to others. Some versions of safetensors leave what they write open to all."""

    def save_open(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(save(tensors, metadata))
        modes.append(stat.S_IMODE(path.stat().st_mode))

    modes: list[int] = []
    monkeypatch.setattr(storage, "save_file", save_open)
    path = tmp_path / "records.safetensors"
    storage.save(records, path)
    assert [*modes, stat.S_IMODE(path.stat().st_mode)] == [0o600, 0o600]
    assert len(storage.load(path)) == len(records)


@pytest.mark.parametrize("keep", [0, 7, 200, -100])
def test_a_truncated_file_is_refused(records: Records, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "records.safetensors"
    storage.save(records, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(EquidpError, match=r"records\.safetensors is damaged .*run the pipeline `ingestion` again"):
        storage.load(path)


def test_a_changed_byte_is_refused(records: Records, tmp_path: Path) -> None:
    path = tmp_path / "records.safetensors"
    storage.save(records, path)
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(EquidpError, match="was changed after it was written"):
        storage.load(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(EquidpError, match="does not hold Records of this version"):
        storage.load(path)


def test_a_missing_file_names_the_pipeline(tmp_path: Path) -> None:
    with pytest.raises(EquidpError, match=r"is missing; run the pipeline `ingestion`"):
        storage.load(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
)
def test_a_failed_write_leaves_the_old_file_and_no_partial_one(
    records: Records, tmp_path: Path, monkeypatch, error: Exception
) -> None:
    path = tmp_path / "records.safetensors"
    storage.save(records, path)
    before = path.read_bytes()

    def full_disk(tensors, target, metadata):
        Path(target).write_bytes(b"half")
        raise error

    monkeypatch.setattr(storage, "save_file", full_disk)
    with pytest.raises(EquidpError, match=r"Cannot write .*records.safetensors: the disk is full"):
        storage.save(records, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["records.safetensors"]
