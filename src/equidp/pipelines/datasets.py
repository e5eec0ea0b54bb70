"""Catalog datasets of our own: folders, documents that may be missing, model weights, releases. Nothing is pickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from equidp.errors import EquidpError
from equidp.models.weights import Weights, load_weights, save_weights
from equidp.reporting.rendering import linked, whole
from equidp.system.files import remove, replacing, replacing_folder

UNDATED = 315_619_200
"""2 January 1980, the date of every file that goes out: a true date would tell when a training ended. Zip files have no
date before 1980."""


class _PathDataset(AbstractDataset[Any, Any]):
    """A file or folder of this machine; only read unless `save` says otherwise."""

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: Any) -> None:
        """Refuse: the writer of this place has a catalog entry of its own, or does not write it as a whole."""
        raise DatasetError(f"{self._filepath} is read here, not saved.")

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return self._filepath.exists()


class FolderDataset(_PathDataset):
    """A folder: raw files as a user laid them out, a cache, or a run's own place for checkpoints. Loads as its path."""

    def load(self) -> Path:
        """The folder's path; whoever reads it says which file is missing."""
        return self._filepath


class WeightsDataset(_PathDataset):
    """Model weights as safetensors, the model's card in the file's metadata. Written atomically."""

    def save(self, data: Weights) -> None:
        """Write weights and card."""
        save_weights(data, self._filepath)

    def load(self) -> Weights:
        """Read weights and card."""
        return load_weights(self._filepath)


class OptionalDocumentDataset(_PathDataset):
    """A JSON document. A missing file is loaded as an empty document; an empty document is saved as no file."""

    def save(self, data: dict[str, Any]) -> None:
        """Write the document as a whole, or remove an earlier run's. Raises EquidpError where the disk refuses."""
        if not data:
            remove(self._filepath)
            return
        with replacing(self._filepath) as part:
            part.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")

    def load(self) -> dict[str, Any]:
        """The document. Raises EquidpError for a file that holds none."""
        if not self._filepath.is_file():
            return {}
        try:
            found = json.loads(self._filepath.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EquidpError(f"{self._filepath} is damaged ({error}): make it again.") from error
        if not isinstance(found, dict):
            raise EquidpError(f"{self._filepath} is damaged (it holds no JSON object): make it again.")
        return found


class PageDataset(_PathDataset):
    """An HTML page; those below one `library` folder share a copy of Plotly there."""

    def __init__(self, *, filepath: str, library: str, metadata: dict | None = None) -> None:
        super().__init__(filepath=filepath, metadata=metadata)
        self._library = Path(library)

    def save(self, data: str) -> None:
        """Write the page as a whole. Raises EquidpError where the disk refuses."""
        page = linked(data, self._filepath, self._library)
        with replacing(self._filepath) as part:
            part.write_text(page, encoding="utf-8")

    def load(self) -> str:
        """The page as one self-contained file."""
        return whole(self._filepath.read_text(encoding="utf-8"))


class ReleaseFolderDataset(_PathDataset):
    """A folder of files by name, written whole or not at all. Saving no file removes what an earlier run left."""

    def save(self, data: dict[str, bytes]) -> None:
        """Write beside the target, then replace it. Raises EquidpError where the disk refuses."""
        if not data:
            remove(self._filepath)
            return
        with replacing_folder(self._filepath) as part:
            for name, content in data.items():
                (part / name).write_bytes(content)
                os.utime(part / name, (UNDATED, UNDATED))
            os.utime(part, (UNDATED, UNDATED))

    def load(self) -> dict[str, bytes]:
        """Every file by its name."""
        return {path.name: path.read_bytes() for path in sorted(self._filepath.iterdir())}
