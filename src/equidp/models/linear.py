"""Models without convolutions: `logistic` (one linear layer) and `mlp`."""

from __future__ import annotations

import itertools
import math

from torch import nn

from equidp.data.records import Schema
from equidp.models.base import Layered, ModelOptions, Standardise
from equidp.options import Widths


class Logistic(Layered):
    """Multinomial logistic regression on the flattened features."""

    def __init__(self, schema: Schema, options: ModelOptions) -> None:
        super().__init__(schema, options)
        self.layers = nn.Sequential(
            Standardise(schema), nn.Flatten(), nn.Linear(math.prod(schema.shape), schema.outputs)
        )


class MlpOptions(ModelOptions):
    """Options of `mlp`."""

    hidden: Widths = (128,)
    """Widths of the hidden layers."""


class Mlp(Layered):
    """Linear layers with an activation between them."""

    Options = MlpOptions

    def __init__(self, schema: Schema, options: MlpOptions) -> None:
        super().__init__(schema, options)
        widths = (math.prod(schema.shape), *options.hidden)
        hidden = [(nn.Linear(a, b), options.make_activation()) for a, b in itertools.pairwise(widths)]
        self.layers = nn.Sequential(
            Standardise(schema),
            nn.Flatten(),
            *itertools.chain.from_iterable(hidden),
            nn.Linear(widths[-1], schema.outputs),
        )
