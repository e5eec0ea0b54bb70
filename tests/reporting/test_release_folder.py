"""The folder that goes out is written whole or not at all, bears no dates, and never outlives its run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kedro.io import DatasetError

from equidp.errors import EquidpError
from equidp.pipelines.datasets import UNDATED, OptionalDocumentDataset, ReleaseFolderDataset
from equidp.pipelines.release.nodes import write_asked_release
from equidp.system.files import replacing_folder

FILES = {"README.md": b"card", "model.safetensors": b"\x00weights"}


def folder(tmp_path: Path) -> ReleaseFolderDataset:
    return ReleaseFolderDataset(filepath=str(tmp_path / "run" / "release"))


def test_files_come_back_as_they_were_saved(tmp_path):
    release = folder(tmp_path)
    release.save(FILES)
    assert release.load() == FILES
    assert os.listdir(tmp_path / "run") == ["release"]


def test_a_second_run_leaves_no_file_of_the_first(tmp_path):
    release = folder(tmp_path)
    release.save(FILES)
    release.save({"README.md": b"other"})
    assert release.load() == {"README.md": b"other"}


def test_a_run_that_writes_none_removes_those_of_an_earlier_run(tmp_path):
    release = folder(tmp_path)
    release.save({})
    release.save(FILES)
    release.save({})
    assert not release.exists()


def test_the_files_bear_no_date(tmp_path):
    folder(tmp_path).save(FILES)
    dates = {path.stat().st_mtime for path in (tmp_path / "run" / "release").iterdir()}
    assert dates == {UNDATED}


def test_a_folder_that_fails_half_way_leaves_the_earlier_one(tmp_path, monkeypatch):
    release = folder(tmp_path)
    release.save(FILES)
    monkeypatch.setattr(Path, "write_bytes", _fails_on_the_second())
    with pytest.raises(DatasetError, match="the disk is full"):
        release.save({"a": b"1", "b": b"2"})
    monkeypatch.undo()
    assert release.load() == FILES
    assert os.listdir(tmp_path / "run") == ["release"]


def _fails_on_the_second():
    calls, honest = [], Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return honest(path, content)

    return write


def test_any_error_within_leaves_no_part(tmp_path):
    with pytest.raises(EquidpError), replacing_folder(tmp_path / "out") as part:
        part.mkdir()
    assert os.listdir(tmp_path) == []


def test_a_document_that_is_missing_is_empty_and_a_damaged_one_is_refused(tmp_path):
    found = OptionalDocumentDataset(filepath=str(tmp_path / "audit.json"))
    assert found.load() == {}
    for damaged in ("{", "[1]"):
        (tmp_path / "audit.json").write_text(damaged)
        with pytest.raises(DatasetError, match="is damaged"):
            found.load()


def test_a_run_that_did_not_finish_is_refused():
    with pytest.raises(EquidpError, match="train first"):
        write_asked_release(None, {}, {}, {}, {}, None, {})
