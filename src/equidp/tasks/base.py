"""Task: the interface of all of them."""

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
"""Of a metric, which value is best; the highest where nothing is said."""


OUTDONE = (
    "did better than the non-private baseline, by more than chance: that baseline can be trained better (a learning "
    "rate of its own, sgd.options.learning_rate, or more training.epochs). Costs and gaps beside it are too small"
)
TOO_LONG = "Steps may be too long for these records, or for this noise: try a smaller training.learning_rate"
"""What follows for a private model that has overshot."""


class LossOptions(TypedDict, total=False):
    """Settings of a loss; those that are none of its own have no effect."""

    class_weights: tuple[float, ...] | None
    huber_delta: float


@dataclass(frozen=True)
class Words:
    """What documents say of a model: what it is, of what it is, into what it sorts, its outputs, and its answer."""

    model: str
    extent: str
    into: str
    outputs: str
    answer: str


class Task(ABC):
    """What a model is trained for on data of one schema.

    Attributes:
        name: registry name; `Schema.task`.
        losses: names of its losses, its own first.
        measured_by: the module of `evaluation` with `evaluate`, `cost_intervals` and `live`, which take predictions as
            they are.
        metrics: measured overall and in every group, in the order they are shown.
        main: the one by which groups are compared and the cost of privacy is told.
        best: of each metric, which value is best.
        most: the highest possible value of the main metric; 0 is the lowest.
        costs: those whose cost of privacy is shown of every group, the main one's first; classes have an `excess_loss`.
        beside: metrics shown of every group beside the main one where several models are compared.
        diverged_means, guessed_means: what follows for the figures of such a model, as an end and as a beginning of a
            sentence.
        metrics_mean, undefined_means, intervals_are: what a page says of the figures.
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
        """A loss's name, the task's own where none is given. Raises EquidpError where the task has no such loss."""
        if name is not None and name not in cls.losses:
            raise unknown_name(f"training.loss of {cls.name}", name, cls.losses)
        return name or cls.losses[0]

    @abstractmethod
    def loss(self, name: str, device: torch.device | str, **options: Unpack[LossOptions]) -> Loss:
        """The loss of each record on its own.

        Never a weighted *mean*: its denominator would couple the records and break the sensitivity.
        """

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """`[n, outputs]` of a model's outputs: what is told to whoever asks the model."""

    def evaluate(
        self, predictions: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """Measure a model overall and in every group.

        Args:
            predictions: `[n, outputs]`.
            labels: of the same records, as `Records` has them.
            groups: per grouping, group ids `[n]` and group names.
            units: `[n]` numbers, equal for records of one unit; None where each is a unit's only one.

        Returns:
            `overall` and `groups[grouping][group]` with `count` and the `metrics`, None where one is undefined;
            `worst[grouping]`, its `telling` group by the main metric; `intervals` of the main metric; and `task`, but
            for classification.
        """
        return {"task": self.name, **self.measured_by.evaluate(predictions, labels, groups, units=units)}

    def cost_intervals(
        self, private: NDArray, baseline: NDArray, labels: NDArray, groups: Groups, *, units: NDArray | None = None
    ) -> dict[str, Any]:
        """Intervals over test records of the main metric's cost of privacy; predictions of both on the same records."""
        return self.measured_by.cost_intervals(private, baseline, labels, groups, units=units)

    def live(self, predictions: NDArray, labels: NDArray, groups: Groups) -> dict[str, float]:
        """The figures shown after an epoch, as `test/<metric>` and `test/<metric>/<grouping>:<group>`."""
        return self.measured_by.live(predictions, labels, groups)

    @abstractmethod
    def words(self) -> Words:
        """For the documents that go out with a model."""

    @classmethod
    def cost(cls, private: Figures, baseline: Figures) -> dict[str, float | None]:
        """What privacy cost some records in each metric: negative where the private model is better, None if unknown.

        Baseline − private where the highest is best, private − baseline where the lowest is, and of a metric best at 0
        the difference of absolute values. The loss's is called `excess_loss`.
        """
        names = {metric: "excess_loss" if metric == "loss" else metric for metric in cls.metrics}
        return {name: cls.lost(metric, private[metric], baseline.get(metric)) for metric, name in names.items()}

    @classmethod
    def lost(cls, metric: str, private: float | None, baseline: float | None) -> float | None:
        """How much worse the first figure of a metric is than the second, as `cost` says; None where one is None."""
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
        """Whether these results of `evaluate` have records but no figures: predictions are not finite."""
        return bool(figures["overall"]["count"]) and figures["overall"][cls.main] is None

    @classmethod
    @abstractmethod
    def guessing(cls, figures: Mapping[str, Any]) -> str | None:
        """What to say of a model that has learnt nothing, as predicate of a sentence; else None."""

    @classmethod
    def hardly(cls, figures: Mapping[str, Any]) -> str | None:
        """What to say of a model that is better than guesses, but no more than chance explains; None if not told."""
        return None

    @classmethod
    def flawless(cls, figures: Mapping[str, Any]) -> str | None:
        """What to say of a model that is too good to be true, as predicate of a sentence; None if not told."""
        return None

    @classmethod
    def overshot(cls, figures: Mapping[str, Any], classes: int = 0) -> str | None:
        """What to say of a model whose loss is worse than without any training; None if not told.

        Args:
            classes: how many there are; 0 if that is known from the figures alone.
        """
        return None

    @classmethod
    def measures(cls, baseline: Mapping[str, Any]) -> bool:
        """Whether a cost of privacy can be told beside this baseline: it has figures, and has learnt something."""
        return not cls.diverged(baseline) and cls.guessing(baseline) is None

    @classmethod
    def outdone(cls, document: Mapping[str, Any]) -> str | None:
        """What to say of the private model of this `metrics.json` if it beats its baseline by more than chance."""
        interval = document.get("cost_of_privacy", {}).get("intervals", {}).get("overall")
        return OUTDONE if interval is not None and interval[1] < 0 else None
