"""Convolutional networks on pixels: `cnn4` and `cnn9` of tempered sigmoids (Papernot et al. 2021), `sa_cnn9`.

SA-DPSGD trains `cnn4` on MNIST and Fashion-MNIST. For CIFAR-10 the paper prints only that the network has "9 layers"
and is from earlier work, without a table. Its batch size, learning rate and noise are those that Tramèr and Boneh
(2021) print for a network of six convolutions and three pools, nine in all, before two linear layers. That is
`sa_cnn9`. `cnn9` is the other network that the paper cites: it has eight layers with weights.
"""

from __future__ import annotations

import itertools
import math

from torch import nn

from equidp.data.records import Schema
from equidp.models.base import AtLeast, Layered, ModelOptions, Standardise

CNN4_LEAST_SIDE = 20
"""Smaller images are padded to this side, because the layers would leave nothing of them."""
CNN9_CHANNELS = (32, 64, 128)
CNN9_LAST_CHANNELS = 256
CNN9_LEAST_SIDE = 8
SA_CNN9_HIDDEN = 128


class Cnn4(Layered):
    """Convolutions 16@8×8 and 32@4×4, each max-pooled with stride 1, then linear 32 and linear classes."""

    kinds = ("image",)

    def __init__(self, schema: Schema, options: ModelOptions) -> None:
        super().__init__(schema, options)
        channels, *sides = schema.shape
        rows, columns = (_cnn4_side(max(side, CNN4_LEAST_SIDE)) for side in sides)
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(CNN4_LEAST_SIDE),
            nn.Conv2d(channels, 16, 8, stride=2, padding=2),
            options.make_activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            options.make_activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(32 * rows * columns, 32),
            options.make_activation(),
            nn.Linear(32, schema.outputs),
        )


class Cnn9(Layered):
    """3×3 convolutions 32-32, 64-64, 128-128, each pair average-pooled, then 256 and classes, averaged over the image.

    It has eight layers with weights, whatever its name says, and 605,226 weights on CIFAR-10.
    """

    kinds = ("image",)

    def __init__(self, schema: Schema, options: ModelOptions) -> None:
        super().__init__(schema, options)
        pairs = itertools.pairwise((schema.shape[0], *CNN9_CHANNELS))
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(CNN9_LEAST_SIDE),
            *itertools.chain.from_iterable(
                _pooled_pair(before, after, nn.AvgPool2d(2), options) for before, after in pairs
            ),
            *_convolution(CNN9_CHANNELS[-1], CNN9_LAST_CHANNELS, options),
            nn.Conv2d(CNN9_LAST_CHANNELS, schema.outputs, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


class SaCnn9(Layered):
    """Convolutions as in `cnn9`, each pair max-pooled, then linear 128 and classes: 550,570 weights on CIFAR-10."""

    kinds = ("image",)

    def __init__(self, schema: Schema, options: ModelOptions) -> None:
        super().__init__(schema, options)
        channels, *sides = schema.shape
        pairs = itertools.pairwise((channels, *CNN9_CHANNELS))
        left = math.prod(max(side, CNN9_LEAST_SIDE) // 8 for side in sides)
        self.layers = nn.Sequential(
            Standardise(schema),
            AtLeast(CNN9_LEAST_SIDE),
            *itertools.chain.from_iterable(
                _pooled_pair(before, after, nn.MaxPool2d(2), options) for before, after in pairs
            ),
            nn.Flatten(),
            nn.Linear(CNN9_CHANNELS[-1] * left, SA_CNN9_HIDDEN),
            options.make_activation(),
            nn.Linear(SA_CNN9_HIDDEN, schema.outputs),
        )


def _cnn4_side(side: int) -> int:
    after_first = (side + 2 * 2 - 8) // 2 + 1 - 1
    return (after_first - 4) // 2 + 1 - 1


def _convolution(before: int, after: int, options: ModelOptions) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, 3, padding=1), options.make_activation()


def _pooled_pair(before: int, after: int, pool: nn.Module, options: ModelOptions) -> tuple[nn.Module, ...]:
    return (*_convolution(before, after, options), *_convolution(after, after, options), pool)
