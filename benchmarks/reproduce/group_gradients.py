"""Which "average gradient norm" does DPSGD-F's paper print for Adult and Dutch?

    kedro sweep dpsgd_f_table
    python benchmarks/reproduce/group_gradients.py

Not the mean of the records' own norms, which docs/results.md has: at the printed losses none can be so short. Here it
is the norm of each sex's mean gradient, over the training records and at the end of training, of the runs with
`training.diagnostics`. Our models have two outputs where a single logit would do, which makes every gradient √2 times
as long; that is taken out. Exact figures of training records: outside any guarantee.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient
from mlflow.entities import Run
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reproduce.again import raw_folder
from reproduce.page import ROOT, run_of

from equidp.evaluation.seeds import mean_interval
from equidp.pipelines.datasets import WeightsDataset
from equidp.pipelines.training.nodes import load_network
from equidp.records import Records
from equidp.sources import source
from equidp.sources.splitting import split
from equidp.sweep.grid import choose_grid
from equidp.sweep.project import Project, by_seed

PRINTED = {  # the dataset's first and second sex; the paper's M is Dutch's female group, by its size
    "adult": {"sgd": (0.11, 0.08), "dpsgd": (0.12, 0.41), "naive": (0.13, 0.43), "dpsgd_f": (0.08, 0.12)},
    "dutch": {"sgd": (0.19, 0.19), "dpsgd": (0.26, 0.12), "naive": (0.26, 0.12), "dpsgd_f": (0.19, 0.18)},
}


def main() -> None:
    """Print one line per dataset, algorithm and sex."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar for every small file
    bootstrap_project(ROOT)
    project = Project(ROOT)
    store, experiment = project.store()
    client = MlflowClient(store)
    cells = project.cells(choose_grid(project.grids(), "dpsgd_f_table", {}))
    for row in by_seed([cell for cell in cells if cell.overrides.get("training.diagnostics")]):
        algorithm, dataset = row[0].algorithm, row[0].dataset
        found = [(cell.seed, run) for cell in row if (run := run_of(cell, client, experiment)) is not None]
        if not found:
            sys.exit(f"No finished run of {row[0]}: run `kedro sweep dpsgd_f_table` first.")
        data = source(dataset)
        records = data.read(data.locate(Path(raw_folder())))
        norms = [
            mean_gradient_norms(trained_model(client, run), split(records, seed=seed).train) for seed, run in found
        ]
        for sex, name in enumerate(records.schema.groupings["sex"]):
            measured = mean_interval([one[sex] for one in norms])
            print(
                f"{dataset} {algorithm} {name}: {measured.mean:.3f} ± {measured.half_width or 0:.3f}, "
                f"printed {PRINTED[dataset][algorithm][sex]:.2f}",
                flush=True,
            )


def trained_model(client: MlflowClient, run: Run) -> nn.Module:
    """The model that a run has published."""
    [weights] = Path(client.download_artifacts(run.info.run_id, "model")).rglob("*.safetensors")
    return load_network(WeightsDataset(filepath=str(weights)).load())


def mean_gradient_norms(model: nn.Module, train: Records) -> Sequence[float]:
    """‖mean gradient‖ of each sex, for one logit instead of two outputs."""
    parameters = list(model.parameters())

    def mean_gradient(chosen: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(train.features[chosen]), train.labels[chosen])
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])

    sexes = train.groups["sex"]
    return [float(mean_gradient(sexes == sex).norm()) / 2**0.5 for sex in range(int(sexes.max()) + 1)]


if __name__ == "__main__":
    main()
