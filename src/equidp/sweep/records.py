"""Encoding the records that cells share, once, before the cells."""

from __future__ import annotations

from pathlib import Path

from equidp.errors import EquidpError
from equidp.sweep.grid import nested, params_text
from equidp.sweep.project import Cell, Project


def encode(project: Project, cell: Cell) -> str | None:
    """Encode the cell's records unless they are there; why that failed, or None."""
    from kedro.framework.startup import bootstrap_project

    from equidp.pipelines.datasets import OnceRecordsDataset
    from equidp.pipelines.ingestion.nodes import encode_records

    bootstrap_project(project.path)
    config = project.config(nested(params_text(cell.overrides)))
    parameters, catalog = config["parameters"], config["catalog"]
    try:
        # an absolute path stays what it is
        raw = project.path / catalog["raw_folder"]["filepath"]
        recipe, _ = encode_records(raw, parameters["data"], parameters["dataset"])
        OnceRecordsDataset(filepath=str(project.path / Path(catalog["records"]["filepath"]))).save(recipe)
    except EquidpError as error:
        return error.message
    return None
