"""Models: one file per family, from schema and settings to a module. A new model is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from equidp.errors import unknown_name
from equidp.models.base import Model, ModelOptions
from equidp.models.bilstm import BiLstm
from equidp.models.cnn import Cnn4, Cnn9
from equidp.models.cnn_small import CnnSmall
from equidp.models.heads import FrozenBackbone, HeadOptions, ScatterCnn, ScatterLinear
from equidp.models.linear import Logistic, Mlp
from equidp.models.resnet9 import ResNet9
from equidp.models.resnet_finetune import ResNetFinetune
from equidp.options import checked_options
from equidp.records import Schema

__all__ = ["MODELS", "Model", "ModelOptions", "build_model", "model_features", "model_options"]

MODELS: dict[str, type[Model]] = {
    "logistic": Logistic,
    "mlp": Mlp,
    "cnn_small": CnnSmall,
    "cnn4": Cnn4,
    "cnn9": Cnn9,
    "resnet9": ResNet9,
    "scatter_linear": ScatterLinear,
    "scatter_cnn": ScatterCnn,
    "frozen_backbone": FrozenBackbone,
    "resnet_finetune": ResNetFinetune,
    "bilstm": BiLstm,
}


def build_model(name: str, schema: Schema, *, options: Mapping[str, Any] | None = None, seed: int = 0) -> Model:
    """A freshly initialised model for a dataset.

    Args:
        name: registry name.
        schema: the dataset's public schema.
        options: `model.options` as they stand in conf.
        seed: of the initial weights; torch's global generator is left as it was.

    Raises:
        EquidpError: an unknown model or option, a value that is not allowed, or features the model cannot take.
    """
    settings = model_options(name, options or {})
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator: weights are made there, and `torch.manual_seed` would reach the GPUs' generators too.
        torch.random.default_generator.manual_seed(seed)
        return MODELS[name](schema, settings)


def model_options(name: str, options: Mapping[str, Any]) -> ModelOptions:
    """Validated settings of a model family.

    Raises:
        EquidpError: an unknown model or option, or a value that is not allowed.
    """
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return checked_options(MODELS[name].Options, options, f"option of model {name!r}")


def model_features(name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the fixed feature map that a model trains on, for `features.extract`; None for raw features.

    Raises:
        EquidpError: an unknown model or option, or a value that is not allowed.
    """
    settings = model_options(name, options)
    return (MODELS[name].extracts, settings.feature_options()) if isinstance(settings, HeadOptions) else None
