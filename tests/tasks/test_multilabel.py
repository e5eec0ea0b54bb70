"""Multi-label: several labels of 0 or 1 for each record, from the file to the page and the served model."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.datasets import make_multilabel_classification
from tests.end_to_end.kedro_project import kedro_run, mlflow_runs, read_json, report_folder

from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.evaluation.metrics import flat_metrics
from equidp.models.weights import load_weights
from equidp.parameters import resolve
from equidp.reporting.release.facts import _exact
from equidp.tasks import task_of

LABELS = ("cough", "fever", "rash")
OPTIONS = {
    "path": "made.csv",
    "labels": list(LABELS),
    "features": {f"x{i}": {"kind": "numeric", "maximum": 40, "clip": True} for i in range(6)},
    "groups": {"ward": {"categories": ["A", "B"]}},
}


def made(folder: Path, rows: int = 400) -> pd.DataFrame:
    """A table that scikit-learn makes, with a ward of no meaning, written as csv."""
    features, labels = make_multilabel_classification(rows, n_features=6, n_classes=3, random_state=0)
    table = pd.DataFrame(features.astype(int), columns=list(OPTIONS["features"])).assign(
        **dict(zip(LABELS, labels.T, strict=True)), ward=np.where(np.arange(rows) % 3, "A", "B")
    )
    table.to_csv(folder / "made.csv", index=False)
    return table


def records(folder: Path):
    made(folder)
    table = source("table", OPTIONS)
    return table.records(table.locate(folder))


def auroc(truth: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs in the right order, by counting them all."""
    above = [float(a > b) + 0.5 * float(a == b) for a, b in product(scores[truth == 1], scores[truth == 0])]
    return sum(above) / len(above)


def test_a_run_reports_each_label_and_group_as_one_would_by_hand(project: Path) -> None:
    made(project / "data" / "01_raw")
    preset = {
        "data": {"source": "table", "task": "multilabel", "groups": ["ward"], "options": OPTIONS},
        "model": {"name": "logistic"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"epochs": 8, "batch_size": 64, "learning_rate": 1.0, "device": "cpu"},
    }
    (project / "conf/local/parameters.yml").write_text(yaml.safe_dump({"presets": {"wards": preset}}))
    kedro_run(project, "dpsgd", dataset="wards")
    folder = report_folder(project, "dpsgd", "wards")
    document = read_json(folder / "metrics.json")

    table = source("table", OPTIONS)
    test = split(table.records(table.locate(project / "data" / "01_raw")), seed=0).test
    weights = load_weights(project / "data/06_models/wards/dpsgd/seed=0/model.safetensors").tensors
    output = test.features.numpy() @ weights["layers.2.weight"].numpy().T + weights["layers.2.bias"].numpy()
    scores, truth = 1 / (1 + np.exp(-output.astype(np.float64))), test.labels.numpy()
    right = (scores > 0.5) == (truth > 0.5)
    wards = {"A": test.groups["ward"].numpy() == 0, "B": test.groups["ward"].numpy() == 1}
    for group, of in {"": np.ones(len(truth), dtype=bool), **wards}.items():
        found = document["groups"]["ward"][group] if group else document["overall"]
        each = [auroc(truth[of, k], scores[of, k]) for k in range(3)]
        likelihood = np.where(truth[of] > 0.5, scores[of], 1 - scores[of])
        expected = {
            "count": of.sum(),
            "label_accuracy": right[of].mean(),
            "macro_auroc": np.mean(each),
            "exact_match": right[of].all(axis=1).mean(),
            "loss": -np.log(likelihood).mean(),
        }
        assert found == pytest.approx(expected, rel=1e-5), group
        for k, label in enumerate(LABELS):
            one = document["labels"][label]["groups"]["ward"][group] if group else document["labels"][label]["overall"]
            assert one == pytest.approx({"count": of.sum(), "accuracy": right[of, k].mean(), "auroc": each[k]}), label
    assert document["overall"]["macro_auroc"] > 0.6  # it has learnt something, so that the figures are no coin's
    lost = document["baseline"]["overall"]["label_accuracy"] - document["overall"]["label_accuracy"]
    assert document["cost_of_privacy"]["overall"]["label_accuracy"] == pytest.approx(lost)

    (run,) = mlflow_runs(project)
    assert run.data.metrics["test/macro_auroc"] == document["overall"]["macro_auroc"]
    raw = pd.read_csv(project / "data" / "01_raw" / "made.csv").drop(columns=[*LABELS, "ward"])
    served = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model").predict(raw)
    assert list(served) == list(LABELS)
    assert served.to_numpy().min() > 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "By label and ward" in page
    assert "how much worse the label accuracy is than the non-private baseline" in page


def test_labels_are_columns_of_0_and_1_and_nothing_else(tmp_path: Path) -> None:
    found, frame = records(tmp_path), pd.read_csv(tmp_path / "made.csv")
    assert found.labels.dtype == torch.float32
    assert found.labels.tolist() == frame[list(LABELS)].to_numpy().tolist()
    assert found.schema.targets == LABELS
    assert found.schema.outputs == 3
    frame.astype({"rash": object}).assign(rash=["2", *frame["rash"][1:]]).to_csv(tmp_path / "made.csv", index=False)
    table = source("table", OPTIONS)
    with pytest.raises(EquidpError, match="line 2, column 'rash'"):
        table.records(table.locate(tmp_path))


def test_a_records_loss_is_the_mean_or_the_sum_over_its_labels(tmp_path: Path) -> None:
    task = task_of(records(tmp_path).schema)
    outputs, labels = torch.tensor([[0.0, 1.0, -2.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    expected = np.log(2) + np.log(1 + np.exp(-1)) + np.log(1 + np.exp(-2))
    assert task.loss("binary_cross_entropy_sum", "cpu")(outputs, labels).tolist() == pytest.approx([expected])
    assert task.loss("binary_cross_entropy", "cpu")(outputs, labels).tolist() == pytest.approx([expected / 3])


def test_a_model_that_gives_everybody_the_more_frequent_values_is_told_of(tmp_path: Path) -> None:
    """Of rare labels its label accuracy is high, and privacy seems to cost nothing."""
    task = task_of(records(tmp_path).schema)
    truth = (np.random.default_rng(0).random((400, 3)) < (0.1, 0.05, 0.7)).astype(np.float32)
    usual = float(np.maximum(truth.mean(0), 1 - truth.mean(0)).mean())
    ranked = np.clip((0.2, 0.2, 0.8) + 0.1 * truth, 0, 1)  # it ranks, and changes nobody's answer
    said = task.hardly(task.evaluate(ranked, truth, {})) or ""
    assert f"more frequent value for everybody (label accuracy {usual:.3f})" in said
    assert "compare by AUROC" in said
    assert task.hardly(task.evaluate(0.1 + 0.8 * truth, truth, {})) is None
    assert task.hardly(task.evaluate(np.full_like(ranked, np.nan), truth, {})) is None


def test_a_label_that_a_group_has_in_one_value_alone_does_not_enter_its_macro_auroc(tmp_path: Path) -> None:
    task = task_of(records(tmp_path).schema)
    truth = np.array([[0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]], dtype=np.float32)
    scores = np.array([[0.1, 0.9, 0.2], [0.8, 0.6, 0.1], [0.3, 0.7, 0.3], [0.2, 0.8, 0.4]])
    found = task.evaluate(scores, truth, {"ward": (np.array([0, 0, 1, 1]), ("A", "B"))})
    assert found["groups"]["ward"]["A"]["macro_auroc"] == 1.0  # of the first label alone
    assert found["labels"]["fever"]["groups"]["ward"]["A"]["auroc"] is None
    assert found["overall"]["macro_auroc"] == pytest.approx((0.75 + 2 / 3) / 2)
    lost = task.evaluate(np.full_like(scores, np.nan), truth, {})
    assert task.diverged(lost)
    json.dumps(lost, allow_nan=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "rash"}, "labels takes the place of label"),
        ({"labels": ["rash"]}, "one label of 0 or 1 is two classes"),
        ({"labels": ["rash", "rash"]}, "two labels have the same name: 'rash'"),
        ({"labels": ["rash", "x1"]}, "the label 'x1' is also a feature"),
    ],
)
def test_labels_that_say_nothing_are_refused(options: dict, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        source("table", OPTIONS | options)


def test_a_task_that_the_table_does_not_declare_is_refused_with_what_declares_it() -> None:
    blocks = {
        "dataset": "wards",
        "data": {"source": "table", "task": "regression", "groups": "ward", "options": OPTIONS},
    }
    with pytest.raises(EquidpError, match=r"data.task=regression: declare data.options.target \(with its bounds\)"):
        resolve({**blocks, "privacy": {"noise_multiplier": 1.0}})


def test_a_share_that_goes_out_is_rounded_to_decimals_as_a_small_one_tells_its_denominator() -> None:
    overall = {"count": 813, "label_accuracy": 0.8765, "macro_auroc": None, "exact_match": 1 / 813, "loss": 0.5}
    released = _exact({"task": "multilabel", "overall": overall, "groups": {}}, {})["overall"]
    assert released == {"label_accuracy": 0.876, "macro_auroc": None, "exact_match": 0.001, "loss": 0.5}


def test_two_labels_that_mlflow_would_call_the_same_keep_their_own_figures() -> None:
    labels = {name: {"overall": {"count": 9, "auroc": auroc}} for name, auroc in (("a+", 0.6), ("a plus", 0.7))}
    flat = flat_metrics({"task": "multilabel", "overall": {}, "groups": {}, "labels": labels})
    assert sorted(flat.values()) == [0.6, 0.7]
