"""Image folder: images of the user's own, with groups from a table that must fit them exactly."""

from __future__ import annotations

import os
import shutil
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import EpsImagePlugin, Image
from tests.data.sources.tiny import write_image, write_tiny

from equidp.data.encoding import encode
from equidp.data.sources import source
from equidp.errors import EquidpError


@pytest.fixture
def options(tmp_path: Path) -> dict:
    return write_tiny("image_folder", tmp_path)


def read(raw_dir: Path, options: dict):
    images = source("image_folder", options)
    return images.read(images.locate(raw_dir))


def test_images_labels_groups_and_units_belong_together(tmp_path: Path, options: dict) -> None:
    records = read(tmp_path, options)
    assert records.features.shape == (80, 3, 16, 16)
    bright = records.features.float().mean(dim=(1, 2, 3)) > 60
    assert torch.equal(bright.long(), records.labels)
    assert torch.bincount(records.groups["sex"]).tolist() == [40, 40]
    assert torch.bincount(records.unit).tolist() == [2] * 40
    # Paths are sorted as text, so rows and images only fit if they were matched by name.
    assert records.groups["sex"][:4].tolist() == [0, 1, 0, 1]
    assert records.unit[1] == records.unit[0] != records.unit[2]


def flat(tmp_path: Path, options: dict) -> dict:
    """The same images in one folder, their classes in the table."""
    rows = (tmp_path / "mine" / "pets.csv").read_text().splitlines()
    told = [f"{row},{row[:3] if at else 'kind'}" for at, row in enumerate(rows)]
    (tmp_path / "mine" / "told.csv").write_text("\n".join([*told, ""]))
    (tmp_path / "flat").mkdir()
    for image in (tmp_path / "mine" / "pets").rglob("*.png"):
        shutil.copy(image, tmp_path / "flat")
    return {**options, "path": "flat", "metadata": "mine/told.csv", "label": "kind"}


def test_a_table_tells_the_classes_of_images_in_one_folder(tmp_path: Path, options: dict) -> None:
    records, told = read(tmp_path, options), read(tmp_path, flat(tmp_path, options))
    assert torch.equal(told.features, records.features)
    assert torch.equal(told.labels, records.labels)
    assert torch.equal(told.groups["class"], records.labels)
    assert torch.equal(told.unit, records.unit)
    for part in ("train", "test"):
        shutil.copytree(tmp_path / "flat", tmp_path / "both" / part)
    for image in sorted((tmp_path / "both" / "train").glob("cat*")) + sorted((tmp_path / "both" / "test").glob("dog*")):
        image.unlink()
    parted = read(tmp_path, {**options, "path": "both", "metadata": "mine/told.csv", "label": "kind"})
    assert parted.labels.tolist() == [1] * 40 + [0] * 40
    assert parted.part.tolist() == [0] * 40 + [1] * 40


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("cat0.png,f,0,cow", r"line 2, column 'kind': 'cow'\. Valid: cat, dog"),
        ("cat0.png,f,0,", "line 2, column 'kind'"),
    ],
)
def test_a_class_that_the_table_does_not_tell_is_refused(tmp_path: Path, options: dict, row: str, message: str) -> None:
    told, table = flat(tmp_path, options), tmp_path / "mine" / "told.csv"
    table.write_text(table.read_text().replace("cat0.png,f,0,cat", row))
    with pytest.raises(EquidpError, match=message):
        read(tmp_path, told)


def test_classes_by_folder_and_by_table_are_told_apart(tmp_path: Path, options: dict) -> None:
    told = flat(tmp_path, options)
    with pytest.raises(EquidpError, match=r"cat0.png is outside .* as would 79 more.*name its column in data.options"):
        read(tmp_path, {**told, "label": ""})
    with pytest.raises(EquidpError, match="need metadata, and so do id and label"):
        read(tmp_path, {**told, "metadata": "", "groups": {}, "unit": ""})
    (tmp_path / "none").mkdir()
    with pytest.raises(EquidpError, match="none holds no JPEG or PNG image"):
        read(tmp_path, {**told, "path": "none"})


def test_grey_images_and_cropping(tmp_path: Path, options: dict) -> None:
    records = read(tmp_path, {**options, "channels": 1, "fit": "crop", "mean": [0.5], "sd": [0.25]})
    assert records.features.shape == (80, 1, 16, 16)
    assert records.schema.mean == (0.5,)


def test_train_and_test_folders_are_the_split(tmp_path: Path, options: dict) -> None:
    for part in ("train", "test"):
        shutil.copytree(tmp_path / "mine" / "pets", tmp_path / "both" / part)
    plain = {key: options[key] for key in ("classes", "size")}
    assert int(read(tmp_path, {**plain, "path": "both"}).part.sum()) == 80

    shutil.copytree(tmp_path / "mine" / "pets", tmp_path / "both" / "val")
    with pytest.raises(EquidpError, match=r"val stands beside train and test, and its images would be left out"):
        read(tmp_path, {**plain, "path": "both"})


def test_a_name_may_have_dots_with_and_without_its_suffix(tmp_path: Path, options: dict) -> None:
    table, pets = tmp_path / "mine" / "pets.csv", tmp_path / "mine" / "pets"
    expected = read(tmp_path, options).groups["sex"]
    for path in pets.rglob("*.png"):
        path.rename(path.with_name(f"scan.{path.name}"))
    header, *rows = table.read_text().splitlines()
    for suffix in (".png", "", ".dcm"):  # .dcm: what the image was made from
        table.write_text("\n".join([header, *(f"scan.{row}".replace(".png", suffix) for row in rows), ""]))
        assert torch.equal(read(tmp_path, options).groups["sex"], expected), suffix


def test_folders_and_names_fit_however_their_accents_are_written(tmp_path: Path, options: dict) -> None:
    """As a Mac's archive unpacks them."""
    composed, apart = (unicodedata.normalize(form, "Kätzchen") for form in ("NFC", "NFD"))
    expected = read(tmp_path, options)
    pets, table = tmp_path / "mine" / "pets", tmp_path / "mine" / "pets.csv"
    for path in (pets / "cat").iterdir():
        path.rename(path.with_name(path.name.replace("cat", apart)))
    (pets / "cat").rename(pets / apart)
    table.write_text(table.read_text().replace("cat", composed))
    records = read(tmp_path, {**options, "classes": [composed, "dog"]})
    assert torch.equal(records.labels, expected.labels)
    assert torch.equal(records.groups["sex"], expected.groups["sex"])


def test_an_image_of_more_than_eight_bits_is_refused_not_cut_off(tmp_path: Path, options: dict) -> None:
    path = tmp_path / "mine" / "pets" / "dog" / "dog0.png"
    Image.fromarray(np.full((16, 16), 4095, dtype=np.uint16)).save(path)
    for channels in (1, 3):
        with pytest.raises(EquidpError, match=r"dog0\.png has more than 8 bits per channel; scale it to 8"):
            read(tmp_path, {**options, "channels": channels})


def test_a_sixteen_bit_image_that_pillow_opens_as_eight_bits_is_refused(tmp_path: Path, options: dict) -> None:
    path, chunks = tmp_path / "mine" / "pets" / "dog" / "dog0.png", []
    for name, data in (
        (b"IHDR", struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0)),  # 16 bits of red, green and blue
        (b"IDAT", zlib.compress(bytes(16 * (1 + 16 * 6)))),
        (b"IEND", b""),
    ):
        chunks.append(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    with pytest.raises(EquidpError, match=r"dog0\.png has more than 8 bits per channel; scale it to 8"):
        read(tmp_path, options)


@pytest.mark.parametrize("place", ["loose.JPG", "train/loose.png", "test/loose.png"])
def test_an_image_in_no_class_is_named(tmp_path: Path, options: dict, place: str) -> None:
    if "/" in place:
        for part in ("train", "test"):
            shutil.copytree(tmp_path / "mine" / "pets", tmp_path / "both" / part)
    else:
        shutil.copytree(tmp_path / "mine" / "pets", tmp_path / "both")
    write_image(tmp_path / "both" / place, 3)
    with pytest.raises(EquidpError, match=r"loose\..* is outside the class folders, and would be left out"):
        read(tmp_path, {"path": "both", "classes": options["classes"]})


def test_of_many_images_in_no_class_it_is_told_how_many(tmp_path: Path, options: dict) -> None:
    shutil.copytree(tmp_path / "mine" / "pets", tmp_path / "flat")
    for i in range(3):
        write_image(tmp_path / "flat" / f"loose{i}.png", 3)
    with pytest.raises(EquidpError, match=r"loose0\.png is outside .* left out, as would 2 more; move it into one"):
        read(tmp_path, {"path": "flat", "classes": options["classes"]})


@pytest.mark.parametrize("suffix", [".jfif", ".avif", ".pgm"])
def test_an_image_of_a_rarer_kind_is_named(tmp_path: Path, options: dict, suffix: str) -> None:
    (tmp_path / "mine" / "pets" / "dog" / f"dog40{suffix}").touch()
    with pytest.raises(EquidpError, match=rf"dog40\{suffix} is neither JPEG nor PNG, and would be left out"):
        read(tmp_path, options)


@pytest.mark.parametrize("place", [".ipynb_checkpoints/dog0-checkpoint.png", "._dog0.png"])
def test_a_copy_that_a_program_keeps_is_no_second_record(tmp_path: Path, options: dict, place: str) -> None:
    """A record that is there twice has twice the influence."""
    write_image(tmp_path / "mine" / "pets" / "dog" / place, 3)
    with pytest.raises(EquidpError, match=r"is hidden, and may be a copy"):
        read(tmp_path, {key: options[key] for key in ("path", "classes", "size")})


def test_an_image_that_would_be_left_out_is_named(tmp_path: Path, options: dict) -> None:
    Image.new("L", (16, 16)).save(tmp_path / "mine" / "pets" / "dog" / "dog40.TIF")
    with pytest.raises(EquidpError, match=r"dog40\.TIF is neither JPEG nor PNG, and would be left out"):
        read(tmp_path, options)


def test_a_dicom_file_without_a_suffix_is_named_and_a_text_file_is_ignored(tmp_path: Path, options: dict) -> None:
    dog = tmp_path / "mine" / "pets" / "dog"
    (dog / "README").write_text("DICM")
    read(tmp_path, options)
    (dog / "IM0001").write_bytes(bytes(128) + b"DICM" + bytes(16))
    with pytest.raises(EquidpError, match=r"IM0001 is neither JPEG nor PNG, and would be left out"):
        read(tmp_path, options)


def test_a_gzipped_scan_is_named(tmp_path: Path, options: dict) -> None:
    (tmp_path / "mine" / "pets" / "dog" / "dog40.nii.gz").touch()
    with pytest.raises(EquidpError, match=r"dog40\.nii\.gz is neither JPEG nor PNG, and would be left out"):
        read(tmp_path, options)


@pytest.mark.parametrize("suffix", [".tif", ".png"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, options: dict, suffix: str) -> None:
    (tmp_path / "mine" / "pets" / "dog" / f"dog40{suffix}").symlink_to(tmp_path / "nowhere")
    with pytest.raises(EquidpError, match=rf"dog40\{suffix} is a broken link"):
        read(tmp_path, options)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe by name")
def test_a_pipe_is_not_waited_for(tmp_path: Path, options: dict) -> None:
    os.mkfifo(tmp_path / "mine" / "pets" / "dog" / "dog40.png")
    with pytest.raises(EquidpError, match=r"dog40\.png is not a file, although its name looks like one"):
        source("image_folder", options).locate(tmp_path)


def test_an_image_that_would_be_left_out_changes_the_fingerprint(tmp_path: Path, options: dict) -> None:
    before = source("image_folder", options).locate(tmp_path).fingerprint  # what kept copies are found by
    Image.new("L", (16, 16)).save(tmp_path / "mine" / "pets" / "dog" / "dog40.TIF")
    assert source("image_folder", options).locate(tmp_path).fingerprint != before


def test_an_image_moved_to_another_class_changes_the_fingerprint(tmp_path: Path, options: dict) -> None:
    """Else the kept copy would be trained on, with the old label."""
    pets = tmp_path / "mine" / "pets"
    for name in ("cat", "dog"):  # a site's folder in each class, called alike
        (pets / name).rename(tmp_path / name)
        (pets / name).mkdir()
        (tmp_path / name).rename(pets / name / "2020")
    before = source("image_folder", options).locate(tmp_path).fingerprint
    last = max((pets / "cat" / "2020").iterdir())
    last.rename(pets / "dog" / "2020" / last.name)
    assert source("image_folder", options).locate(tmp_path).fingerprint != before


def test_a_file_that_is_there_twice_by_a_link_is_refused(tmp_path: Path, options: dict) -> None:
    pets = tmp_path / "mine" / "pets"
    plain = {key: options[key] for key in ("path", "classes", "size")}
    (pets / "dog" / "again.png").symlink_to(pets / "cat" / "cat3.png")
    with pytest.raises(EquidpError, match=r"cat/cat3\.png and .*dog/again\.png are one file, by a link: its person"):
        read(tmp_path, plain)
    (pets / "dog" / "again.png").unlink()
    (pets / "dog" / "more").symlink_to(pets / "cat")
    with pytest.raises(EquidpError, match=r"are one file, by a link"):
        read(tmp_path, plain)


def test_images_of_linked_folders_are_read_and_in_the_fingerprint(tmp_path: Path, options: dict) -> None:
    pets, elsewhere = tmp_path / "mine" / "pets", tmp_path / "elsewhere"
    expected = read(tmp_path, options)
    (pets / "dog").rename(elsewhere)
    (pets / "dog").symlink_to(elsewhere)
    (tmp_path / "more").mkdir()
    (elsewhere / "dog9.png").rename(tmp_path / "more" / "dog9.png")
    (elsewhere / "linked").symlink_to(tmp_path / "more")
    assert torch.equal(read(tmp_path, options).labels, expected.labels)
    before = source("image_folder", options).locate(tmp_path).fingerprint
    write_image(tmp_path / "more" / "dog9.png", 3)
    assert source("image_folder", options).locate(tmp_path).fingerprint != before


def test_a_standard_deviation_of_zero_is_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(EquidpError, match=r"'sd\.1' is not valid: Input should be greater than 0"):
        read(tmp_path, {**options, "sd": [0.2, 0.0, 0.2]})


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line + "\n")


def test_a_class_that_is_not_declared_is_named(tmp_path: Path, options: dict) -> None:
    write_image(tmp_path / "mine" / "pets" / "dgo" / "x.png", 3)
    with pytest.raises(EquidpError, match=r"Unknown class folder in .*pets: 'dgo'\. Did you mean 'dog'"):
        read(tmp_path, options)


def test_a_class_without_a_folder_is_named(tmp_path: Path, options: dict) -> None:
    with pytest.raises(EquidpError, match=r"pets/cow is missing; make it, empty if there is no image of that class"):
        read(tmp_path, {**options, "classes": ["cat", "dog", "cow"]})


def test_whether_a_run_is_refused_does_not_tell_the_only_image_of_a_class(tmp_path: Path, options: dict) -> None:
    """Without that image the run was refused, and with it the model came out."""
    alone = {"path": options["path"], "classes": ["cat", "dog", "cow"], "size": 8}
    only = tmp_path / "mine" / "pets" / "cow" / "one.png"
    write_image(only, 3)
    there = read(tmp_path, alone)
    only.unlink()
    gone = read(tmp_path, alone)
    assert len(there) - len(gone) == 1
    assert torch.equal(there.features[there.labels != 2], gone.features)
    for image in (tmp_path / "mine" / "pets").rglob("*.png"):
        image.unlink()
    with pytest.raises(EquidpError, match="pets holds no JPEG or PNG image"):
        read(tmp_path, alone)


def test_metadata_without_an_image_and_the_reverse_are_named(tmp_path: Path, options: dict) -> None:
    table, pets = tmp_path / "mine" / "pets.csv", tmp_path / "mine" / "pets"
    write_image(pets / "dog" / "stray.png", 3)
    with pytest.raises(EquidpError, match=r"Image 'stray' in .*pets has no row in .*pets\.csv"):
        read(tmp_path, options)
    (pets / "dog" / "stray.png").unlink()
    append(table, "ghost.png,f,1")
    with pytest.raises(EquidpError, match=r"pets\.csv, line 82: image 'ghost' is not in .*pets"):
        read(tmp_path, options)


def test_ambiguous_names_are_refused(tmp_path: Path, options: dict) -> None:
    table, pets = tmp_path / "mine" / "pets.csv", tmp_path / "mine" / "pets"
    shutil.copy(pets / "cat" / "cat0.png", pets / "dog" / "cat0.png")
    with pytest.raises(EquidpError, match=r"pets holds two images called 'cat0'; rename one"):
        read(tmp_path, options)
    append(table, "cat0.png,f,1")
    with pytest.raises(EquidpError, match=r"line 82, column 'image': 'cat0' is in an earlier line too"):
        read(tmp_path, options)


def test_another_decoder_is_another_encoding_unless_ids_say_who_is_who(
    tmp_path: Path, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels may differ in a last bit, and who trains follows from them: the ledger must not take it for one split."""

    def encodings(options: dict) -> list[str]:
        found = []
        for version in ("11.0.0", "12.0.0"):
            monkeypatch.setattr(PIL, "__version__", version)
            told = encode("pets", "image_folder", options, raw_folder=tmp_path, cache=tmp_path / "cache")[1]
            found.append(told["encoding"])
        return found

    assert len(set(encodings(options))) == 2
    assert len(set(encodings({**options, "id": "image"}))) == 1


def test_a_corrupt_image_is_named(tmp_path: Path, options: dict) -> None:
    (tmp_path / "mine" / "pets" / "cat" / "cat7.png").write_bytes(b"not an image")
    with pytest.raises(EquidpError, match=r"cat7\.png is corrupt, or neither JPEG nor PNG"):
        read(tmp_path, options)


def test_postscript_called_png_is_not_run(tmp_path: Path, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow goes by a file's content, and has another program execute this one."""
    run: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: run.append(given))
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n{} loop\n"
    (tmp_path / "mine" / "pets" / "cat" / "cat7.png").write_bytes(program)
    with pytest.raises(EquidpError, match=r"cat7\.png is corrupt, or neither JPEG nor PNG"):
        read(tmp_path, options)
    assert run == []


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP"])
def test_what_an_image_is_does_not_go_by_its_name(tmp_path: Path, options: dict, kind: str) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "mine" / "pets" / "cat" / "cat7.png", kind)
    with pytest.raises(EquidpError, match=r"cat7\.png is corrupt, or neither JPEG nor PNG"):
        read(tmp_path, options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": ""}, "groups and unit need metadata"),
        ({"mean": [0.1]}, "mean and sd need 3 values"),
        ({"classes": ["cat", "cat"]}, "two classes have the same name"),
        ({"path": "../.."}, "must lead to a file below raw_dir"),
        ({"path": "mine/zoo"}, "mine/zoo, a folder with one subfolder per class, is missing"),
        ({"metadata": "mine/zoo.csv"}, r"mine/zoo\.csv, plain or as \.gz, is missing"),
        ({"image": "img"}, r"No column 'img' in .*pets\.csv\. Did you mean 'image'"),
    ],
)
def test_a_wrong_declaration_is_refused(tmp_path: Path, options: dict, change: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        read(tmp_path, {**options, **change})
