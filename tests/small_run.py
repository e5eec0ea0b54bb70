"""A small training, for tests of how its steps are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.models.conftest import SCHEMAS, batch
from tests.models.test_models import FIRST, cross_entropy

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.models import build_model

RECORDS = 60


def trainer_of(
    algorithm: str,
    new_recorder: Callable[[], Any] | None,
    device: str = "cpu",
    model: str = "mlp",
    *,
    epochs: int = 5,
    **more: Any,
) -> Trainer:
    """Batches of about twenty records; `more` as of `Trainer`."""
    schema = SCHEMAS[FIRST[model]]
    labels = (torch.arange(RECORDS) % len(schema.classes)).to(device)
    records = Records(batch(schema, RECORDS).to(device), labels, {"class": labels}, schema)
    return Trainer(
        model=build_model(model, schema, options={}, seed=1).to(device),
        loss=cross_entropy,
        algorithm=algorithm_settings(algorithm).build(),
        plan=Plan(RECORDS, 20, epochs, len(schema.classes), 1e-3, 1.0),
        population=Population(records, labels),
        random=SeededRandom(3, device),
        ledger=Ledger(),
        learning_rate=0.1,
        new_recorder=new_recorder,
        public=records,
        **more,
    )
