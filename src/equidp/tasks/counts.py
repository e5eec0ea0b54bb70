"""Counts: how often something happened to each record, from 0 to a public maximum.

A model has one output z, which gives the logarithm of an expected count μ: log μ = m + h·tanh(z). The middle m and the
half width h are those of the range from log `LEAST` to log M, where M is the maximum. So μ is in this range for every
z. No output, however large, makes a loss infinite, and nothing about the range is learnt from private records. A
record's loss is its Poisson deviance, 2·(y·log(y/μ) − y + μ), which is 0 where μ = y.
"""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from equidp.evaluation import regression
from equidp.gradients.losses import Loss
from equidp.tasks.base import Best, LossOptions, Words
from equidp.tasks.regression import Regression

LEAST = 1e-3
"""The smallest expected count."""


class Counts(Regression):
    """Predictions are expected counts."""

    name = "counts"
    losses: ClassVar[tuple[str, ...]] = ("poisson",)
    metrics: ClassVar[tuple[str, ...]] = regression.COUNT_METRICS
    best: ClassVar[Best] = {**Regression.best, "deviance": "lowest"}
    metrics_mean = (
        "MAE, RMSE and mean error are numbers of events. The mean error is positive where predictions are too high. "
        "The deviance is Poisson's, per record; an R² of 0 is that of the mean for everybody."
    )

    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """Poisson deviance."""

        def each(outputs: Tensor, labels: Tensor) -> Tensor:
            log_rate = self._log_rate(outputs).squeeze(1)
            return 2 * (torch.xlogy(labels, labels) - labels * log_rate - labels + log_rate.exp())

        return each

    def predict(self, outputs: Tensor) -> Tensor:
        """`[n, 1]` expected counts."""
        return self._log_rate(outputs.float()).exp().clamp(LEAST, self.schema.bounds[1])  # float32 may round beyond

    def words(self) -> Words:
        """Words that name the target and its maximum."""
        target = f"{self.schema.targets[0]}, a count up to {self.schema.bounds[1]:g}"
        return Words("model", f"of {target}", f"for {target}", "one output z", f"One expected count, {target}")

    def _log_rate(self, outputs: Tensor) -> Tensor:
        low, high = math.log(LEAST), math.log(self.schema.bounds[1])
        return (low + high) / 2 + (high - low) / 2 * torch.tanh(outputs)
