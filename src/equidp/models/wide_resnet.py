"""`wrn16_4`: a wide residual network whose layers keep records apart, as De et al. (2022) train it on CIFAR-10.

A WRN-depth-width of Zagoruyko and Komodakis (2016), pre-activated, with GroupNorm in place of BatchNorm and with
standardised weights. The convolutions have no bias and no gain of their own: a GroupNorm follows each of them or their
sum. Depth 16 and width 4 on colour images of 32×32 and ten classes: 2,748,890 weights.
"""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import Field, model_validator
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.gradients.standardised import StandardisedConv2d
from equidp.models.base import AtLeast, Layered, ModelOptions, Standardise

LEAST_SIDE = 8
FIRST, STAGES = 16, (1, 2, 4)
"""Channels of the first convolution, and each stage's multiple of `FIRST · width`."""


class WideResNetOptions(ModelOptions):
    """Options of `wrn16_4`."""

    depth: Annotated[int, Field(ge=10, le=100)] = 16
    """Number of convolutions, 6·n + 4: three stages of n blocks of two, a first one, and three shortcuts."""
    width: Annotated[int, Field(ge=1, le=32)] = 4
    """Multiple of the channels 16, 32 and 64 of the stages."""
    groups: Annotated[int, Field(ge=1, le=FIRST)] = 16
    """Groups of each GroupNorm; it has to divide 16."""

    @model_validator(mode="after")
    def _fits(self) -> WideResNetOptions:
        if (self.depth - 4) % 6:
            raise ValueError(f"depth={self.depth}: give 6·n + 4, such as 10, 16, 28 or 40")
        if FIRST % self.groups:
            raise ValueError(f"groups={self.groups}: give 1, 2, 4, 8 or 16, which divide the {FIRST} first channels")
        return self


class WideResNet(Layered):
    """Wide residual network with GroupNorm and standardised weights, 16 layers deep and 4 times as wide."""

    kinds = ("image",)
    Options = WideResNetOptions

    def __init__(self, schema: Schema, options: WideResNetOptions) -> None:
        super().__init__(schema, options)
        channels = (FIRST, *(FIRST * options.width * multiple for multiple in STAGES))
        blocks = [
            Block(after if later else before, after, 2 if stage and not later else 1, options)
            for stage, (before, after) in enumerate(itertools.pairwise(channels))
            for later in range((options.depth - 4) // 6)
        ]
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(LEAST_SIDE),
            _convolution(schema.shape[0], FIRST),
            *blocks,
            *_activated(channels[-1], options),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels[-1], schema.outputs),
        )


class Block(nn.Module):
    """Two convolutions, each after GroupNorm and activation. The input is added.

    If its shape differs from the output, a 1×1 convolution adapts it.
    """

    def __init__(self, before: int, after: int, stride: int, options: WideResNetOptions) -> None:
        super().__init__()
        self.activated = nn.Sequential(*_activated(before, options))
        self.convolutions = nn.Sequential(
            _convolution(before, after, stride), *_activated(after, options), _convolution(after, after)
        )
        same = before == after and stride == 1
        self.shortcut = None if same else StandardisedConv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, after, height/stride, width/stride]`."""
        activated = self.activated(x)
        return self.convolutions(activated) + (x if self.shortcut is None else self.shortcut(activated))


def _convolution(before: int, after: int, stride: int = 1) -> nn.Module:
    return StandardisedConv2d(before, after, 3, stride=stride, padding=1, bias=False)


def _activated(channels: int, options: WideResNetOptions) -> tuple[nn.Module, nn.Module]:
    return nn.GroupNorm(options.groups, channels), options.make_activation()
