"""HAM10000: lesions stay whole, nobody is dropped for a missing sex, and every broken image or row is named."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.data.sources.tiny import DIAGNOSES, write_image, write_tiny

from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.errors import EquidpError

NV, MEL, BKL, BCC, AKIEC, VASC, DF = 6_705, 1_113, 1_099, 514, 327, 142, 115


def read(raw_dir: Path, **options):
    ham = source("ham10000", {"verify": False, "download": False, "size": 16, **options})
    return ham.read(ham.locate(raw_dir))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny("ham10000", tmp_path)
    return tmp_path / "HAM10000"


def edit(folder: Path, old: str, new: str) -> None:
    metadata = folder / "HAM10000_metadata.csv"
    text = metadata.read_text()
    assert old in text
    metadata.write_text(text.replace(old, new, 1))


def test_the_real_files_give_the_providers_counts(raw_dir: Path) -> None:
    ham = source("ham10000")
    records = ham.read(ham.locate(raw_dir))
    counts = dict(zip(records.schema.classes, torch.bincount(records.labels).tolist(), strict=True))
    assert counts == {"nv": NV, "mel": MEL, "bkl": BKL, "bcc": BCC, "akiec": AKIEC, "vasc": VASC, "df": DF}
    assert len(torch.unique(records.unit)) == 7_470
    assert torch.bincount(records.groups["sex"]).tolist() == [4_552, 5_406, 57]
    assert torch.bincount(records.groups["age_band"])[-1] == 57
    assert torch.bincount(records.groups["majority"]).tolist() == [NV, 10_015 - NV]
    assert records.schema.groupings["localization"][-1] == "unknown"
    assert int((records.groups["localization"] == 14).sum()) == 234
    parts = split(records, seed=0, split_by="unit", membership="strata")
    assert not set(parts.train.unit.tolist()) & set(parts.test.unit.tolist())
    assert len(parts.test) == pytest.approx(2_003, abs=60)


@pytest.mark.slow
def test_the_real_packed_jpegs_give_the_packed_arrays_pixels(raw_dir: Path) -> None:
    arrays, jpegs = (read(raw_dir, layout=layout, size=28) for layout in ("npz", "tar"))
    assert torch.equal(arrays.features, jpegs.features)


def test_images_are_put_to_their_rows(folder: Path) -> None:
    records = read(folder.parent)
    brightness = records.features.float().mean(dim=(1, 2, 3))
    expected = torch.tensor([20.0 * DIAGNOSES.index(DIAGNOSES[i // 2 % 9]) for i in range(180)])
    assert float((brightness - expected - 14.5).abs().max()) < 4
    assert records.features.shape == (180, 3, 16, 16)


def test_a_missing_sex_or_age_is_a_group_of_its_own(folder: Path) -> None:
    records = read(folder.parent)
    assert len(records) == 180
    for grouping in ("sex", "age_band", "localization"):
        ids, names = records.grouping(grouping)
        assert names[-1] == "unknown"
        assert int((ids == len(names) - 1).sum()) == 60


def test_both_images_of_a_lesion_share_a_unit(folder: Path) -> None:
    assert read(folder.parent).unit.tolist() == [i // 2 for i in range(180)]


def test_a_lesion_is_the_word_for_its_unit() -> None:
    ham = source("ham10000")
    found = [ham.split_level("privacy.unit", word) for word in ("lesion", "image", "unit", "record")]
    assert found == ["unit", "record"] * 2


@pytest.mark.parametrize("size", [8, 16, 40])
def test_any_size_is_read_from_the_jpegs(folder: Path, size: int) -> None:
    assert read(folder.parent, size=size).features.shape == (180, 3, size, size)


def test_a_tar_of_jpegs_gives_the_same_images(folder: Path) -> None:
    from_folder = read(folder.parent)
    with tarfile.open(folder / "ham10000_200x150_jpeg.tar.xz", "w:xz") as archive:
        for path in sorted(folder.rglob("*.jpg"), reverse=True):
            archive.add(path, arcname=f"deep/{path.name}")
    assert torch.equal(read(folder.parent, layout="tar").features, from_folder.features)


def test_a_truncated_tar_is_named(folder: Path) -> None:
    packed = folder / "ham10000_200x150_jpeg.tar.xz"
    with tarfile.open(packed, "w:xz") as archive:
        archive.add(folder / "HAM10000_images_part_1", arcname="images")
    packed.write_bytes(packed.read_bytes()[: packed.stat().st_size // 2])
    with pytest.raises(EquidpError, match=r"jpeg\.tar\.xz is truncated or corrupt .*download it again"):
        read(folder.parent, layout="tar")


def test_a_corrupt_jpeg_is_named(folder: Path) -> None:
    path = folder / "HAM10000_images_part_1" / "ISIC_0000004.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(EquidpError, match=r"Image .*ISIC_0000004\.jpg is corrupt, or neither JPEG nor PNG.*replace it"):
        read(folder.parent)


def test_a_bomb_of_an_image_is_refused(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(EquidpError, match=r"is corrupt, or neither JPEG nor PNG .*decompression bomb"):
        read(folder.parent)


def test_a_row_without_an_image_is_named(folder: Path) -> None:
    (folder / "HAM10000_images_part_1" / "ISIC_0000004.jpg").unlink()
    with pytest.raises(EquidpError, match=r"lists 1 images that .* does not hold, the first is 'ISIC_0000004'"):
        read(folder.parent)


def test_a_second_image_of_one_name_is_refused_unless_it_is_the_same(folder: Path) -> None:
    """Masks may lie beside photographs, and which comes first is the order of folders' names."""
    first, masks = folder / "HAM10000_images_part_1" / "ISIC_0000004.jpg", folder / "A_masks"
    masks.mkdir()
    shutil.copy(first, masks)
    assert len(read(folder.parent)) == 180
    write_image(masks / "ISIC_0000004.jpg", 200)
    with pytest.raises(EquidpError, match=r"is a second, different image called 'ISIC_0000004'; remove"):
        read(folder.parent)


def test_an_image_without_a_row_is_named(folder: Path) -> None:
    write_image(folder / "HAM10000_images_part_2" / "ISIC_9999999.jpg", 3)
    with pytest.raises(EquidpError, match=r"Image 'ISIC_9999999' in .* has no row in .*HAM10000_metadata\.csv"):
        read(folder.parent)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ISIC_0000000,nv", "ISIC_0000000,naevus", r"line 2, column 'dx': 'naevus'\."),
        (
            "ISIC_0000001,nv",
            "ISIC_0000000,nv",
            r"line 3, column 'image_id': 'ISIC_0000000' is in an earlier line too",
        ),
        ("histo,0.0,male", "histo,0.0,mail", r"line 2, column 'sex': 'mail'\. Did you mean 'male'"),
        (
            "histo,0.0,male",
            "histo,old,male",
            r"line 2, column 'age': 'old' is not a number; give a number from 0 to 120",
        ),
        ("male,back", "male,moon", r"line 2, column 'localization': 'moon'\."),
        ("lesion_id", "lesion", r"No column 'lesion_id' in .*HAM10000_metadata\.csv\."),
    ],
)
def test_a_bad_row_is_named(folder: Path, old: str, new: str, message: str) -> None:
    edit(folder, old, new)
    with pytest.raises(EquidpError, match=message):
        read(folder.parent)


def test_missing_metadata_and_missing_images_are_asked_for(tmp_path: Path) -> None:
    ham = source("ham10000", {"verify": False})
    with pytest.raises(EquidpError, match=r"HAM10000_metadata\.csv.* is missing: .*this provider allows no automatic"):
        ham.locate(tmp_path)
    (tmp_path / "HAM10000").mkdir()
    (tmp_path / "HAM10000" / "HAM10000_metadata.csv").write_text("x")
    with pytest.raises(EquidpError, match=r"HAM10000, a folder with the images as <image_id>\.jpg.* is missing"):
        ham.locate(tmp_path)


def test_the_packed_arrays_have_one_size(raw_dir: Path) -> None:
    with pytest.raises(EquidpError, match=r"data\.options\.size=32: .*holds 28×28 images; use the JPEG images"):
        read(raw_dir, layout="npz", size=32)
