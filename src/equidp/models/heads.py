"""Models on fixed features: `scatter_linear` and `scatter_cnn`; `backbone` has a file of its own.

They take extracted features, which `equidp.models.features.extract` computes once. They also take raw images, and map
them in every step: the result is the same, but slower.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.models.base import AtLeast, MeanPool, Model, ModelOptions, Standardise
from equidp.models.features import ScatterOptions, feature_map, is_raw_image


class HeadOptions(ModelOptions):
    """Options of a model on fixed features."""

    def feature_options(self) -> dict[str, Any] | None:
        """The options of the feature map; None where the model trains on the records as they are."""
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


class ScatterHeadOptions(ScatterOptions, HeadOptions):
    """Options of `scatter_linear` and `scatter_cnn`."""

    def feature_options(self) -> dict[str, Any]:
        """Scales, groups and photographs."""
        return self.model_dump(include=set(ScatterOptions.model_fields))


class ScatterHead(Head):
    """A head behind the scattering transform."""

    kinds = ("image",)
    Options = ScatterHeadOptions
    extracts = "scatter"


class ScatterLinear(ScatterHead):
    """Scattering transform and one linear layer."""

    def head(self, schema: Schema, options: ScatterHeadOptions) -> nn.Module:
        """One linear layer."""
        return nn.Sequential(Standardise(schema), nn.Flatten(), nn.Linear(math.prod(schema.shape), schema.outputs))


class ScatterCnn(ScatterHead):
    """Scattering transform, two convolutions and two linear layers: our own network, from no paper."""

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
            nn.Linear(64, schema.outputs),
        )
