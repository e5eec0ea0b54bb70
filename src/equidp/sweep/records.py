"""Encoding the records that cells share, once, before the cells."""

from __future__ import annotations

from equidp.data.encoding import encode
from equidp.errors import EquidpError
from equidp.sweep.project import Cell


def encode_for(cell: Cell) -> str | None:
    """Encode the cell's records unless they are stored; returns why that failed, or None."""
    data = cell.settings["data"]
    if data["options"].get("catalog"):  # which a cell's own Kedro run has
        return None
    try:
        encode(cell.dataset, data["source"], data["options"], raw_folder=cell.raw_folder, cache=cell.records_cache)
    except EquidpError as error:
        return error.message
    return None
