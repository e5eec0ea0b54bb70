"""On a GPU no step waits for the device, and nothing on the host mixes with what lies there.

Tried without a GPU, on torch's meta device: it has shapes and no numbers, so whatever asks for a value raises, and so
does an operation on tensors of two devices. Only who is in the batch is given, as its size is a shape. Units here are
records: indexing units of several records waits for how many there are.
"""

from __future__ import annotations

import pytest
import torch
from tests.models.conftest import SCHEMAS, batch
from tests.models.test_models import FIRST, cross_entropy
from torch import Tensor

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.algorithms.dpis import ImportanceSampling
from equidp.data.records import Records
from equidp.mechanism.noise import Stream
from equidp.mechanism.parts import Draw
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.models import MODELS, build_model

META = torch.device("meta")
ASKING = ("sa_dpsgd",)
"""Its decision needs a number."""


class Shapes:
    """Random numbers without numbers."""

    repeatable = True

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        return self.uniform(size) < probability

    def uniform(self, size: int, stream: Stream = "sampling") -> Tensor:
        return torch.rand(size, device=META, dtype=torch.float64)

    def normal(self, size: int) -> Tensor:
        return torch.randn(size, device=META)

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        return values + self.normal(len(values)).mul_(sensitivity * noise_multiplier)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


def trainer_for(algorithm: str, model: str, options: dict) -> Trainer:
    """A trainer on the meta device whose model is trusted, in its first epoch."""
    schema = SCHEMAS[FIRST[model]]
    features = batch(schema, 40).to(META)
    labels = torch.zeros(len(features), dtype=torch.long, device=META)
    records = Records(features, labels, {"class": labels}, schema)
    trainer = Trainer(
        model=build_model(model, schema, options=options[model], seed=1).to(META).train(),
        loss=cross_entropy,
        algorithm=algorithm_settings(algorithm).build(),
        plan=Plan(len(records), 10, 1, len(schema.classes), 1e-3, 1.0),
        population=Population(records, labels),
        random=Shapes(),
        ledger=Ledger(),
        learning_rate=0.1,
        public=records,
    )
    trainer.engine.try_out = lambda *_: None  # type: ignore[method-assign]  # it compares numbers, once per run
    sampling = trainer.sampling
    sampling.draw = lambda: Draw(torch.arange(8, device=META), torch.rand(8, device=META))  # type: ignore[method-assign]
    if isinstance(sampling, ImportanceSampling):  # what an epoch's beginning releases
        sampling.records, sampling.norm_sum, sampling.gradient_noise, sampling.rate = 40.0, 20.0, 1.0, 0.5
    else:
        trainer.begin_epoch(0)
    return trainer


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("custom", *ASKING)])
def test_no_algorithms_step_asks_for_a_number(algorithm: str, options: dict) -> None:
    trainer = trainer_for(algorithm, "cnn_small", options)
    for _ in range(2):
        trainer.step(trainer.segments[0])
    assert trainer.steps_done == 2


@pytest.mark.parametrize("model", MODELS)
def test_no_model_asks_for_a_number(model: str, options: dict) -> None:
    trainer = trainer_for("dpsgd_f", model, options)
    trainer.step(trainer.segments[0])
    assert trainer.steps_done == 1


@pytest.mark.parametrize("algorithm", ASKING)
def test_a_step_that_asks_is_found_out(algorithm: str, options: dict) -> None:
    trainer = trainer_for(algorithm, "cnn_small", options)
    with pytest.raises(RuntimeError, match="meta tensors"):
        trainer.step(trainer.segments[0])
