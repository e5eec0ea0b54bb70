"""A whole `kedro run` with its data and models on another device than the CPU, tried on a pretended GPU."""

from __future__ import annotations

import pytest
from tests.end_to_end.kedro_project import QUICK, kedro_run, mlflow_runs, read_json, report_folder
from tests.pretended import as_on_gpu, pretended_gpu


@pytest.mark.slow
def test_a_run_on_a_gpu_says_what_the_cpus_says(project):
    settings = {
        **QUICK,
        "training.epochs": 1,
        "training.batch_size": 512,
        "training.diagnostics": True,
        "training.checkpoint_every": 1,
    }
    with as_on_gpu():
        kedro_run(project, "dpsgd_f", **settings)
    folder = report_folder(project, "dpsgd_f")
    privacy, metrics = read_json(folder / "privacy.json"), read_json(folder / "metrics.json")

    with pretended_gpu():
        kedro_run(project, "dpsgd_f", **{**settings, "training.device": "auto"})

    assert [run.data.tags["device"] for run in mlflow_runs(project)] == ["cpu", "cuda"]
    assert read_json(folder / "privacy.json")["ledger"] == privacy["ledger"]
    there = read_json(folder / "metrics.json")
    assert there["overall"]["accuracy"] == metrics["overall"]["accuracy"]
    assert there["overall"]["loss"] == pytest.approx(metrics["overall"]["loss"], rel=1e-4)
