"""The model and the loss of a run, and its predictions."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor, nn

from equidp.data.records import Records, Schema
from equidp.errors import EquidpError
from equidp.gradients.layout import channels_last, convolutions_for, evaluating
from equidp.gradients.losses import Loss
from equidp.gradients.refusals import Untrained
from equidp.gradients.shape import in_vectors, padded
from equidp.gradients.shares import WholeShares
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.noise import derived_seed
from equidp.models import Model, build_model
from equidp.models.features import is_mapped, is_raw_image
from equidp.parameters import ModelSettings, TrainingSettings
from equidp.parameters.sections import AUGMENTATIONS, HUBER_DELTA
from equidp.tasks import task_of


def loss_of(training: TrainingSettings, train: Records, device: torch.device) -> Loss:
    """The loss of each record on its own, by the task of the data.

    Raises:
        EquidpError: if the task has no such loss, if there is not one weight for each class, or if weights shall follow
            sizes of classes that are not declared.
    """
    task = task_of(train.schema)
    return task.loss(
        task.loss_named(training.loss),
        device,
        class_weights=class_weights(training, train),
        huber_delta=training.huber_delta or HUBER_DELTA,
    )


def class_weights(training: TrainingSettings, train: Records) -> tuple[float, ...] | None:
    """Weights of the classes in the loss.

    Balanced ones are 1 for the rarest class. For another class with m times as many records it is 1/m. Only declared
    sizes count.

    Raises:
        EquidpError: if balanced ones are asked for, and there are no such sizes.
    """
    if training.class_weights != "balanced":
        return training.class_weights
    sizes = () if train.membership is None else train.membership.class_sizes
    if not sizes or min(sizes) <= 0:
        raise EquidpError(
            "training.class_weights=balanced takes declared sizes of classes, and there are none "
            "(or none of some class): declare data.options.sizes if they are public, or give weights as "
            "numbers, or take dpsgd_level or dpsgd_minimax, which count with noise."
        )
    return tuple(min(sizes) / size for size in sizes)


def augmentation(training: TrainingSettings, schema: Schema, seed: int) -> Augmentation | None:
    """How the run augments its records; None if it does not.

    Raises:
        EquidpError: if there are no such views of these data.
    """
    if not training.augmentations:
        return None
    mapped = is_mapped(schema)
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
    """The run's model with what the algorithm imposes: options, or its own model for features computed of images."""
    if algorithm.model and schema.kind == "image" and not is_raw_image(schema):
        model = ModelSettings(name=algorithm.model)
    return model.model_copy(update={"options": {**model.options, **algorithm.model_options}})


def make_model(schema: Schema, model: ModelSettings, algorithm: Algorithm, seed: int) -> nn.Module:
    """The model an algorithm trains. Algorithms of one seed that train the same model start from the same weights."""
    chosen = imposed(model, algorithm, schema)
    return build_model(chosen.name, schema, options=chosen.options, seed=derived_seed(seed, "model"))


NUMBERS_AT_ONCE = 1 << 24
"""The most numbers of features in one forward pass: those of 111 images of 3 × 224². A ResNet-50 needs up to 5 GB for
these, besides a step's memory."""


def scored_at_once(network: nn.Module, features: Tensor) -> int:
    """How many of these records (`[n, …]`) one forward pass without gradients may have."""
    most = getattr(network, "scored_at_once", Model.scored_at_once)
    return max(1, min(most, NUMBERS_AT_ONCE // max(1, math.prod(features.shape[1:]))))


@torch.no_grad()
def predict(network: nn.Module, features: Tensor, schema: Schema | None = None, *, alike: bool = False) -> Tensor:
    """Predictions `[n, outputs]` on the CPU, by the schema's task, scored in batches; else class probabilities.

    The network is in evaluation mode meanwhile. Every layer gets its own mode back.

    Args:
        network: the model.
        features: `[n, …]`.
        schema: of the records; None for class probabilities.
        alike: give every pass the same number of rows, in whole blocks; rows at the end may stand for no record. By
            this number, and by a row's place in or beside such blocks, libraries choose a kernel, and two kernels round
            differently. Otherwise one record less could move the scores of others across the edge of a bin.

    Raises:
        EquidpError: for a network that keeps something of the records that it scores.
    """
    final = (lambda outputs: torch.softmax(outputs.float(), dim=1)) if schema is None else task_of(schema).predict
    where = next(network.parameters()).device
    features = _resident(features, where)
    rows = scored_at_once(network, features)
    rows = in_vectors(rows) if alike else rows
    chunks = [padded(chunk, rows) if alike else chunk for chunk in features.split(rows)]
    shares = WholeShares(network) if alike else None

    def score(chunk: Tensor) -> Tensor:
        return final(network(chunk))

    def scored(chunk: Tensor) -> Tensor:
        return score(chunk) if shares is None else shares.passed(score, chunk, rows)

    with evaluating(network), channels_last(convolutions_for(network)):
        parts = Untrained(network).watched(lambda: [scored(chunk.to(where)) for chunk in chunks])
    return torch.cat(parts)[: len(features)].cpu()


_HELD: list[tuple[weakref.ref[Tensor], Tensor]] = []
"""The features that were scored last, and their copy on a GPU."""


def _resident(features: Tensor, device: torch.device) -> Tensor:
    """Features on a GPU, if they fit into an eighth of its free memory; they stay there until others are scored."""
    if device.type != "cuda" or features.device == device:
        return features
    if _HELD and (_HELD[0][0]() is not features or _HELD[0][1].device != device):
        _HELD.clear()
    if not _HELD:
        free, _ = torch.cuda.mem_get_info(device)
        if features.numel() * features.element_size() > free // 8:
            return features
        _HELD.append((weakref.ref(features), features.to(device)))
    return _HELD[0][1]
