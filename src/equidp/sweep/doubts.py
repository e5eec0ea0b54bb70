"""What means over a sweep's cells do not show: cells that are missing, and raw files that changed between them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from equidp.errors import listed_names
from equidp.sweep.project import Cell, by_seed, grouped
from equidp.sweep.summary import labels_of


def doubts(cells: Sequence[Cell], finished: Sequence[Cell]) -> dict[str, list[str]]:
    """Sentences on the finished cells, by data set; `cells` are all of the sweep."""
    labels, found = labels_of(cells), defaultdict[str, list[str]](list)
    for of in grouped(cells, lambda cell: cell.dataset):
        there = [cell for cell in finished if cell.dataset == of[0].dataset]
        found[of[0].dataset] += [*_lacking(of, there, labels), *_of_other_files(there, labels)]
    return {dataset: sentences for dataset, sentences in found.items() if sentences}


def _lacking(cells: Sequence[Cell], finished: Sequence[Cell], labels: dict[str, str]) -> Iterator[str]:
    """Say which rows lack cells, because seeds that fail may be those that go badly."""
    there = {cell.key for cell in finished}
    rows = [(labels[of[0].key], sum(cell.key in there for cell in of), len(of)) for of in by_seed(cells)]
    if lacking := [f"{label} ({count} of {planned} seeds)" for label, count, planned in rows if count < planned]:
        yield f"This sweep is not finished. Cells of these rows failed or were not run: {', '.join(lacking)}."


def _of_other_files(cells: Sequence[Cell], labels: dict[str, str]) -> Iterator[str]:
    """Say which cells are of other raw files than the first cell, because they have other test records too."""
    digests = {cell.key: digest for cell in cells if (digest := _digest(cell))}
    names = {cell.key: f"{labels[cell.key]} (seed {cell.seed})" for cell in cells if cell.key in digests}
    first = next(iter(digests), "")
    if other := [names[key] for key, digest in digests.items() if digest != digests[first]]:
        yield (
            "Means and gains here mix runs on different raw files, by their digests (of a folder, a copy is another): "
            f"those of {listed_names(other)} are not those of {names[first]}. Delete the results of one kind, and call "
            "the sweep again."
        )


def _digest(cell: Cell) -> str | None:
    """Return the digest of the raw files that the cell was trained on; None if it is not known."""
    try:
        return str(json.loads(cell.provenance.read_text())["raw_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
