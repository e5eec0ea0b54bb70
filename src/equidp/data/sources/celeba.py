"""CelebA: faces with forty binary attributes, through torchvision.

One attribute is the label, or several attributes are labels of 0 or 1 each. Every other attribute is a grouping.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from equidp.data.images import IMAGENET_MEAN, IMAGENET_SD, decode_all, image_files
from equidp.data.membership import identities
from equidp.data.raw_files import PublishedFile, RawFiles, digest, fingerprint, folder_fingerprint
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions, part_column
from equidp.errors import EquidpError, first_line, refuse_unknown
from equidp.options import listed

if TYPE_CHECKING:
    from torchvision.datasets import CelebA as TorchvisionCelebA

PAGE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
FOLDER = PublishedFile(
    "celeba", PAGE, contains="img_align_celeba/ and the five .txt files of annotations (torchvision's layout)"
)
ATTRIBUTES = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs", "Big_Lips", "Big_Nose",
    "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows", "Chubby", "Double_Chin", "Eyeglasses",
    "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes",
    "No_Beard", "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns", "Smiling",
    "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat", "Wearing_Lipstick", "Wearing_Necklace",
    "Wearing_Necktie", "Young",
)  # fmt: skip
PARTS = ("train", "test")


class CelebaOptions(SourceOptions):
    """Options of `celeba`.

    Attributes:
        attribute: the attribute that is the label.
        attributes: in place of `attribute`, several labels.
        size: side of the square cut from the middle of each image.
    """

    attribute: str = "Male"
    attributes: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    size: Annotated[int, Field(ge=8, le=218)] = 64


class Celeba(Source):
    """162,770 training and 19,962 test faces; the provider's validation part is left out."""

    name = "celeba"
    Options = CelebaOptions
    unit_names = ("image", "person")
    tasks = ("classification", "multilabel")

    @property
    def task(self) -> str:
        """`multilabel` if several attributes are named, else `classification`."""
        return "multilabel" if self.options.attributes else "classification"

    @property
    def schema(self) -> Schema:
        """The label's attribute gives the classes, or several give the labels; every other attribute is a grouping."""
        labels = self._labels()
        classes = () if self.options.attributes else (f"not {labels[0]}", labels[0])
        others = {name: (f"not {name}", name) for name in ATTRIBUTES if name not in labels}
        return Schema(
            name=self.name,
            kind="image",
            shape=(3, self.options.size, self.options.size),
            classes=classes,
            groupings=({"class": classes} if classes else {}) | others,
            task=self.task,
            targets=() if classes else labels,
            mean=IMAGENET_MEAN,
            sd=IMAGENET_SD,
        )

    def search(self, raw_dir: Path) -> RawFiles | None:
        """torchvision's folder; torchvision itself checks the annotations' checksums."""
        folder = raw_dir / FOLDER.path
        tables = sorted(folder.glob("*.txt"))
        if not (folder / "img_align_celeba").is_dir() or not tables:
            return None
        images = folder_fingerprint(folder, image_files(folder / "img_align_celeba"))
        return RawFiles({"root": raw_dir}, fingerprint([*map(digest, tables), images]))

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """torchvision's folder."""
        return FOLDER

    def download(self, raw_dir: Path) -> None:
        """Fetch everything with torchvision's downloader (which needs the package gdown)."""
        import torchvision.datasets

        torchvision.datasets.CelebA(str(raw_dir), download=True)

    def read(self, files: RawFiles) -> Records:
        """Images uint8 `[N, 3, size, size]`; the unit is the person shown."""
        schema = self.schema
        parts = [self._open(files.paths["root"], part) for part in PARTS]
        attributes = torch.cat([part.attr for part in parts]).long()
        column = {name: attributes[:, i] for i, name in enumerate(self._names(parts[0]))}
        several = torch.stack([column[name] for name in self._labels()], dim=1)
        labels = several.float() if self.options.attributes else several[:, 0]
        persons = torch.cat([part.identity.squeeze(1) for part in parts]).long()
        return Records(
            features=self._pixels(parts),
            labels=labels,
            groups={name: labels if name == "class" else column[name] for name in schema.groupings},
            schema=schema,
            part=part_column(*map(len, parts)),
            unit=persons,
            identity=identities(name for part in parts for name in part.filename),
            unit_identity=identities(map(str, persons.tolist())),
        )

    def _labels(self) -> tuple[str, ...]:
        labels = self.options.attributes or (self.options.attribute,)
        refuse_unknown("attribute of CelebA", labels, ATTRIBUTES)
        if len(set(labels)) < len(self.options.attributes) or len(self.options.attributes) == 1:
            raise EquidpError(
                "data.options.attributes: name two different attributes or more; for one take `attribute`."
            )
        return labels

    def _open(self, root: Path, part: str) -> TorchvisionCelebA:
        try:
            return _reader(verify=self.options.verify)(str(root), split=part)
        except (RuntimeError, OSError, ValueError, IndexError) as error:
            raise EquidpError(
                f"{root / FOLDER.path} is not CelebA as published ({first_line(error)}); download it again from "
                f"{PAGE}, or accept it as it is with data.options.verify=false."
            ) from error

    def _names(self, opened: TorchvisionCelebA) -> list[str]:
        names = [name for name in opened.attr_names if name]
        if names != list(ATTRIBUTES):
            raise EquidpError(f"list_attr_celeba.txt names other attributes than CelebA's forty; take it from {PAGE}.")
        return names

    def _pixels(self, parts: list[TorchvisionCelebA]) -> Tensor:
        files = [
            Path(part.root) / part.base_folder / "img_align_celeba" / name for part in parts for name in part.filename
        ]
        absent = next((path for path in files if not path.is_file()), None)
        if absent is not None:
            raise EquidpError(f"{absent} is missing; unpack img_align_celeba.zip again.")
        encoded = ((i, str(path), path) for i, path in enumerate(files))
        return decode_all(encoded, len(files), side=self.options.size, crop=True, title="CelebA images")


def _reader(*, verify: bool) -> type[TorchvisionCelebA]:
    """torchvision's class, or the same without its comparison of checksums."""
    import torchvision.datasets  # a second's import that the other datasets need not wait for

    if verify:
        return torchvision.datasets.CelebA
    files = [(page, None, name) for page, _, name in torchvision.datasets.CelebA.file_list]
    return type("Unverified", (torchvision.datasets.CelebA,), {"file_list": files})
