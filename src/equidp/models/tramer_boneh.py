"""Networks on scatter features as Tramèr and Boneh print them (2021, "Differentially Private Learning Needs Better …").

DPIS and its baseline DP-SGD-HF train them. The features are normalised within groups of each record's own channels, or
by two public photographs; the variant of the paper that normalises by noised statistics of the private data is left
out.
"""

from __future__ import annotations

import math

from torch import nn

from equidp.data.records import Schema
from equidp.models.base import AtLeast, Standardise
from equidp.models.heads import ScatterHead, ScatterHeadOptions

MNIST_CHANNELS = (16, 32)
MNIST_HIDDEN = 32
CIFAR10_CHANNELS = 64


class TramerBonehMnist(ScatterHead):
    """Scattering transform, convolutions of 16 (stride 2) and 32, linear 32 and classes: 33,066 weights on MNIST."""

    def head(self, schema: Schema, options: ScatterHeadOptions) -> nn.Module:
        """7×7 features of 28×28 images leave the convolutions as 4×4."""
        channels, *sides = schema.shape
        first, second = MNIST_CHANNELS
        left = math.prod((side + 1) // 2 for side in sides)
        return nn.Sequential(
            Standardise(schema),
            nn.Conv2d(channels, first, 3, stride=2, padding=1),
            options.make_activation(),
            nn.Conv2d(first, second, 3, padding=1),
            options.make_activation(),
            nn.Flatten(),
            nn.Linear(second * left, MNIST_HIDDEN),
            options.make_activation(),
            nn.Linear(MNIST_HIDDEN, schema.outputs),
        )


class TramerBonehCifar10(ScatterHead):
    """Scattering transform, two 3×3 convolutions of 64, max-pooled between, and linear: 187,210 weights on CIFAR-10."""

    def head(self, schema: Schema, options: ScatterHeadOptions) -> nn.Module:
        """8×8 features of 32×32 images leave the pool as 4×4."""
        channels, *sides = schema.shape
        left = math.prod(max(side, 2) // 2 for side in sides)
        return nn.Sequential(
            Standardise(schema),
            AtLeast(2),
            nn.Conv2d(channels, CIFAR10_CHANNELS, 3, padding=1),
            options.make_activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(CIFAR10_CHANNELS, CIFAR10_CHANNELS, 3, padding=1),
            options.make_activation(),
            nn.Flatten(),
            nn.Linear(CIFAR10_CHANNELS * left, schema.outputs),
        )
