"""Features: fixed maps of one record at a time, ScatterNet or a pretrained network. Models train on their results.

A map has no trainable parameter and reads no statistic of the data, so it costs no privacy. `extract` computes features
once, as Records, which are stored and reused by every algorithm and seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm

from equidp.data.records import Records, Schema
from equidp.errors import EquidpError, refuse_unknown
from equidp.gradients.shape import padded
from equidp.gradients.shares import WholeShares
from equidp.options import Declared, checked_options
from equidp.system.progress import frames

logger = logging.getLogger(__name__)

BATCH = 64
AT_ONCE = 8
"""Windows of photographs that are scattered at a time."""

PASSES = "whole shares"
"""How records go through a map. The last digits of features depend on it, so features that were stored under another
value are computed anew."""

MOST_BYTES = 8 * 2**30
"""The most bytes of extracted features. More are refused, because they would not fit the memory of usual machines."""
BACKBONE_FEATURE = "backbone."


class FeatureOptions(Declared):
    """Options of a feature map; frozen, unknown names refused."""


class FeatureMap(nn.Module):
    """A fixed map from stored features, such as uint8 `[batch, channels, height, width]`, to those of `self.schema`.

    Attributes:
        schema: of the extracted features.
        dtype: in which the extracted features are stored.
        kinds: kinds of stored features that the map takes.
        rows: number of rows in every pass; a shorter batch is padded. Libraries choose a kernel by this number, and
            kernels round differently: without padding, one record less would change the others' features.
    """

    Options: ClassVar[type[FeatureOptions]] = FeatureOptions
    dtype: ClassVar[torch.dtype] = torch.float32
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    schema: Schema
    rows: int = BATCH

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features, float32."""

    def chunks(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and stored features of `rows` records, or fewer, at a time."""
        for index in torch.arange(len(features)).split(self.rows):
            yield index, features[index]

    @classmethod
    def identity(cls, options: Any) -> str:
        """Return what the features depend on besides records and options, such as a weights file's checksum."""
        return ""


PHOTOGRAPHED: dict[tuple[int, int, int, int, str], tuple[Tensor, Tensor]] = {}
"""Each channel's mean and standard deviation over the photographs, by the facts that decide them. They are kept because
computing them takes seconds."""


class ScatterOptions(FeatureOptions):
    """Options of `scatter`."""

    scales: Annotated[int, Field(ge=1, le=4)] = 2
    """J of the scattering transform."""
    groups: Annotated[int, Field(ge=0)] = 27
    """Groups of channels within which each record is normalised; 0 for no normalisation."""
    photographs: bool = False
    """Normalise each channel by its mean and standard deviation over two public photographs, in place of the groups."""


class Scatter(FeatureMap):
    """Scattering transform (Oyallon & Mallat), normalised within groups of each record's own channels (Tramèr & Boneh
    2021), or each channel by its mean and standard deviation over the two photographs that come with scikit-learn.

    The photographs are nobody's private data. Tramèr & Boneh's variant with statistics of the private data is left out,
    because it would cost privacy. Features are stored as half floats, because the values are of order one, and there
    are up to 81 per pixel and channel.
    """

    Options = ScatterOptions
    dtype = torch.float16
    mean: Tensor
    sd: Tensor

    def __init__(self, schema: Schema, options: ScatterOptions) -> None:
        super().__init__()
        # The package's own top level fails on recent SciPy (it imports a function SciPy has removed).
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

        channels, height, width = schema.shape
        if min(height, width) < 2**options.scales:
            raise EquidpError(f"A scattering transform of {options.scales} scales needs images of {2**options.scales}.")
        self.scattering = ScatteringTorch2D(J=options.scales, shape=(height, width))
        with torch.no_grad():
            shape = self._scattered(torch.zeros((1, channels, height, width))).shape[1:]
        self.groups = 0 if options.photographs else options.groups
        if self.groups and shape[0] % self.groups:
            raise EquidpError(
                f"groups={self.groups} does not divide the {shape[0]} channels of the scattering transform."
            )
        self.schema = dataclasses.replace(schema, shape=tuple(shape), mean=(), sd=())
        mean, sd = torch.zeros(shape[0]), torch.ones(shape[0])
        if options.photographs:
            key = (channels, height, width, options.scales, str(torch.get_default_device()))
            if key not in PHOTOGRAPHED:
                with torch.no_grad():  # a few at a time, because scattered images are many times as large
                    parts = [self._scattered(some) for some in photographs(channels, height, width).split(AT_ONCE)]
                values = torch.cat(parts)
                PHOTOGRAPHED[key] = values.mean((0, 2, 3)), values.std((0, 2, 3))
            mean, sd = (of.clone() for of in PHOTOGRAPHED[key])
        self.register_buffer("mean", mean.view(-1, 1, 1), persistent=False)
        self.register_buffer("sd", sd.view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """`[batch, channels·81, height/4, width/4]` for two scales."""
        scattered = (self._scattered(images.float() / 255) - self.mean) / self.sd
        return nn.functional.group_norm(scattered, self.groups) if self.groups else scattered

    def _scattered(self, images: Tensor) -> Tensor:
        return self.scattering(images.contiguous()).flatten(1, 2)


def photographs(channels: int, height: int, width: int) -> Tensor:
    """`[n, channels, height, width]`, 0 to 1: windows of scikit-learn's two photographs, seen from two distances."""
    from sklearn.datasets import load_sample_images

    windows = []
    for picture in load_sample_images().images:
        image = torch.tensor(picture).permute(2, 0, 1).unsqueeze(0) / 255
        image = image if channels == image.shape[1] else image.mean(1, keepdim=True).expand(-1, channels, -1, -1)
        for times in (2, 4):
            size = (times * height, round(times * width * image.shape[3] / image.shape[2]))
            small = nn.functional.interpolate(image, size=size, mode="bilinear", antialias=True)
            cut = small.unfold(2, height, height // 2).unfold(3, width, width // 2)
            windows.append(cut.permute(0, 2, 3, 1, 4, 5).flatten(0, 2))
    return torch.cat(windows)


class NetworkOptions(FeatureOptions):
    """Options of `network`.

    Attributes:
        network: `timm:<name>`, `torchvision:<name>` or `hf:<folder>`.
        weights: path of a `.safetensors` file or its folder, or `download`; empty for `hf`.
        size: side that images are resized to; 0 for the network's own.
        precision: number format of the network's computations, float32 or bf16.
        views: number of views of an image over which features are averaged: 1, 2, 4 or 8.
        config: the network's configuration, where its folder is missing.
    """

    network: str
    weights: str = ""
    size: int = 0
    precision: Literal["float32", "bf16"] = "float32"
    views: Literal[1, 2, 4, 8] = 1
    config: dict[str, Any] = Field(default_factory=dict)


class NetworkFeatures(FeatureMap):
    """A pretrained network without its last layer: one row of numbers per image, or per text in its own tokens."""

    Options = NetworkOptions
    kinds = ("image", "text")

    def __init__(self, schema: Schema, options: NetworkOptions) -> None:
        super().__init__()
        from equidp.models.hubs import open_network  # late: other maps need not wait for it

        self.network = open_network(options, schema)
        self.rows = self.network.rows
        names = tuple(f"{BACKBONE_FEATURE}{i}" for i in range(self.network.width))
        raw = dataclasses.replace(schema, mean=(), sd=(), vocabulary=0, words=(), tokenizer="")
        self.schema = dataclasses.replace(raw, kind="tabular", shape=(self.network.width,), feature_names=names)

    @classmethod
    def identity(cls, options: NetworkOptions) -> str:
        """The library's version and the weights' digest."""
        from equidp.models.hubs import identity

        return identity(options)

    def chunks(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and stored features of each pass, as the network's `chunks` gives them."""
        return self.network.chunks(features)

    def forward(self, features: Tensor) -> Tensor:
        """`[batch, width]`."""
        return self.network(features)


FEATURES: dict[str, type[FeatureMap]] = {"scatter": Scatter, "network": NetworkFeatures}


def feature_map(name: str, schema: Schema, options: Mapping[str, Any] | None = None) -> FeatureMap:
    """Return the feature map registered under a name, for a dataset's raw images (or tokens).

    Raises:
        EquidpError: an unknown map or option, or records that the map does not take.
    """
    if maps(name, schema):
        return FEATURES[name](schema, feature_options(name, options)).eval()
    raise EquidpError(f"Features {name!r} are computed from raw images; dataset {schema.name!r} has other features.")


def feature_options(name: str, options: Mapping[str, Any] | None = None) -> FeatureOptions:
    """Return the validated options of a feature map.

    Raises:
        EquidpError: an unknown map or option, or a value that is not allowed.
    """
    return checked_options(FEATURES[_known(name)].Options, options or {}, f"option of features {name!r}")


def fingerprint(name: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a sha256 of all that features depend on except the records. Features are stored under it.

    Raises:
        EquidpError: an unknown map or option, or a weights file that is missing.
    """
    settings = feature_options(name, options)
    facts = [name, settings.model_dump(mode="json"), FEATURES[name].identity(settings), PASSES]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def extract(
    records: Records, name: str, options: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
) -> Records:
    """Return the same records with extracted features, on the CPU.

    Records that the map does not take are returned unchanged, with a line in the log: tables, and texts unless the map
    is a network for texts.

    Raises:
        EquidpError: no record, an unknown map or option, weights that are not available, or more features than memory
            holds.
    """
    if not len(records):  # for example, *.jpg matches no .JPG file; a library would refuse it less clearly
        raise EquidpError("There are no records to compute features of: check where they are read from.")
    if not maps(name, records.schema):
        feature_options(name, options)
        logger.warning("Dataset %s has no raw images: features %r leave it as it is.", records.schema.name, name)
        return records
    mapped = feature_map(name, records.schema, options).to(device)
    size = len(records) * torch.Size(mapped.schema.shape).numel() * mapped.dtype.itemsize
    if size > MOST_BYTES:
        raise EquidpError(
            f"The features of {len(records)} images would take {size / 2**30:.0f} GiB; choose a smaller "
            "data.options.size."
        )
    logger.info("Features %r of %s records are computed, once for all runs.", name, f"{len(records):,}")
    features = torch.empty((len(records), *mapped.schema.shape), dtype=mapped.dtype)
    shares = WholeShares(mapped)  # else a record's last digits would depend on its place among the others
    with torch.no_grad(), tqdm(total=len(records), desc=f"features {name}", unit="record", **frames()) as bar:
        for index, chunk in mapped.chunks(records.features):
            full = padded(chunk, mapped.rows).to(device)
            found = shares.passed(mapped, full, mapped.rows)
            features[index] = found[: len(chunk)].to("cpu", mapped.dtype)
            bar.update(len(index))
    return dataclasses.replace(records, features=features, schema=mapped.schema)


def maps(name: str, schema: Schema) -> bool:
    """Whether a map takes records of a schema. Raises EquidpError for an unknown map."""
    kinds = FEATURES[_known(name)].kinds
    return is_raw_image(schema) or (schema.kind == "text" and "text" in kinds)


def is_raw_image(schema: Schema) -> bool:
    """Whether features are raw byte images; only their schema has scaling constants."""
    return schema.kind == "image" and bool(schema.mean)


def is_row_of_network(schema: Schema) -> bool:
    """Whether features are a pretrained network's rows of numbers, whose kind is `tabular`."""
    return bool(schema.feature_names) and schema.feature_names[0].startswith(BACKBONE_FEATURE)


def is_mapped(schema: Schema) -> bool:
    """Whether a map gave these features: a network's rows of numbers, or images without scaling constants."""
    return is_row_of_network(schema) or (schema.kind == "image" and not is_raw_image(schema))


def _known(name: str) -> str:
    refuse_unknown("features", [name], FEATURES)
    return name
