"""CIFAR-10: 50,000 + 10,000 colour images of 32×32, ten classes.

The provider's `python` batches are pickles. They are never unpickled: `pickletools` lists the operations of a pickle
without carrying them out, and the pixel bytes and labels are read from that list.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equidp.data.images import load_arrays, unpack_sheets
from equidp.data.raw_files import PublishedFile, RawFiles, content
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, classified
from equidp.errors import EquidpError

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
FOLDER = "cifar10/cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
PACKED = PublishedFile("cifar10/cifar10.npz", PAGE, "ea60ff18e4f2fadd950cd5fb244a2b43921063c50cc8b2c61c5241e1758bbbbc")
SCHEMA = Schema(
    name="cifar10",
    kind="image",
    shape=(3, SIDE, SIDE),
    classes=CLASSES,
    groupings={"class": CLASSES},
    mean=(0.4914, 0.4822, 0.4465),
    sd=(0.2470, 0.2435, 0.2616),
)
LABELS = "labels"
PIXELS = "data"


class Cifar10(Source):
    """CIFAR-10 from the provider's batches, or from the packed file."""

    name = "cifar10"
    unit_names = ("image",)
    sizes = (5_000,) * 10
    layouts = (tuple(PublishedFile(f"{FOLDER}/{name}", PAGE, md5=md5) for name, md5 in BATCHES.items()), (PACKED,))

    def read(self, files: RawFiles) -> Records:
        """Images uint8 `[60000, 3, 32, 32]`, the provider's training part first."""
        packed = files.paths.get(PACKED.path)
        return classified(SCHEMA, _read_packed(packed) if packed else _read_batches(files))

    def download(self, raw_dir: Path) -> None:
        """Fetch and unpack the batches with torchvision's downloader."""
        import torchvision.datasets

        torchvision.datasets.CIFAR10(str(Path(raw_dir) / "cifar10"), download=True)


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 `[N, 3, 32, 32]` and labels int64 `[N]` of one batch, without unpickling it.

    Raises:
        EquidpError: the file is not such a batch.
    """
    entries = _entries(path)
    pixels = np.frombuffer(b"".join(v for v in entries[PIXELS] if isinstance(v, bytes)), dtype=np.uint8)
    labels = torch.tensor([v for v in entries[LABELS] if isinstance(v, int)], dtype=torch.int64)
    if not len(labels) or len(pixels) != len(labels) * 3 * SIDE * SIDE:
        raise EquidpError(f"{path} holds {len(pixels)} bytes of pixels for {len(labels)} labels; download it again.")
    return torch.from_numpy(pixels.copy()).reshape(-1, 3, SIDE, SIDE), _checked(labels, path)


def _entries(path: Path) -> dict[str, list[bytes | int]]:
    """Values that follow each of the two keys of a batch's dictionary, up to the next key."""
    found: dict[str, list[bytes | int]] = {PIXELS: [], LABELS: []}
    key = ""
    for value in _operands(path):
        name = value.decode("latin-1") if isinstance(value, bytes) else value
        if name in (PIXELS, LABELS, "filenames", "batch_label"):
            key = str(name)
        elif key == PIXELS and isinstance(value, bytes) and len(value) > SIDE:
            found[PIXELS].append(value)
        elif key == LABELS and isinstance(value, int):
            found[LABELS].append(value)
    return found


def _operands(path: Path) -> Iterator[bytes | int]:
    """Byte strings and integers that a pickle would push, in order; memo numbers are left out."""
    try:
        for operation, value, _ in pickletools.genops(content(path)):
            if isinstance(value, str) and operation.name.endswith(("STRING", "UNICODE")):
                yield value.encode("latin-1", errors="replace")
            elif isinstance(value, bytes) or (isinstance(value, int) and "INT" in operation.name):
                yield value
    except (ValueError, UnicodeDecodeError, IndexError) as error:
        raise EquidpError(f"{path} is not a CIFAR-10 batch ({error}); download it again.") from error


def _read_batches(files: RawFiles) -> list[tuple[Tensor, Tensor]]:
    *train, test = (read_batch(files.paths[f"{FOLDER}/{name}"]) for name in BATCHES)
    pixels, labels = zip(*train, strict=True)
    return [(torch.cat(pixels), torch.cat(labels)), test]


def _read_packed(path: Path) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for prefix in ("train_", "test_"):
        arrays = load_arrays(path, [f"{prefix}webp", f"{prefix}offsets", f"{prefix}labels"])
        labels = torch.from_numpy(arrays[f"{prefix}labels"].astype(np.int64))
        pixels = unpack_sheets(arrays, prefix, SIDE, path)
        if len(pixels) != len(labels):
            raise EquidpError(f"{path} holds {len(pixels)} images for {len(labels)} labels; download it again.")
        parts.append((pixels, _checked(labels, path)))
    return parts


def _checked(labels: Tensor, path: Path) -> Tensor:
    outside = ((labels < 0) | (labels >= len(CLASSES))).nonzero()
    if len(outside):
        row = int(outside[0])
        raise EquidpError(f"{path}, record {row}: label {int(labels[row])} lies outside 0..{len(CLASSES) - 1}.")
    return labels
