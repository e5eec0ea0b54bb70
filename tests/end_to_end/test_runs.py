"""What a user runs, on tiny settings: the files, the MLflow runs and the ε that every pipeline leaves."""

from __future__ import annotations

import errno
import gc
import logging
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import click
import dp_accounting as dp
import kedro.framework.project
import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml
from dp_accounting import pld, rdp
from kedro.pipeline import Pipeline, node
from kedro.runner import ParallelRunner, ThreadRunner
from mlflow.exceptions import MlflowException
from rich.console import Console
from sklearn.datasets import load_digits
from tests.end_to_end.kedro_project import (
    QUICK,
    bootstrapped,
    kedro_run,
    mlflow_runs,
    nested,
    own_project,
    read_json,
    report_folder,
)

from equidp import pipeline_registry, training
from equidp.algorithms import ALGORITHMS
from equidp.errors import EquidpError
from equidp.hooks import print as prints
from equidp.hooks.guard import LOCK
from equidp.hooks.print import print_groups
from equidp.hooks.record import run_name
from equidp.pipeline_registry import DEMONSTRATION
from equidp.pipelines.training import nodes
from equidp.reporting.privacy_report import privacy_report
from equidp.settings import Session
from equidp.system import files
from equidp.training import forget, train_model

FOLDER = "equidp.pipelines.datasets.FolderDataset"

PRIVATE = sorted(set(ALGORITHMS) - {"sgd"})
FEW = ["dp_adambc", "dpis", "dpsgd", "dpsgd_level", "psasc_momentum", "sa_dpsgd"]
OTHERS = sorted(set(PRIVATE) - set(FEW))
SHARED_SESSIONS = [
    FEW,
    pytest.param(OTHERS[::2], marks=pytest.mark.slow),
    pytest.param(OTHERS[1::2], marks=pytest.mark.slow),
]
"""Algorithms that share a session: what is the same for all is then made once."""
SHARED = {"dataset", "seed", "training.epochs", "training.batch_size", "privacy.delta", "model.name", "data.groups"}


def shared_columns(run: mlflow.entities.Run) -> set[str]:
    return {name for name in run.data.params if ".options" not in name and name.split(".")[0] not in ALGORITHMS}


def test_a_private_pipeline_leaves_one_run_and_all_files_and_a_target_epsilon_is_recomputable_from_one(
    project, monkeypatch
):
    durable, settled, before_forgotten = files.durable, set(), []
    monkeypatch.setattr(files, "durable", lambda file: (settled.add(os.fstat(file).st_ino), durable(file)))
    monkeypatch.setattr(training, "forget", lambda place: (before_forgotten.append({*settled}), forget(place)))
    kedro_run(project, "dpsgd_f", **QUICK, **{"privacy.epsilon": 3.0})

    # a power cut after what a run is resumed by has gone would find these empty otherwise
    results = {path.stat().st_ino for path in report_folder(project, "dpsgd_f").iterdir() if path.is_file()}
    (model,) = (project / "data" / "06_models" / "digits" / "dpsgd_f").rglob("*.safetensors")
    results.add(model.stat().st_ino)
    assert len(results) > 5
    assert results <= before_forgotten[0]

    (run,) = mlflow_runs(project)
    assert run.info.run_name == "dpsgd_f epochs=2 batch_size=128 device=cpu epsilon=3.0 digits seed=0"
    left_by(project, "dpsgd_f", run)
    privacy = read_json(report_folder(project, "dpsgd_f") / "privacy.json")
    found = []
    for accountant in (rdp.RdpAccountant(), pld.PLDAccountant()):
        for entry in privacy["ledger"]:
            event = dp.GaussianDpEvent(entry["noise_multiplier"])
            if entry["event"] == "poisson_gaussian":
                event = dp.PoissonSampledDpEvent(entry["sampling_rate"], event)
            accountant.compose(event, entry["count"])
        found.append(accountant.get_epsilon(privacy["delta"]))
    assert min(found) == pytest.approx(privacy["epsilon"], rel=1e-6)
    assert 2.97 <= min(found) <= 3.0
    assert privacy["delta"] < 1 / privacy["records"]
    assert "each group's gradients" in privacy["releases"][1]
    assert privacy["releases"][2:] == ["Groups are those of class."]


def test_a_command_collects_garbage_while_it_trains(project, monkeypatch):
    collecting: list[bool] = []

    def noted(*args, **named):
        collecting.append(gc.isenabled())
        return train_model(*args, **named)

    bootstrapped(project)
    monkeypatch.setattr(nodes, "train_model", noted)
    with click.Context(click.Command("run")), Session.create(project, runtime_params=nested(QUICK)) as session:
        session.run(pipeline_names=["sgd"])
    assert collecting == [True]


@pytest.mark.parametrize("algorithms", SHARED_SESSIONS, ids=["few", "every other", "the rest"])
def test_every_private_algorithm_leaves_a_run_and_all_files(project, algorithms: list[str]):
    kedro_run(project, *algorithms, **QUICK)

    children = children_of_one_parent(project)
    assert set(children) == {"sgd", *algorithms}
    for name in algorithms:
        left_by(project, name, children[name])


def children_of_one_parent(project: Path) -> dict[str, mlflow.entities.Run]:
    """The runs of the algorithms of one session, below the one run that compares them."""
    runs = mlflow_runs(project)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.tags["algorithm"]: run for run in runs if run is not parent}
    told = "epochs=2 batch_size=128 device=cpu digits seed=0"
    assert sorted(parent.info.run_name.removesuffix(f" {told}").split("+")) == sorted(children)
    assert {run.info.run_name for run in children.values()} == {f"{name} {told}" for name in children}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    assert all(run.info.status == "FINISHED" for run in runs)
    columns = [shared_columns(run) - {"resolved.noise_multiplier"} for run in children.values()]
    assert all(c == columns[0] for c in columns)
    for run in children.values():  # as in a single run
        assert run.data.params["sgd.options.learning_rate"] == "None"
    compared = pd.read_csv(report_folder(project, "comparison") / "table.csv")
    assert set(compared["algorithm"]) == set(children)
    logged = {item.path for item in mlflow.MlflowClient().list_artifacts(parent.info.run_id)}
    assert logged == {"report.html", "table.csv"}
    return children


def left_by(project: Path, algorithm: str, run: mlflow.entities.Run) -> None:
    """What one algorithm's run leaves in its folder and in MLflow."""
    folder = report_folder(project, algorithm)
    metrics, privacy = read_json(folder / "metrics.json"), read_json(folder / "privacy.json")
    history = pd.read_parquet(folder / "history.parquet")
    assert {"overall", "groups", "baseline", "cost_of_privacy"} <= set(metrics)
    cost = metrics["cost_of_privacy"]["groups"]["class"]["8"]["accuracy"]
    by_hand = metrics["baseline"]["groups"]["class"]["8"]["accuracy"] - metrics["groups"]["class"]["8"]["accuracy"]
    assert cost == pytest.approx(by_hand)
    assert len(history) == 2
    assert history["epsilon"].iloc[-1] == pytest.approx(privacy["epsilon"], rel=1e-6)
    assert history["epsilon_rdp"].iloc[-1] == privacy["epsilon_rdp"]
    assert history["epsilon_rdp"].is_monotonic_increasing
    assert 30_000 < (folder / "report.html").stat().st_size < 200_000  # the plots' library lies beside, once
    assert (folder.parents[2] / "plotly.min.js").stat().st_size > 1_000_000
    # made of what privacy.json holds alone, so it may go out with the model
    assert (folder / "privacy.md").read_text(encoding="utf-8") == privacy_report(privacy, "digits")

    assert run.info.status == "FINISHED"
    assert run.data.tags["algorithm"] == algorithm
    assert run.data.tags["private"] == "true"
    assert run.data.tags["device"] == "cpu"
    assert run.data.tags["raw_fingerprint"] == "embedded"
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("digits", "embedded")
    assert re.fullmatch(
        r"ε = \d+\.\d{4} at δ = 0\.0001, research mode; test accuracy 0\.\d{4}, cost of privacy [+-]0\.\d{4}\.",
        run.data.tags["mlflow.note.content"],
    )
    assert run.data.metrics["epsilon"] == pytest.approx(privacy["epsilon"])
    # curves over the epochs end in the run's own figures, and do not begin with them
    for name, own in {"test/accuracy": metrics["overall"]["accuracy"], "epsilon_rdp": privacy["epsilon_rdp"]}.items():
        assert 0 not in {point.step for point in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)}
        assert run.data.metrics[name] == pytest.approx(own)
    shown = {"test/accuracy", "test/worst_group_accuracy", "cost_of_privacy/accuracy", "cost_of_privacy/gap", "epsilon"}
    assert shown <= set(run.data.metrics)
    assert len(run.data.metrics.keys() - set(history.columns)) <= 12  # all others are in metrics.json
    logged = {item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert {"privacy.md", "privacy.json", "report.html"} <= logged
    packed = {item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id, "model")}
    assert {"model/MLmodel", "model/privacy.md", "model/privacy.json"} <= packed
    assert set(run.data.params) >= SHARED
    assert any(name.startswith(f"{algorithm}.") for name in run.data.params)


@pytest.fixture(scope="module")
def demonstrated(template, tmp_path_factory):
    """A project in which the demonstration has run."""
    with own_project(template, tmp_path_factory.mktemp("demonstrated")) as folder:
        kedro_run(folder, **QUICK)
        yield folder


def test_the_demonstration_is_one_parent_and_one_child_of_each_algorithm(demonstrated):
    assert set(children_of_one_parent(demonstrated)) == set(DEMONSTRATION)


def test_the_page_says_of_every_file_that_runs_leave_whether_it_may_go_out(demonstrated):
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    section = page.partition("## What may go out")[2].partition("\n## ")[0]
    named = {part for code in re.findall(r"`([^`]+)`", section) for part in code.split("/")} - {"data", "06_models"}
    tops = [demonstrated / top for top in ("data", "mlartifacts", ".viz")]
    left = [path.relative_to(demonstrated) for top in tops for path in top.rglob("*")]
    left = [path for path in left if (demonstrated / path).is_file() and path.name not in (".gitkeep", LOCK)]
    assert {"model.safetensors", "provenance.json", "history.parquet"} <= {path.name for path in left}
    assert [str(path) for path in left if not named.intersection(path.parts)] == []
    assert (demonstrated / "mlflow.db").is_file()
    assert "mlflow.db" in named


def test_logged_model_predicts_raw_records_without_a_pickle(demonstrated):
    (run,) = [run for run in mlflow_runs(demonstrated) if run.data.tags.get("algorithm") == "dpsgd"]
    model = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    pixels = load_digits().images[:5].astype(np.uint8)
    scores = model.predict(pixels[:, None])
    assert scores.shape == (5, 10)
    assert np.allclose(scores.sum(axis=1), 1, atol=1e-5)
    with pytest.raises(MlflowException, match=r"^The model takes an array of numbers of shape") as refused:
        model.predict(pixels)  # an error of MLflow's: its server answers any other with a traceback
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"
    artifacts = demonstrated / "mlartifacts"
    assert not [path for path in artifacts.rglob("*") if path.suffix in {".pkl", ".pt", ".pickle"}]
    described = list(artifacts.rglob("MLmodel"))
    assert described
    for file in described:
        assert not re.search(r"file:|: /", file.read_text()), "it would tell the paths of this machine"


def test_baseline_pipeline_has_no_epsilon_and_its_own_report_does_not_go_unsaid(project, caplog):
    kedro_run(project, "sgd", **QUICK)
    (run,) = mlflow_runs(project)
    assert run.data.tags["private"] == "false"
    assert "epsilon" not in run.data.metrics
    assert read_json(report_folder(project, "sgd") / "privacy.json")["epsilon"] is None
    assert "are replaced" not in caplog.text

    kedro_run(project, "dpsgd", **QUICK)
    (told,) = (r.message for r in caplog.records if "are replaced" in r.message)
    assert str(report_folder(project, "sgd").relative_to(project)) in told


def test_ingestion_opens_no_run_and_tells_the_groups(project):
    kedro_run(project, "ingestion")

    assert mlflow_runs(project) == []
    groups = pd.read_csv(report_folder(project, "ingestion") / "groups.csv", dtype={"group": str})
    rare = groups[groups["group"] == "8"].iloc[0]
    assert rare["train"] == 37  # of 40 expected: each record is drawn by its own hash


def test_the_sizes_of_groups_stand_in_a_line_each_and_small_ones_are_marked(capsys, monkeypatch, tmp_path):
    """The note of a small group took so much room that every name was broken over lines, or cut."""
    monkeypatch.setattr(prints, "terminal", lambda: Console(width=80, file=sys.stdout))
    names = ["Female*Amer-Indian-Eskimo", "Male*Amer-Indian-Eskimo"]
    notes = {"evaluable": [False, True], "note": ["only 9 test records: too few to be evaluated", ""]}
    sizes = {"train": [141, 221], "test": [9, 48], "public": [0, 0]}
    groups = pd.DataFrame({"grouping": "localization*age_band", "group": names, **sizes, **notes})

    print_groups(groups, tmp_path / "groups.csv")

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["localization*age_band", f"{names[0]}", "†", "141", "0", "9"] in lines
    assert ["localization*age_band", names[1], "221", "0", "48"] in lines
    assert ["†", "fewer", "than", "10", "test"] in [line[:5] for line in lines]

    print_groups(groups[1:], tmp_path / "groups.csv")
    assert "†" not in capsys.readouterr().out


def test_a_device_that_is_not_here_ends_only_what_trains(project):
    kedro_run(project, "ingestion", **{"training.device": "cuda:99"})
    with pytest.raises(EquidpError, match=r"training.device='cuda:99' is not available here"):
        kedro_run(project, "dpsgd", **{"training.device": "cuda:99"})
    assert mlflow_runs(project) == []


def test_an_audit_leaves_its_findings_and_its_page_here_and_in_mlflow(project, capsys):
    attacks = {"audit.gradient_canaries": 200, "audit.input_canaries": 20, "audit.reference_models": 2}
    kedro_run(
        project, "audit", **QUICK | {"training.epochs": 1}, **attacks, algorithm="dpsgd", **{"audit.resamples": 20}
    )

    folder = project / "data/08_reporting/digits/audit/dpsgd/seed=0"
    found = read_json(folder / "audit.json")["gradient_canaries"]
    assert found["epsilon_lower_bound"] <= found["epsilon_claimed"]
    (run,) = mlflow_runs(project)
    assert run.data.metrics["audit/gradient_canaries/epsilon_claimed"] == pytest.approx(found["epsilon_claimed"])
    logged = {item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert logged == {"audit.json", "bounds.json", "exposure.json", "report.html"}
    page = (folder / "report.html").read_text()
    assert "Not tested" in page  # ten guesses show nothing, however right
    assert f"{found['correct']:,}</td>" in page
    said = capsys.readouterr().out
    assert f"audit_report: {folder / 'report.html'}" in said
    assert "With all 10 guesses right it would have shown ε ≥ " in said


def test_a_runs_name_tells_what_it_was_given_and_no_other_algorithms_options():
    settings = {"dataset": "adult", "seed": 1}
    given = {"dataset": "adult", "privacy.epsilon": 3, "dpsgd_f.options.ratio_over": "counted", "resume": True}
    assert run_name("dpsgd", settings, given) == "dpsgd epsilon=3 adult seed=1"
    assert run_name("dpsgd_f", settings, given) == "dpsgd_f epsilon=3 ratio_over=counted adult seed=1"
    assert run_name("dpsgd", settings, {"model.name": "mlp"}) == "dpsgd model=mlp adult seed=1"  # and not name=mlp
    # a sweep's row knows what differs
    assert run_name("dpsgd", settings, given, "dpsgd epochs=5") == "dpsgd epochs=5 adult seed=1"
    assert run_name("dpsgd", settings, given, "dpsgd") == "dpsgd adult seed=1"
    both = {"privacy.epsilon": 3, "privacy.evaluation.epsilon": 1, "privacy.delta": 1e-6}
    assert run_name("dpsgd", settings, both) == "dpsgd epsilon=3 evaluation.epsilon=1 delta=1e-06 adult seed=1"
    # alone it was read as the model's, which was that of its preset
    assert run_name("dpsgd", settings, {"privacy.evaluation.epsilon": 1}) == "dpsgd evaluation.epsilon=1 adult seed=1"
    assert run_name("dpsgd", {**settings, "privacy": {"secure": True}}, {}) == "dpsgd adult secure", "no seed of noise"
    assert run_name("sgd", {**settings, "privacy": {"secure": True}}, {}) == "sgd adult not private"
    assert len(run_name("dpsgd", settings, {"data.path": "x" * 300})) == 250  # the most that a server's database takes


@pytest.mark.slow
def test_a_baseline_that_diverges_is_said_and_compared_with_nothing(project, caplog):
    diverging = {"sgd.options.learning_rate": 1e12, "model.name": "mlp"}
    kedro_run(project, "dpsgd", **QUICK, **diverging, dataset="digits")
    metrics = read_json(report_folder(project, "dpsgd") / "metrics.json")
    assert metrics["overall"]["accuracy"] > 0.1
    assert set(metrics["cost_of_privacy"]["overall"].values()) == {None}
    assert "The non-private baseline diverged" in caplog.text
    assert (report_folder(project, "dpsgd") / "report.html").exists()


@pytest.mark.slow
def test_a_baseline_that_puts_all_into_one_class_is_said(project, caplog):
    rare = {"data.keep": {str(digit): 3 for digit in range(9)}, "sgd.options.learning_rate": 0.05}
    kedro_run(project, "dpsgd", **QUICK, **rare)
    assert read_json(report_folder(project, "dpsgd") / "metrics.json")["baseline"]["overall"]["mcc"] == 0
    assert "The non-private baseline has learnt nothing" in caplog.text


@pytest.fixture(scope="module")
def otherwise(template, tmp_path_factory):
    """A project with one run of unusual settings, which do not touch one another, and what the run warned of."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    with own_project(template, tmp_path_factory.mktemp("otherwise")) as folder:
        (folder / "conf/local/catalog.yml").write_text(
            '"{algorithm}.history": {type: pandas.CSVDataset, filepath: '
            '"out/${setting:dataset}/${setting:seed}/${setting:run_label}/{algorithm}.csv"}\n'
            '"{algorithm}.scores": {type: pickle.PickleDataset, filepath: "out/{algorithm}.pkl"}\n'
            "test: {type: pickle.PickleDataset, filepath: out/test.pkl}\n"
        )
        logging.getLogger("equidp").addHandler(handler)
        kedro_run(folder, "dpsgd", **QUICK, run_label=None, **{"data.evaluate_on": "validation", "privacy.delta": 0.9})
        logging.getLogger("equidp").removeHandler(handler)
        yield folder, heard


@pytest.mark.slow
def test_figures_of_the_validation_part_are_called_so_in_mlflow_too(otherwise):
    (run,) = mlflow_runs(otherwise[0])
    assert "; validation accuracy 0." in run.data.tags["mlflow.note.content"]


@pytest.mark.slow
def test_the_statement_says_that_validation_records_were_evaluated(otherwise):
    """It spoke of test records, which such a run leaves out, and only metrics.json told."""
    folder = report_folder(otherwise[0], "dpsgd")
    assert read_json(folder / "privacy.json")["evaluated_on"] == "validation"
    told = (folder / "privacy.md").read_text(encoding="utf-8")
    assert "The validation records are not protected at all" in told
    assert "The test records are not" not in told


def test_results_may_be_of_another_format_and_lie_elsewhere(otherwise):
    folder, _ = otherwise
    assert (folder / "out/digits/0/dpsgd.csv").is_file()
    (run,) = mlflow_runs(folder)
    assert "dpsgd.csv" in {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}


def test_scores_of_single_records_are_kept_where_a_catalog_asks_for_them_and_stay_out_of_mlflow(otherwise):
    folder, _ = otherwise
    scores, test = (pickle.loads((folder / "out" / name).read_bytes()) for name in ("dpsgd.pkl", "test.pkl"))
    metrics = read_json(report_folder(folder, "dpsgd") / "metrics.json")
    assert (scores.argmax(1) == test.labels.numpy()).mean() == pytest.approx(metrics["overall"]["accuracy"])
    (run,) = mlflow_runs(folder)
    assert not {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)} & {"dpsgd.pkl", "test.pkl"}


def test_an_empty_label_is_none(otherwise):
    assert (report_folder(otherwise[0], "dpsgd") / "metrics.json").is_file()


def test_a_delta_that_promises_nothing_is_said_before_training(otherwise):
    assert [message.partition(" is not below")[0] for message in otherwise[1] if "δ" in message] == [
        "dpsgd: δ = 0.9"  # and nothing of the baseline's
    ]


@pytest.mark.slow
def test_same_seed_gives_the_same_metrics_by_threads_too_and_another_seed_or_baseline_others(project):
    kedro_run(project, "dpsgd", **QUICK, run_label="first")
    kedro_run(project, "dpsgd", options={"runner": ThreadRunner()}, **QUICK, run_label="threads")
    kedro_run(project, "dpsgd", **QUICK, **{"sgd.options.learning_rate": 1e-6}, run_label="own")
    assert sorted(run.data.tags["run_label"] for run in mlflow_runs(project)) == ["first", "own", "threads"]
    assert {run.info.status for run in mlflow_runs(project)} == {"FINISHED"}
    folder = report_folder(project, "dpsgd")
    first, threads, own = (read_json(folder / label / "metrics.json") for label in ("first", "threads", "own"))
    assert threads == first
    assert own["overall"] == first["overall"]
    assert own["baseline"]["overall"]["loss"] > first["baseline"]["overall"]["loss"] + 0.1

    kedro_run(project, "dpsgd", options={"to_nodes": ["dpsgd.train_model"]}, **QUICK, seed=1)
    losses = [
        pd.read_parquet(place / "history.parquet")["test/loss"].tolist()
        for place in (folder / "first", report_folder(project, "dpsgd", seed=1))
    ]
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_nothing_of_an_earlier_run_stays_beside_a_new_model_whether_the_new_run_is_cut_short_or_fails(
    project, caplog, monkeypatch
):
    folder, only_train = report_folder(project, "dpsgd"), {"to_nodes": ["dpsgd.train_model"]}
    kedro_run(project, "dpsgd", **QUICK, **{"dpsgd_f.options.base_clip_norm": 2.0, "sgd.options.learning_rate": 0.2})
    assert [r.message for r in caplog.records if "--params sets" in r.message] == [
        "--params sets dpsgd_f, which has no effect: what runs here is dpsgd, sgd."
    ]
    assert "are replaced" not in caplog.text
    assert read_json(folder / "privacy.json")["noise_multiplier"] != 1.5

    kedro_run(project, "dpsgd", options=only_train, **QUICK, **{"privacy.noise_multiplier": 1.5})
    (told,) = (r.message for r in caplog.records if "are replaced" in r.message)
    assert str(folder.relative_to(project)) in told
    assert {path.name for path in folder.iterdir()} == {"privacy.json", "history.parquet"}
    assert read_json(folder / "privacy.json")["noise_multiplier"] == 1.5
    whole, cut = mlflow_runs(project)
    assert "cost_of_privacy/accuracy" in whole.data.metrics
    assert "cost_of_privacy/accuracy" not in cut.data.metrics
    assert cut.info.status == "FINISHED"

    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pd.DataFrame, "to_parquet", full)
        with pytest.raises(EquidpError, match=r"history\.parquet: the disk is full"):
            kedro_run(project, "dpsgd", options=only_train, **QUICK, **{"privacy.noise_multiplier": 1.7})
    assert not list(folder.iterdir())  # nor half of what the disk had no room for

    kedro_run(project, "dpsgd", options=only_train, **QUICK, **{"privacy.noise_multiplier": 1.7}, resume=True)
    assert read_json(folder / "privacy.json")["noise_multiplier"] == 1.7


def test_a_file_where_a_folder_should_be_is_named(project):
    shutil.rmtree(project / "data")
    (project / "data").write_text("")
    with pytest.raises(EquidpError, match=r"Cannot write .*data.08_reporting.*: a file stands where a folder"):
        kedro_run(project, "dpsgd", **QUICK)


def test_where_results_cannot_be_written_nothing_is_trained(project, monkeypatch):
    monkeypatch.setattr(nodes, "train_model", lambda *args, **named: pytest.fail("trained"))
    place = project / "data" / "08_reporting" / "digits" / "dpsgd"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("")
    with pytest.raises(EquidpError, match=r"Cannot write .*digits.dpsgd.seed=0.*: a file stands where a folder"):
        kedro_run(project, "dpsgd", **QUICK)
    place.unlink()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "08_reporting" not in str(path) and allowed(path, mode))
    with pytest.raises(EquidpError, match=r"Cannot write .*digits.dpsgd.seed=0.*: writing there is not allowed"):
        kedro_run(project, "dpsgd", **QUICK)


def test_a_folder_for_records_that_cannot_be_made_is_named(project, monkeypatch):
    """Kedro wraps this one, and the search for its path ended in an AttributeError."""
    make = Path.mkdir

    def refuse(path: Path, *given, **named) -> None:
        if "03_primary" in path.parts:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        make(path, *given, **named)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EquidpError, match=r"Cannot write .*data.03_primary.digits.*: the file system is read-only"):
        kedro_run(project, "ingestion")


def test_records_and_findings_of_earlier_settings_are_refused(project):
    """They were taken: the newest records whatever the source's options, and the findings of another ε."""
    kedro_run(project, "ingestion")
    for pipeline, options, words in (
        ("dpsgd", {"from_inputs": ["records"]}, "'records' is not kept between runs"),
        ("ingestion", {"only_missing_outputs": True}, "would take files of earlier settings for this run's"),
        ("audit", {"only_missing_outputs": True}, "would take files of earlier settings for this run's"),
    ):
        with pytest.raises(EquidpError, match=words):
            kedro_run(project, pipeline, options=options, **QUICK)
    assert mlflow_runs(project) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_names": ["reporting.write_report_dpsgd"]}, r"'dpsgd\.\w+' would be an earlier run's"),
        (
            {
                "node_names": [
                    *(f"ingestion.{name}" for name in ("encode_records", "extract_features", "split_records")),
                    "dpsgd.train_model",
                ]
            },
            r"'dpsgd\.plan' would be an earlier run's",
        ),
        ({"only_missing_outputs": True}, "would take files of earlier settings for this run's"),
        ({"load_versions": {"dpsgd.metrics": "2026-01-01T00.00.00.000Z"}}, "no dataset here has versions"),
        ({"from_nodes": ["evaluation.evaluate_dpsgd"]}, "'dpsgd.scores' is not kept between runs"),
    ],
)
def test_what_kedro_offers_and_would_mislead_is_refused(project, options, words):
    with pytest.raises(EquidpError, match=words):
        kedro_run(project, "dpsgd", options=options, **QUICK)
    assert mlflow_runs(project) == []


@pytest.mark.slow
def test_an_experiment_of_ones_own_keeps_how_runs_are_tracked(project):
    (project / "conf/local/mlflow.yml").write_text("tracking: {experiment: {name: clinic}}\n")
    kedro_run(project, "ingestion")
    assert mlflow_runs(project) == []
    kedro_run(project, "dpsgd", **QUICK)
    (run,) = mlflow_runs(project)
    assert mlflow.get_experiment(run.info.experiment_id).name == "clinic"
    assert run.info.artifact_uri.startswith((project / "mlartifacts").as_uri())
    assert run.data.params["training.epochs"] == "2"
    assert mlflow.active_run() is None
    kedro_run(project, "report")  # looks where runs are logged


@pytest.mark.parametrize(
    ("name", "entry", "words"),
    [
        ("{algorithm}.metrics", {"filepath": "{algorithm}.json", "versioned": True}, "metrics' is no plain local file"),
        pytest.param(
            "{algorithm}.metrics",
            {"filepath": "memory://{algorithm}.json"},
            "metrics' is no plain local file",
            marks=pytest.mark.slow,
        ),
        ("{algorithm}.report", {"type": "MemoryDataset"}, "report' is no plain local file"),
        ("{algorithm}.metrics", {"filepath": "metrics.json"}, "'sgd.metrics' and 'dpsgd.metrics' are one file"),
        ("dpsgd.metrics", {"filepath": "${_where}.json"}, r"'_where' not found \(dpsgd.metrics.filepath\)"),
        pytest.param(
            "dpsgd.metrics",
            {"filepath": "a.json", "type": "json.JSONDatset"},
            "'JSONDatset' not found",
            marks=pytest.mark.slow,
        ),
        ("provenance", {"type": "MemoryDataset"}, "'provenance' is no plain local file"),
        # the next run would replace a secure model, or be taken for this one
        (
            "dpsgd.model",
            {"filepath": "m"},
            r"one file .* Write \$\{setting:dataset\}, \$\{setting:seed\}, \$\{setting:run",
        ),
        ("finished.model", {"filepath": "${setting:dataset}/${setting:run_label}"}, r"Write \$\{setting:seed\} into"),
        ("dpsgd.plan", {"filepath": "${setting:dataset}/plan.json"}, "'dpsgd.plan' is one file for several runs"),
        ("dpsgd.workplace", {"filepath": "w", "type": FOLDER}, "'dpsgd.workplace' is one file for several runs"),
        ("privacy_ledger", {"filepath": "l/${setting:run_label}", "type": FOLDER}, "another folder for each run"),
        ("privacy_ledger", {"filepath": "s3://team/ledger", "type": FOLDER}, "'privacy_ledger' is no folder of this"),
        pytest.param(
            "privacy_ledger",
            {"filepath": "ledger.json"},
            "'privacy_ledger' is no folder of this machine",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_entry_of_the_catalog_that_would_lose_results_is_refused_before_training(project, name, entry, words):
    catalog = {name: {"type": "json.JSONDataset"} | entry}
    (project / "conf/local/catalog.yml").write_text(yaml.safe_dump(catalog))
    bootstrapped(project)
    with Session.create(project_path=project) as session, pytest.raises(EquidpError, match=words):
        session.run(pipeline_names=["dpsgd"])
    assert mlflow_runs(project) == []


def test_an_entry_of_the_catalog_that_tells_the_run_in_its_own_way_is_taken(project):
    path = "mine/${setting:dataset}/{algorithm}-${setting:seed}-${setting:run_label}.json"
    entry = {"{algorithm}.metrics": {"type": "json.JSONDataset", "filepath": path}}
    entry["visits"] = {"type": "pandas.SQLQueryDataset", "sql": "SELECT 1", "credentials": "clinic_db"}  # no result
    (project / "conf/local/catalog.yml").write_text(yaml.safe_dump(entry))
    (project / "conf/local/credentials.yml").write_text("clinic_db: {con: 'sqlite://'}\n")
    kedro_run(project, "sgd", **QUICK, run_label="a")
    assert [file.name for file in (project / "mine/digits").iterdir()] == ["sgd-0-a.json"]


@pytest.mark.slow
def test_a_pipeline_of_ones_own_runs_and_makes_no_page_of_figures_of_other_settings(project, monkeypatch):
    def with_own(ours=pipeline_registry.register_pipelines):
        found = ours()
        told = node(lambda metrics: str(metrics["overall"]), "dpsgd.metrics", "told", name="told")
        found["mine"] = Pipeline([told, node(str.__str__, "told", "mine", name="mine")])  # it is of no module
        found["page"] = found["dpsgd"].only_nodes("reporting.write_report_dpsgd")
        return found

    kedro_run(project, "dpsgd", **QUICK)
    page = report_folder(project, "dpsgd") / "report.html"
    before = page.read_bytes()
    monkeypatch.setattr(pipeline_registry, "register_pipelines", with_own)
    with Session.create(project_path=project) as session, monkeypatch.context() as patched:
        patched.setattr(kedro.framework.project, "PACKAGE_NAME", "own")
        assert session.run(pipeline_names=["mine"]).keys() == {"mine"}
    with Session.create(project_path=project) as session, monkeypatch.context() as patched:
        patched.setattr(kedro.framework.project, "PACKAGE_NAME", "own")
        with pytest.raises(EquidpError, match="would be an earlier run's"):
            session.run(pipeline_names=["page"])
    assert page.read_bytes() == before


@pytest.mark.slow
def test_a_secure_run_that_was_cut_goes_on_to_its_figures_and_its_release(project):
    secure = {**QUICK, "privacy.secure": True, "data.membership": "hash", "privacy.evaluation.epsilon": 1.0}
    kedro_run(project, "dpsgd", options={"to_outputs": ["dpsgd.metrics"]}, **secure)
    ledger, folder = project / "data/privacy_ledger/ledger.jsonl", report_folder(project, "dpsgd")
    entered, said = ledger.read_text(), read_json(folder / "privacy.json")
    for again in (secure, QUICK):  # begun anew, it would lose a model whose ε is spent
        with pytest.raises(EquidpError, match="Finish that run by its command with resume=true in --params, give this"):
            kedro_run(project, "dpsgd", **again)
    assert read_json(folder / "privacy.json") == said
    kedro_run(project, "dpsgd", **secure, resume=True)
    assert (folder / "metrics_release.json").is_file()
    assert (folder / "release").is_dir()
    assert read_json(folder / "privacy.json") == said
    assert ledger.read_text() == entered


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_names": ["train"]}, r"contain nodes named \['train'\]: `kedro reg"),
        ({"tags": ["mine"]}, "contains no nodes"),
    ],
)
def test_a_mistyped_node_ends_in_a_sentence(project, options, words):
    bootstrapped(project)
    with Session.create(project_path=project) as session, pytest.raises(EquidpError, match=words):
        session.run(pipeline_names=["ingestion"], **options)


@pytest.mark.parametrize("stage", ["03_primary", "06_models", "08_reporting"])
def test_a_file_where_a_folder_belongs_is_told(project, stage):
    (project / "data" / stage).mkdir(parents=True, exist_ok=True)
    (project / "data" / stage / "digits").touch()
    with pytest.raises(EquidpError, match="a file stands where a folder should be; move it"):
        kedro_run(project, "dpsgd", **QUICK)


def test_processes_that_cannot_see_the_run_are_refused(project):
    runner = ParallelRunner()
    try:
        with pytest.raises(EquidpError, match="take ThreadRunner"):
            kedro_run(project, "dpsgd", options={"runner": runner}, **QUICK)
    finally:
        runner._manager.shutdown()


def test_a_pipeline_of_ones_own_may_name_its_output_as_it_likes(project, monkeypatch):
    def with_own(ours=pipeline_registry.register_pipelines):
        found = ours()
        found["mine"] = Pipeline([node(lambda: 1, None, "model")])
        return found

    monkeypatch.setattr(pipeline_registry, "register_pipelines", with_own)
    kedro_run(project, "mine")


@pytest.mark.slow
def test_the_ledgers_figure_is_no_run_of_mlflow(project: Path) -> None:
    kedro_run(project, "dpsgd", **QUICK)
    before = [run.info.run_id for run in mlflow_runs(project)]
    kedro_run(project, "ledger")
    assert [run.info.run_id for run in mlflow_runs(project)] == before
