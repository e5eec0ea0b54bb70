"""Regression: a number with public bounds for each record.

A model has one output: the number on a scale where the bounds are −1 and 1, and the middle between them is 0. So
nothing about the scale is learnt from private records. A prediction beyond a bound becomes that bound, which is nearer
to any number within the bounds. Figures are in the number's own unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from equidp.evaluation import regression
from equidp.evaluation.intervals import Groups
from equidp.gradients.losses import Loss
from equidp.tasks.base import Best, LossOptions, Task, Words

LEANS = (
    "has a smaller MAE than the non-private baseline, by more than chance, and a larger RMSE. Bounded gradients lead "
    "towards the median, which has the smallest MAE, and the baseline's, without a bound, towards the mean. Costs "
    "and gaps in MAE are too small: read RMSE, R² and the mean error beside them"
)


class Regression(Task):
    """Outputs are scaled numbers; predictions are numbers in the target's own unit."""

    name = "regression"
    losses: ClassVar[tuple[str, ...]] = ("squared", "huber")
    measured_by: ClassVar[ModuleType] = regression
    metrics: ClassVar[tuple[str, ...]] = regression.METRICS
    main = "mae"
    best: ClassVar[Best] = {"mae": "lowest", "rmse": "lowest", "mean_error": "nearest to 0"}
    costs = ("mae",)
    beside = ("mean_error",)
    guessed_means = "Its MAE may then be that of one number for everybody"
    metrics_mean = (
        "MAE, RMSE and mean error are in the target's own unit. The mean error is positive where predictions are too "
        "high. An R² of 0 is that of the mean for everybody."
    )
    undefined_means = "no test record; of R², fewer than two different values; of an interval, values that all agree"
    intervals_are = "mean ± t·s/√n of absolute errors and of their differences"

    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """Squared error, or Huber's loss: half the squared error up to `huber_delta` of the range, linear beyond it."""
        (middle, half), delta = self._scale(), 2 * options.get("huber_delta", 0.1)

        def each(outputs: Tensor, labels: Tensor) -> Tensor:
            found, wanted = outputs.squeeze(1), (labels - middle) / half
            if name == "huber":
                return F.huber_loss(found, wanted, reduction="none", delta=delta)
            return F.mse_loss(found, wanted, reduction="none")

        return each

    def predict(self, outputs: Tensor) -> Tensor:
        """`[n, 1]` within the bounds."""
        middle, half = self._scale()
        return (middle + half * outputs.float()).clamp(*self.schema.bounds)

    def _scale(self) -> tuple[float, float]:
        low, high = self.schema.bounds
        return (low + high) / 2, (high - low) / 2

    def evaluate(
        self, predictions: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """As `evaluation.regression.evaluate`."""
        figures = regression.evaluate(predictions[:, 0], labels, groups, metrics=self.metrics, units=units)
        return {"task": self.name, "target": self.schema.targets[0], **figures}

    def cost_intervals(
        self, private: NDArray, baseline: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """Intervals of the mean differences of absolute errors."""
        return super().cost_intervals(private[:, 0], baseline[:, 0], labels, groups, units=units)

    def live(self, predictions: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
        """The mean absolute error."""
        return super().live(predictions[:, 0], labels, groups)

    def words(self) -> Words:
        """Words that name the target and its bounds."""
        low, high = self.schema.bounds
        target = f"{self.schema.targets[0]}, a number from {low:g} to {high:g}"
        outputs = f"one output, −1 for {low:g} and 1 for {high:g}"
        return Words("regression model", f"of {target}", f"for {target}", outputs, f"One number, {target}")

    @classmethod
    def outdone(cls, document: Mapping[str, Any]) -> str | None:
        """As of `Task`, but `LEANS` where the baseline has the smaller squared error, and so is trained well enough."""
        said = super().outdone(document)
        squared = document["cost_of_privacy"]["overall"].get("rmse") if said else None
        return LEANS if squared is not None and squared > 0 else said

    @classmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """Judge by R²."""
        found = figures.get("overall", {}).get("r2")
        if found is None or found > 0:
            return None
        return f"has learnt nothing: its R² is {found:.2f}, and the evaluated records' mean for everybody would have 0"
