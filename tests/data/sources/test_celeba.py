"""CelebA and Imagenette: thin wrappers of torchvision, tried on tiny copies of the providers' layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.data.sources.tiny import write_tiny

from equidp.data.sources import source
from equidp.errors import EquidpError


@pytest.fixture
def options(tmp_path: Path) -> dict:
    return write_tiny("celeba", tmp_path)


def read(raw_dir: Path, options: dict):
    faces = source("celeba", options)
    return faces.read(faces.locate(raw_dir))


def test_the_label_is_an_attribute_and_all_others_are_groupings(tmp_path: Path, options: dict) -> None:
    records = read(tmp_path, options)
    assert records.schema.classes == ("not Male", "Male")
    assert len(records.schema.groupings) == 40
    bright = records.features.float().mean(dim=(1, 2, 3)) > 60
    assert torch.equal(bright.long(), records.labels)
    ids, names = records.grouping("Young*Smiling")
    assert names[0] == "not Young*not Smiling"
    assert len(ids) == len(records)


def test_the_validation_part_is_left_out(tmp_path: Path, options: dict) -> None:
    records = read(tmp_path, options)
    assert (int((records.part == 0).sum()), int(records.part.sum())) == (30, 20)


def test_another_attribute_can_be_the_label(tmp_path: Path, options: dict) -> None:
    records = read(tmp_path, {**options, "attribute": "Young"})
    assert "Male" in records.schema.groupings
    assert "Young" not in records.schema.groupings
    with pytest.raises(EquidpError, match=r"Unknown attribute of CelebA 'Yung'\. Did you mean 'Young'"):
        read(tmp_path, {**options, "attribute": "Yung"})


def test_several_attributes_are_labels_of_0_or_1(tmp_path: Path, options: dict) -> None:
    one, records = read(tmp_path, options), read(tmp_path, {**options, "attributes": "Male+Young"})
    assert (records.schema.task, records.schema.targets, records.schema.classes) == (
        "multilabel",
        ("Male", "Young"),
        (),
    )
    assert len(records.schema.groupings) == 38
    assert torch.equal(records.labels, torch.stack([one.labels, one.groups["Young"]], dim=1).float())
    with pytest.raises(EquidpError, match="name two different attributes or more"):
        read(tmp_path, {**options, "attributes": ["Male", "Male"]})


def test_torchvision_checks_the_annotations(tmp_path: Path, options: dict) -> None:
    with pytest.raises(EquidpError, match=r"celeba is not CelebA as published \(RuntimeError: .*verify=false"):
        read(tmp_path, {**options, "verify": True})


def test_an_image_that_is_missing_is_named(tmp_path: Path, options: dict) -> None:
    (tmp_path / "celeba" / "img_align_celeba" / "000005.jpg").unlink()
    with pytest.raises(EquidpError, match=r"000005\.jpg is missing; unpack img_align_celeba\.zip again"):
        read(tmp_path, options)


def test_a_broken_annotation_file_is_named(tmp_path: Path, options: dict) -> None:
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("000001.jpg train\n")
    with pytest.raises(EquidpError, match=r"celeba is not CelebA as published \(ValueError"):
        read(tmp_path, options)


def test_missing_files_are_fetched_with_torchvision(tmp_path: Path, monkeypatch) -> None:
    import torchvision.datasets

    def fetch(root, download):
        raise RuntimeError("To download files from GDrive, 'gdown' is required.")

    monkeypatch.setattr(torchvision.datasets, "CelebA", fetch)
    with pytest.raises(
        EquidpError, match=r"celeba, a folder with img_align_celeba/ .* is missing: .*'gdown' is required"
    ):
        source("celeba").locate(tmp_path)


def test_an_image_that_is_replaced_is_encoded_again(tmp_path: Path, options: dict) -> None:
    """Else the old copy of a face that was withdrawn would train on."""
    before = source("celeba", options).locate(tmp_path).fingerprint
    image = tmp_path / "celeba" / "img_align_celeba" / "000005.jpg"
    image.write_bytes((tmp_path / "celeba" / "img_align_celeba" / "000006.jpg").read_bytes() + b" ")
    assert source("celeba", options).locate(tmp_path).fingerprint != before
