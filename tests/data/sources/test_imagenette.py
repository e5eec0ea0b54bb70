"""Imagenette: torchvision's layout, the provider's split, and errors that name the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.data.sources.tiny import write_tiny

from equidp.data.sources import source
from equidp.errors import EquidpError


def read(raw_dir: Path, options: dict):
    photos = source("imagenette", options)
    return photos.read(photos.locate(raw_dir))


def test_photographs_are_cut_to_squares_in_the_providers_order(tmp_path: Path) -> None:
    records = read(tmp_path, write_tiny("imagenette", tmp_path))
    assert records.features.shape == (90, 3, 16, 16)
    assert torch.bincount(records.labels).tolist() == [9] * 10
    assert int(records.part.sum()) == 30
    brightness = [float(records.features[records.labels == k].float().mean()) for k in range(10)]
    assert brightness == sorted(brightness)


def test_a_missing_class_is_refused(tmp_path: Path) -> None:
    options = write_tiny("imagenette", tmp_path)
    shutil.rmtree(tmp_path / "imagenette" / "imagenette2-160" / "val" / "n01440764")
    with pytest.raises(EquidpError, match="lacks classes of Imagenette"):
        read(tmp_path, options)


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    options = write_tiny("imagenette", tmp_path)
    folder = tmp_path / "imagenette" / "imagenette2-160" / "val"
    (folder / "n01440764").rename(folder / "n99999999")
    with pytest.raises(EquidpError, match=r"imagenette2-160/val is not Imagenette \(KeyError"):
        read(tmp_path, options)


def test_missing_files_are_fetched_with_torchvision(tmp_path: Path, monkeypatch) -> None:
    import torchvision.datasets

    asked = {}

    def fetch(root, **how):
        asked.update(how)
        write_tiny("imagenette", Path(root).parent)

    monkeypatch.setattr(torchvision.datasets, "Imagenette", fetch)
    assert source("imagenette").locate(tmp_path).paths
    assert asked == {"size": "160px", "download": True}


def test_an_archive_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    options = write_tiny("imagenette", tmp_path)
    photos = source("imagenette", {**options, "verify": True})
    with pytest.raises(EquidpError, match=r"records of class 'tench' where 963 are published"):
        photos.records(photos.locate(tmp_path))
