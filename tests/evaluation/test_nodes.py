"""What evaluation says in the terminal."""

import logging
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equidp.data.records import Records, Schema
from equidp.parameters import DataSettings, Settings
from equidp.pipelines.evaluation.nodes import cost_against_baseline, evaluate_groups
from equidp.pipelines.training import nodes

LABELS = (0, 0, 0, 1)

SETTINGS = cast(Settings, SimpleNamespace(data=DataSettings()))
"""Those that evaluation reads."""


def said(caplog: pytest.LogCaptureFixture, algorithm: str, given: tuple[int, ...], labels: tuple[int, ...]) -> str:
    caplog.clear()
    schema = Schema(name="made", kind="tabular", shape=(1,), classes=("no", "yes"), groupings={"class": ("no", "yes")})
    of_class = torch.tensor(labels)
    test = Records(features=torch.zeros(len(labels), 1), labels=of_class, groups={"class": of_class}, schema=schema)
    with caplog.at_level(logging.WARNING):
        evaluate_groups(np.eye(2, dtype=np.float32)[list(given)], test, SETTINGS, algorithm=algorithm)
    return caplog.text


def test_any_model_that_puts_all_into_one_class_is_said_by_its_name(caplog):
    assert "dpsgd: the model has learnt nothing" in said(caplog, "dpsgd", (0, 0, 0, 0), LABELS)
    assert "The non-private baseline has learnt nothing" in said(caplog, "sgd", (0, 0, 0, 0), LABELS)
    assert not said(caplog, "dpsgd", LABELS, LABELS)


def test_a_class_that_the_test_part_lacks_is_said_once_for_all_algorithms(caplog):
    told = said(caplog, "sgd", (0, 0, 0), (0, 0, 0))
    assert "The test part has no record of class yes" in told
    assert "any model looks perfect" in told
    assert not said(caplog, "dpsgd", (0, 0, 0), (0, 0, 0))
    assert not said(caplog, "sgd", LABELS, LABELS)


def test_a_baseline_that_is_outdone_is_no_measure_of_the_cost(caplog):
    labels = (0, 1) * 40
    schema = Schema(name="made", kind="tabular", shape=(1,), classes=("no", "yes"), groupings={"class": ("no", "yes")})
    of_class = torch.tensor(labels)
    test = Records(features=torch.zeros(80, 1), labels=of_class, groups={"class": of_class}, schema=schema)
    good, sure = np.eye(2, dtype=np.float32)[list(labels)], np.eye(2, dtype=np.float32)[[0, 1] * 25 + [0, 0] * 15]
    poor = 0.4 + 0.2 * sure

    def told(private: np.ndarray, baseline: np.ndarray) -> str:
        caplog.clear()
        both = [evaluate_groups(scores, test, SETTINGS, algorithm="dpsgd") for scores in (private, baseline)]
        cost_against_baseline(*both, private, baseline, test, SETTINGS, algorithm="dpsgd")
        return caplog.text

    assert "dpsgd did better than the non-private baseline, by more than chance" in told(good, poor)
    assert not told(good, good)
    assert not told(poor, good)
    assert "by more than chance" not in told(good, np.zeros_like(good))  # one that guesses is told of already
    assert "by more than chance" not in told(good, sure)  # of one that overshot it is told that its steps are too long


def test_a_model_that_chance_explains_is_told_of(caplog):
    labels, predicted = (0,) * 100 + (1,) * 100, (0,) * 95 + (1,) * 5 + (0,) * 90 + (1,) * 10
    assert "dpsgd: the model may be no better than guesses: MCC 0.09" in said(caplog, "dpsgd", predicted, labels)


def test_a_model_of_the_rarer_class_alone_is_not_told_to_have_the_accuracy_of_the_frequent_one(caplog):
    told = said(caplog, "dpsgd", (1,) * 100, (0,) * 60 + (1,) * 40)
    assert "Its accuracy may then be that of one class for everybody and says nothing." in told


@pytest.mark.parametrize("predicted", [(1,) * 100, (0, 1) * 50])
def test_a_private_model_that_overshot_is_told_what_to_try(caplog, predicted):
    """Whether its classes are guesses or not: its baseline alone was told so."""
    told = said(caplog, "dpsgd", predicted, (0,) * 60 + (1,) * 40)
    assert "above the 0.69 of equal probabilities. Steps may be too long for these records, or for this noise" in told
    assert "try a smaller training.learning_rate" in told
    assert "equal probabilities" not in said(caplog, "dpsgd", (0,) * 60 + (1,) * 40, (0,) * 60 + (1,) * 40)


@pytest.mark.parametrize("algorithm", ["sgd", "dpsgd"])
def test_a_model_that_overshot_is_told_of_where_no_class_is_reported_by(caplog, algorithm):
    """A draft of `kedro new-dataset` reports by sex and age."""
    sex, labels = torch.tensor([0, 1] * 40), torch.tensor([0, 1] * 40)
    schema = Schema("made", "tabular", (1,), ("no", "yes"), {"class": ("no", "yes"), "sex": ("f", "m")})
    test = Records(torch.zeros(80, 1), labels, {"class": labels, "sex": sex}, schema)
    settings = cast(Settings, SimpleNamespace(data=DataSettings(groups=("sex",))))
    sure_and_often_wrong = np.eye(2, dtype=np.float32)[[0, 1] * 30 + [1, 1] * 10]
    with caplog.at_level(logging.WARNING):
        evaluate_groups(sure_and_often_wrong, test, settings, algorithm=algorithm)
    assert "above the 0.69 of equal probabilities" in caplog.text


def test_a_model_without_any_error_is_told_of_where_records_are_many(caplog):
    labels = (0,) * 60 + (1,) * 40
    assert "dpsgd: the model got all 100 records right, as where a feature tells the label" in said(
        caplog, "dpsgd", labels, labels
    )
    assert not said(caplog, "dpsgd", labels[1:], labels[1:])
    assert not said(caplog, "dpsgd", (1, *labels[1:]), labels)


def test_a_baseline_whose_loss_is_above_that_of_equal_probabilities_is_told_of(caplog):
    """Its accuracy may be as high as the private model's: privacy seemed to be free beside a rate far too large."""
    labels, sure_and_often_wrong = (0, 1) * 40, (0, 1) * 30 + (1, 1) * 10
    told = said(caplog, "sgd", sure_and_often_wrong, labels)
    assert "above the 0.69 of equal probabilities: costs of privacy beside it are too small" in told
    assert "baseline" not in said(caplog, "dpsgd", sure_and_often_wrong, labels)
    assert not said(caplog, "sgd", labels, labels)


def test_no_advice_on_the_baseline_stands_beside_a_model_that_guesses(caplog):
    labels = (0,) * 76 + (1,) * 4
    schema = Schema(name="made", kind="tabular", shape=(1,), classes=("no", "yes"), groupings={"class": ("no", "yes")})
    of_class = torch.tensor(labels)
    test = Records(features=torch.zeros(80, 1), labels=of_class, groups={"class": of_class}, schema=schema)
    frequent, sensitive = (
        np.eye(2, dtype=np.float32)[[0] * 80],
        np.eye(2, dtype=np.float32)[[0, 1] * 36 + [0] * 4 + [1] * 4],
    )
    both = [evaluate_groups(scores, test, SETTINGS, algorithm="dpsgd") for scores in (frequent, sensitive)]
    cost_against_baseline(*both, frequent, sensitive, test, SETTINGS, algorithm="dpsgd")
    assert "has learnt nothing" in caplog.text
    assert "did better than the non-private baseline" not in caplog.text


def test_several_records_of_one_unit_widen_the_intervals():
    labels = torch.arange(80) % 2
    schema = Schema(name="made", kind="tabular", shape=(1,), classes=("no", "yes"), groupings={"class": ("no", "yes")})

    def widths(unit: torch.Tensor | None) -> list[float]:
        test = Records(torch.zeros(80, 1), labels, {"class": labels}, schema, unit=unit)
        right = np.eye(2, dtype=np.float32)[labels]
        wrong_for_some = np.where(np.arange(80)[:, None] < 20, right[:, ::-1], right)
        ours, before = (
            evaluate_groups(scores, test, SETTINGS, algorithm="dpsgd") for scores in (wrong_for_some, right)
        )
        document = cost_against_baseline(ours, before, wrong_for_some, right, test, SETTINGS, algorithm="dpsgd")
        cost = document["cost_of_privacy"]
        return [high - low for low, high in (ours["intervals"]["overall"], cost["intervals"]["overall"])]

    single = widths(None)
    assert widths(torch.arange(80)) == pytest.approx(single)
    assert all(wide > 1.5 * narrow for wide, narrow in zip(widths(torch.arange(80) // 10), single, strict=True))


class ByBatchSize(nn.Linear):
    """What a library does: another kernel for another number of rows, here one that cuts off bits."""

    scored_at_once = 16

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) % self.scored_at_once == 0 else (64 * x).floor() / 64)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 48])
def test_scores_that_are_released_do_not_depend_on_how_many_other_records_there_are(size, monkeypatch):
    # else the noised histogram of a secure run would move by more than the sensitivity that its noise is made for
    torch.manual_seed(0)
    network, features = ByBatchSize(40, 2), torch.rand(size + 1, 40)
    schema = Schema(name="made", kind="tabular", shape=(40,), classes=("no", "yes"), groupings={"class": ("no", "yes")})
    monkeypatch.setattr(nodes, "network_of", lambda *args: network)

    def scores(count: int, secure: bool) -> np.ndarray:
        privacy = SimpleNamespace(secure=secure, evaluation=SimpleNamespace(epsilon=1.0))
        given = cast(Settings, SimpleNamespace(privacy=privacy, training=SimpleNamespace(device="cpu")))
        labels = torch.zeros(count, dtype=torch.int64)
        test = Records(features[:count], labels, {"class": labels}, schema)
        return nodes.score_test(None, test, given)  # type: ignore[arg-type]

    assert np.array_equal(scores(size, True), scores(size + 1, True)[:size])
    if size == 15:  # with one more its only pass is whole: the test would tell
        assert not np.array_equal(scores(size, False), scores(size + 1, False)[:size])
