"""Regression: a number with public bounds, from the file to the page and the model that goes out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_diabetes
from tests.end_to_end.kedro_project import kedro_run, mlflow_runs, read_json, report_folder

from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.evaluation import multilabel, ordinal
from equidp.evaluation.intervals import mean_interval
from equidp.evaluation.metrics import cost_of_privacy, flat_metrics, metrics_document
from equidp.evaluation.regression import evaluate
from equidp.models import build_model
from equidp.models.weights import load_weights, network_of
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings, resolve
from equidp.sweep.printed import print_table
from equidp.sweep.summary import Row, averaged, table_of
from equidp.tasks import task_of
from equidp.training import TrainingRequest, groups_of, plan_run, predict, prepare, units_in

OPTIONS = {
    "path": "t.csv",
    "label": "y",
    "target": {"minimum": 10, "maximum": 50},
    "features": {"x": {"kind": "numeric", "maximum": 1}},
    "groups": {"sex": {"categories": ["f", "m"]}},
}


def patients():
    diabetes = source("diabetes")
    return diabetes.records(diabetes.locate(Path()))


def table(folder: Path, *rows: str, **options):
    (folder / "t.csv").write_text("\n".join(["x,y,sex", *rows, ""]))
    made = source("table", OPTIONS | options)
    return made.records(made.locate(folder))


def by_hand(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """The four figures by NumPy alone."""
    errors = predicted - truth
    return {
        "count": len(errors),
        "mae": float(np.abs(errors).mean()),
        "rmse": math.sqrt(float((errors**2).mean())),
        "r2": 1 - float((errors**2).sum() / ((truth - truth.mean()) ** 2).sum()),
        "mean_error": float(errors.mean()),
    }


@pytest.mark.slow
def test_a_run_reports_each_group_as_one_would_by_hand(project: Path) -> None:
    params = {"dataset": "diabetes", "training.epochs": 3, "training.device": "cpu", "release.documents": True}
    kedro_run(project, "dpsgd", **params)
    folder = report_folder(project, "dpsgd", "diabetes")
    document = read_json(folder / "metrics.json")
    test = split(patients(), seed=0).test
    weights = load_weights(project / "data/06_models/diabetes/dpsgd/seed=0/model.safetensors")
    features, truth = test.features.double().numpy(), test.labels.double().numpy()
    layer = {name: value.double().numpy() for name, value in weights.tensors.items()}
    output = features @ layer["layers.2.weight"].T + layer["layers.2.bias"]
    predicted = (25 + 346) / 2 + (346 - 25) / 2 * np.clip(output[:, 0], -1, 1)
    for grouping, groups in document["groups"].items():
        ids = test.groups[grouping].numpy()
        for k, (group, figures) in enumerate(groups.items()):
            expected = by_hand(predicted[ids == k], truth[ids == k])
            assert figures == pytest.approx(expected, rel=1e-4, abs=1e-4), group
    assert document["overall"] == pytest.approx(by_hand(predicted, truth), rel=1e-4, abs=1e-4)

    sexes, cost = document["groups"]["sex"], document["cost_of_privacy"]
    lost = {sex: sexes[sex]["mae"] - document["baseline"]["groups"]["sex"][sex]["mae"] for sex in sexes}
    assert {sex: of["mae"] for sex, of in cost["groups"]["sex"].items()} == pytest.approx(lost)
    assert cost["gap"]["sex"]["mae"] == pytest.approx(max(lost.values()) - min(lost.values()))
    worst = max(sexes, key=lambda sex: sexes[sex]["mae"])
    assert document["worst"]["sex"] == {"group": worst, "mae": sexes[worst]["mae"]}

    (run,) = mlflow_runs(project)
    assert run.data.metrics["test/worst_group_mae"] == sexes[worst]["mae"]
    assert run.data.metrics["cost_of_privacy/gap"] == cost["gap"]["sex"]["mae"]
    assert "test MAE" in run.data.tags["mlflow.note.content"]
    raw = load_diabetes(as_frame=True, scaled=False).frame.drop(columns=["target", "sex"])
    served = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model").predict(raw)
    assert list(served) == ["progression"]
    assert served["progression"].between(25, 346).all()
    every = predict(network_of(weights), patients().features, test.schema)
    assert np.array_equal(served.to_numpy(), every.numpy())

    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "how much worse the MAE is than the non-private baseline" in page
    assert "accuracy" not in json.dumps(document)
    card = (folder / "release" / "README.md").read_text(encoding="utf-8")
    assert "A regression model of progression, a number from 25 to 346" in card
    assert "tabular-regression" in card
    assert not {word for word in ("classifier", "classification", "logit", "ccuracy was") if word in card}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "sgd"])
def test_an_algorithm_trains_on_numbers_or_says_that_it_needs_classes(name: str) -> None:
    algorithm = algorithm_settings(name, {}).build()
    parts = split(patients(), seed=0, public_fraction=0.2 if algorithm.needs_public else 0.0)
    training = TrainingSettings(epochs=1, batch_size=100, learning_rate=0.1)
    privacy = PrivacySettings(noise_multiplier=2.0, delta=1e-4)
    if algorithm.objective.by_class:
        with pytest.raises(EquidpError, match="not for the task regression: choose another algorithm"):
            groups_of(algorithm, parts.train, "sex")
        return
    plan = plan_run(algorithm, units=units_in(parts.train, privacy), groups=2, privacy=privacy, training=training)
    settings = {"grouping": "sex", "model": ModelSettings(name="logistic"), "privacy": privacy, "training": training}
    trainer = prepare(TrainingRequest(algorithm, plan, seed=0, **settings), parts).trainer
    before = trainer.engine.flatten().clone()
    trainer.train(progress=False)  # without the statement of ε, which takes longer than all else
    after = trainer.engine.flatten()
    assert after.isfinite().all()
    assert not torch.equal(before, after)


@pytest.mark.parametrize(("loss", "expected"), [("squared", [0.25, 4.0, 0.0]), ("huber", [0.08, 0.38, 0.0])])
def test_a_loss_is_of_the_number_on_the_scale_of_its_bounds(tmp_path: Path, loss: str, expected: list[float]) -> None:
    """The scale is −1 to 1: of the outputs below the errors are 0.5, 2 and 0, and 0.2 of it is 0.1 of the range."""
    task = task_of(table(tmp_path, "0,10,f", "1,50,m").schema)
    each = task.loss(loss, "cpu", huber_delta=0.1)
    labels = torch.tensor([10.0, 50.0, 30.0])
    assert each(torch.tensor([[-0.5], [-1.0], [0.0]]), labels).tolist() == pytest.approx(expected)
    assert task.predict(torch.tensor([[-2.0], [0.5]])).tolist() == [[10.0], [40.0]]
    low, high = bounds = 0.1, 0.7  # half the range and the middle are rounded, and their sum is beyond the bound
    extremes = task_of(replace(task.schema, bounds=bounds)).predict(torch.tensor([[-9.0], [9.0]]))
    assert extremes.flatten().tolist() == torch.tensor([low, high]).tolist()


def test_numbers_beyond_their_bounds_are_refused_or_clipped_and_told_by_group(tmp_path: Path) -> None:
    rows = ("0,10,f", "1,51,m", "1,9,m", "0,30.5,f")
    with pytest.raises(EquidpError, match=r"line 3, column 'y': '51' is out of bounds; give a number from 10 to 50"):
        table(tmp_path, *rows)
    records = table(tmp_path, *rows, target={"minimum": 10, "maximum": 50, "clip": True})
    assert records.labels.tolist() == [10.0, 50.0, 10.0, 30.5]
    assert records.labels.dtype == torch.float32
    (told,) = records.remarks
    assert "column 'y': 2 of 4 numbers are beyond 10 to 50 and are set to the nearer bound (sex: m 2)" in told


def test_patients_who_differ_in_the_target_alone_are_no_copies_of_each_other(tmp_path: Path) -> None:
    """Else the identity of one, and so its part, would depend on whether the other is there."""
    both, one = table(tmp_path, "0,10.25,f", "0,10.5,f"), table(tmp_path, "0,10.5,f")
    assert both.identity is not None
    assert one.identity is not None
    assert torch.equal(both.identity[1], one.identity[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": ["a", "b"]}, "one of classes, target .* labels .*, not by classes, target"),
        ({"target": None}, "one of classes, target .* labels .*, not by none"),
        ({"target": {"minimum": 5, "maximum": 5}}, "minimum must be less than maximum"),
        ({"target": {"minimum": 5}}, "target.maximum.*Field required"),
        ({"label": ""}, "label: name the label's column"),
        ({"label": "x"}, "the label 'x' is also a feature"),
        ({"unit": "x"}, "the unit 'x' is also a feature"),
        ({"class_edges": [3]}, "class_map and class_edges are for classes, and target declares none"),
        ({"sizes": [3, 4]}, "sizes: without classes give one number"),
        ({"target": {"maximum": 1e39}}, "cannot be told apart by seven digits"),
        ({"target": {"minimum": 1e8, "maximum": 1e8 + 1}}, "cannot be told apart by seven digits"),
    ],
)
def test_a_declaration_that_tells_no_task_is_refused(options: dict, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        source("table", OPTIONS | options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": {"task": "classification"}}, "data.task=classification: source 'diabetes' is for regression"),
        ({"data": {"task": "regresion"}}, "Unknown data.task 'regresion'. Did you mean 'regression'"),
        ({"dataset": "digits", "data": {"task": "regression"}}, "source 'digits' is for classification"),
        ({"data": {"groups": "class+sex"}}, "data.groups names class, and regression has no classes"),
        ({"data": {"groups": ["sex * class"]}}, "data.groups names class, and regression has no classes"),
        ({"data": {"keep": {"1": 0.5}}}, "data.keep is not for the task regression"),
        ({"training": {"class_weights": [1, 2]}}, "training.class_weights is not for the task regression"),
        ({"training": {"loss": "hubr"}}, "Unknown training.loss of regression 'hubr'. Did you mean 'huber'"),
        ({"training": {"huber_delta": 0.2}}, "huber_delta has no effect unless loss is huber"),
        ({"dataset": "digits", "training": {"loss": "huber"}}, "Unknown training.loss of classification 'huber'"),
        (
            {"privacy": {"evaluation": {"epsilon": 1.0}}},
            "privacy.evaluation.epsilon is for classification, not for the task regression",
        ),
    ],
)
def test_a_setting_that_needs_classes_is_refused(given: dict, words: str) -> None:
    blocks = {"dataset": "diabetes", "data": {"groups": "sex"}, "privacy": {"noise_multiplier": 1.0}}
    for name, values in given.items():
        blocks[name] = {**blocks[name], **values} if isinstance(blocks.get(name), dict) else values
    with pytest.raises(EquidpError, match=words):
        resolve(blocks)


def test_a_pipeline_that_needs_classes_is_refused_before_anything_runs(project: Path) -> None:
    for pipeline, words in {
        "audit": "gives records wrong classes",
        "tune": "chooses by the accuracy of classes",
    }.items():
        with pytest.raises(EquidpError, match=f"The pipeline {pipeline} {words}: it is for classification"):
            kedro_run(project, pipeline, dataset="diabetes")
    with pytest.raises(EquidpError, match=r"dpsgd_f_adjusted allows for .* not for the task regression"):
        kedro_run(project, "dpsgd_f_adjusted", dataset="diabetes")
    assert not (project / "data" / "08_reporting").exists()


def test_an_undefined_figure_is_none_and_a_model_that_diverged_has_none() -> None:
    groups = {"sex": (np.array([0, 0, 1]), ("f", "m", "other"))}
    truth = np.array([1.0, 3.0, 2.0])
    found = evaluate(np.array([1.5, 2.0, 2.0]), truth, groups)
    assert found["groups"]["sex"]["m"] == {"count": 1, "mae": 0.0, "rmse": 0.0, "r2": None, "mean_error": 0.0}
    assert found["groups"]["sex"]["other"] == {"count": 0, **dict.fromkeys(("mae", "rmse", "r2", "mean_error"))}
    assert found["worst"]["sex"] == {"group": "f", "mae": 0.75}
    task = task_of(patients().schema)
    lost = task.evaluate(np.full((3, 1), np.nan), truth, groups)
    assert set(lost["overall"].values()) == {3, None}
    assert task.diverged(lost)
    assert not [name for name in flat_metrics(metrics_document(lost, lost)) if name.startswith("cost_of_privacy")]
    json.dumps(metrics_document(lost, lost), allow_nan=False)


def test_a_cost_is_positive_where_something_is_lost_whichever_end_of_a_metric_is_best() -> None:
    task, truth = task_of(patients().schema), np.array([0.0, 10.0, 20.0])
    good, poor = (task.evaluate(np.array([[a], [b], [20.0]]), truth, {}) for a, b in ((1.0, 9.0), (5.0, 16.0)))
    cost = cost_of_privacy(poor, good)["overall"]
    assert cost == pytest.approx(
        {"mae": 3.0, "rmse": (61 / 3) ** 0.5 - (2 / 3) ** 0.5, "r2": 0.295, "mean_error": 11 / 3}
    )
    assert not task.outdone({"cost_of_privacy": {"intervals": {"overall": [-1.0, 1.0]}}})
    assert "has learnt nothing: its R² is" in (task.guessing(task.evaluate(np.full((3, 1), 99.0), truth, {})) or "")
    assert task.guessing(good) is None
    assert "its R² is -" in (task.guessing(task.evaluate(np.array([[20.0], [0.0], [10.0]]), truth, {})) or "")
    assert "may then be that of one number" in task.guessed_means  # as it is of a model below 0 whose answers differ


def test_a_baseline_of_larger_mae_and_smaller_rmse_is_not_called_badly_trained() -> None:
    """Clipped squared errors lead to the median, others to the mean: neither is trained worse than the other."""
    task = task_of(patients().schema)
    truth = np.array([0.0, 0.0, 0.0, 90.0] * 25)
    low, middle, exact = (np.array([[a], [a], [a], [b]] * 25) for a, b in ((1.0, 20.0), (18.0, 50.0), (1.0, 85.0)))

    def told(private: np.ndarray, baseline: np.ndarray) -> str | None:
        document = metrics_document(task.evaluate(private, truth, {}), task.evaluate(baseline, truth, {}))
        document["cost_of_privacy"]["intervals"] = task.cost_intervals(private, baseline, truth, {})
        return task.outdone(document)

    assert "has a smaller MAE than the non-private baseline, by more than chance, and a larger" in (
        told(low, middle) or ""
    )
    assert "that baseline can be trained better" in (told(exact, middle) or "")
    assert told(middle, low) is None


def test_an_interval_counts_units_and_not_their_records() -> None:
    values = np.array([1.0, 2.0, 4.0])
    half = 4.302653 * np.std(values, ddof=1) / math.sqrt(3)  # Student's t of two degrees of freedom
    assert mean_interval(values, np.arange(3)) == pytest.approx([7 / 3 - half, 7 / 3 + half])
    assert mean_interval(np.repeat(values, 2), np.repeat(np.arange(3), 2)) == pytest.approx(
        [7 / 3 - half, 7 / 3 + half]
    )
    assert mean_interval(values[:1], np.arange(1)) is None


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1 + 0.2])
def test_values_that_all_agree_have_no_interval(value: float) -> None:
    """Of 78 records with the same predictions the cost is 0, and not certainly 0."""
    values = np.full(78, value)
    values[0] = round(value, 12)
    assert mean_interval(values, np.arange(78)) is None


def test_an_interval_of_errors_or_shares_holds_no_value_that_their_mean_cannot_have() -> None:
    """Of three records, t is 4.3: without a cut the interval of an error would begin below 0."""
    truth, right = np.zeros(3), np.array([[1.0], [1.0], [0.0]])
    assert evaluate(np.array([0.0, 0.0, 3.0]), truth, {})["intervals"]["overall"][0] == 0.0
    assert ordinal.evaluate(np.eye(3)[[0, 0, 2]], truth.astype(int), {})["intervals"]["overall"][0] == 0.0
    assert multilabel.evaluate(right, np.ones((3, 1)), {}, names=("a",))["intervals"]["overall"] == [0.0, 1.0]


def test_seeds_are_averaged_with_the_main_metrics_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    task, truth = task_of(patients().schema), np.array([0.0, 10.0, 20.0])
    groups = {"sex": (np.array([0, 1, 1]), ("f", "m"))}
    several = [task.evaluate(np.array([[a], [9.0], [20.0]]), truth, groups) for a in (1.0, 2.0)]
    page = averaged("dpsgd", {seed: metrics_document(one, several[0]) for seed, one in enumerate(several)})
    assert page["task"] == "regression"
    assert page["overall"]["mae"] == pytest.approx(5 / 6)
    low, high = page["intervals"]["overall"]
    assert low < 5 / 6 < high
    documents = {seed: metrics_document(one, several[0]) for seed, one in enumerate(several)}
    row = Row("patients", "dpsgd", "dpsgd", documents, {"epsilon": 3.0}, {}, "row")
    lines = table_of([row])
    assert lines.loc[0, ["mae", "cost", "worst"]].tolist() == pytest.approx([5 / 6, 1 / 6, 1.5])
    print_table(lines, Console(width=100))
    shown = capsys.readouterr().out
    assert "patients: test MAE" in shown
    assert "paired by seed: how much worse the MAE is than the non-private baseline's" in " ".join(shown.split())


def test_a_network_of_any_family_has_one_output_for_the_number() -> None:
    schema = patients().schema
    assert build_model("mlp", schema)(torch.zeros(2, 9)).shape == (2, 1)
