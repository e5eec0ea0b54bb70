"""`resnet9`: a small residual network with GroupNorm, the papers' model for CelebA and Imagenette."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.models.base import AtLeast, Layered, ModelOptions, Standardise

LEAST_SIDE = 8
MOST_GROUPS = 32
LEAST_CHANNELS_PER_GROUP = 4


class ResNet9Options(ModelOptions):
    """Options of `resnet9`."""

    width: Annotated[int, Field(ge=4, le=512)] = 64
    """Channels of the first convolution; the last has eight times as many. 64 is usual, 16 suits a CPU."""


class ResNet9(Layered):
    """Eight convolutions with GroupNorm, two residual blocks, global average and a linear layer."""

    kinds = ("image",)
    Options = ResNet9Options

    def __init__(self, schema: Schema, options: ResNet9Options) -> None:
        super().__init__(schema, options)
        w = options.width
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(LEAST_SIDE),
            _unit(schema.shape[0], w, options),
            _unit(w, 2 * w, options, pooled=True),
            Residual(_unit(2 * w, 2 * w, options), _unit(2 * w, 2 * w, options)),
            _unit(2 * w, 4 * w, options, pooled=True),
            _unit(4 * w, 8 * w, options, pooled=True),
            Residual(_unit(8 * w, 8 * w, options), _unit(8 * w, 8 * w, options)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * w, schema.outputs),
        )


class Residual(nn.Sequential):
    """Layers whose output is added to their input."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`. The sum is not in place, because the engine keeps layer outputs."""
        return x + super().forward(x)


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with at most 32 groups of at least 4 channels; it normalises each record on its own."""
    groups = next(
        g for g in range(min(MOST_GROUPS, max(1, channels // LEAST_CHANNELS_PER_GROUP)), 0, -1) if channels % g == 0
    )
    return nn.GroupNorm(groups, channels)


def _unit(before: int, after: int, options: ModelOptions, *, pooled: bool = False) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    pool = (nn.MaxPool2d(2),) if pooled else ()
    return nn.Sequential(convolution, group_norm(after), options.make_activation(), *pool)
