"""Tiny raw files in every provider's own format, for tests that run a source from end to end.

`write_tiny(name, raw_dir)` writes them and returns the `data.options` to read them with (no checksum, no download).
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OFFLINE = {"verify": False, "download": False}


def write_tiny(name: str, raw_dir: Path) -> dict[str, Any]:
    """Write the raw files of a dataset below `raw_dir`; returns its `data.options`."""
    return WRITERS[name](Path(raw_dir))


def write_idx(path: Path, values: np.ndarray) -> None:
    """One IDX file of unsigned bytes, gzipped when its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def _write_idx_pair(folder: Path, part: str, count: int, side: int = 28) -> None:
    rng = np.random.default_rng(count)
    labels = np.arange(count) % 10
    pixels = rng.integers(0, 60, (count, side, side)) + 15 * labels[:, None, None]
    write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels)
    write_idx(folder / f"{part}-labels-idx1-ubyte", labels)


def _mnist(raw_dir: Path, folder: str = "MNIST") -> dict[str, Any]:
    _write_idx_pair(raw_dir / folder / "raw", "train", 120)
    _write_idx_pair(raw_dir / folder / "raw", "t10k", 60)
    return OFFLINE


ADULT_ROW = (
    "{age}, Private, 77516, Bachelors, 13, Never-married, {job}, Not-in-family, {race}, {sex}, 0, 0, 40, "
    "United-States, {income}"
)


def adult_rows(count: int, *, stop: str = "") -> list[str]:
    """Rows of an Adult file; `stop` ends the labels, as the provider's test file does."""
    jobs, races = ("Sales", "Adm-clerical", "Tech-support"), ("White", "Black")
    return [
        ADULT_ROW.format(
            age=18 + i % 60,
            job=jobs[i % 3],
            race=races[i % 5 == 0],
            sex=("Male", "Female")[i % 2],
            income=(">50K" if (i // 2) % 3 == 0 else "<=50K") + stop,
        )
        for i in range(count)
    ]


def _adult(raw_dir: Path) -> dict[str, Any]:
    folder = raw_dir / "adult"
    folder.mkdir(parents=True, exist_ok=True)
    incomplete = ADULT_ROW.format(age=40, job="?", race="White", sex="Male", income="<=50K")
    (folder / "adult.data").write_text("\n".join([*adult_rows(160), incomplete, ""]))
    test = "\n".join(["|1x3 Cross validator", *adult_rows(80, stop="."), ""])
    (folder / "adult.test.gz").write_bytes(gzip.compress(test.encode()))
    return OFFLINE


WRITERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "digits": lambda raw_dir: {},
    "adult": _adult,
    "mnist": _mnist,
    "mnist_unbalanced": _mnist,
    "fashion_mnist": lambda raw_dir: _mnist(raw_dir, "FashionMNIST"),
}
