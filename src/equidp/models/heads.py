"""Models on fixed features: `scatter_linear`, `scatter_cnn` and `frozen_backbone`. Only the head is trained.

They take extracted features (equidp.models.features.extract, computed once), or raw images, which they then map
themselves in every step: the same result, slower.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.models.base import AtLeast, MeanPool, Model, ModelOptions, Standardise
from equidp.models.features import BACKBONE_FEATURE, feature_map, is_raw_image
from equidp.options import Widths


class HeadOptions(ModelOptions):
    """Options of a model on fixed features."""

    def feature_options(self) -> dict[str, Any]:
        """Those of the options that belong to the feature map."""
        return {}


class Head(Model):
    """A trained head behind a fixed map; `extracts` names the map."""

    Options: ClassVar[type[ModelOptions]] = HeadOptions

    def __init__(self, schema: Schema, options: HeadOptions) -> None:
        super().__init__(schema, options)
        mapped = feature_map(self.extracts, schema, options.feature_options()) if is_raw_image(schema) else None
        self.features: nn.Module | None = mapped
        self.layers = self.head(mapped.schema if mapped is not None else schema, options)

    def head(self, schema: Schema, options: Any) -> nn.Module:
        """The trained layers on extracted features of this schema."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch, classes]`."""
        if self.features is not None:
            with torch.no_grad():
                features = self.features(features)
        return self.layers(features)

    def train(self, mode: bool = True) -> Head:
        """As `nn.Module.train`, but the fixed map stays in evaluation mode."""
        super().train(mode)
        if self.features is not None:
            self.features.eval()
        return self


class ScatterHeadOptions(HeadOptions):
    """Options of `scatter_linear` and `scatter_cnn`."""

    scales: Annotated[int, Field(ge=1, le=4)] = 2
    """J of the scattering transform."""
    groups: Annotated[int, Field(ge=0)] = 27
    """Groups of channels within which each record is normalised; 0 for no normalisation."""

    def feature_options(self) -> dict[str, Any]:
        """Scales and groups."""
        return {"scales": self.scales, "groups": self.groups}


class ScatterLinear(Head):
    """Scattering transform and one linear layer."""

    kinds = ("image",)
    Options = ScatterHeadOptions
    extracts = "scatter"

    def head(self, schema: Schema, options: ScatterHeadOptions) -> nn.Module:
        """One linear layer."""
        return nn.Sequential(Standardise(schema), nn.Flatten(), nn.Linear(math.prod(schema.shape), len(schema.classes)))


class ScatterCnn(Head):
    """Scattering transform, two convolutions and two linear layers: a network of ours, in no paper."""

    kinds = ("image",)
    Options = ScatterHeadOptions
    extracts = "scatter"

    def head(self, schema: Schema, options: ScatterHeadOptions) -> nn.Module:
        """Convolutions of 64 channels, pooled once, then 64 hidden units."""
        return nn.Sequential(
            Standardise(schema),
            AtLeast(4),
            nn.Conv2d(schema.shape[0], 64, 3, padding=1),
            options.make_activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            options.make_activation(),
            MeanPool(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 64),
            options.make_activation(),
            nn.Linear(64, len(schema.classes)),
        )


class BackboneHeadOptions(HeadOptions):
    """Options of `frozen_backbone`."""

    paths = ("weights",)

    architecture: Literal["resnet18", "resnet34", "resnet50"] = "resnet18"
    """Which torchvision network."""
    weights: str = "torchvision"
    """`torchvision`, or the path of a `.safetensors` or `.pth` file."""
    size: Annotated[int, Field(ge=0, le=1024)] = 224
    """Side that images are resized to before the network sees them; 0 keeps theirs."""
    hidden: Widths = ()
    """Widths of the head's hidden layers; none for a linear head."""

    def feature_options(self) -> dict[str, Any]:
        """Architecture, weights and size."""
        return {"architecture": self.architecture, "weights": self.weights, "size": self.size}


class FrozenBackbone(Head):
    """A pretrained network for images that stays as it is, its features normalised, and a linear or MLP head."""

    Options = BackboneHeadOptions
    extracts = "backbone"

    def head(self, schema: Schema, options: BackboneHeadOptions) -> nn.Module:
        """LayerNorm without parameters (per record, so nothing is learnt from the data), hidden layers, logits."""
        if not schema.feature_names or not schema.feature_names[0].startswith(BACKBONE_FEATURE):
            raise EquidpError(
                f"Model frozen_backbone takes images, dataset {schema.name!r} has {schema.kind} features; "
                "choose another model.name."
            )
        layers: list[nn.Module] = []
        width = schema.shape[0]
        for hidden in options.hidden:
            layers += [nn.Linear(width, hidden), options.make_activation()]
            width = hidden
        norm = nn.LayerNorm(schema.shape[0], elementwise_affine=False)
        return nn.Sequential(Standardise(schema), norm, *layers, nn.Linear(width, len(schema.classes)))
