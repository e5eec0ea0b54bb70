"""CelebA: faces with forty binary attributes, through torchvision. Any attribute is the label, any other a grouping."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch import Tensor

from equidp.data.images import IMAGENET_MEAN, IMAGENET_SD, decode_all, image_files
from equidp.data.membership import identities
from equidp.data.raw_files import PublishedFile, RawFiles, digest, fingerprint, folder_fingerprint
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.errors import EquidpError, unknown_name
from equidp.system.network import first_line

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
        attribute: the label.
        size: side of the square cut from the middle of each image.
    """

    attribute: str = "Male"
    size: Annotated[int, Field(ge=8, le=218)] = 64


class Celeba(Source):
    """162,770 training and 19,962 test faces; the provider's validation part is left out."""

    name = "celeba"
    Options = CelebaOptions
    unit_names = ("image", "person")

    @property
    def schema(self) -> Schema:
        """The label's attribute gives the classes, every other attribute a grouping."""
        label = self._attribute()
        others = [name for name in ATTRIBUTES if name != label]
        classes = (f"not {label}", label)
        return Schema(
            name=self.name,
            kind="image",
            shape=(3, self.options.size, self.options.size),
            classes=classes,
            groupings={"class": classes, **{name: (f"not {name}", name) for name in others}},
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
        labels = column[self.options.attribute]
        persons = torch.cat([part.identity.squeeze(1) for part in parts]).long()
        return Records(
            features=self._pixels(parts),
            labels=labels,
            groups={"class": labels, **{name: column[name] for name in schema.groupings if name != "class"}},
            schema=schema,
            part=torch.cat([torch.full((len(part),), i, dtype=torch.uint8) for i, part in enumerate(parts)]),
            unit=persons,
            identity=identities(name for part in parts for name in part.filename),
            unit_identity=identities(map(str, persons.tolist())),
        )

    def _attribute(self) -> str:
        if self.options.attribute not in ATTRIBUTES:
            raise unknown_name("attribute of CelebA", self.options.attribute, ATTRIBUTES)
        return self.options.attribute

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
    return type("Unverified", (torchvision.datasets.CelebA,), {"_check_integrity": lambda self: True})
