"""HAM10000: 10,015 dermatoscopic images of 7,470 skin lesions, seven diagnoses (Tschandl, Rosendahl & Kittler 2018).

Several images show one lesion, so splits keep lesions whole and a lesion can be the unit of privacy. A missing sex or
age is a group of its own. Images come from the provider's JPEG folders, at any resolution, or from packed files.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from equidp.data.cells import codes, place, require
from equidp.data.groupings import Grouping, group_ids, group_names, id_names, unit_ids
from equidp.data.images import (
    IMAGENET_MEAN,
    IMAGENET_SD,
    SUFFIXES,
    Encoded,
    decode_all,
    image_files,
    load_arrays,
    unpack_sheets,
)
from equidp.data.membership import identities
from equidp.data.raw_files import PublishedFile, RawFiles, digest, find, fingerprint, folder_fingerprint, verified
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.tables import read_rows
from equidp.errors import EquidpError

PAGE = "https://doi.org/10.7910/DVN/DBW86T"
FOLDER = "HAM10000"
METADATA = PublishedFile(
    f"{FOLDER}/HAM10000_metadata.csv", PAGE, "06aee5e603d313ba69de38263053c792a1dff030eb9c44a96ceb477ceefb99a5"
)
PACKED = PublishedFile(
    f"{FOLDER}/ham10000_28x28.npz", PAGE, "4c7001c8df9baf51831ca408fddb7b257242b6345d6efd54c53766f567aabd77"
)
TAR = PublishedFile(
    f"{FOLDER}/ham10000_200x150_jpeg.tar.xz", PAGE, "9be56c310eea566fb8fefeff7e4ec0b5950e00fc7a6426a4489c3a0ee0f855ad"
)
IMAGES = PublishedFile(FOLDER, PAGE, contains="the images as <image_id>.jpg, in any subfolder")
PACKED_SIDE = 28
CLASSES = ("akiec", "bcc", "bkl", "df", "nv", "vasc", "mel")
MAJORITY_CLASS = "nv"
MAJORITY = ("majority", "minority")
GROUPINGS = {
    "sex": Grouping(categories=("female", "male"), unknown=True),
    "age_band": Grouping(column="age", edges=(30, 40, 50, 60, 70), maximum=120, unknown=True),
    "localization": Grouping(
        categories=(
            "abdomen", "acral", "back", "chest", "ear", "face", "foot", "genital", "hand", "lower extremity", "neck",
            "scalp", "trunk", "upper extremity",
        ),
        unknown=True,
    ),
}  # fmt: skip


class HamOptions(SourceOptions):
    """Options of `ham10000`.

    Attributes:
        size: side of the square that images are resized to.
        layout: where images are read from; `auto` takes the JPEG folder, then the packed 28×28 file where it has the
            wanted size, then the packed JPEGs.
    """

    size: Annotated[int, Field(ge=8, le=1024)] = PACKED_SIDE
    layout: Literal["auto", "folder", "tar", "npz"] = "auto"


class Ham10000(Source):
    """Skin lesions; groupings class, sex, age band, localization, majority."""

    name = "ham10000"
    Options = HamOptions
    unit_names = ("image", "lesion")
    sizes = (327, 514, 1_099, 115, 6_705, 142, 1_113)
    unit_sizes = (228, 327, 727, 73, 5_403, 98, 614)

    @property
    def schema(self) -> Schema:
        """Three colour channels, scaled by ImageNet's published constants."""
        return Schema(
            name=self.name,
            kind="image",
            shape=(3, self.options.size, self.options.size),
            classes=CLASSES,
            groupings={"class": CLASSES, **group_names(GROUPINGS), "majority": MAJORITY},
            mean=IMAGENET_MEAN,
            sd=IMAGENET_SD,
        )

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The metadata and the images, in the first layout that is there."""
        metadata = find(raw_dir, METADATA)
        images = self._find_images(raw_dir)
        if metadata is None or images is None:
            return None
        table = verified(metadata, METADATA, verify=self.options.verify)
        return RawFiles({"metadata": metadata, "images": images}, fingerprint([table, self._images_digest(images)]))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The metadata, or the images where only they are missing."""
        return IMAGES if find(raw_dir, METADATA) else METADATA

    def read(self, files: RawFiles) -> Records:
        """Images uint8 `[10015, 3, size, size]` in the metadata's order; units are lesions."""
        path, where = files.paths["metadata"], str(files.paths["metadata"])
        frame = read_rows(path, None)
        require(frame, ("lesion_id", "image_id", "dx"), where)
        _refuse_duplicates(frame["image_id"], where)
        labels = codes(frame["dx"], CLASSES, where)
        groups = {"class": labels, **group_ids(frame, GROUPINGS, where)}
        groups["majority"] = (labels != CLASSES.index(MAJORITY_CLASS)).long()
        pixels = self._pixels(files.paths["images"], frame["image_id"].tolist(), where)
        lesions, images = id_names(frame["lesion_id"], where), id_names(frame["image_id"], where, "image")
        return Records(
            pixels,
            labels,
            groups,
            self.schema,
            unit=unit_ids(lesions),
            identity=identities(images),
            unit_identity=identities(lesions),
        )

    def _find_images(self, raw_dir: Path) -> Path | None:
        packed_first = (PACKED, TAR) if self.options.size == PACKED_SIDE else (TAR,)
        packed = {"auto": packed_first, "folder": (), "tar": (TAR,), "npz": (PACKED,)}[self.options.layout]
        folder = raw_dir / FOLDER
        if self.options.layout in ("auto", "folder") and folder.is_dir() and image_files(folder):
            return folder
        return next((path for file in packed if (path := find(raw_dir, file))), None)

    def _images_digest(self, images: Path) -> str:
        if images.is_dir():
            return folder_fingerprint(images, image_files(images))
        known = {Path(file.path).name: file for file in (TAR, PACKED)}.get(images.name)
        return verified(images, known, verify=self.options.verify) if known else digest(images)

    def _pixels(self, images: Path, ids: Sequence[str], where: str) -> Tensor:
        if images.suffix == ".npz":
            return _packed_pixels(images, ids, self.options.size, where)
        position = {image_id: i for i, image_id in enumerate(ids)}
        files = ((path.stem, path) for path in image_files(images)) if images.is_dir() else _in_tar(images)
        found = _placed(files, position, images, where)
        return decode_all(found, len(ids), side=self.options.size, title="HAM10000 images")


def _in_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                content = archive.extractfile(member) if Path(member.name).suffix.lower() in SUFFIXES else None
                if content is not None:
                    yield Path(member.name).stem, content.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise EquidpError(f"{path} is truncated or corrupt ({error}); download it again.") from error


def _placed(
    encoded: Iterable[tuple[str, Path | bytes]], position: dict[str, int], images: Path, where: str
) -> Iterator[Encoded]:
    """Give each image its row's position; every row needs an image, and every image a row."""
    waiting, read = dict(position), dict[str, bytes]()
    for image_id, image in encoded:
        if image_id not in position:
            raise EquidpError(f"Image {image_id!r} in {images} has no row in {where}; remove it or add its row.")
        content = hashlib.sha256(image.read_bytes() if isinstance(image, Path) else image).digest()
        if read.setdefault(image_id, content) != content:  # for example, masks beside photographs
            place = image if isinstance(image, Path) else f"{images}/{image_id}"
            raise EquidpError(f"{place} is a second, different image called {image_id!r}; remove the one or the other.")
        if image_id in waiting:
            yield waiting.pop(image_id), f"{images}/{image_id}" if isinstance(image, bytes) else str(image), image
    if waiting:
        first = next(iter(waiting))
        raise EquidpError(
            f"{where} lists {len(waiting)} images that {images} does not hold, the first is {first!r}; "
            "unpack all parts of the archive, or remove their rows."
        )


def _packed_pixels(path: Path, ids: Sequence[str], size: int, where: str) -> Tensor:
    if size != PACKED_SIDE:
        raise EquidpError(
            f"data.options.size={size}: {path} holds {PACKED_SIDE}×{PACKED_SIDE} images; use the JPEG images."
        )
    arrays = load_arrays(path, ("webp", "offsets", "image_id"))
    names = np.char.decode(arrays["image_id"], "ascii").tolist()
    if names != list(ids):
        row = next((i for i, (a, b) in enumerate(zip(names, ids, strict=False)) if a != b), min(len(names), len(ids)))
        raise EquidpError(f"{path} and {where} differ from record {row} on; take both from one place.")
    pixels = unpack_sheets(arrays, "", PACKED_SIDE, path)
    if len(pixels) != len(ids):
        raise EquidpError(f"{path} holds {len(pixels)} images for {len(ids)} rows; download it again.")
    return pixels


def _refuse_duplicates(column: pd.Series, where: str) -> None:
    repeated = column.duplicated()
    if repeated.any():
        row = column.index[int(torch.tensor(repeated.to_numpy()).nonzero()[0])]
        raise EquidpError(f"{place(where, column, row)}: {column.loc[row]!r} is in an earlier line too.")
