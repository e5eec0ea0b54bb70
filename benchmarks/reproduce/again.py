"""Reruns cells of a sweep from the lines that docs/results.md prints, and compares every metric to the last digit.

    python benchmarks/reproduce/again.py digits_table --cells 3

The cells are drawn among those that have a record (`records.jsonl`, what the page shows) or are finished in this
project's MLflow, which knows every metric. Each is run by `kedro run …` in an empty project of its own, with one
thread, as cells of a sweep are. Exits with 1 where any metric differs. Another processor or another version of torch
rounds differently: there the figures agree within seed noise, not to the letter. A GPU draws its noise from another
generator, so its cells are left out on a machine that has none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reproduce.page import ROOT, device_of, figures_of, read_records, run_of
from sweep import EXPERIMENT, environment, scratch_project

from equidp.cli import project_at
from equidp.evaluation.metrics import flat_metrics
from equidp.sweep.grid import choose_grid, params_text
from equidp.sweep.project import Cell

SHOWN = 5


def main() -> None:
    """Rerun and compare."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("sweep")
    arguments.add_argument("--cells", type=int, default=3)
    arguments.add_argument("--draw", type=int, default=0, help="another draw of cells")
    options = arguments.parse_args()
    bootstrap_project(ROOT)
    project = project_at(ROOT)
    store, experiment = project.store()
    client = MlflowClient(store)
    cells = project.cells(choose_grid(project.grids(), options.sweep, {}))
    records, gpu = read_records(), torch.cuda.is_available()
    recorded = {key: record.metrics for key, record in records.items() if not record.rounded}
    runs = {cell.key: run for cell in cells if (run := run_of(cell, client, experiment)) is not None}
    whole = {cell.key: figures_of(cell, runs[cell.key]) for cell in cells if cell.key in runs}
    devices = {key: record.device for key, record in records.items()}
    devices |= {key: device_of(run) for key, run in runs.items()}
    elsewhere = {key for key, device in devices.items() if device and not gpu}
    finished = [cell for cell in cells if cell.key in recorded | whole and cell.key not in elsewhere]
    if not finished:
        sys.exit(
            f"No cell of {options.sweep} has a record that can be made again here: run `kedro sweep {options.sweep}`."
        )
    drawn = random.Random(options.draw).sample(finished, min(options.cells, len(finished)))
    different = 0
    for cell in drawn:
        again = metrics_again(cell, {} if devices[cell.key] or not gpu else {"training.device": "cpu"})
        if cell.key not in whole:  # a record knows what the page shows alone
            again = {name: value for name, value in again.items() if name in recorded[cell.key]}
        told = compared(whole.get(cell.key) or recorded[cell.key], again)
        different += bool(told)
        print(f"{cell}: {len(again)} metrics, {len(told)} differ", flush=True)
        print("".join(f"  {line}\n" for line in told[:SHOWN]), end="")
    sys.exit(bool(different))


def metrics_again(cell: Cell, more: Mapping[str, str]) -> dict[str, float]:
    """Metrics of the cell's own command, and `more` overrides, in a project that has nothing yet."""
    params = params_text({**cell.overrides, "dataset": cell.dataset, **more})
    command = [sys.executable, "-m", "kedro", "run", f"--pipeline={cell.algorithm}", f"--params={params}"]
    with scratch_project() as folder:
        variables = environment(folder) | {"OMP_NUM_THREADS": "1", "EQUIDP_RAW_DIR": raw_folder()}
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command[2:])} failed: {done.stderr[-600:]}")
        client = MlflowClient(variables["MLFLOW_TRACKING_URI"])
        experiment = client.get_experiment_by_name(EXPERIMENT)
        assert experiment is not None
        [run] = client.search_runs([experiment.experiment_id])
        (document,) = (folder / "data" / "08_reporting" / cell.dataset / cell.algorithm).rglob("metrics.json")
        return run.data.metrics | flat_metrics(json.loads(document.read_text(encoding="utf-8")))


def raw_folder() -> str:
    """Where the files are: the scratch project has none of its own."""
    return os.environ.get("EQUIDP_RAW_DIR", str(ROOT / "data" / "01_raw"))


def compared(first: Mapping[str, float], second: Mapping[str, float]) -> list[str]:
    """A line for every metric that differs or is missing on one side; durations are no results.

    Nor are a record's figures after some epochs (`name@epoch`) compared: a run's own metrics are its last ones.
    """
    names = sorted(name for name in {*first, *second} if "seconds" not in name and "@" not in name)
    pairs = [(name, first.get(name, math.nan), second.get(name, math.nan)) for name in names]
    return [f"{name}: {a!r} and {b!r}" for name, a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]


if __name__ == "__main__":
    main()
