"""Catalog datasets of our own: folders, and model weights. Nothing is pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from equidp.models.weights import Weights, load_weights, save_weights


class FolderDataset(AbstractDataset[None, Path]):
    """A folder: raw files as a user laid them out, a cache, or a run's own place for checkpoints. Loads as its path."""

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def load(self) -> Path:
        """The folder's path; whoever reads it says which file is missing."""
        return self._filepath

    def save(self, data: None) -> None:
        """A folder is not written as a whole."""
        raise DatasetError(f"{self._filepath} is a folder: it is read, not saved.")

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return self._filepath.is_dir()


class WeightsDataset(AbstractDataset[Weights, Weights]):
    """Model weights as safetensors, the model's card in the file's metadata. Written atomically."""

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: Weights) -> None:
        """Write weights and card."""
        save_weights(data, self._filepath)

    def load(self) -> Weights:
        """Read weights and card."""
        return load_weights(self._filepath)

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return self._filepath.is_file()
