"""The history's ε after a crash: what the ledger held then, ending in the statement's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.data.splitting import split
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, plan_run, train_model

pytestmark = pytest.mark.usefixtures("coarse")


def test_a_history_after_a_crash_counts_steps_that_were_charged_again(tmp_path: Path, power_cut: Any) -> None:
    features = torch.rand(500, 3, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0.5).long()
    schema = Schema(
        name="toy", kind="tabular", shape=(3,), classes=("a", "b"), groupings={"class": ("a", "b")},
        feature_names=tuple("xyz"),
    )  # fmt: skip
    parts = split(Records(features=features, labels=labels, groups={"class": labels}, schema=schema), seed=0)
    algorithm = algorithm_settings("dpsgd").build()
    privacy = PrivacySettings(noise_multiplier=1.0, secure=True)
    training = TrainingSettings(epochs=4, batch_size=50, device="cpu")
    plan = plan_run(algorithm, units=len(parts.train), groups=2, privacy=privacy, training=training)

    def run(*, resume: bool):
        request = TrainingRequest(
            algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy,
            training=training, seed=0, workplace=tmp_path, resume=resume, checkpoint_every=1,
        )  # fmt: skip
        return train_model(request, parts, progress=False)

    with power_cut(after=20):
        run(resume=False)
    finished = run(resume=True)

    path = finished.history["epsilon"]
    assert sum(event["count"] for event in finished.privacy["ledger"]) > plan.steps
    assert finished.privacy["epsilon"] > algorithm.epsilon(plan).value
    assert path.is_monotonic_increasing
    assert path.iloc[-1] == finished.privacy["epsilon"]
