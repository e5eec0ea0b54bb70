"""Served model: the model as MLflow serves it. This file is its code, and its weights are safetensors without pickle.

`mlflow.pyfunc.load_model("runs:/<run id>/model").predict(rows)` takes rows as the provider's file has them: a DataFrame
of raw columns for tabular data, otherwise an array of stored features. It gives a column of probabilities for each
class, or a column of numbers for a target, in the target's unit. Input that training would have refused, or could not
have seen, is refused here, too, because its score would be arbitrary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel, PythonModelContext
from torch import Tensor

from equidp.data.cells import SENT, cells
from equidp.data.records import Schema
from equidp.data.sources import source
from equidp.data.sources.base import Source
from equidp.errors import EquidpError
from equidp.models import model_features
from equidp.models.features import is_raw_image
from equidp.models.weights import load_weights, network_of
from equidp.training import predict

REASON = "reason"
"""Column that says why a row has no score, if there are such rows."""


class RefusedInputError(EquidpError, MlflowException):  # type: ignore[misc]  # `message` is final in click, not in MLflow
    """A refusal whose sentence MLflow's server passes on. For any other error the server returns a traceback."""

    def __init__(self, message: str) -> None:
        EquidpError.__init__(self, message)
        MlflowException.__init__(self, message, error_code=INVALID_PARAMETER_VALUE)


class ServedModel(PythonModel):
    """Loads weights and card, and encodes raw rows by the dataset's declared schema before it scores them."""

    def load_context(self, context: PythonModelContext) -> None:
        """Rebuild the network from the artifact `weights`."""
        weights = load_weights(Path(context.artifacts["weights"]))
        self.card = weights.card
        self.network = network_of(weights)

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """Return `[n, outputs]`: columns of probabilities named by class, or columns of numbers named by target.

        Arrays are accepted, too, but MLflow warns of such a type hint. Rows that break the dataset's declaration get
        None, and another column says why.

        Raises:
            RefusedInputError: all rows break the declaration, a column is missing, or an array does not have the
                features of this model.
        """
        schema, refused = Schema.from_dict(self.card["schema"]), dict[int, str]()
        try:
            rows = _as_rows(model_input)
            if rows is None:
                features = self._stored(model_input)
            else:
                encoder = source(self.card["source"], self.card["source_options"]).as_in(schema)
                features = _encoded(encoder, as_read(rows.set_axis(pd.RangeIndex(len(rows), name=SENT))), refused)
        except EquidpError as error:
            raise RefusedInputError(error.message) from error
        found = predict(self.network, features, schema).numpy()
        if rows is None:
            return pd.DataFrame(found, columns=schema.output_names)
        every = np.full((len(rows), found.shape[1]), np.nan, dtype=found.dtype)
        every[[at for at in range(len(rows)) if at not in refused]] = found
        # with the rows' own index, so that scores that are joined to a part of a table belong to the right rows
        scores = pd.DataFrame(every, columns=schema.output_names, index=rows.index)
        if refused:
            name = REASON if REASON not in schema.output_names else f"{REASON} of no score"
            # MLflow's server writes NaN as NaN, which strict readers of JSON refuse, but None as null
            scores = scores.astype(object).where(scores.notna(), None)
            scores[name] = [refused.get(at, "") for at in range(len(rows))]
        return scores

    def _stored(self, given: Any) -> Tensor:
        """Return features as in training: pixels as bytes, token ids, or numbers of a table scaled to 0..1."""
        schema = Schema.from_dict(self.card["schema"])
        try:
            values = np.asarray(given)
        except ValueError:  # lists of different lengths
            values = np.empty(0, dtype=object)
        if values.dtype.kind not in "biuf" or values.shape[1:] != schema.shape or not values.ndim:
            wanted, found = (", ".join(map(str, shape)) for shape in (("n", *schema.shape), values.shape))
            remedy = "resize or reshape it" if schema.kind == "image" else "give that, or a data frame of raw columns"
            raise EquidpError(
                f"The model takes an array of numbers of shape ({wanted}), one entry per record, and this one is "
                f"({found}) of {values.dtype}; {remedy}."
            )
        if is_raw_image(schema):  # as bytes, because floats would not be scaled
            return torch.from_numpy(_within(values, 255, "pixels", whole=True).astype(np.uint8))
        if schema.kind == "text":
            return torch.from_numpy(_within(values, schema.vocabulary - 1, "token ids", whole=True).astype(np.int64))
        raw = model_features(self.card["model"], self.card["options"]) is None and schema.kind == "tabular"
        scaled = _within(values, 1, "scaled features") if raw else _within(values, np.inf, "features", least=-np.inf)
        return torch.from_numpy(scaled.astype(np.float32))


def _encoded(encoder: Source, rows: pd.DataFrame, refused: dict[int, str]) -> Tensor:
    """Return the features of rows that fit the declaration; put positions and faults of other rows into `refused`.

    Raises:
        EquidpError: a column is missing, or no row fits.
    """
    encoder.encode(rows.iloc[:0])
    try:
        return encoder.encode(rows)
    except EquidpError:
        refused.update(encoder.unfit(rows))
    if len(refused) == len(rows):
        raise EquidpError(refused[0])
    return encoder.encode(rows.drop(index=list(refused)))


def _as_rows(given: Any) -> pd.DataFrame | None:
    """Return rows with named columns as a data frame, for all ways to write them; None if columns have no names."""
    if isinstance(given, pd.Series):
        return given.to_frame().T
    if isinstance(given, Mapping):
        single = all(np.ndim(value) == 0 for value in given.values())
        try:
            return pd.DataFrame([given] if single else dict(given))
        except ValueError as error:  # lists of different lengths, or of lists
            raise EquidpError(f"The given columns make no table ({error}); give one value per row in each.") from error
    if isinstance(given, list) and given and all(isinstance(row, Mapping) for row in given):
        return pd.DataFrame(given)
    return given if isinstance(given, pd.DataFrame) else None


def as_read(rows: pd.DataFrame) -> pd.DataFrame:
    """Return cells as they are read from a table: text is stripped, numbers and booleans stay as they are."""
    if rows.columns.has_duplicates:
        twice = rows.columns[rows.columns.duplicated()][0]
        raise EquidpError(f"The given table has two columns called {str(twice)!r}; leave one out.")
    return cells(rows)


def _within(values: np.ndarray, most: float, what: str, *, least: float = 0, whole: bool = False) -> np.ndarray:
    """Return the values themselves.

    Raises:
        EquidpError: a value is no finite number from `least` to `most`, or is not whole although `whole` is set.
    """
    good = np.isfinite(values) & (values >= least) & (values <= most)
    if whole:
        good &= values == np.floor(values)
    if not good.all():
        kind = "whole numbers" if whole else "finite numbers"
        bounds = "" if most == np.inf else f" from {least:g} to {most:g}"
        raise EquidpError(f"The given array holds {values[~good][0]!s}; the model takes {what}, {kind}{bounds}.")
    return values


mlflow.models.set_model(ServedModel())
