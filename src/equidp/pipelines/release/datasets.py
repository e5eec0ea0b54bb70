"""Catalog datasets of the release: documents that may be missing, and a folder that is written whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from equidp.errors import EquidpError
from equidp.system.files import remove, replacing, replacing_folder

UNDATED = 315_619_200
"""2 January 1980, the date of every file that goes out: a date tells when a training ended. Zip has no earlier one."""


class OptionalDocumentDataset(AbstractDataset[dict[str, Any], dict[str, Any]]):
    """A JSON document; an empty one where there is no file, and no file where an empty one is saved."""

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def load(self) -> dict[str, Any]:
        """The document.

        Raises:
            EquidpError: for a file that holds none.
        """
        if not self._filepath.is_file():
            return {}
        try:
            found = json.loads(self._filepath.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EquidpError(f"{self._filepath} is damaged ({error}): make it again.") from error
        if not isinstance(found, dict):
            raise EquidpError(f"{self._filepath} is damaged (it holds no JSON object): make it again.")
        return found

    def save(self, data: dict[str, Any]) -> None:
        """Write it whole, or remove what an earlier run left.

        Raises:
            EquidpError: where the disk refuses.
        """
        if not data:
            remove(self._filepath)
            return
        with replacing(self._filepath) as part:
            part.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return self._filepath.is_file()


class ReleaseFolderDataset(AbstractDataset[dict[str, bytes], dict[str, bytes]]):
    """A folder of files by name, written whole or not at all. Saving no file removes what an earlier run left."""

    def __init__(self, *, filepath: str, metadata: dict | None = None) -> None:
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: dict[str, bytes]) -> None:
        """Write beside the target, then replace it.

        Raises:
            EquidpError: where the disk refuses.
        """
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

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath)}

    def _exists(self) -> bool:
        return self._filepath.is_dir()
