"""The figures followed while training agree with those of the finished run, names included."""

from __future__ import annotations

import numpy as np
import pytest

from equidp.evaluation.live import live_metrics
from equidp.evaluation.metrics import evaluate, flat_metrics, metrics_document


def test_live_figures_are_those_of_the_full_evaluation():
    rng = np.random.default_rng(0)
    scores, labels = rng.dirichlet(np.ones(2), 50), rng.integers(0, 2, 50)
    groups = {"sex*race": (rng.integers(0, 2, 50), ("F*<a>", "M*b", "none"))}
    live = live_metrics(scores, labels, groups)
    final = flat_metrics(metrics_document(evaluate(scores, labels, groups, classes=("no", "yes")), None))
    assert len(live) == 4
    assert live == {name: pytest.approx(final[name]) for name in live}


def test_scores_that_are_not_finite_leave_the_loss_out():
    live = live_metrics(np.array([[np.nan, np.nan], [0.2, 0.8]]), np.array([1, 1]), {})
    assert live == {"test/accuracy": 0.5}
