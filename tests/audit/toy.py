"""A tiny dataset, a linear model and ways to train it for the tests of the audit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.audit import TrainingSetup
from equidp.data.records import Records, Schema, Split
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.noise import SeededRandom

SCHEMA = Schema("toy", "tabular", (4,), ("no", "yes"), {"class": ("no", "yes"), "sex": ("f", "m", "x")})


def records(count: int, seed: int, *, signal: bool = True) -> Records:
    """Records whose label follows their first feature, or nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(count, 4, generator=generator)
    labels = (features[:, 0] > 0.5).long() if signal else torch.randint(0, 2, (count,), generator=generator)
    return Records(features, labels, {"class": labels, "sex": torch.arange(count) % 3}, SCHEMA)


def split(count: int, **how: Any) -> Split:
    """Training and test part of one distribution."""
    return Split(records(count, 1, **how), records(count, 2, **how), records(64, 3, **how))


def linear(schema: Schema) -> nn.Module:
    """Logistic regression from zero."""
    model = nn.Linear(schema.shape[0], len(schema.classes))
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def algorithm_of(name: str) -> Algorithm:
    """An algorithm with its defaults; side noise is a ratio, so that the gradients get most of the budget."""
    options: dict[str, object] = (
        {"count_noise_multiplier": "10x"} if "count_noise_multiplier" in ALGORITHMS[name].model_fields else {}
    )
    if name == "asc":  # as much as its groups are sampled at
        options["rate_limit"] = 1.0
    return algorithm_settings(name, options).build()


@cache
def setup_of(
    name: str, *, count: int = 60, batch_size: int = 60, epochs: int = 10, epsilon: float = 2.0
) -> TrainingSetup:
    """An algorithm with its defaults, its noise solved for ε."""
    algorithm = algorithm_of(name)
    plan = Plan(records=count, batch_size=batch_size, epochs=epochs, groups=2, delta=1e-6, noise_multiplier=1.0)
    if name in ("asc", "dpis"):
        # it cannot take everybody, its releases of N and K pay off at size only, and its budget holds at one δ
        plan = replace(plan, records=5000, batch_size=2500, epochs=5, delta=3e-5)
    if algorithm.private:
        plan = algorithm.calibrated(plan, epsilon)
    return TrainingSetup(
        build_model=linear,
        algorithm=algorithm,
        plan=plan,
        loss=CrossEntropy(),
        learning_rate=0.5,
        public=records(64, 3) if algorithm.needs_public else None,
    )


class HalfNoise(SeededRandom):
    """A mechanism that adds half the noise that its ledger is charged for."""

    share = 1 / 2

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier * self.share)


class ThirdNoise(HalfNoise):
    """A third of it."""

    share = 1 / 3
