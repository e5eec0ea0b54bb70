"""Ordered classes: grades of a disease, bands of a number, answers from never to always.

A model has one logit z_k for each class k but the last. It says whether the record is above class k: P(y > k) =
sigmoid(z_k). These are cumulative logits; Frank and Hall (2001) train a separate classifier for each k. A record's loss
is the mean of its logits' binary cross-entropies. For K classes, the loss's gradient in every logit is within
±1/(K − 1). A record's gradient is clipped as for any other loss, because all that the record adds goes through the
network's ordinary head.

Proportional odds (McCullagh 1980), one shared score with K − 1 rising thresholds, has fewer parameters. Yet the
thresholds would be parameters beside the layers of every model, and noise would break their order at any step. Here
nothing has to be kept in order during training. `predict` restores the order: it takes the smallest of P(y > j), j ≤ k,
as P(y > k).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.evaluation import ordinal
from equidp.gradients.losses import Loss
from equidp.tasks.base import Best, LossOptions, Task, Words
from equidp.tasks.classification import record_loss


class Ordinal(Task):
    """Outputs are cumulative logits; predictions are probabilities of the classes."""

    name = "ordinal"
    losses = ("cumulative_cross_entropy",)
    measured_by: ClassVar[ModuleType] = ordinal
    metrics = ordinal.METRICS
    main = "mae"
    best: ClassVar[Best] = {"mae": "lowest", "loss": "lowest"}
    costs = ("mae", "accuracy")
    beside = ("kappa",)
    guessed_means = "Its MAE is then that of one class for everybody"
    metrics_mean = (
        "MAE counts ranks: how many classes the predicted one is from the true one. Within one rank is the share at "
        "most one class away. Weighted kappa is Cohen's with quadratic weights: 0 at chance, 1 where all are right."
    )
    undefined_means = "no test record; of weighted kappa, one class only; of an interval, values that all agree"
    intervals_are = "mean ± t·s/√n of errors in ranks and of their differences"

    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """Binary cross-entropy of the cumulative logits, averaged over the record's logits."""

        def each(outputs: Tensor, labels: Tensor) -> Tensor:
            above = labels.unsqueeze(1) > torch.arange(outputs.shape[1], device=outputs.device)
            return F.binary_cross_entropy_with_logits(outputs, above.to(outputs.dtype), reduction="none").mean(1)

        return record_loss(options.get("class_weights"), self.schema.classes, device, each)

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities `[n, classes]`."""
        above = torch.cummin(torch.sigmoid(outputs.float()), dim=1).values
        return F.pad(above, (1, 0), value=1.0) - F.pad(above, (0, 1))

    def words(self) -> Words:
        """Words that name the number of classes."""
        count = len(self.schema.classes)
        names = f"with {count} ordered classes", f"into {count} ordered classes"
        answer = f"One score for each of {count} ordered classes, of which the median is the predicted class"
        return Words("classifier", *names, "a logit for each class but the last, whether it is above", answer)

    @classmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """Judge by weighted kappa."""
        found = figures.get("overall", {}).get("kappa")
        if found is None or found > 1e-9:  # one class for everybody gives 0, except for rounding
            return None
        return "has learnt nothing: its weighted kappa is not above 0, as if all records were put into one class"
