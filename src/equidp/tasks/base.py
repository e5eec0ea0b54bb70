"""Task: the interface of all tasks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
from numpy.typing import NDArray
from torch import Tensor

from equidp.data.records import Schema
from equidp.errors import unknown_name
from equidp.evaluation.intervals import Groups
from equidp.evaluation.metrics import worst_group
from equidp.gradients.losses import Loss

Figures = Mapping[str, float | None]
"""Count and metrics of some records."""

Best = Mapping[str, Literal["lowest", "nearest to 0"]]
"""Which value of a metric is best, by its name; of a metric that is not named, the highest."""


OUTDONE = (
    "did better than the non-private baseline, by more than chance: that baseline can be trained better (a learning "
    "rate of its own, sgd.options.learning_rate, or more training.epochs). Costs and gaps beside it are too small"
)
TOO_LONG = "Steps may be too long for these records, or for this noise: try a smaller training.learning_rate"
"""Advice for a private model that has overshot."""


class LossOptions(TypedDict, total=False):
    """Settings of a loss. A setting that the loss does not have has no effect."""

    class_weights: tuple[float, ...] | None
    huber_delta: float


@dataclass(frozen=True)
class Words:
    """How documents describe a model.

    Attributes:
        model: what it is, such as "classifier".
        extent: what follows that word, such as "with 10 classes".
        into: what follows a word for its input, such as "into 10 classes".
        outputs: what the network gives for a record, such as "one logit per class".
        answer: what a user gets for a record.
    """

    model: str
    extent: str
    into: str
    outputs: str
    answer: str


class Task(ABC):
    """What a model is trained for on data of one schema.

    Attributes:
        name: registry name; `Schema.task`.
        losses: names of its losses, the default first.
        measured_by: the module of `evaluation` with `evaluate`, `cost_intervals` and `live`, which measure predictions.
        metrics: names of the metrics measured overall and in every group, in the order they are shown.
        main: the metric by which groups are compared and the cost of privacy is stated.
        best: which value of each metric is best.
        most: the highest possible value of the main metric; 0 is the lowest.
        costs: names of the costs of privacy that are shown for every group, the main metric's first; see `cost`.
        beside: metrics shown for every group beside the main one, where several models are compared.
        diverged_means: what divergence means for the figures, as the end of a sentence.
        guessed_means: what it means for the figures if a model guesses, as the beginning of a sentence.
        metrics_mean: what the metrics mean, as sentences of a page.
        undefined_means: why a figure is undefined, as words of a page.
        intervals_are: which intervals a page shows.
    """

    name: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]
    measured_by: ClassVar[ModuleType]
    metrics: ClassVar[tuple[str, ...]]
    main: ClassVar[str]
    best: ClassVar[Best] = {}
    most: ClassVar[float] = math.inf
    costs: ClassVar[tuple[str, ...]]
    beside: ClassVar[tuple[str, ...]]
    diverged_means: ClassVar[str] = "its figures are undefined"
    guessed_means: ClassVar[str]
    metrics_mean: ClassVar[str]
    undefined_means: ClassVar[str]
    intervals_are: ClassVar[str]

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    @classmethod
    def loss_named(cls, name: str | None) -> str:
        """Return a loss's name, the default's for None. Raises EquidpError where the task has no such loss."""
        if name is not None and name not in cls.losses:
            raise unknown_name(f"training.loss of {cls.name}", name, cls.losses)
        return name or cls.losses[0]

    @abstractmethod
    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """Return the function that gives the loss of each record on its own.

        It is never a weighted *mean*, because the mean's denominator would couple the records and break the
        sensitivity.
        """

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Turn a model's outputs `[n, outputs]` into predictions, a row for each record: the answers that users get."""

    def evaluate(
        self, predictions: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """Measure a model overall and in every group.

        Args:
            predictions: one row for each record, as `predict` gives them.
            labels: of the same records, as `Records` has them.
            groups: per grouping, group ids `[n]` and group names.
            units: `[n]` numbers, equal for records of one unit; None where each record is its unit's only one.

        Returns:
            `overall` and `groups[grouping][group]` with `count` and the `metrics`, None where a metric is undefined;
            `worst[grouping]`, the worst `telling` group by the main metric; `intervals` of the main metric; and `task`,
            except for classification.
        """
        return {"task": self.name, **self.measured_by.evaluate(predictions, labels, groups, units=units)}

    def cost_intervals(
        self, private: NDArray, baseline: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """Return intervals over test records for the main metric's cost of privacy.

        Both models' predictions are for the same records.
        """
        return self.measured_by.cost_intervals(private, baseline, labels, groups, units=units)

    def live(self, predictions: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
        """The figures shown after an epoch, as `test/<metric>` and `test/<metric>/<grouping>:<group>`."""
        return self.measured_by.live(predictions, labels, groups)

    @abstractmethod
    def words(self) -> Words:
        """Words for the documents that go out with a model."""

    @classmethod
    def cost(cls, private: Figures, baseline: Figures) -> dict[str, float | None]:
        """Return the cost of privacy to some records in each metric: negative for a gain, None if unknown.

        The cost is baseline − private if the highest value is best, and private − baseline if the lowest is. For a
        metric that is best at 0 it is the difference of absolute values. The cost in `loss` is called `excess_loss`.
        """
        names = {metric: "excess_loss" if metric == "loss" else metric for metric in cls.metrics}
        return {name: cls.lost(metric, private[metric], baseline.get(metric)) for metric, name in names.items()}

    @classmethod
    def lost(cls, metric: str, private: float | None, baseline: float | None) -> float | None:
        """Return how much worse `private` is than `baseline` in a metric, as `cost` says; None if either is None."""
        if private is None or baseline is None:
            return None
        if (best := cls.best.get(metric)) is None:
            return baseline - private
        return private - baseline if best == "lowest" else abs(private) - abs(baseline)

    @classmethod
    def worst_of(cls, groups: Mapping[str, Figures]) -> dict[str, Any]:
        """The `telling` group that is worst by the main metric, and its value."""
        return worst_group(groups, cls.main, max if cls.best.get(cls.main) == "lowest" else min)

    @classmethod
    def diverged(cls, figures: Mapping[str, Any]) -> bool:
        """Whether these results of `evaluate` have records but no figures, because predictions are not finite."""
        return bool(figures["overall"]["count"]) and figures["overall"][cls.main] is None

    @classmethod
    @abstractmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """Return the predicate of a sentence on a model that has learnt nothing; None for other models."""

    @classmethod
    def hardly(cls, figures: Mapping[str, Any]) -> str | None:
        """Return such a predicate for a model that is better than guesses, but by no more than chance; else None."""
        return None

    @classmethod
    def flawless(cls, figures: Mapping[str, Any]) -> str | None:
        """Return such a predicate for a model that is too good to be true; else None."""
        return None

    @classmethod
    def overshot(cls, figures: Mapping[str, Any], classes: int = 0) -> str | None:
        """Return such a predicate for a model whose loss is worse than without any training; else None.

        Args:
            figures: results of `evaluate`.
            classes: the number of classes; 0 to count those in the figures.
        """
        return None

    @classmethod
    def measures(cls, baseline: Mapping[str, Any]) -> bool:
        """Whether a cost of privacy can be stated against this baseline: it has figures, and has learnt something."""
        return not cls.diverged(baseline) and cls.guessing(baseline) is None

    @classmethod
    def outdone(cls, document: Mapping[str, Any]) -> str | None:
        """Return such a predicate if the private model of this `metrics.json` beats its baseline beyond chance."""
        interval = document.get("cost_of_privacy", {}).get("intervals", {}).get("overall")
        return OUTDONE if interval is not None and interval[1] < 0 else None
