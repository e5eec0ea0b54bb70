"""Features: fixed maps of one record at a time, computed once and then trained on: ScatterNet and a frozen backbone.

A map has no trainable parameter and reads no statistic of the data, so it costs no privacy. `extract` gives Records
that are stored and reused by every algorithm and seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm

from equidp.data.records import Records, Schema
from equidp.errors import EquidpError, unknown_name
from equidp.options import Declared, checked_options

logger = logging.getLogger(__name__)

BATCH = 256
MOST_BYTES = 8 * 2**30
"""Extracted features beyond this are refused: they would not fit the memory of the machines this runs on."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_SD = (0.229, 0.224, 0.225)
BACKBONE_FEATURE = "backbone."


class FeatureOptions(Declared):
    """Options of a feature map; frozen, unknown names refused."""


class FeatureMap(nn.Module):
    """A fixed map of images: uint8 `[batch, channels, height, width]` in, features of `self.schema` out.

    Attributes:
        schema: of the extracted features.
        dtype: they are stored in.
    """

    Options: ClassVar[type[FeatureOptions]] = FeatureOptions
    dtype: ClassVar[torch.dtype] = torch.float32
    schema: Schema

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features, float32."""

    @classmethod
    def identity(cls, options: Any) -> str:
        """What the result depends on besides the options, such as a weights file's checksum."""
        return ""


class ScatterOptions(FeatureOptions):
    """Options of `scatter`.

    Attributes:
        scales: J of the scattering transform; each scale halves the image.
        groups: of the normalisation over channels; 0 for none.
    """

    scales: Annotated[int, Field(ge=1, le=4)] = 2
    groups: Annotated[int, Field(ge=0)] = 27


class Scatter(FeatureMap):
    """Scattering transform (Oyallon & Mallat), normalised within groups of each record's own channels.

    Tramèr & Boneh 2021; their variant with statistics of the private data is left out, as it would cost privacy.
    Half floats are stored: the values are of order one, and there are up to 81 per pixel and channel.
    """

    Options = ScatterOptions
    dtype = torch.float16

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
        self.groups = options.groups
        if self.groups and shape[0] % self.groups:
            raise EquidpError(
                f"groups={self.groups} does not divide the {shape[0]} channels of the scattering transform."
            )
        self.schema = dataclasses.replace(schema, shape=tuple(shape), mean=(), sd=())

    def forward(self, images: Tensor) -> Tensor:
        """`[batch, channels·81, height/4, width/4]` for two scales."""
        scattered = self._scattered(images.float() / 255)
        return nn.functional.group_norm(scattered, self.groups) if self.groups else scattered

    def _scattered(self, images: Tensor) -> Tensor:
        return self.scattering(images.contiguous()).flatten(1, 2)


class BackboneOptions(FeatureOptions):
    """Options of `backbone`.

    Attributes:
        architecture: which torchvision network.
        weights: `torchvision`, or the path of a `.safetensors` or `.pth` file.
        size: side that images are resized to before the network sees them; 0 keeps theirs.
    """

    architecture: Literal["resnet18", "resnet34", "resnet50"] = "resnet18"
    weights: str = "torchvision"
    size: Annotated[int, Field(ge=0, le=1024)] = 224


class Backbone(FeatureMap):
    """A pretrained ResNet without its last layer: 512 (2,048 for `resnet50`) numbers per image."""

    Options = BackboneOptions
    mean: Tensor
    sd: Tensor

    def __init__(self, schema: Schema, options: BackboneOptions) -> None:
        super().__init__()
        from equidp.models import pretrained  # imports torchvision, which other maps need not wait for

        self.network = pretrained.resnet(options.architecture, norm="frozen")
        pretrained.load_pretrained(self.network, options.architecture, options.weights)
        width = self.network.fc.in_features
        self.network.fc = nn.Identity()
        self.network.requires_grad_(False)
        self.expand = pretrained.three_channels
        self.size = options.size
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).reshape(-1, 1, 1), persistent=False)
        self.register_buffer("sd", torch.tensor(IMAGENET_SD).reshape(-1, 1, 1), persistent=False)
        names = tuple(f"{BACKBONE_FEATURE}{i}" for i in range(width))
        self.schema = dataclasses.replace(schema, kind="tabular", shape=(width,), mean=(), sd=(), feature_names=names)

    @classmethod
    def identity(cls, options: BackboneOptions) -> str:
        """The weights' checksum or address."""
        from equidp.models import pretrained

        return pretrained.weights_fingerprint(options.architecture, options.weights)

    def forward(self, images: Tensor) -> Tensor:
        """`[batch, 512]` (2,048 for `resnet50`)."""
        pixels = (self.expand(images.float() / 255) - self.mean) / self.sd
        if self.size:
            pixels = nn.functional.interpolate(pixels, self.size, mode="bilinear", align_corners=False)
        return self.network(pixels)


FEATURES: dict[str, type[FeatureMap]] = {"scatter": Scatter, "backbone": Backbone}


def feature_map(name: str, schema: Schema, options: Mapping[str, Any] | None = None) -> FeatureMap:
    """The feature map registered under a name, for a dataset's raw images.

    Raises:
        EquidpError: an unknown map or option, or data it cannot map.
    """
    if is_raw_image(schema):
        return FEATURES[_known(name)](schema, feature_options(name, options)).eval()
    raise EquidpError(f"Features {name!r} are computed from raw images; dataset {schema.name!r} has other features.")


def feature_options(name: str, options: Mapping[str, Any] | None = None) -> FeatureOptions:
    """Validated options of a feature map.

    Raises:
        EquidpError: an unknown map or option, or a value that is not allowed.
    """
    return checked_options(FEATURES[_known(name)].Options, options or {}, f"option of features {name!r}")


def fingerprint(name: str, options: Mapping[str, Any] | None = None) -> str:
    """sha256 of everything except the records that `extract`'s result depends on; the result is stored under it.

    Raises:
        EquidpError: an unknown map or option, or a weights file that is missing.
    """
    settings = feature_options(name, options)
    facts = [name, settings.model_dump(mode="json"), FEATURES[name].identity(settings)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def extract(
    records: Records, name: str, options: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
) -> Records:
    """The same records with extracted features, on the CPU.

    Tables and texts have no such map: they are returned unchanged, with a line in the log.

    Raises:
        EquidpError: an unknown map or option, weights that are not available, or more features than memory holds.
    """
    if not is_raw_image(records.schema):
        feature_options(name, options)
        logger.warning("Dataset %s has no raw images: features %r leave it as it is.", records.schema.name, name)
        return records
    mapped = feature_map(name, records.schema, options).to(device)
    _refuse_too_large(len(records), mapped)
    features = torch.empty((len(records), *mapped.schema.shape), dtype=mapped.dtype)
    with torch.no_grad():
        for start in tqdm(range(0, len(records), BATCH), desc=f"features {name}", unit="batch", disable=None):
            chunk = slice(start, start + BATCH)
            features[chunk] = mapped(records.features[chunk].to(device)).to("cpu", mapped.dtype)
    return dataclasses.replace(records, features=features, schema=mapped.schema)


def is_raw_image(schema: Schema) -> bool:
    """Whether features are byte images; extracted ones carry no scaling constants."""
    return schema.kind == "image" and bool(schema.mean)


def _known(name: str) -> str:
    if name not in FEATURES:
        raise unknown_name("features", name, FEATURES)
    return name


def _refuse_too_large(records: int, mapped: FeatureMap) -> None:
    size = records * torch.Size(mapped.schema.shape).numel() * mapped.dtype.itemsize
    if size > MOST_BYTES:
        raise EquidpError(
            f"The features of {records} images would take {size / 2**30:.0f} GiB; choose a smaller data.options.size."
        )
