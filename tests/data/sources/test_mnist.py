"""MNIST and its relatives: the provider's counts, and a clear error for each kind of bad file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.sources.tiny import write_idx, write_tiny

from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.errors import EquidpError


def read_tiny(raw_dir: Path, name: str = "mnist"):
    mnist = source(name, {"verify": False, "download": False})
    return mnist.read(mnist.locate(raw_dir))


def test_the_real_unbalanced_files_give_the_papers_counts(raw_dir: Path) -> None:
    mnist = source("mnist_unbalanced")
    parts = split(mnist.read(mnist.locate(raw_dir)), seed=0, keep={"8": 500}, membership="strata")
    counts = torch.bincount(parts.train.labels).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 500, 5949]
    assert len(parts.train) == 54_649
    assert len(parts.test) == 10_000
    assert torch.bincount(parts.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_the_real_fashion_files_give_the_providers_counts(raw_dir: Path) -> None:
    fashion = source("fashion_mnist")
    records = fashion.read(fashion.locate(raw_dir))
    assert torch.bincount(records.labels).tolist() == [7_000] * 10
    assert int(records.part.sum()) == 10_000
    assert records.schema.classes[9] == "Ankle boot"


@pytest.mark.parametrize("name", ["mnist", "mnist_unbalanced", "fashion_mnist"])
def test_images_stay_bytes_and_the_providers_split_is_kept(tmp_path: Path, name: str) -> None:
    write_tiny(name, tmp_path)
    records = read_tiny(tmp_path, name)
    assert records.features.dtype == torch.uint8
    assert records.features.shape == (180, 1, 28, 28)
    assert int(records.part.sum()) == 60
    assert records.schema.name == name


@pytest.mark.slow
def test_the_published_constants_standardise_the_real_images(raw_dir: Path) -> None:
    mnist = source("mnist")
    records = mnist.read(mnist.locate(raw_dir))
    pixels = records.features[records.part == 0].float() / 255
    assert float(pixels.mean()) == pytest.approx(records.schema.mean[0], abs=1e-4)
    assert float(pixels.std()) == pytest.approx(records.schema.sd[0], abs=1e-4)


def test_plain_files_and_gzipped_ones_have_one_fingerprint(tmp_path: Path) -> None:
    values = np.zeros((4, 28, 28))
    for folder, suffix in (("plain", ""), ("packed", ".gz")):
        write_tiny("mnist", tmp_path / folder)
        raw = tmp_path / folder / "MNIST" / "raw"
        (raw / "train-images-idx3-ubyte.gz").unlink()
        write_idx(raw / f"train-images-idx3-ubyte{suffix}", values)
    prints = {source("mnist", {"verify": False}).locate(tmp_path / f).fingerprint for f in ("plain", "packed")}
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("train-labels-idx1-ubyte", np.full(120, 11), r"record 0: label 11 lies outside 0\.\.9"),
        ("train-labels-idx1-ubyte", np.zeros(7), r"holds 120 images but .*train-labels-idx1-ubyte 7 labels"),
        ("t10k-labels-idx1-ubyte", np.zeros((60, 2)), r"holds records of shape \(2,\), expected \(\)"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, name: str, values, message: str) -> None:
    write_tiny("mnist", tmp_path)
    write_idx(tmp_path / "MNIST" / "raw" / name, values)
    with pytest.raises(EquidpError, match=message):
        read_tiny(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>not found</html>", "is not an IDX file of unsigned bytes"),
        (b"", "is not an IDX file of unsigned bytes"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 120)) + bytes(119), "holds 119 bytes of data where its header says 120"),
    ],
)
def test_a_file_that_is_no_idx_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_tiny("mnist", tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(EquidpError, match=message):
        read_tiny(tmp_path)


def test_a_missing_file_is_fetched_with_torchvisions_downloader(tmp_path: Path, monkeypatch) -> None:
    import torchvision.datasets

    monkeypatch.setattr(torchvision.datasets, "MNIST", lambda root, download: write_tiny("mnist", Path(root)))
    assert len(source("mnist", {"verify": False}).locate(tmp_path).paths) == 4
