"""Extras: libraries that some settings alone need, imported when those are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from equidp.errors import EquidpError


def extra(name: str, needed_by: str) -> Any:
    """The module `name` of an extra. Raises EquidpError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise EquidpError(
            f"{needed_by} needs {name.partition('.')[0]}, which is not installed: pip install 'equidp[pretrained]'."
        ) from error
