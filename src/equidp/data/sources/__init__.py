"""Sources: one file per dataset, from raw files to Records. A new dataset is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equidp.errors import refuse_unknown
from equidp.registry import Registry

if TYPE_CHECKING:
    from equidp.data.sources.base import Source


SOURCES: Registry[type[Source]] = Registry(
    "equidp.data.sources",
    {
        "digits": "digits:Digits",
        "diabetes": "diabetes:Diabetes",
        "diabetes_bands": "diabetes:DiabetesBands",
        "adult": "adult:Adult",
        "dutch": "dutch:Dutch",
        "mnist": "mnist:Mnist",
        "mnist_unbalanced": "mnist:MnistUnbalanced",
        "fashion_mnist": "mnist:FashionMnist",
        "cifar10": "cifar10:Cifar10",
        "ham10000": "ham10000:Ham10000",
        "imdb": "imdb:Imdb",
        "celeba": "celeba:Celeba",
        "imagenette": "imagenette:Imagenette",
        "table": "table:Table",
        "csv": "table:Csv",
        "image_folder": "image_folder:ImageFolder",
    },
    "base:Source",
)


def source(name: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source registered under a dataset's name, with its `data.options`.

    Raises:
        EquidpError: an unknown dataset or option, or a value that is not allowed.
    """
    refuse_unknown("dataset", [name], SOURCES)
    return SOURCES[name](options)


def published_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A source's options as they may be published: of a folder only its name, because folders reveal the machine."""
    paths = SOURCES[name].Options.paths
    return {key: Path(value).name if key in paths else value for key, value in options.items()}


def unit_noun(unit: str) -> str:
    """Return the noun for one unit in sentences: the word of `privacy.unit`, or `unit` if that is a column's name."""
    return unit if unit.isalpha() and unit.islower() else "unit"


def unit_named(unit: str) -> str:
    """As `unit_noun`, for the first mention in a text: with the column's name, if there is one."""
    noun = unit_noun(unit)
    return noun if noun == unit else f"{noun} (column '{unit}')"


@cache
def record_words() -> frozenset[str]:
    """The words for one record, of all sources; any other word in `data.split_by` and `privacy.unit` is a unit."""
    return frozenset({"record", *(kind.unit_names[0] for _, kind in SOURCES.sound())})
