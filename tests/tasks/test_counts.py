"""Counts: whole numbers from 0 on, predicted as expected counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from equidp.algorithms import algorithm_settings
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.tasks import task_of
from equidp.training import TrainingRequest, plan_run, predict, prepare, units_in

OPTIONS = {
    "path": "visits.csv",
    "label": "visits",
    "counts": {"maximum": 20},
    "features": {"x": {"kind": "numeric", "maximum": 1}},
    "groups": {"ward": {"categories": ["A", "B"]}},
}


def records(folder: Path, *rows: str, **options):
    (folder / "visits.csv").write_text("\n".join(["x,visits,ward", *rows, ""]))
    table = source("table", OPTIONS | options)
    return table.records(table.locate(folder))


def test_each_group_is_measured_as_one_would_by_hand(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    x = drawn.random(300).round(3)
    visits = drawn.poisson(np.exp(2 * x)).clip(0, 20)
    table = records(tmp_path, *(f"{a},{b},{'AB'[i % 2]}" for i, (a, b) in enumerate(zip(x, visits, strict=True))))
    parts, privacy = split(table, seed=0), PrivacySettings(noise_multiplier=1.0, delta=1e-4)
    algorithm, training = algorithm_settings("dpsgd", {}).build(), TrainingSettings(batch_size=32, learning_rate=0.1)
    plan = plan_run(algorithm, units=units_in(parts.train, privacy), groups=2, privacy=privacy, training=training)
    settings = {"grouping": "ward", "model": ModelSettings(name="logistic"), "privacy": privacy, "training": training}
    trainer = prepare(TrainingRequest(algorithm, plan, seed=0, **settings), parts).trainer
    trainer.train(progress=False)
    network, test = trainer.released_model(), parts.test
    groups = {"ward": (test.groups["ward"].numpy(), ("A", "B"))}
    predicted = predict(network, test.features, test.schema).numpy()
    document = task_of(test.schema).evaluate(predicted, test.labels.numpy(), groups)

    weight, bias = (value.double().numpy() for value in network.state_dict().values())
    z, low, high = test.features.double().numpy()[:, 0] * weight[0, 0] + bias[0], np.log(0.001), np.log(20)
    mean, truth = np.exp((low + high) / 2 + (high - low) / 2 * np.tanh(z)), test.labels.double().numpy()
    for k, ward in enumerate("AB"):
        of = groups["ward"][0] == k
        y, mu = truth[of], mean[of]
        log = np.where(y > 0, y * np.log(np.where(y > 0, y, 1) / mu), 0)
        found = document["groups"]["ward"][ward]
        assert found["deviance"] == pytest.approx(2 * (log - y + mu).mean(), rel=1e-4)
        assert found["mae"] == pytest.approx(np.abs(mu - y).mean(), rel=1e-4)
        assert found["mean_error"] == pytest.approx((mu - y).mean(), rel=1e-3, abs=1e-4)
    assert document["overall"]["r2"] > 0.1  # it has learnt something, so that the figures are no constant's
    assert document["task"] == "counts"


def test_a_loss_is_the_deviance_and_finite_whatever_the_output(tmp_path: Path) -> None:
    task = task_of(records(tmp_path, "0,0,A", "1,20,B").schema)
    outputs = torch.tensor([[0.3], [0.3], [1e9], [-1e9]], requires_grad=True)
    labels = torch.tensor([0.0, 3.0, 0.0, 20.0])
    mu = task.predict(outputs).squeeze(1)
    losses = task.loss("poisson", "cpu")(outputs, labels)
    expected = [2 * mu[0].item(), 2 * (3 * np.log(3 / mu[1].item()) - 3 + mu[1].item())]
    assert losses[:2].tolist() == pytest.approx(expected, rel=1e-5)
    assert mu[2:].tolist() == pytest.approx([20.0, 0.001], rel=1e-4)
    thousand = replace(task.schema, bounds=(0.0, 1000.0))  # whose logarithm, rounded, is that of more
    assert task_of(thousand).predict(outputs).max() <= 1000
    losses.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (("0,1.5,A",), {}, "line 2, column 'visits': '1.5' is no whole number"),
        (("0,21,A",), {}, "line 2, column 'visits': '21' is out of bounds; give a number from 0 to 20"),
        (("0,1,A",), {"counts": {"minimum": 3, "maximum": 9}}, "counts.minimum"),
        (("0,1,A",), {"target": {"maximum": 9}}, "by one of classes, .* not by target, counts"),
    ],
)
def test_what_is_no_count_is_refused(tmp_path: Path, rows: tuple[str, ...], options: dict, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        records(tmp_path, *rows, **options)
