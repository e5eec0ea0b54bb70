"""CIFAR-10: batches are read without being unpickled, the packed file gives the provider's pixels."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.sources.tiny import cifar_batch, python_2_pickle, write_tiny

from equidp.data.sources import source
from equidp.data.sources.cifar10 import read_batch
from equidp.errors import EquidpError


@pytest.mark.slow
def test_the_real_packed_file_gives_the_published_figures(raw_dir: Path) -> None:
    cifar = source("cifar10")
    records = cifar.read(cifar.locate(raw_dir))
    train = records.features[records.part == 0]
    assert torch.bincount(records.labels[records.part == 0]).tolist() == [5_000] * 10
    assert torch.bincount(records.labels[records.part == 1]).tolist() == [1_000] * 10
    for channel in range(3):
        # One channel at a time, in place of 600 MB of floats.
        pixels = train[:, channel].float() / 255
        assert float(pixels.mean()) == pytest.approx(records.schema.mean[channel], abs=1e-4)
        assert float(pixels.std()) == pytest.approx(records.schema.sd[channel], abs=1e-4)


@pytest.mark.parametrize("form", ["python 2", 2, 3, 4])
def test_a_batch_is_read_whatever_pickled_it(tmp_path: Path, form: str | int) -> None:
    path, batch = tmp_path / "data_batch_1", cifar_batch(70)
    path.write_bytes(python_2_pickle(batch) if form == "python 2" else pickle.dumps(batch, protocol=int(form)))
    pixels, labels = read_batch(path)
    assert torch.equal(pixels.reshape(70, -1), torch.from_numpy(batch[b"data"]))
    assert labels.tolist() == batch[b"labels"]


def test_the_writer_of_tiny_batches_writes_what_python_2_wrote() -> None:
    batch = pickle.loads(python_2_pickle(cifar_batch(12)), encoding="bytes")
    assert np.array_equal(batch[b"data"], cifar_batch(12)[b"data"])


def test_nothing_in_a_batch_is_carried_out(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.write_text, (tmp_path / "sprung", "x"))

    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"labels": [1], b"data": Trap()}))
    with pytest.raises(EquidpError, match="bytes of pixels for 1 labels"):
        read_batch(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x80\x02}(U\x06lab", "is not a CIFAR-10 batch"),
        (b"<html>", "is not a CIFAR-10 batch"),
        (b"", "is not a CIFAR-10 batch"),
        (pickle.dumps({b"labels": [12], b"data": bytes(3072)}), r"record 0: label 12 lies outside 0\.\.9"),
        (pickle.dumps({b"labels": [2, 3], b"data": bytes(3072)}), "holds 3072 bytes of pixels for 2 labels"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(raw)
    with pytest.raises(EquidpError, match=message):
        read_batch(path)


def test_the_providers_checksum_is_checked(tmp_path: Path) -> None:
    write_tiny("cifar10", tmp_path)
    with pytest.raises(
        EquidpError, match=r"data_batch_1 is not the provider's file: the md5 .*c99cafc152244af753f735de"
    ):
        source("cifar10", {"download": False}).locate(tmp_path)


def test_the_checksums_are_torchvisions() -> None:
    import torchvision.datasets

    from equidp.data.sources.cifar10 import BATCHES

    assert dict(torchvision.datasets.CIFAR10.train_list + torchvision.datasets.CIFAR10.test_list) == BATCHES


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"PK\x03\x04" + bytes(100), lambda raw: b"x" * 99]
)
def test_a_damaged_packed_file_is_refused(tmp_path: Path, damage) -> None:
    path = tmp_path / "cifar10" / "cifar10.npz"
    path.parent.mkdir()
    np.savez(path, train_labels=np.zeros(5))
    path.write_bytes(damage(path.read_bytes()))
    cifar = source("cifar10", {"verify": False, "download": False})
    with pytest.raises(EquidpError, match=r"cifar10\.npz is damaged or not the packed file") as refused:
        cifar.read(cifar.locate(tmp_path))
    assert "pickle" not in str(refused.value)  # NumPy's advice, which nobody should follow here


def test_missing_batches_are_fetched_with_torchvisions_downloader(tmp_path: Path, monkeypatch) -> None:
    import torchvision.datasets

    monkeypatch.setattr(
        torchvision.datasets, "CIFAR10", lambda root, download: write_tiny("cifar10", Path(root).parent)
    )
    assert len(source("cifar10", {"verify": False}).locate(tmp_path).paths) == 6
