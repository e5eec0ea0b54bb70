"""Which runs of a sweep are compared with which: private runs with those of one algorithm, the reference.

This module imports nothing that takes long, so that a misspelt reference is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import EquidpError, unknown_name
from equidp.sweep.project import Cell, by_seed, digest, row_key

DEFAULT = "dpsgd"
"""The reference, where the sweep runs it on the data set."""

OWN = ("training", BASELINE)
"""Blocks of settings in which two runs may differ if the reference has only one run that is otherwise alike."""


def references(cells: Sequence[Cell], reference: str = "") -> dict[str, str]:
    """Return, by data set, the algorithm that its private runs are compared with.

    A data set on which this algorithm is not run is left out.

    Args:
        cells: all cells of the sweep, finished or not.
        reference: the algorithm's name. If empty, it is `dpsgd`, or the first private algorithm on a data set without
            dpsgd.

    Raises:
        EquidpError: no private run of the sweep is of this algorithm.
    """
    there: dict[str, list[str]] = {}
    for cell in filter(_private, cells):
        there.setdefault(cell.dataset, []).append(cell.algorithm)
    names = list(dict.fromkeys(name for of in there.values() for name in of))
    if reference and reference not in names:
        if reference not in ALGORITHMS:
            raise unknown_name("reference", reference, names)
        raise EquidpError(
            f"reference={reference}: no private run of this sweep is of it; "
            + (f"take one of {', '.join(names)}." if names else "leave it out, as the sweep has none.")
        )
    chosen = {dataset: reference or (DEFAULT if DEFAULT in of else of[0]) for dataset, of in there.items()}
    return {dataset: name for dataset, name in chosen.items() if name in there[dataset]}


def counterparts(cells: Sequence[Cell], reference: str = "") -> dict[str, list[str]]:
    """Return, for each private run of another algorithm, the reference's runs to compare it with, as `row_key`s.

    These are the runs at the same settings, except for options of the two algorithms. If there is none, a single run of
    the reference on the same data, with the same model and at the same privacy settings takes the place: each algorithm
    then has its own training settings, such as the best learning rate. If there are several such runs, none is taken,
    because none is better to compare with than another.

    `cells` are all cells, finished or not: a run must not get another counterpart only because a cell failed.

    Raises:
        EquidpError: as `references`.
    """
    chosen = references(cells, reference)
    firsts = [of[0] for of in by_seed(filter(_private, cells)) if of[0].dataset in chosen]
    bases = [cell for cell in firsts if cell.algorithm == chosen[cell.dataset]]
    found = {}
    for cell in firsts:
        if cell.algorithm != chosen[cell.dataset]:
            equal = [base for base in bases if _held(base) == _held(cell)]
            trained_apart = [base for base in bases if _held(base, *OWN) == _held(cell, *OWN)]
            alone = trained_apart if len(trained_apart) == 1 else []
            found[row_key(cell)] = [row_key(base) for base in equal or alone]
    return found


def _held(cell: Cell, *free: str) -> str:
    """Digest of the settings that two runs must share to be compared: not the seed, nor an algorithm's own options."""
    aside = {"seed", "algorithm", cell.algorithm, "audited", *free}  # `audited` repeats options of one algorithm
    return digest({name: value for name, value in cell.settings.items() if name not in aside})


def _private(cell: Cell) -> bool:
    """Whether a run has an ε. A run without one has only the unit among its privacy settings."""
    return cell.settings["privacy"].keys() != {"unit"}
