"""A private last layer on a pretrained network's features, and what it costs whom: docs/medical.md, docs/pretrained.md.

    python benchmarks/pretrained.py ham_pretrained_tuning --out tuning.jsonl   # rates, on records held back
    python benchmarks/pretrained.py ham_pretrained --out ham.jsonl             # the tables; imdb_pretrained likewise

Trains the cells of a grid of conf/base/sweeps.yml in this process, without reports and tracking; `kedro sweep` with the
same name makes the same trainings as runs. One line of JSON a cell; a cell that `--out` has already is not repeated.
Says at its end how much memory it had at most.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from kedro.framework.startup import bootstrap_project
from scipy.stats import t
from sklearn.metrics import balanced_accuracy_score, matthews_corrcoef
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from reproduce.tune import ROOT, raw_folder, trained

from equidp.cli import project_at
from equidp.data.records import Records
from equidp.evaluation.live import live_metrics
from equidp.pipelines.training.nodes import group_arrays
from equidp.sweep.grid import choose_grid
from equidp.sweep.project import Cell

Row = Mapping[str, Any]


def main() -> None:
    """Train, and print the tables."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("grid")
    arguments.add_argument("--out", type=Path, required=True)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    bootstrap_project(ROOT)
    project = project_at(ROOT)
    cells, raw = project.cells(choose_grid(project.grids(), asked.grid, {})), raw_folder(project)
    known = (
        {row["key"]: row for row in map(json.loads, asked.out.read_text().splitlines())} if asked.out.exists() else {}
    )
    for cell in tqdm(cells, disable=not sys.stderr.isatty()):
        if cell.key not in known:
            found = figures(*trained(cell.settings, cell.algorithm, raw), cell.settings["data"]["groups"])
            known[cell.key] = row = {"key": cell.key, **found}
            with asked.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    for title, rows in tables([(cell, known[cell.key]) for cell in cells]).items():
        print(f"\n{title}\n\n" + "\n".join(rows))
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB", file=sys.stderr)


def figures(parts: Any, outputs: torch.Tensor, groupings: Sequence[str]) -> dict[str, float]:
    """Overall, balanced, MCC and the accuracy of every group, of one model on its test part."""
    test: Records = parts.test
    predicted, labels = outputs.argmax(1).numpy(), test.labels.numpy()
    live = live_metrics(outputs.numpy(), labels, group_arrays(test, tuple(groupings)))
    return {
        "overall": float((predicted == labels).mean()),
        "balanced": float(balanced_accuracy_score(labels, predicted)),
        "MCC": float(matthews_corrcoef(labels, predicted)),
        **{name.removeprefix("test/accuracy/"): float(value) for name, value in live.items() if name.count("/") == 2},
    }


def tables(cells: Iterable[tuple[Cell, Row]]) -> dict[str, list[str]]:
    """Two tables of markdown for every way of splitting: classes, and the other groupings."""
    found: dict[str, dict[tuple[str, str, str], list[Row]]] = defaultdict(lambda: defaultdict(list))
    cells = list(cells)
    alike = len({cell.settings["training"]["epochs"] for cell, _ in cells}) == 1
    for cell, row in cells:
        data, training, private = (cell.settings[block] for block in ("data", "training", "privacy"))
        where = f"split by {data['split_by']}, on {data['evaluate_on']} records"
        epsilon = "–" if cell.algorithm == "sgd" else f"{private['epsilon']:g}"
        options = cell.settings[cell.algorithm]["options"]
        shown = {
            "δ": private.get("delta"),
            "τ": options.get("adjustment"),
            "λ": options.get("pull"),
            "rate": options.get("learning_rate") or training["learning_rate"],
            "epochs": None if alike else training["epochs"],
        }
        note = ", ".join(f"{name} {value:g}" for name, value in shown.items() if value is not None)
        note += "" if (more := training.get("trainable")) in (None, "head") else f", {more}"
        found[where][epsilon, cell.algorithm, note].append(row)
    return {
        f"**{where}{title}**": [*header(names), *(line(key, rows, names) for key, rows in sorted(rows_of.items()))]
        for where, rows_of in found.items()
        for title, names in columns(next(iter(rows_of.values()))[0]).items()
        if names
    }


def columns(row: Row) -> dict[str, list[str]]:
    """Which figures each table has."""
    classes = [name for name in row if name.startswith("class:")]
    others = [name for name in row if ":" in name and name not in classes]
    groupings = " and ".join(dict.fromkeys(name.partition(":")[0] for name in others))
    return {"": ["balanced", "MCC", "overall", *classes], f", accuracy by {groupings}": others}


def header(names: Iterable[str]) -> list[str]:
    """The first two lines of a table."""
    shown = [name.partition(":")[2] or name for name in names]
    return [f"| ε | | | seeds | {' | '.join(shown)} |", "|---" * (4 + len(shown)) + "|"]


def line(key: tuple[str, str, str], rows: list[Row], names: Iterable[str]) -> str:
    """One algorithm: means, and half of the 95 % interval over the seeds."""
    epsilon, algorithm, note = key
    shown = " | ".join(interval([row[name] for row in rows if name in row]) for name in names)
    return f"| {epsilon} | `{algorithm}` | {note} | {len(rows)} | {shown} |"


def interval(values: list[float]) -> str:
    """`mean ± half width`."""
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "–"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
