"""Packing: writes the model for MLflow, a folder that `mlflow.pyfunc` loads, with one code file and safetensors."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, Schema

import equidp
from equidp.data.records import Schema as Facts
from equidp.data.sources import SOURCES, source
from equidp.models import MODELS, model_options
from equidp.models.weights import load_weights
from equidp.system.logs import held_back

CODE = Path(__file__).with_name("served_model.py")


def pack(target: Path, weights: Path, statement: Iterable[Path] = ()) -> None:
    """Write the folder `target`, which `mlflow.pyfunc` loads.

    The files of the privacy `statement` lie beside the model, so that everybody who gets the model knows its ε.
    """
    card = load_weights(weights).card
    example = source(card["source"], card["source_options"]).example()
    # no inputs: MLflow would refuse 1 where the signature says 1.0, and numbers where categories are texts
    outputs = Schema([ColSpec(DataType.double, name) for name in Facts.from_dict(card["schema"]).output_names])
    with held_back("mlflow.pyfunc", below=logging.ERROR):
        mlflow.pyfunc.save_model(
            str(target),
            python_model=str(CODE),
            # MLflow warns of a signature without an example
            signature=None if example is None else ModelSignature(outputs=outputs),
            input_example=example,
            artifacts={"weights": weights.as_uri()},
            # given here, because to find them MLflow would import the model in another process
            pip_requirements=_requirements(card),
        )
    _forget_paths(target)
    for path in statement:
        shutil.copy(path, target)


def _requirements(card: Mapping[str, Any]) -> list[str]:
    """Return what pip installs where the model is served: equidp, and packages that add its network or its data set."""
    extra = model_options(card["model"], card["options"]).extra
    added = MODELS.package(card["model"]), SOURCES.package(card["source"])
    own = f"equidp[{extra}]" if extra else "equidp"
    return [f"{own}=={equidp.__version__}", *(f"{name}=={version(name)}" for name in sorted({*filter(None, added)}))]


def _forget_paths(model: Path) -> None:
    """Remove from a saved model the paths of code and weights on this machine, which MLflow notes."""
    saved = Model.load(str(model))
    kept = saved.flavors["python_function"]
    kept["model_code_path"] = Path(kept["model_code_path"]).name  # loading needs only the name
    for artifact in kept["artifacts"].values():
        artifact.pop("uri", None)
    saved.save(str(model / "MLmodel"))
