"""Image folder: the user's own images, with classes by folder or by a table, which may give groups and units too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor

from equidp.data.cells import codes, composed, looks, place, require, row_of
from equidp.data.groupings import Grouping, group_ids, group_names, owners
from equidp.data.images import IMAGENET_MEAN, IMAGENET_SD, OTHER_SUFFIXES, SUFFIXES, decode_all, decoder, image_files
from equidp.data.raw_files import PublishedFile, RawFiles, digest, find_own, fingerprint, folder_fingerprint, inside
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.sources.table import PARTS
from equidp.data.sources.table_options import Classes, Sizes, check_group_names, check_ordered, check_sizes
from equidp.data.tables import read_rows
from equidp.errors import EquidpError, unknown_name
from equidp.options import Number


class ImageFolderOptions(SourceOptions):
    """Options of `image_folder`.

    Attributes:
        path: the folder, relative to the raw folder: `<class>/…`, or `train/<class>/…` and `test/<class>/…`.
        classes: the class folders' names, or the values of `label`, in label order.
        ordered: the order of the classes counts (`ordinal`), as for grades.
        size: side of the square that images are resized to.
        channels: 3, or 1 for grey.
        fit: `squeeze` keeps the whole image, `crop` its proportions.
        mean, sd: published constants per channel on the 0..1 scale; ImageNet's unless given.
        metadata: csv relative to the raw folder with one row per image; empty for none.
        image: column of the metadata with the file's name, with or without folder and suffix.
        label: column with each image's class; folders then mean nothing. Empty where folders are the classes.
        groups: groupings over columns of the metadata.
        unit: column whose value is shared by the images of one person; empty where each image is a unit.
        id: column with an id for each image. The id, instead of the content, then decides on its part (`data.id`).
        sizes, unit_sizes: public numbers of images, and of units, of each class, as for `csv`.
    """

    path: str
    classes: Classes
    ordered: bool = False
    size: Annotated[int, Field(ge=8, le=1024)] = 64
    channels: Literal[1, 3] = 3
    fit: Literal["squeeze", "crop"] = "squeeze"
    mean: tuple[Number, ...] = ()
    sd: tuple[Annotated[Number, Field(gt=0)], ...] = ()
    metadata: str = ""
    image: str = "image"
    label: str = ""
    groups: dict[str, Grouping] = Field(default_factory=dict)
    unit: str = ""
    id: str = ""
    sizes: Sizes = ()
    unit_sizes: Sizes = ()

    @model_validator(mode="after")
    def _fits_together(self) -> ImageFolderOptions:
        check_group_names(self.groups)
        if (self.groups or self.unit or self.id or self.label) and not self.metadata:
            raise ValueError("groups and unit need metadata, and so do id and label: a csv with one row per image")
        check_sizes(self.classes, self.sizes, self.unit_sizes)
        check_ordered(self.classes, ordered=self.ordered)
        for constants in (self.mean, self.sd):
            if constants and len(constants) != self.channels:
                raise ValueError(f"mean and sd need {self.channels} values")
        return self


class ImageFolder(Source):
    """Images with classes by folder or by a table; groupings are the class and the declared ones."""

    name = "image_folder"
    Options = ImageFolderOptions
    unit_names = ("image",)
    tasks = ("classification", "ordinal")

    @property
    def task(self) -> str:
        """`ordinal` if the classes are ordered, else `classification`."""
        return "ordinal" if self.options.ordered else "classification"

    def words(self) -> tuple[str, ...]:
        """Units have the name of their column."""
        return (*self.unit_names, self.options.unit) if self.options.unit else self.unit_names

    @property
    def schema(self) -> Schema:
        """The schema that the options declare."""
        channels, size = self.options.channels, self.options.size
        grey = channels == 1
        return Schema(
            name=self.name,
            kind="image",
            shape=(channels, size, size),
            task=self.task,
            classes=self.options.classes,
            groupings={"class": self.options.classes, **group_names(self.options.groups)},
            mean=self.options.mean or (IMAGENET_MEAN[:1] if grey else IMAGENET_MEAN),
            sd=self.options.sd or (IMAGENET_SD[:1] if grey else IMAGENET_SD),
            sizes=self.options.sizes,
            unit_sizes=self.options.unit_sizes,
        )

    @property
    def reader(self) -> str:
        """Versions of the libraries that decode images; empty if images have ids."""
        return "" if self.options.id else decoder()

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The folder and, where one is declared, the metadata."""
        folder, paths, prints = inside(raw_dir, self.options.path), {}, []
        if not folder.is_dir():
            return None
        paths["images"] = folder
        # also over images that are not read: else a kept copy of the records would hide a new .tif
        prints.append(folder_fingerprint(folder, image_files(folder, SUFFIXES + OTHER_SUFFIXES)))
        if self.options.metadata:
            inside(raw_dir, self.options.metadata)
            table = find_own(raw_dir, self.options.metadata)
            if table is None:
                return None
            paths["metadata"] = table
            prints.append(digest(table))
        return RawFiles(paths, fingerprint(prints))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The folder, or the metadata where only it is missing."""
        if (raw_dir / self.options.path).is_dir():
            return PublishedFile(self.options.metadata.removesuffix(".gz"), "")
        return PublishedFile(
            self.options.path, "", contains="the images" if self.options.label else "one subfolder per class"
        )

    def read(self, files: RawFiles) -> Records:
        """Images uint8 `[N, channels, size, size]`, in the order of their paths."""
        folder = files.paths["images"]
        parts = PARTS if all((folder / part).is_dir() for part in PARTS) else ("",)
        if parts is PARTS:
            _refuse_beside(folder)
        found = [
            (path, label, part)
            for part, part_name in enumerate(parts)
            for path, label in self._found_in(folder / part_name)
        ]
        paths = [path for path, _, _ in found]
        _refuse_linked_twice(paths)
        labels = torch.tensor([label for _, label, _ in found], dtype=torch.int64)
        groups, ids = {}, {}
        if table := files.paths.get("metadata"):
            frame, where = self._metadata(table, paths, folder), str(table)
            groups = group_ids(frame, self.options.groups, where)
            ids = owners(frame, self.options.unit, self.options.id, where)
            if self.options.label:
                labels = codes(frame[self.options.label], self.options.classes, where)
        return Records(
            features=self._pixels(paths),
            labels=labels,
            groups={"class": labels, **groups},
            schema=self.schema,
            part=torch.tensor([part for _, _, part in found], dtype=torch.uint8) if len(parts) > 1 else None,
            **ids,
        )

    def _pixels(self, paths: list[Path]) -> Tensor:
        return decode_all(
            ((i, str(path), path) for i, path in enumerate(paths)),
            len(paths),
            side=self.options.size,
            channels=self.options.channels,
            crop=self.options.fit == "crop",
        )

    def _found_in(self, folder: Path) -> list[tuple[Path, int]]:
        """Images with the labels that folders give; 0 if the table gives them."""
        if self.options.label:
            if not (paths := _images(folder)):
                raise EquidpError(f"{folder} holds no JPEG or PNG image; put the images there.")
            return [(path, 0) for path in paths]
        return _labelled(folder, self.options.classes)

    def _metadata(self, table: Path, paths: list[Path], folder: Path) -> pd.DataFrame:
        """The rows, in the order of the images."""
        frame, options = read_rows(table, None), self.options
        require(frame, [options.image, *filter(None, (options.unit, options.id, options.label))], str(table))
        return _rows_of(frame, options.image, paths, folder, str(table))


def _refuse_beside(folder: Path) -> None:
    """Refuse images beside `train/` and `test/`, such as those of a `val/`."""
    _refuse_loose(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in PARTS and image_files(path):
            raise EquidpError(
                f"{path} stands beside {' and '.join(PARTS)}, and its images would be left out; move them into one of "
                "these, or remove the folder."
            )


def _refuse_loose(folder: Path) -> None:
    """Refuse images that are outside the class folders."""
    loose = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.is_dir())
    if loose:
        more = f", as would {len(loose) - 1:,} more" if len(loose) > 1 else ""
        raise EquidpError(
            f"{loose[0]} is outside the class folders, and would be left out{more}; move it into one, or remove it. If "
            "a table tells the classes, name its column in data.options.label."
        )


def _refuse_linked_twice(paths: list[Path]) -> None:
    """Refuse a file that is there under two names, by a link."""
    known: dict[Path, Path] = {}
    for path in paths:
        first = known.setdefault(path.resolve(), path)
        if first is not path:
            raise EquidpError(
                f"{first} and {path} are one file, by a link: its person would count twice, and may be in two parts. "
                "Remove one of them."
            )


def _images(folder: Path) -> list[Path]:
    """All images below a folder. Raises EquidpError for an image that is not read, or may be a hidden copy."""
    if unread := image_files(folder, OTHER_SUFFIXES):
        raise EquidpError(f"{unread[0]} is neither JPEG nor PNG, and would be left out; save it as PNG, or remove it.")
    found = image_files(folder)
    for image in found:
        if any(part.startswith(".") for part in image.relative_to(folder).parts):
            raise EquidpError(
                f"{image} is hidden, and may be a copy that a program keeps of another image: its person would count "
                "twice. Remove it, or give it a name that does not begin with a dot."
            )
    return found


def _labelled(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Image paths with their labels; every class must have a folder, and every folder be declared.

    A folder may be empty: a refusal would tell whether one record more is there, and no ε covers that.
    """
    label_of = {composed(name): label for label, name in enumerate(classes)}
    labels = {}
    _refuse_loose(folder)
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        if composed(path.name) not in label_of:
            raise unknown_name(f"class folder in {folder}:", path.name, classes)
        labels[path.name] = label_of[composed(path.name)]
    for label, name in enumerate(classes):
        if label not in labels.values():
            raise EquidpError(
                f"{folder / name} is missing; make it, empty if there is no image of that class, or remove it from "
                "classes."
            )
    found = sorted((labels[image.relative_to(folder).parts[0]], image) for image in _images(folder))
    if not found:
        raise EquidpError(f"{folder} holds no JPEG or PNG image; put the images into the folders of their classes.")
    return [(image, label) for label, image in found]


def _stem(name: str) -> str:
    """A file's name without folder and suffix. What follows another dot belongs to the name: `scan.017`."""
    path = Path(composed(name).replace("\\", "/"))  # as Windows writes folders
    return path.stem if path.suffix.lower() in SUFFIXES + OTHER_SUFFIXES else path.name


def _rows_of(frame: pd.DataFrame, column: str, paths: list[Path], folder: Path, where: str) -> pd.DataFrame:
    """The metadata's rows in the order of the images; each image needs one row, and each row an image."""
    keys = frame[column].map(_stem)
    again = keys.map(looks).duplicated()  # names that look alike are two spellings of one image's name
    for key, row in zip(keys[again], frame.index[again], strict=True):
        raise EquidpError(f"{place(where, frame[column], row)}: {key!r} is in an earlier line too.")
    stems = [composed(path.stem) for path in paths]
    if (twice := pd.Series(map(looks, stems)).duplicated()).any():
        repeated = stems[int(twice.to_numpy().argmax())]
        raise EquidpError(f"{folder} holds two images called {repeated!r}; rename one, so that metadata fit.")
    known, wanted = set(keys), set(stems)
    for stem in stems:
        if stem not in known:
            raise EquidpError(f"Image {stem!r} in {folder} has no row in {where}; remove it or add its row.")
    for key, row in zip(keys, frame.index, strict=True):
        if key not in wanted:
            raise EquidpError(
                f"{where}, {row_of(frame.index, row)}: image {key!r} is not in {folder}; add it or remove the line."
            )
    label_of = dict(zip(keys, frame.index, strict=True))
    return frame.loc[[label_of[stem] for stem in stems]]
