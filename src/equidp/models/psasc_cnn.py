"""`psasc_cnn`: four convolutions and one linear layer, DP-PSASC's network for MNIST and Fashion-MNIST.

The paper prints the kinds of layers, but not their widths, and says that it trains with Opacus. We chose the widths of
the network in Opacus' own example, which has the same layers.
"""

from __future__ import annotations

import itertools

from torch import nn

from equidp.data.records import Schema
from equidp.models.base import AtLeast, Layered, ModelOptions, Standardise

CHANNELS = (32, 64, 64, 128)
LEAST_SIDE = 8


class PsascCnn(Layered):
    """3×3 convolutions of 32, 64, 64 (average-pooled) and 128, global average, linear: 130,890 weights on MNIST."""

    kinds = ("image",)

    def __init__(self, schema: Schema, options: ModelOptions) -> None:
        super().__init__(schema, options)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((schema.shape[0], *CHANNELS)):
            layers += [nn.Conv2d(before, after, 3, padding=1), options.make_activation(), nn.AvgPool2d(2)]
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(LEAST_SIDE),
            *layers[:-1],  # the last convolution is averaged over the whole image
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(CHANNELS[-1], schema.outputs),
        )
