"""What is told while a run trains: every epoch's row, with groups called by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.data.splitting import split
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, plan_run, train_model
from equidp.training.conclusion import Trained

pytestmark = pytest.mark.usefixtures("coarse")


def trained(privacy: PrivacySettings, name: str) -> tuple[Trained, list[dict[str, float]]]:
    """A finished run of three epochs, and the rows that were told while it trained."""
    features = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0.5).long()
    schema = Schema(
        name="toy", kind="tabular", shape=(3,), classes=("ill", "well"), groupings={"class": ("ill", "well")},
        feature_names=tuple("xyz"),
    )  # fmt: skip
    parts = split(Records(features=features, labels=labels, groups={"class": labels}, schema=schema), seed=0)
    algorithm = algorithm_settings(name).build()
    training = TrainingSettings(epochs=3, batch_size=50, device="cpu")
    told: list[dict[str, float]] = []
    request = TrainingRequest(
        algorithm, plan_run(algorithm, units=len(parts.train), groups=2, privacy=privacy, training=training),
        grouping="class", model=ModelSettings(name="logistic"), privacy=privacy, training=training, seed=0,
    )  # fmt: skip

    def tell(row: dict[str, float], network: torch.nn.Module) -> dict[str, float]:
        told.append(dict(row))
        return {"seen": float(len(told))}

    return train_model(request, parts, on_epoch=tell, progress=False), told


def test_an_epochs_row_calls_groups_by_their_names_as_the_history_does() -> None:
    finished, told = trained(PrivacySettings(noise_multiplier=1.0), "dpsgd_f")
    # the last epsilon_rdp of a finished run is its statement's
    rows = finished.history.drop(columns=["epsilon", "epsilon_rdp", "seen"]).to_dict("records")
    assert rows == [{name: value for name, value in row.items() if name != "epsilon_rdp"} for row in told]
    assert {"clip_norm/ill", "clip_norm/well"} <= told[0].keys()
    assert list(finished.history["seen"]) == [1, 2, 3]


@pytest.mark.parametrize("trials", [{"max_trials": 5}, {"trials_law": "geometric", "trials_mean": 5.0}])
def test_what_is_told_of_epsilon_while_a_run_trains_is_of_all_declared_trials(trials: dict[str, Any]) -> None:
    finished, told = trained(PrivacySettings(noise_multiplier=1.0, **trials), "dpsgd")
    assert told[-1]["epsilon_rdp"] >= finished.privacy["epsilon_rdp"] * (1 - 1e-9)
    assert all(
        row["epsilon_rdp"] >= path * (1 - 1e-9) for row, path in zip(told, finished.history["epsilon"], strict=True)
    )
