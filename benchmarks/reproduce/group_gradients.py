"""Which "average gradient norm" does DPSGD-F's paper print?

    kedro sweep dpsgd_f_table
    python benchmarks/reproduce/group_gradients.py
    kedro sweep dpsgd_f_mnist_table
    python benchmarks/reproduce/group_gradients.py dpsgd_f_mnist_table

Not the mean of the records' own norms, which docs/results.md has for Adult and Dutch: at the printed losses none can be
so short. Here it is the norm of each group's mean gradient, over the training records and at the end of training: of
the runs with `training.diagnostics` for Adult and Dutch, of whatever runs of the paper's epochs are finished for MNIST.
Our models of two classes have two outputs where a single logit would do, which makes every gradient √2 times as long;
that is taken out. Exact figures of training records: outside any guarantee.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient
from mlflow.entities import Run
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reproduce.again import raw_folder
from reproduce.page import ROOT, run_of

from equidp.cli import project_at
from equidp.data.records import Records
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.evaluation.seeds import mean_interval
from equidp.models.weights import load_weights, network_of
from equidp.sweep.grid import choose_grid
from equidp.sweep.project import Cell, by_seed

SWEEPS = {  # which cells, by which groups and which of them (all: None)
    "dpsgd_f_table": (lambda cell: cell.overrides.get("training.diagnostics"), "sex", None),
    "dpsgd_f_mnist_table": (lambda cell: "training.epochs" not in cell.overrides, "class", (2, 8)),
}
PRINTED = {  # in the order of the groups; the paper's M is Dutch's female group, by its size
    "adult": {"sgd": (0.11, 0.08), "dpsgd": (0.12, 0.41), "naive": (0.13, 0.43), "dpsgd_f": (0.08, 0.12)},
    "dutch": {"sgd": (0.19, 0.19), "dpsgd": (0.26, 0.12), "naive": (0.26, 0.12), "dpsgd_f": (0.19, 0.18)},
    "mnist_unbalanced": {"sgd": (0.68, 4.76), "dpsgd": (13.53, 100.46), "naive": (0.83, 0.76), "dpsgd_f": (1.45, 2.53)},
}
AT_ONCE = 1000  # records


def main() -> None:
    """Print one line per row of a sweep and group."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("sweep", nargs="?", choices=SWEEPS, default="dpsgd_f_table")
    sweep = arguments.parse_args().sweep
    wanted, grouping, chosen = SWEEPS[sweep]
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar for every small file
    bootstrap_project(ROOT)
    project = project_at(ROOT)
    store, experiment = project.store()
    client = MlflowClient(store)
    cells = project.cells(choose_grid(project.grids(), sweep, {}))
    known: dict[tuple[str, int], Records] = {}
    finished = {
        cell.key: run for cell in filter(wanted, cells) if (run := run_of(cell, client, experiment)) is not None
    }
    if not finished:
        sys.exit(f"No finished run: run `kedro sweep {sweep}` first.")
    for row in by_seed(cell for cell in cells if cell.key in finished):
        norms = []
        for cell in row:
            place = cell.dataset, cell.seed
            known[place] = train = known.get(place) or training_records(cell)
            groups = range(len(train.schema.groupings[grouping])) if chosen is None else chosen
            norms.append(mean_gradient_norms(trained_model(client, finished[cell.key]), train, grouping, groups))
        for index, group in enumerate(groups):
            measured = mean_interval([one[index] for one in norms])
            printed = PRINTED[row[0].dataset].get(row[0].algorithm)
            beside = f", printed {printed[index]:.2f}" if printed else ""
            width = f" ± {measured.half_width:.3f}" if measured.half_width else ""
            name, seeds = train.schema.groupings[grouping][group], ", ".join(str(cell.seed) for cell in row)
            print(f"{row[0]}, {name}: {measured.mean:.3f}{width} (seeds {seeds}){beside}", flush=True)


def training_records(cell: Cell) -> Records:
    """What the runs of a cell have been trained on."""
    data = source(cell.settings["data"]["source"], cell.settings["data"]["options"])
    records = data.read(data.locate(Path(raw_folder())))
    return split(records, seed=cell.seed, keep=cell.settings["data"]["keep"], membership="strata").train


def trained_model(client: MlflowClient, run: Run) -> nn.Module:
    """The model that a run has published."""
    [weights] = Path(client.download_artifacts(run.info.run_id, "model")).rglob("*.safetensors")
    return network_of(load_weights(weights))


def mean_gradient_norms(model: nn.Module, train: Records, grouping: str, groups: Iterable[int]) -> list[float]:
    """‖mean gradient‖ of some groups, for one logit where there are two outputs."""
    parameters = list(model.parameters())

    def gradient_sum(chosen: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(train.features[chosen]), train.labels[chosen], reduction="sum")
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])

    def norm(group: int) -> float:
        chosen = (train.groups[grouping] == group).nonzero().squeeze(1)
        total = torch.stack([gradient_sum(some) for some in chosen.split(AT_ONCE)]).sum(0)
        return float((total / len(chosen)).norm())

    return [norm(group) / (2**0.5 if len(train.schema.classes) == 2 else 1) for group in groups]


if __name__ == "__main__":
    main()
