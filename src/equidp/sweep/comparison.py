"""Which runs of a sweep are compared with which: private ones with those of one algorithm, the reference.

Nothing that takes long to import: a misspelt reference is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import EquidpError, unknown_name
from equidp.sweep.project import Cell, by_seed, digest, row_key

DEFAULT = "dpsgd"
"""The reference of a data set on which it is run."""

OWN = ("training", BASELINE)
"""Blocks of settings in which algorithms may differ that have but one run each."""


def references(cells: Sequence[Cell], reference: str = "") -> dict[str, str]:
    """The algorithm that each data set's private runs are compared with; a data set without it is left out.

    Args:
        cells: all that the sweep has, finished or not.
        reference: its name. Without one it is `dpsgd`, or the first private algorithm of a data set that has no dpsgd.

    Raises:
        EquidpError: for a name that no private run of the sweep has.
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
    """For each private run of another algorithm, the reference's runs that it may be compared with, as `row_key`s.

    These are the runs at the same settings, options of the two algorithms aside. If the reference has none, but a
    single run on the same data, with the same model and at the same privacy settings, it is that one: each algorithm
    then has training settings of its own, such as the best learning rate. Of several the first is as good as the
    last, so nothing is compared with them.

    All cells are asked for, finished or not: a run must not be compared with another one only because a cell failed.

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
    """Whether a run has an ε; of one that has none only the unit is left of the privacy settings."""
    return cell.settings["privacy"].keys() != {"unit"}
