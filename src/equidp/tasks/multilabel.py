"""Multi-label: several labels of 0 or 1 for each record, such as the diagnoses of one image."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from equidp.evaluation import multilabel
from equidp.evaluation.intervals import Groups
from equidp.gradients.losses import Loss
from equidp.tasks.base import Best, LossOptions, Task, Words


class MultiLabel(Task):
    """Outputs are one logit per label; predictions are probabilities."""

    name = "multilabel"
    losses = ("binary_cross_entropy", "binary_cross_entropy_sum")
    measured_by: ClassVar[ModuleType] = multilabel
    metrics = multilabel.METRICS
    main = "label_accuracy"
    best: ClassVar[Best] = {"loss": "lowest"}
    most = 1.0
    costs = ("label_accuracy", "macro_auroc")
    beside = ("macro_auroc",)
    guessed_means = "Its label accuracy is then that of the most frequent value of each label"
    metrics_mean = (
        "Label accuracy is the share of right labels: of a rare label, 0 for everybody has a high one. Macro AUROC is "
        "the mean over the labels that occur with both values, which in a small group may be fewer."
    )
    undefined_means = "no test record, or of AUROC no label with both values; of an interval, values that all agree"
    intervals_are = "mean ± t·s/√n of each record's share of right labels"

    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """Binary cross-entropy, averaged or summed over the labels of the record."""
        over = torch.sum if name == "binary_cross_entropy_sum" else torch.mean
        return lambda outputs, labels: over(F.binary_cross_entropy_with_logits(outputs, labels, reduction="none"), 1)

    def predict(self, outputs: Tensor) -> Tensor:
        """The sigmoid of each output."""
        return torch.sigmoid(outputs.float())

    def evaluate(
        self, predictions: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """As `evaluation.multilabel.evaluate`."""
        found = multilabel.evaluate(predictions, labels, groups, names=self.schema.targets, units=units)
        return {"task": self.name, **found}

    def words(self) -> Words:
        """Words that name the number of labels."""
        count = len(self.schema.targets)
        names = f"of {count} labels", f"for {count} labels"
        return Words("multi-label classifier", *names, "one logit per label", f"One score for each of {count} labels")

    @classmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """Judge by macro AUROC."""
        found = figures.get("overall", {}).get("macro_auroc")
        if found is None or found > 0.5:
            return None
        return "has learnt nothing: its macro AUROC is not above 0.5, which a coin has"

    @classmethod
    def hardly(cls, figures: Mapping[str, Any]) -> str | None:
        """Compare with the label accuracy of one answer for everybody.

        It is high for rare labels, and privacy does not lower it.
        """
        usual, interval = figures.get("usual"), figures.get("intervals", {}).get("overall")
        if usual is None or interval is None or interval[0] > usual or cls.guessing(figures):
            return None
        return (
            f"did no better than each label's more frequent value for everybody (label accuracy {usual:.3f}), but for "
            "chance: costs in label accuracy say little, so compare by AUROC"
        )
