"""Extras: libraries that only some settings need; they are imported when such a setting is used."""

from __future__ import annotations

import importlib
from typing import Any

from equidp.errors import EquidpError

EXCEL = "openpyxl"
"""The library with which pandas reads Excel workbooks."""


def extra(name: str, needed_by: str) -> Any:
    """Return the module `name` of an extra. Raises EquidpError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise not_installed(name, needed_by) from error


def not_installed(name: str, needed_by: str) -> EquidpError:
    """Build the error for a module that is missing."""
    library = name.partition(".")[0]
    chosen = {EXCEL: "excel", "pytest": "check", "hypothesis": "check"}.get(library, "pretrained")
    return EquidpError(f"{needed_by} needs {library}, which is not installed: pip install 'equidp[{chosen}]'.")
