"""Model: the interface of every model family, and the two modules they share: input scaling and the activation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import ConfigDict, model_validator
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.options import Declared

SIGMOID_SETTINGS = frozenset({"scale", "temperature", "offset"})


class ModelOptions(Declared):
    """Options every model has (`model.options.*`)."""

    model_config = ConfigDict(protected_namespaces=())

    paths: ClassVar[tuple[str, ...]] = ()
    """Names of the options that may be the path of a file."""

    activation: Literal["relu", "tanh", "tempered_sigmoid"] = "relu"
    """Activation between layers. `tempered_sigmoid` is φ(x) = s/(1 + e^(−T·x)) − o (Papernot et al. 2021)."""
    scale: float = 2.0
    """s of the tempered sigmoid. With temperature 2 and offset 1 a scale of 2 gives exactly tanh."""
    temperature: float = 2.0
    """T of the tempered sigmoid."""
    offset: float = 1.0
    """o of the tempered sigmoid."""

    @model_validator(mode="after")
    def _sigmoid_settings_need_it(self) -> ModelOptions:
        unused = SIGMOID_SETTINGS & self.model_fields_set
        if unused and self.activation != "tempered_sigmoid":
            raise ValueError(f"{', '.join(sorted(unused))} has no effect unless activation is tempered_sigmoid")
        return self

    def without_files(self) -> Self:
        """The options without files of initial weights, for a model that gets trained weights. To be overridden."""
        return self

    @classmethod
    def published(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as they may be published: of a file only its name, because its folder may reveal the machine."""
        return {key: Path(value).name if key in cls.paths else value for key, value in options.items()}

    def tokenizer(self) -> str:
        """Folder of the tokenizer whose tokens the model reads; empty where it reads words or no text."""
        return ""

    @property
    def extra(self) -> str:
        """Name of the extra of this package that is needed to build a trained model again; empty for none."""
        return ""

    def make_activation(self) -> nn.Module:
        """A fresh activation; never in place, because the engine keeps layer outputs."""
        if self.activation == "tempered_sigmoid":
            return TemperedSigmoid(self.scale, self.temperature, self.offset)
        return nn.Tanh() if self.activation == "tanh" else nn.ReLU()


class Model(nn.Module):
    """A network from features, as Records store them, to outputs `[batch, schema.outputs]`: a classifier's logits.

    Attributes:
        Options: settings class of `model.options`.
        kinds: kinds of features the family accepts.
        extracts: name of the fixed feature map whose output the family trains on; empty for raw features.
        scored_at_once: the most records in one forward pass without gradients.
    """

    Options: ClassVar[type[ModelOptions]] = ModelOptions
    kinds: ClassVar[tuple[str, ...]] = ("tabular", "image")
    extracts: ClassVar[str] = ""
    scored_at_once: ClassVar[int] = 1024

    def __init__(self, schema: Schema, options: Any) -> None:
        super().__init__()
        if schema.kind not in self.kinds:
            raise EquidpError(
                f"Model {type(self).__name__} takes {' or '.join(self.kinds)} features, dataset {schema.name!r} has "
                f"{schema.kind} features; choose another model.name."
            )


class Layered(Model):
    """A family whose networks are one sequence of layers."""

    layers: nn.Sequential

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch, classes]`."""
        return self.layers(features)


class Standardise(nn.Module):
    """Turn stored features into floats: uint8 images become (x/255 − mean)/sd, by published constants.

    It has no parameters. The model does this, so that records stay in memory as bytes.
    """

    mean: Tensor
    sd: Tensor

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        channels = schema.shape[0] if schema.kind == "image" else 1
        # Not persistent: mean and sd follow from the schema and are no weights.
        self.register_buffer("mean", _per_channel(schema.mean or (0.0,) * channels), persistent=False)
        self.register_buffer("sd", _per_channel(schema.sd or (1.0,) * channels), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Float features of the same shape. Features that are floats already (extracted ones) are not scaled."""
        if features.is_floating_point():
            return features.to(self.mean.dtype)
        return (features.to(self.mean.dtype) / 255 - self.mean) / self.sd


class MeanPool(nn.AdaptiveAvgPool2d):
    """Adaptive average pool.

    On a GPU it uses windows of one size, if these fit, because their backward pass adds in a fixed order.
    """

    def __init__(self, side: int) -> None:
        super().__init__(side)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, channels, side, side]`."""
        side, (height, width) = self.side, x.shape[-2:]
        if x.is_cuda and height % side == 0 and width % side == 0:
            return nn.functional.avg_pool2d(x, (height // side, width // side))
        return super().forward(x)


class AtLeast(nn.Module):
    """Zero-pads images around their centre to a least height and width; larger ones pass unchanged."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        """`[batch, channels, max(height, side), max(width, side)]`."""
        tall, wide = (max(0, self.side - size) for size in images.shape[-2:])
        if not tall and not wide:
            return images
        return nn.functional.pad(images, (wide // 2, wide - wide // 2, tall // 2, tall - tall // 2))

    def extra_repr(self) -> str:
        """The least side."""
        return f"side={self.side}"


class TemperedSigmoid(nn.Module):
    """φ(x) = s/(1 + e^(−T·x)) − o; s = 2, T = 2, o = 1 is tanh."""

    def __init__(self, scale: float, temperature: float, offset: float) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, same shape."""
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        """The three constants."""
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
