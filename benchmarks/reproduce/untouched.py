"""`worst_group_table` once more, scored on test records alone that no choice of a setting has seen.

    python benchmarks/reproduce/untouched.py             # digits, 20 seeds; five minutes on one core
    python benchmarks/reproduce/untouched.py adult worst_class_table --seeds 5

Where the seed draws the test part, the records that `tuning` held back for its choices, on other seeds, are partly test
records of the table's. Here they are left out: every cell is trained as in the table, and the worst group taken over
the test records that are in no validation part. Prints per algorithm their mean, and how far the first algorithm is
ahead, paired by seed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from typing import Any

import torch
from kedro.framework.startup import bootstrap_project
from tqdm import tqdm
from tune import ROOT, divided, raw_folder, trained, worst_and_overall

from equidp.cli import project_at
from equidp.data.records import Records
from equidp.errors import EquidpError
from equidp.evaluation.seeds import mean_interval, paired_difference
from equidp.sweep.grid import choose_grid
from equidp.sweep.project import Cell


def main() -> None:
    """Train, and print a line per algorithm."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("dataset", nargs="?", default="digits")
    arguments.add_argument("sweep", nargs="?", default="worst_group_table")
    arguments.add_argument("--seeds", type=int, default=20)
    arguments.add_argument("--first", default="dpsgd_f_adjusted", help="whose lead is printed")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    bootstrap_project(ROOT)
    project = project_at(ROOT)
    raw = raw_folder(project)

    def cells_of(sweep: str, **axes: int) -> list[Cell]:
        grids = {name: of_dataset(part, asked.dataset) for name, part in project.grids().items()}
        found = [cell for cell in project.cells(choose_grid(grids, sweep, axes)) if cell.dataset == asked.dataset]
        if not found:
            raise EquidpError(f"Sweep {sweep!r} has no cell of dataset {asked.dataset!r}.")
        return found

    cells = cells_of(asked.sweep, seeds=asked.seeds)
    held_back = {cell.seed: cell for cell in cells_of("tuning")}  # its other settings leave a validation part as it is
    seen = {row for cell in held_back.values() for row in rows(divided(cell.settings, cell.algorithm, raw).test)}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    shares = []
    for cell in tqdm(cells, disable=not sys.stderr.isatty()):
        parts, outputs = trained(cell.settings, cell.algorithm, raw)
        untouched = torch.tensor([row not in seen for row in rows(parts.test)])
        shares.append(untouched.float().mean().item())
        worst, _ = worst_and_overall(parts.test.take(untouched), outputs[untouched], cell.settings["data"]["groups"][0])
        found[cell.algorithm][cell.seed] = worst
    print(f"{asked.dataset}: {min(shares):.0%} to {max(shares):.0%} of the test records are in no validation part")
    for algorithm, by_seed in found.items():
        lead = paired_difference(found[asked.first], by_seed)
        print(f"{algorithm:20s} {mean_interval(list(by_seed.values()))}   {asked.first} ahead by {lead}")


def of_dataset(part: dict[str, Any], dataset: str) -> dict[str, Any]:
    """A sweep without the parts of other datasets, as resolving a cell's settings takes longer than its training."""
    if dataset in part.get("datasets", ()):
        part = {**part, "datasets": [dataset]}
    below = [of_dataset(one, dataset) for one in part.get("grids", []) if dataset in one.get("datasets", [dataset])]
    return {**part, "grids": below} if below else part


def rows(records: Records) -> list[bytes]:
    """Every record by its features: equal ones count as one."""
    return [row.tobytes() for row in records.features.numpy()]


if __name__ == "__main__":
    main()
