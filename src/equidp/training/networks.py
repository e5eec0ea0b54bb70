"""The model and the loss of a run, and its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.noise import derived_seed
from equidp.models import Model, build_model
from equidp.models.features import is_raw_image
from equidp.parameters import ModelSettings, TrainingSettings
from equidp.parameters.sections import AUGMENTATIONS


def record_loss(weights: tuple[float, ...] | None, classes: Sequence[str], device: torch.device) -> Any:
    """Cross-entropy of each record on its own, optionally times its class's weight.

    Never a weighted *mean*: its denominator would couple the records and break the sensitivity.

    Raises:
        EquidpError: there is not one weight for each class.
    """
    if weights is None:
        return CrossEntropy()
    if len(weights) != len(classes):
        raise EquidpError(
            f"training.class_weights has {len(weights)} numbers; give one for each of the {len(classes)} classes, in "
            f"this order: {', '.join(classes)}."
        )
    scale = torch.tensor(weights, device=device)
    plain = CrossEntropy()
    return lambda outputs, labels: plain(outputs, labels) * scale[labels]


def augmentation(training: TrainingSettings, schema: Schema, seed: int) -> Augmentation | None:
    """How the run augments its records; None where it does not.

    Raises:
        EquidpError: where there are no views of such data.
    """
    if not training.augmentations:
        return None
    mapped = schema.kind == "image" and not is_raw_image(schema)
    there = () if mapped else AUGMENTATIONS.get(schema.kind, ())
    kinds = training.augmentation_kinds or there
    if not there or not set(kinds) <= set(there):
        raise EquidpError(
            f"training.augmentations={training.augmentations}: the features of dataset {schema.name!r} are "
            f"{'those of a fixed map' if mapped else schema.kind}, of which there are "
            + (f"views by {' and '.join(there)} alone." if there else "no random views: set training.augmentations=0.")
        )
    padding, sd = training.augmentation_padding, training.augmentation_noise
    return Augmentation(
        training.augmentations,
        kinds,
        derived_seed(seed, "views"),
        schema.shape,
        padding=Augmentation.padding if padding is None else padding,
        sd=Augmentation.sd if sd is None else sd,
    )


def imposed(model: ModelSettings, algorithm: Algorithm, schema: Schema) -> ModelSettings:
    """The run's model, with what the algorithm imposes on it: options, or another head for features of its own."""
    if algorithm.model and schema.kind == "image" and not is_raw_image(schema):
        model = ModelSettings(name=algorithm.model)
    return model.model_copy(update={"options": {**model.options, **algorithm.model_options}})


def make_model(schema: Schema, model: ModelSettings, algorithm: Algorithm, seed: int) -> nn.Module:
    """The model an algorithm trains. Algorithms of one seed that train the same model start from the same weights."""
    chosen = imposed(model, algorithm, schema)
    return build_model(chosen.name, schema, options=chosen.options, seed=derived_seed(seed, "model"))


@torch.no_grad()
def predict(network: nn.Module, features: Tensor) -> Tensor:
    """Class probabilities `[n, classes]` on the CPU, scored in batches."""
    where = next(network.parameters()).device
    was_training = network.training
    network.eval()
    size = getattr(network, "scored_at_once", Model.scored_at_once)
    parts = [torch.softmax(network(chunk.to(where)).float(), dim=1).cpu() for chunk in features.split(size)]
    network.train(was_training)
    return torch.cat(parts)
