"""A laboratory for algorithms: tiny data, a tiny model, the real gradient engine, randomness that can be scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.parts import StepFacts
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer

FEATURES, CLASSES, GROUPS = 6, 3, 3
cross_entropy = CrossEntropy()


def zero_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss whose every gradient is exactly zero: what is left of a step is its noise."""
    return (outputs * 0.0).sum(1)


class Scripted(SeededRandom):
    """Seeded randomness with its coins replaced by `always` (or left alone) and its noise scaled."""

    def __init__(self, seed: int = 0, *, coins: bool | None = None, noise: float = 1.0) -> None:
        super().__init__(seed, "cpu")
        self.coins, self.noise = coins, noise

    def bernoulli(self, probability: float | Tensor, size: int, **keywords: Any) -> Tensor:
        drawn = super().bernoulli(probability, size, **keywords)
        return drawn if self.coins is None else torch.full_like(drawn, self.coins)

    def normal(self, size: int) -> Tensor:
        return super().normal(size) * self.noise


def make_records(size: int = 40, seed: int = 0, features: int = FEATURES) -> Records:
    """Random records whose gradient norms spread over two orders of magnitude; group k has about a third of them."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(size, features, generator=stream) * torch.logspace(-1, 1, size)[:, None]
    labels = torch.randint(CLASSES, (size,), generator=stream)
    schema = Schema(
        name="laboratory",
        kind="tabular",
        shape=(features,),
        classes=tuple("abc"),
        groupings={"class": tuple("abc")},
        feature_names=tuple(f"x{j}" for j in range(features)),
    )
    return Records(features=x, labels=labels, groups={"class": labels}, schema=schema)


@dataclass(frozen=True)
class Laboratory:
    """Everything a test of one algorithm needs; see the fixture."""

    records: Callable[..., Records]
    random: type[Scripted]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    zero_loss: Callable[[Tensor, Tensor], Tensor]

    def plan(self, **changes: Any) -> Plan:
        """40 records, B = 10, one epoch of 4 steps, 3 groups, σ = 1."""
        plan = Plan(records=40, batch_size=10, epochs=1, groups=GROUPS, delta=1e-5, noise_multiplier=1.0)
        return replace(plan, **changes)

    def facts(self, plan: Plan | None = None, **changes: Any) -> StepFacts:
        """Facts of step 0 under a plan: Δ = 1, 21 parameters."""
        plan = plan or self.plan()
        facts = StepFacts(plan, 0, plan.noise_multiplier, torch.tensor(1.0), 21, plan.sampling_rate)
        return replace(facts, **changes)

    def trainer(self, name: str, options: dict[str, Any] | None = None, **changes: Any) -> Trainer:
        """A trainer of a linear model under the named algorithm; every argument can be replaced."""
        records = changes.pop("records", None) or self.records()
        plan = changes.pop("plan", None) or self.plan(records=len(records) or 40)
        if name == "sgd":
            plan = replace(plan, noise_multiplier=0.0)
        torch.manual_seed(changes.pop("model_seed", 1))
        model = changes.pop("model", None) or nn.Linear(records.features.shape[1], CLASSES)
        arguments: dict[str, Any] = {
            "model": model,
            "loss": cross_entropy,
            "algorithm": changes.pop("algorithm", None) or algorithm_settings(name, options).build(),
            "plan": plan,
            "population": Population(records, records.groups["class"]),
            "random": Scripted(),
            "ledger": Ledger(),
            "learning_rate": 0.1,
            "public": make_records(16, seed=9, features=records.features.shape[1]),
        }
        return Trainer(**(arguments | changes))

    def trained(self, name: str, options: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
        """Train to the end; the trainer, its history and its final parameters."""
        trainer = self.trainer(name, options, **changes)
        history = trainer.train(progress=False)
        ends = {"parameters": trainer.engine.flatten(), "released": released(trainer)}
        return SimpleNamespace(trainer=trainer, history=history, **ends)


def released(trainer: Trainer) -> Tensor:
    """`[d]` weights that leave the run."""
    return torch.cat([p.detach().reshape(-1) for p in trainer.released_model().parameters()])


@pytest.fixture(scope="session")
def lab() -> Laboratory:
    """The laboratory."""
    return Laboratory(make_records, Scripted, cross_entropy, zero_loss)


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[None]:
    """A module trains up to a thousand times, nearly always the same model."""
    with tried_once():
        yield
