"""Classification: one of several classes for each record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Unpack

import torch
from numpy.typing import NDArray
from torch import Tensor

from equidp.errors import EquidpError
from equidp.evaluation import learnt, metrics
from equidp.evaluation.intervals import Groups
from equidp.evaluation.live import live_metrics
from equidp.gradients.losses import CrossEntropy, Loss
from equidp.tasks.base import Best, LossOptions, Task, Words

CROSS_ENTROPY: Loss = CrossEntropy()


def record_loss(
    weights: tuple[float, ...] | None, classes: Sequence[str], device: torch.device | str, plain: Loss = CROSS_ENTROPY
) -> Loss:
    """The loss of each record on its own, times its class's weight where there are weights.

    Raises:
        EquidpError: there is not one weight for each class.
    """
    if weights is None:
        return plain
    if len(weights) != len(classes):
        raise EquidpError(
            f"training.class_weights has {len(weights)} numbers; give one for each of the {len(classes)} classes, in "
            f"this order: {', '.join(classes)}."
        )
    scale = torch.tensor(weights, device=device)
    return lambda outputs, labels: plain(outputs, labels) * scale[labels]


class Classification(Task):
    """Outputs are logits, predictions probabilities of the classes."""

    name = "classification"
    losses = ("cross_entropy",)
    measured_by: ClassVar[ModuleType] = metrics
    metrics = metrics.METRICS
    main = "accuracy"
    best: ClassVar[Best] = {"loss": "lowest", "calibration_error": "lowest"}
    most = 1.0
    costs = ("accuracy", "excess_loss")
    beside = ("auroc",)
    diverged_means = "every prediction counts as wrong"
    guessed_means = "Its accuracy is then that of the most frequent class"
    metrics_mean = "Balanced accuracy and macro-F1 count every class alike, however rare."
    undefined_means = "no test record, or one class only. Within a class, accuracy is its recall"
    intervals_are = "Wilson's of accuracies and Newcombe's of differences"

    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """Cross-entropy."""
        return record_loss(options.get("class_weights"), self.schema.classes, device)

    def predict(self, outputs: Tensor) -> Tensor:
        """Softmax."""
        return torch.softmax(outputs.float(), dim=1)

    def evaluate(
        self, predictions: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None, positive: str = ""
    ) -> dict[str, Any]:
        """As `evaluation.metrics.evaluate`."""
        classes = self.schema.classes
        return metrics.evaluate(predictions, labels, groups, classes=classes, units=units, positive=positive)

    def live(self, predictions: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
        """Accuracy and loss."""
        return live_metrics(predictions, labels, groups)

    def words(self) -> Words:
        """By the number of classes."""
        count = len(self.schema.classes)
        names = f"with {count} classes", f"into {count} classes"
        return Words("classifier", *names, "one logit per class", f"One score for each of {count} classes")

    @classmethod
    def diverged(cls, figures: Mapping[str, Any]) -> bool:
        """Whether there is no loss: the accuracy of wrong predictions is 0."""
        return learnt.diverged(figures)

    @classmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """By MCC and AUROC."""
        return learnt.guessing(figures)

    @classmethod
    def hardly(cls, figures: Mapping[str, Any]) -> str | None:
        """By MCC, AUROC and the number of records."""
        return learnt.hardly(figures)

    @classmethod
    def overshot(cls, figures: Mapping[str, Any]) -> str | None:
        """By the loss; the number of classes is known where they are reported."""
        return learnt.overshot(figures)
