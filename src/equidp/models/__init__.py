"""Models: one file per family, which builds modules from schema and settings. A new model: a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError, first_line, refuse_unknown
from equidp.gradients.layout import evaluating
from equidp.gradients.misfit import FAILURES
from equidp.gradients.rewriting import rewritten
from equidp.models.backbone import Backbone
from equidp.models.base import Model, ModelOptions
from equidp.models.bilstm import BiLstm
from equidp.models.cnn import Cnn4, Cnn9, SaCnn9
from equidp.models.cnn_small import CnnSmall
from equidp.models.features import is_raw_image
from equidp.models.heads import HeadOptions, ScatterCnn, ScatterLinear
from equidp.models.linear import Logistic, Mlp
from equidp.models.psasc_cnn import PsascCnn
from equidp.models.resnet9 import ResNet9
from equidp.models.resnet_finetune import ResNetFinetune
from equidp.models.tramer_boneh import TramerBonehCifar10, TramerBonehMnist
from equidp.models.wide_resnet import WideResNet
from equidp.options import checked_options
from equidp.registry import Registry
from equidp.system.threads import GLOBAL_RANDOM

MODELS: Registry[type[Model]] = Registry(
    "equidp.models",
    {
        "logistic": Logistic,
        "mlp": Mlp,
        "cnn_small": CnnSmall,
        "cnn4": Cnn4,
        "cnn9": Cnn9,
        "sa_cnn9": SaCnn9,
        "psasc_cnn": PsascCnn,
        "resnet9": ResNet9,
        "wrn16_4": WideResNet,
        "scatter_linear": ScatterLinear,
        "scatter_cnn": ScatterCnn,
        "tramer_boneh_mnist": TramerBonehMnist,
        "tramer_boneh_cifar10": TramerBonehCifar10,
        "backbone": Backbone,
        "resnet_finetune": ResNetFinetune,
        "bilstm": BiLstm,
    },
    "base:Model",
)


def build_model(
    name: str, schema: Schema, *, options: Mapping[str, Any] | None = None, seed: int = 0, files: bool = True
) -> Model:
    """Return a freshly initialised model for a dataset.

    Args:
        name: registry name.
        schema: the dataset's public schema.
        options: `model.options` as they stand in conf.
        seed: for the initial weights; torch's global generator keeps its state.
        files: whether to read the files of initial weights. False for a model that gets trained weights: the files may
            then be missing.

    Raises:
        EquidpError: an unknown model or option, a value that is not allowed, features the model cannot take, or a model
            whose output is not logits.
    """
    settings = model_options(name, options or {})
    settings = settings if files else settings.without_files()
    with GLOBAL_RANDOM, torch.random.fork_rng(devices=[]):
        # Weights are made on the CPU. `torch.manual_seed` would seed the GPUs' generators too.
        torch.random.default_generator.manual_seed(seed)
        model = MODELS[name](schema, settings)
        rewritten(model)  # torch's attention and recurrence do not show their inner calls
        _refuse_other_state(model)
        _try(name, model, schema)
    return model


def _refuse_other_state(model: nn.Module) -> None:
    """Refuse a model whose state_dict has an entry that is neither a parameter nor a buffer.

    The entry would be saved with the weights, but nobody sees whether it learns from the records.
    """
    watched = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    if other := sorted(model.state_dict().keys() - {name for name, _ in watched}):
        raise EquidpError(
            f"The model's state_dict has {other[0]!r}, which is neither a parameter nor a buffer: what it learns of "
            "the records would leave with the model, and nobody sees it. Leave it out, or register a buffer."
        )


def _try(name: str, model: Model, schema: Schema) -> None:
    """Run a new model on two records of zeros, so that a model that does not fit is refused before training."""
    dtype = torch.int64 if schema.kind == "text" else torch.uint8 if is_raw_image(schema) else torch.float32
    try:
        with torch.no_grad(), evaluating(model):
            outputs = model(torch.zeros((2, *schema.shape), dtype=dtype))
    except FAILURES as error:
        raise EquidpError(
            f"Model {name!r} fails on {schema.kind} features of shape {schema.shape}: {first_line(error)}. "
            "Choose another model.name for this dataset, or correct the model's forward."
        ) from error
    wanted = (2, schema.outputs)
    if not isinstance(outputs, Tensor) or outputs.shape != wanted:
        given = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise EquidpError(
            f"Model {name!r} gives {given} for two records; it must give one for each class, or each target: {wanted}."
        )
    if not outputs.isfinite().all():
        raise EquidpError(
            f"Model {name!r} gives logits that are not finite before it is trained: check its initial weights, or "
            "the weights it was given."
        )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's weights by name, on the CPU, to be written to a file.

    Layers that share a weight have a copy each.

    Raises:
        EquidpError: the model's state_dict has an entry that is neither a parameter nor a buffer.
    """
    _refuse_other_state(model)
    return {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}


def model_options(name: str, options: Mapping[str, Any]) -> ModelOptions:
    """Validated settings of a model family.

    Raises:
        EquidpError: an unknown model or option, or a value that is not allowed.
    """
    refuse_unknown("model", [name], MODELS)
    return checked_options(MODELS[name].Options, options, f"option of model {name!r}")


def card_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's options as they may be published. They suffice to build the model without its files."""
    return MODELS[name].Options.published(options)


def model_features(name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the fixed feature map that a model trains on, for `features.extract`; None for raw features.

    Raises:
        EquidpError: an unknown model or option, or a value that is not allowed.
    """
    settings = model_options(name, options)
    given = settings.feature_options() if isinstance(settings, HeadOptions) else None
    return None if given is None else (MODELS[name].extracts, given)
