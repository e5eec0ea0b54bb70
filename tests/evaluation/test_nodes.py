"""What evaluation says in the terminal."""

import logging

import numpy as np
import pytest
import torch

from equidp.pipelines.evaluation.nodes import evaluate_groups
from equidp.records import Records, Schema

LABELS = (0, 0, 0, 1)


def said(caplog: pytest.LogCaptureFixture, algorithm: str, given: tuple[int, ...], labels: tuple[int, ...]) -> str:
    caplog.clear()
    schema = Schema(name="made", kind="tabular", shape=(1,), classes=("no", "yes"), groupings={"class": ("no", "yes")})
    of_class = torch.tensor(labels)
    test = Records(features=torch.zeros(len(labels), 1), labels=of_class, groups={"class": of_class}, schema=schema)
    with caplog.at_level(logging.WARNING):
        evaluate_groups(np.eye(2, dtype=np.float32)[list(given)], test, {}, algorithm=algorithm)
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
