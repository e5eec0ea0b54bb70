"""Models: one file per family, from schema and settings to a module. A new model is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from equidp.errors import EquidpError, unknown_name
from equidp.models.base import Model, ModelOptions
from equidp.models.cnn_small import CnnSmall
from equidp.models.linear import Logistic, Mlp
from equidp.records import Schema

__all__ = ["MODELS", "Model", "ModelOptions", "build_model", "model_options"]

MODELS: dict[str, type[Model]] = {
    "logistic": Logistic,
    "mlp": Mlp,
    "cnn_small": CnnSmall,
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
    family = MODELS[name].Options
    for key in options:
        if key not in family.model_fields:
            raise unknown_name(f"option of model {name!r}", key, family.model_fields)
    try:
        return family(**options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "options"
        raise EquidpError(f"Model {name!r}, {place}: {first['msg']} (given: {first['input']!r}).") from error
