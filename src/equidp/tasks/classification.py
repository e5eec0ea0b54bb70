"""Classification: one of several classes for each record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Unpack

import torch
from numpy.typing import NDArray
from torch import Tensor

from equidp.errors import EquidpError
from equidp.evaluation import metrics
from equidp.evaluation.intervals import Groups
from equidp.evaluation.live import live_metrics
from equidp.gradients.losses import CrossEntropy, Loss
from equidp.tasks.base import Best, LossOptions, Task, Words

CROSS_ENTROPY: Loss = CrossEntropy()

RANKS = 0.6
"""AUROC above which a ranking has learnt something, however small the test part."""

FLAWLESS = 100
"""A model without any error is reported if it is evaluated on so many records; fewer may all be easy."""

ONE_IN_TWENTY = 1.645
"""A standard normal number is above this in one of twenty cases."""


def record_loss(
    weights: tuple[float, ...] | None, classes: Sequence[str], device: torch.device | str, plain: Loss = CROSS_ENTROPY
) -> Loss:
    """Return the loss of each record on its own, multiplied by the weight of its class where there are weights.

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
    """Outputs are logits; predictions are probabilities of the classes."""

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
    guessed_means = "Its accuracy may then be that of one class for everybody"
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
        """Words that name the number of classes."""
        count = len(self.schema.classes)
        names = f"with {count} classes", f"into {count} classes"
        return Words("classifier", *names, "one logit per class", f"One score for each of {count} classes")

    @classmethod
    def diverged(cls, figures: Mapping[str, Any]) -> bool:
        """Whether there is no loss; there is an accuracy, because predictions that are not finite count as wrong."""
        return bool(figures["overall"]["count"]) and figures["overall"]["loss"] is None

    @classmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """Judge by MCC: it is exactly 0 for a model that puts every record into one class, however high its accuracy.

        Its scores may still rank the records. Then the model has learnt something, and only its classes say nothing.
        """
        overall = figures.get("overall", {})
        mcc, auroc = overall.get("mcc"), overall.get("auroc")
        if mcc is None or mcc > 0 or cls.diverged(figures):
            return None
        if auroc is not None and auroc > RANKS:
            return f"ranks the records (AUROC {auroc:.2f}), but its classes are guesses: its MCC is not above 0"
        return "has learnt nothing: its MCC is not above 0, as if all records were put into one class"

    @classmethod
    def hardly(cls, figures: Mapping[str, Any]) -> str | None:
        """Judge by MCC and the number n of records, unless the model's scores rank the records.

        Guesses do not depend on the labels. Over test parts of two classes, their MCC has the standard deviation 1/√n,
        and less with more classes. So only one guessing model in twenty has an MCC above 1.645/√n.
        """
        overall = figures.get("overall", {})
        mcc, auroc, count = (overall.get(name) for name in ("mcc", "auroc", "count"))
        if mcc is None or not 0 < mcc < ONE_IN_TWENTY / math.sqrt(count) or (auroc is not None and auroc > RANKS):
            return None
        ranking = "" if auroc is None else f" and AUROC {auroc:.2f}"
        return f"may be no better than guesses: MCC {mcc:.2f}{ranking} on {count:,} records can be chance"

    @classmethod
    def flawless(cls, figures: Mapping[str, Any]) -> str | None:
        """Judge by accuracy alone. A usual cause is a column that was filled in after the label was known."""
        overall = figures.get("overall", {})
        if overall.get("accuracy") != 1 or overall["count"] < FLAWLESS:
            return None
        return (
            f"got all {overall['count']:,} records right, as where a feature tells the label: leave out what is known "
            "only after it"
        )

    @classmethod
    def overshot(cls, figures: Mapping[str, Any], classes: int = 0) -> str | None:
        """Judge by a loss above that of equal probabilities.

        Figures give the number of classes if they report groups by class. Such a model's classes may be half right, but
        its steps are too long, or it trained for too long.
        """
        loss = figures.get("overall", {}).get("loss")
        classes = classes or len(figures.get("groups", {}).get("class", {}))
        if loss is None or classes < 2 or loss <= math.log(classes):
            return None
        return f"has a test loss of {loss:.2f}, above the {math.log(classes):.2f} of equal probabilities"
