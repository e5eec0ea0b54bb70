"""Sources: one file per dataset, from raw files to Records. A new dataset is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equidp.data.raw_files import RawFiles
from equidp.data.sources.adult import Adult
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.sources.celeba import Celeba
from equidp.data.sources.cifar10 import Cifar10
from equidp.data.sources.csv_table import Csv
from equidp.data.sources.digits import Digits
from equidp.data.sources.dutch import Dutch
from equidp.data.sources.ham10000 import Ham10000
from equidp.data.sources.image_folder import ImageFolder
from equidp.data.sources.imagenette import Imagenette
from equidp.data.sources.imdb import Imdb
from equidp.data.sources.mnist import FashionMnist, Mnist, MnistUnbalanced
from equidp.errors import unknown_name

__all__ = ["SOURCES", "RawFiles", "Source", "SourceOptions", "source"]

SOURCES: dict[str, type[Source]] = {
    "digits": Digits,
    "adult": Adult,
    "dutch": Dutch,
    "mnist": Mnist,
    "mnist_unbalanced": MnistUnbalanced,
    "fashion_mnist": FashionMnist,
    "cifar10": Cifar10,
    "ham10000": Ham10000,
    "imdb": Imdb,
    "celeba": Celeba,
    "imagenette": Imagenette,
    "csv": Csv,
    "image_folder": ImageFolder,
}


def source(name: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source registered under a dataset's name, with its `data.options`.

    Raises:
        EquidpError: an unknown dataset or option, or a value that is not allowed.
    """
    if name not in SOURCES:
        raise unknown_name("dataset", name, SOURCES)
    return SOURCES[name](options)
