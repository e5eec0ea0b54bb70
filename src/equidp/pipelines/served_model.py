"""The model as MLflow serves it: this file is the model's code, its weights are safetensors. Nothing is pickled.

`mlflow.pyfunc.load_model("runs:/<run id>/model").predict(rows)` takes rows as the provider's file has them (a DataFrame
of raw columns for tabular data, an array of stored features otherwise) and gives one column of probabilities per class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext

from equidp.pipelines.datasets import WeightsDataset
from equidp.pipelines.training.nodes import load_network
from equidp.sources import source
from equidp.training import predict


class ServedModel(PythonModel):
    """Loads weights and card; encodes raw rows by the dataset's declared schema before scoring them."""

    def load_context(self, context: PythonModelContext) -> None:
        """Rebuild the network from the artifact `weights`."""
        weights = WeightsDataset(filepath=str(Path(context.artifacts["weights"]))).load()
        self.card = weights.card
        self.network = load_network(weights)

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """`[n, classes]` probabilities, columns named by class; takes arrays too, but MLflow warns of such a hint."""
        if isinstance(model_input, pd.DataFrame):
            features = source(self.card["source"], self.card["source_options"]).encode(model_input.astype(str))
        else:
            features = torch.as_tensor(np.asarray(model_input))
        return pd.DataFrame(predict(self.network, features).numpy(), columns=self.card["schema"]["classes"])


mlflow.models.set_model(ServedModel())
