"""MNIST and Fashion-MNIST: 60,000 + 10,000 images of 28×28 in IDX files, ten classes.

`mnist_unbalanced` is MNIST under a name of its own, whose preset cuts class 8 to 500 training records (DPSGD-F paper).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from equidp.data.idx import read_idx
from equidp.data.raw_files import PublishedFile, RawFiles
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, classified
from equidp.errors import EquidpError

SIDE = 28
PARTS = (("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"))


def _layout(folder: str, page: str, checksums: dict[str, str]) -> tuple[tuple[PublishedFile, ...], ...]:
    return (tuple(PublishedFile(f"{folder}/raw/{name}", page, sha) for name, sha in checksums.items()),)


class Mnist(Source):
    """Handwritten digits; scaled by the published mean .1307 and standard deviation .3081."""

    name = "mnist"
    unit_names = ("image",)
    sizes = (5_923, 6_742, 5_958, 6_131, 5_842, 5_421, 5_918, 6_265, 5_851, 5_949)
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    mean: ClassVar[float] = 0.1307
    sd: ClassVar[float] = 0.3081
    torchvision_name: ClassVar[str] = "MNIST"
    layouts = _layout(
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    )

    @property
    def schema(self) -> Schema:
        """One grey channel of 28×28; the only grouping is the class."""
        return Schema(
            name=self.name,
            kind="image",
            shape=(1, SIDE, SIDE),
            classes=self.classes,
            groupings={"class": self.classes},
            mean=(self.mean,),
            sd=(self.sd,),
        )

    def read(self, files: RawFiles) -> Records:
        """Images uint8 `[N, 1, 28, 28]`, the provider's training part first."""
        path = {place.rsplit("/", 1)[1]: file for place, file in files.paths.items()}
        parts = [_read_part(path[images], path[labels], len(self.classes)) for images, labels in PARTS]
        return classified(self.schema, parts)

    def download(self, raw_dir: Path) -> None:
        """Fetch the files with torchvision's downloader."""
        import torchvision.datasets

        getattr(torchvision.datasets, self.torchvision_name)(str(raw_dir), download=True)


class MnistUnbalanced(Mnist):
    """MNIST, to be trained with class 8 rare: its preset sets `data.keep` to `{"8": 500}`."""

    name = "mnist_unbalanced"


class FashionMnist(Mnist):
    """Zalando's articles of clothing in MNIST's format."""

    name = "fashion_mnist"
    classes = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    sizes = (6_000,) * 10
    mean = 0.2860
    sd = 0.3530
    torchvision_name = "FashionMNIST"
    layouts = _layout(
        "FashionMNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        {
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    )


def _read_part(images: Path, labels: Path, classes: int) -> tuple[Tensor, Tensor]:
    pixels, digits = read_idx(images, (SIDE, SIDE)), read_idx(labels, ())
    if len(pixels) != len(digits):
        raise EquidpError(
            f"{images} holds {len(pixels)} images but {labels} {len(digits)} labels; download both again."
        )
    if len(digits) and int(digits.max()) >= classes:
        row = int((digits >= classes).nonzero()[0])
        raise EquidpError(f"{labels}, record {row}: label {int(digits[row])} lies outside 0..{classes - 1}.")
    return pixels.unsqueeze(1), digits.long()
