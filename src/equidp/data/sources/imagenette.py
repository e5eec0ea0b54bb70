"""Imagenette: ten easily told classes of ImageNet, 9,469 + 3,925 photographs, through torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from equidp.data.images import IMAGENET_MEAN, IMAGENET_SD, decode_all, image_files
from equidp.data.membership import identities
from equidp.data.raw_files import PublishedFile, RawFiles, fingerprint, folder_fingerprint
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions, part_column
from equidp.errors import EquidpError, first_line

PAGE = "https://github.com/fastai/imagenette"
ARCHIVES = {"full": "imagenette2", "320px": "imagenette2-320", "160px": "imagenette2-160"}
CLASSES = (
    "tench", "English springer", "cassette player", "chain saw", "church", "French horn", "garbage truck", "gas pump",
    "golf ball", "parachute",
)  # fmt: skip
PARTS = ("train", "val")


class ImagenetteOptions(SourceOptions):
    """Options of `imagenette`.

    Attributes:
        archive: which of the provider's three sizes to read.
        size: side of the square cut from the middle of each photograph.
    """

    archive: Literal["full", "320px", "160px"] = "160px"
    size: Annotated[int, Field(ge=8, le=512)] = 128


class Imagenette(Source):
    """Ten classes; the provider's validation part is the test part."""

    name = "imagenette"
    Options = ImagenetteOptions
    unit_names = ("image",)
    sizes = (963, 955, 993, 858, 941, 956, 961, 931, 951, 960)
    test_size = 3_925

    @property
    def schema(self) -> Schema:
        """Three colour channels, scaled by ImageNet's published constants."""
        return Schema(
            name=self.name,
            kind="image",
            shape=(3, self.options.size, self.options.size),
            classes=CLASSES,
            groupings={"class": CLASSES},
            mean=IMAGENET_MEAN,
            sd=IMAGENET_SD,
        )

    def search(self, raw_dir: Path) -> RawFiles | None:
        """torchvision's folder below `imagenette/`."""
        root = raw_dir / "imagenette"
        folder = root / ARCHIVES[self.options.archive]
        if not all((folder / part).is_dir() for part in PARTS):
            return None
        return RawFiles({"root": root}, fingerprint([folder_fingerprint(folder, image_files(folder))]))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The unpacked archive."""
        return PublishedFile(f"imagenette/{ARCHIVES[self.options.archive]}", PAGE, contains="train/ and val/")

    def download(self, raw_dir: Path) -> None:
        """Fetch and unpack the archive with torchvision's downloader."""
        import torchvision.datasets

        torchvision.datasets.Imagenette(str(Path(raw_dir) / "imagenette"), size=self.options.archive, download=True)

    def read(self, files: RawFiles) -> Records:
        """Images uint8 `[N, 3, size, size]`, the provider's training part first."""
        samples = [self._samples(files.paths["root"], part) for part in PARTS]
        paths = [Path(path) for part in samples for path, _ in part]
        labels = torch.tensor([label for part in samples for _, label in part], dtype=torch.int64)
        encoded = ((i, str(path), path) for i, path in enumerate(paths))
        return Records(
            features=decode_all(encoded, len(paths), side=self.options.size, crop=True, title="Imagenette images"),
            labels=labels,
            groups={"class": labels},
            schema=self.schema,
            identity=identities(path.name for path in paths),
            part=part_column(*map(len, samples)),
        )

    def _samples(self, root: Path, part: str) -> list[tuple[str, int]]:
        import torchvision.datasets  # a second's import that the other datasets need not wait for

        try:
            opened = torchvision.datasets.Imagenette(
                str(root), split=part, size=self.options.archive, loader=lambda path: path
            )
        except (RuntimeError, OSError, KeyError) as error:
            folder = root / ARCHIVES[self.options.archive] / part
            raise EquidpError(
                f"{folder} is not Imagenette ({first_line(error)}); unpack it again from {PAGE}."
            ) from error
        if tuple(names[0] for names in opened.classes) != CLASSES:
            raise EquidpError(f"{root} lacks classes of Imagenette; unpack it again from {PAGE}.")
        return [opened[i] for i in range(len(opened))]
