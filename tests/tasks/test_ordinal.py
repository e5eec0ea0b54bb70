"""Ordered classes: from the declaration to the page and the model that goes out."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from tests.end_to_end.kedro_project import kedro_run, mlflow_runs, read_json, report_folder

from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.evaluation.ordinal import evaluate
from equidp.models.weights import load_weights
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings, resolve
from equidp.tasks import task_of
from equidp.training import TrainingRequest, groups_of, plan_run, prepare, units_in

BANDS = ("under 100", "100-179", "180-259", "260 and over")
OPTIONS = {
    "path": "t.csv",
    "label": "grade",
    "classes": ["none", "mild", "severe"],
    "ordered": True,
    "features": {"x": {"kind": "numeric", "maximum": 1}},
}


def patients():
    diabetes = source("diabetes_bands")
    return diabetes.records(diabetes.locate(Path()))


def by_hand(logits: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    """The five figures by NumPy alone."""
    odds = np.minimum.accumulate(1 / (1 + np.exp(-logits)), axis=1)
    predicted, k = (odds > 0.5).sum(axis=1), logits.shape[1] + 1
    apart = np.abs(predicted - truth)
    observed = np.zeros((k, k))
    np.add.at(observed, (truth, predicted), 1)
    by_chance = np.outer(observed.sum(1), observed.sum(0)) / len(truth)
    square = np.subtract.outer(np.arange(k), np.arange(k)) ** 2
    is_above = truth[:, None] > np.arange(k - 1)
    return {
        "count": len(truth),
        "mae": apart.mean(),
        "accuracy": (apart == 0).mean(),
        "within_one": (apart < 2).mean(),
        "kappa": 1 - (square * observed).sum() / (square * by_chance).sum() if len(set(truth)) > 1 else None,
        "loss": -np.log(np.where(is_above, odds, 1 - odds)).mean(),
    }


@pytest.mark.slow
def test_a_run_reports_each_group_as_one_would_by_hand(project: Path) -> None:
    params = {"dataset": "diabetes_bands", "training.epochs": 30, "training.device": "cpu", "release.documents": True}
    kedro_run(project, "dpsgd", **params)
    folder = report_folder(project, "dpsgd", "diabetes_bands")
    document = read_json(folder / "metrics.json")
    test = split(patients(), seed=0).test
    weights = load_weights(project / "data/06_models/diabetes_bands/dpsgd/seed=0/model.safetensors").tensors
    logits = test.features.double().numpy() @ weights["layers.2.weight"].double().numpy().T
    logits, truth = logits + weights["layers.2.bias"].double().numpy(), test.labels.numpy()
    assert logits.shape[1] == 3  # one less than classes
    for grouping, groups in document["groups"].items():
        ids = test.groups[grouping].numpy()
        for k, (group, figures) in enumerate(groups.items()):
            expected = by_hand(logits[ids == k], truth[ids == k])
            assert (figures["kappa"] is None) == (grouping == "class")  # of one class only
            for name, value in expected.items():
                assert figures[name] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), group
    assert document["overall"] == pytest.approx(by_hand(logits, truth), rel=1e-4)
    assert document["overall"]["kappa"] > 0.2  # it has learnt something

    sexes, cost, before = document["groups"]["sex"], document["cost_of_privacy"], document["baseline"]["groups"]["sex"]
    assert cost["groups"]["sex"]["1"]["mae"] == pytest.approx(sexes["1"]["mae"] - before["1"]["mae"])
    assert cost["groups"]["sex"]["1"]["kappa"] == pytest.approx(before["1"]["kappa"] - sexes["1"]["kappa"])
    worst = max(document["groups"]["class"], key=lambda band: document["groups"]["class"][band]["mae"])
    assert document["worst"]["class"] == {"group": worst, "mae": document["groups"]["class"][worst]["mae"]}

    (run,) = mlflow_runs(project)
    assert run.data.metrics["test/mae"] == document["overall"]["mae"]
    assert run.data.metrics["cost_of_privacy/mae"] == cost["overall"]["mae"]
    raw = load_diabetes(as_frame=True, scaled=False).frame.drop(columns=["target", "sex"])
    served = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model").predict(raw)
    assert tuple(served) == BANDS
    assert served.to_numpy().min() >= 0
    assert served.sum(axis=1).to_numpy() == pytest.approx(1)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "how much worse the MAE is than the non-private baseline" in page
    assert "MAE counts ranks" in page
    assert "within one rank" in page
    card = (folder / "release" / "README.md").read_text(encoding="utf-8")
    assert "A classifier with 4 ordered classes" in card


def test_a_records_loss_is_the_mean_over_its_cumulative_logits_and_its_weight_that_of_its_class() -> None:
    task = task_of(patients().schema)
    outputs, labels = torch.tensor([[2.0, 0.0, -1.0], [1.0, 3.0, 0.0]]), torch.tensor([1, 3])
    first = np.log(1 + np.exp([-2.0, 0.0, -1.0])).mean()  # above the first class, below the second and third
    second = np.log(1 + np.exp([-1.0, -3.0, 0.0])).mean()
    assert task.loss(task.losses[0], "cpu")(outputs, labels).tolist() == pytest.approx([first, second])
    weighted = task.loss(task.losses[0], "cpu", class_weights=(1.0, 2.0, 1.0, 0.5))
    assert weighted(outputs, labels).tolist() == pytest.approx([2 * first, second / 2])


def test_a_large_output_moves_a_records_loss_by_a_bounded_gradient() -> None:
    outputs = torch.tensor([[1e4, -1e4, 1e4]], requires_grad=True)
    task_of(patients().schema).loss("cumulative_cross_entropy", "cpu")(outputs, torch.tensor([0])).sum().backward()
    assert outputs.grad is not None
    assert float(outputs.grad.abs().max()) == pytest.approx(1 / 3)


def test_logits_out_of_order_give_probabilities_all_the_same() -> None:
    logits = torch.tensor([[0.0, 5.0, -1.0], [-9.0, 9.0, 9.0]])
    shares = task_of(patients().schema).predict(logits)
    odds = 1 / (1 + np.exp(1.0))
    assert shares[0].tolist() == pytest.approx([0.5, 0.0, 0.5 - odds, odds])
    assert shares.min() >= 0
    assert shares.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_the_predicted_class_is_the_median_and_figures_without_a_prediction_are_none() -> None:
    scores = np.array([[0.4, 0.15, 0.45], [0.6, 0.2, 0.2], [np.nan, np.nan, np.nan]])
    found = evaluate(scores, np.array([1, 2, 0]), {"of": (np.array([0, 0, 1]), ("known", "lost"))})
    assert (
        found["groups"]["of"]["known"]["mae"] == 1.0
    )  # 0 and 2 ranks, where the most probable classes are 1 and 2 away
    assert found["groups"]["of"]["known"]["within_one"] == 0.5
    assert found["groups"]["of"]["lost"] == {"count": 1, **dict.fromkeys(task_of(patients().schema).metrics)}
    assert found["overall"]["mae"] is None


def test_a_model_of_one_class_for_everybody_has_learnt_nothing() -> None:
    task, labels = task_of(patients().schema), np.array([0, 1, 2, 3, 1, 1, 2])
    for k in range(4):
        said = task.guessing(task.evaluate(np.eye(4)[np.full(7, k)], labels, {}))
        assert "has learnt nothing: its weighted kappa" in (said or ""), k
    assert task.guessing(task.evaluate(np.eye(4)[labels], labels, {})) is None


def test_algorithms_train_on_ordered_classes_or_say_that_they_are_for_others() -> None:
    training, privacy = TrainingSettings(epochs=1, batch_size=100), PrivacySettings(noise_multiplier=2.0, delta=1e-4)
    for name in ("dpsgd_f_smooth", "dpis", "sa_dpsgd", "custom"):
        algorithm = algorithm_settings(name, {}).build()
        parts = split(patients(), seed=0, public_fraction=0.2 if algorithm.needs_public else 0.0)
        plan = plan_run(algorithm, units=units_in(parts.train, privacy), groups=4, privacy=privacy, training=training)
        request = TrainingRequest(
            algorithm, plan, seed=0, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy,
            training=training,
        )  # fmt: skip
        trainer = prepare(request, parts).trainer
        before = trainer.engine.flatten().clone()
        trainer.train(progress=False)
        after = trainer.engine.flatten()
        assert after.isfinite().all(), name
        assert not torch.equal(before, after), name
    built = {name: algorithm_settings(name, {}).build() for name in ALGORITHMS}
    for name, algorithm in built.items():
        if algorithm.objective.by_class:
            with pytest.raises(EquidpError, match=f"{name} allows for .* not for the task ordinal"):
                groups_of(algorithm, patients(), "class")


def test_a_table_or_a_folder_of_images_declares_the_order() -> None:
    schema = source("table", OPTIONS).schema
    assert (schema.task, schema.classes, schema.outputs) == ("ordinal", ("none", "mild", "severe"), 2)
    folder = source("image_folder", {"path": "eyes", "classes": OPTIONS["classes"], "ordered": True})
    assert (folder.task, folder.schema.task) == ("ordinal", "ordinal")
    with pytest.raises(EquidpError, match="an order counts where there are three classes or more"):
        source("table", OPTIONS | {"classes": ["no", "yes"]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"data": {"positive_class": BANDS[3]}}, "data.positive_class is not for the task ordinal", id="p"),
        pytest.param({"privacy": {"evaluation": {"epsilon": 1.0}}}, "not for the task ordinal: leave it out", id="e"),
        pytest.param({"training": {"loss": "cross_entropy"}}, "Unknown training.loss of ordinal", id="loss"),
        pytest.param({"data": {"task": "classification"}}, "source 'diabetes_bands' is for ordinal", id="task"),
    ],
)
def test_what_is_for_classification_is_refused(given: dict, words: str) -> None:
    blocks: dict = {"dataset": "diabetes_bands", "data": {"groups": "class+sex"}, "privacy": {"noise_multiplier": 1.0}}
    resolve(blocks | {"data": {"groups": "class", "keep": {"260 and over": 20}}})  # classes can be made rare
    for name, values in given.items():
        blocks[name] = {**blocks.get(name, {}), **values}
    with pytest.raises(EquidpError, match=words):
        resolve(blocks)
