"""Digits: the 1,797 images of 8×8 inside scikit-learn; the embedded default, so that a first run needs no file."""

from __future__ import annotations

from pathlib import Path

import torch

from equidp.data.raw_files import RawFiles
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source

CLASSES = tuple("0123456789")
BRIGHTEST = 16
SCHEMA = Schema(
    name="digits", kind="image", shape=(1, 8, 8), classes=CLASSES, groupings={"class": CLASSES}, mean=(0.0,), sd=(1.0,)
)


class Digits(Source):
    """Handwritten digits, 17 grey levels stretched to 0..255; its preset cuts training class 8 to 40."""

    name = "digits"
    unit_names = ("image",)
    sizes = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)

    def locate(self, raw_dir: Path) -> RawFiles:
        """No file is needed: the images are part of scikit-learn."""
        return RawFiles({}, "embedded")

    def read(self, files: RawFiles) -> Records:
        """1,797 images, uint8 `[1797, 1, 8, 8]`."""
        from sklearn.datasets import load_digits  # slow to import, and only needed here

        images, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(images).mul(255 / BRIGHTEST).round().to(torch.uint8).reshape(-1, *SCHEMA.shape)
        ids = torch.from_numpy(labels).long()
        return Records(features=pixels, labels=ids, groups={"class": ids}, schema=SCHEMA)
