"""Catalog datasets of our own: folders, records that are made once, model weights. Nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equidp.data import storage
from equidp.data.records import Records
from equidp.errors import EquidpError
from equidp.system.files import replacing


class FolderDataset(AbstractDataset[None, Path]):
    """A folder: raw files as a user laid them out, or a run's own place for checkpoints. Loading gives its path."""

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


@dataclass(frozen=True)
class Recipe:
    """Records that need not be made again: a fingerprint of everything they depend on, and how to make them."""

    fingerprint: str
    build: Callable[[], Records]


class OnceRecordsDataset(AbstractDataset[Recipe | Records, Records]):
    """Records kept by fingerprint: saving a recipe whose records exist already costs nothing.

    Plain records are passed on in memory: there was nothing to be made.

    Args:
        filepath: folder of the files; one file per fingerprint, so that settings never overwrite each other.
    """

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self._current: Path | Records | None = None
        self.metadata = metadata

    def save(self, data: Recipe | Records) -> None:
        """Make and store the records, unless they are there."""
        if isinstance(data, Records):
            self._current = data
            return
        path = self._filepath / f"{data.fingerprint[:16]}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.save(data.build(), path)
        self._current = path

    def load(self) -> Records:
        """The records saved in this run; in a notebook, where none were, the newest there are."""
        found = self._current or max(self._filepath.glob("*.safetensors"), key=os.path.getmtime, default=None)
        if found is None:
            raise EquidpError(
                f"No records in {self._filepath}: run `kedro run --pipeline=ingestion` for this dataset first."
            )
        return found if isinstance(found, Records) else storage.load(found)

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return isinstance(self._current, Records) or (
            self._filepath.is_dir() and any(self._filepath.glob("*.safetensors"))
        )


@dataclass(frozen=True)
class Weights:
    """A model's weights by name, with what is needed to rebuild the model (JSON types)."""

    tensors: dict[str, Tensor]
    card: dict[str, Any]


class WeightsDataset(AbstractDataset[Weights, Weights]):
    """Model weights as safetensors, the model's card in the file's metadata. Written atomically."""

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: Weights) -> None:
        """Write beside the target, then replace it: a reader never sees half a file."""
        with replacing(self._filepath) as part:
            save_file(data.tensors, part, metadata={"card": json.dumps(data.card)})

    def load(self) -> Weights:
        """Read weights and card.

        Raises:
            EquidpError: for a file that is not what it should be.
        """
        try:
            with safe_open(self._filepath, framework="pt") as file:
                card = json.loads((file.metadata() or {})["card"])
                # copies: Windows does not replace a file that is mapped
                return Weights({name: file.get_tensor(name).clone() for name in file.keys()}, card)  # noqa: SIM118
        except FileNotFoundError as error:
            raise EquidpError(f"There is no model {self._filepath}: train one first.") from error
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise EquidpError(f"{self._filepath} is damaged ({error}): delete it, and train again.") from error

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return self._filepath.is_file()
