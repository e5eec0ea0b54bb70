"""`cnn_small`: two convolutions and two linear layers, the kind of network DPSGD-F trains on MNIST."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from equidp.data.records import Schema
from equidp.models.base import AtLeast, Layered, MeanPool, ModelOptions, Standardise

CHANNELS = (20, 50)
LAST_SIDE = 4
LEAST_SIDE = 4
SMALL_SIDE = 16
"""Smaller images keep their size in the convolutions (3×3, padded), because 5×5 would leave nothing of 8×8 pixels."""


class CnnSmallOptions(ModelOptions):
    """Options of `cnn_small`."""

    hidden: Annotated[int, Field(ge=1, le=4096)] = 64
    """Units between the convolutions and the logits. With 500 the model is the LeNet of 431,080 parameters on which
    Bagdasaryan, Poursaeed and Shmatikov (2019) showed the disparate impact of DP-SGD on MNIST."""


class CnnSmall(Layered):
    """Convolutions of 20 and 50 channels, each pooled by 2, then a hidden layer; any image size and channels."""

    kinds = ("image",)
    Options = CnnSmallOptions

    def __init__(self, schema: Schema, options: CnnSmallOptions) -> None:
        super().__init__(schema, options)
        channels, height, width = schema.shape
        smallest = max(min(height, width), LEAST_SIDE)
        kernel, padding = (3, 1) if smallest < SMALL_SIDE else (5, 0)
        first, second = CHANNELS
        # 28×28 leaves the second pool as 4×4, and the last pool changes nothing. It brings larger images to 4×4.
        side = min(LAST_SIDE, smallest // 4)
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(LEAST_SIDE),
            nn.Conv2d(channels, first, kernel, padding=padding),
            options.make_activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, kernel, padding=padding),
            options.make_activation(),
            nn.MaxPool2d(2),
            MeanPool(side),
            nn.Flatten(),
            nn.Linear(second * side * side, options.hidden),
            options.make_activation(),
            nn.Linear(options.hidden, schema.outputs),
        )
