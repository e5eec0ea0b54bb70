"""What a model or a loss keeps of its first records is found wherever it is, and what keeps none is left alone."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor, weights: Any = None) -> Tensor:
    given = None if weights is None else torch.as_tensor(weights, dtype=torch.float32)
    return nn.functional.cross_entropy(outputs, labels, given, reduction="none")


def rarer(labels: Tensor) -> Tensor:
    return 1 / torch.bincount(labels, minlength=3).clamp(min=1).float()


def tried(loss: Loss, model: nn.Module | None = None) -> None:
    GradientEngine(model or nn.Linear(6, 3), loss).norms(torch.randn(40, 6), (torch.arange(40) % 5).clamp(max=2))


class Within:
    """An object that is not called."""

    weights: Tensor | None = None

    def of(self, labels: Tensor) -> Tensor:
        if self.weights is None:
            self.weights = rarer(labels)
        return self.weights

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels, self.of(labels))


class Slotted:
    __slots__ = ("weights",)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if not hasattr(self, "weights"):
            self.weights = rarer(labels)
        return cross_entropy(outputs, labels, self.weights)


class Begun:
    """Its slot has a value before the first batch."""

    __slots__ = ("weights",)

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.weights = rarer(labels) if self.weights is None else self.weights
        return cross_entropy(outputs, labels, self.weights)


class OfItsClass(nn.Module):
    kept: ClassVar[dict[str, Tensor]] = {}

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels, self.kept.setdefault("weights", rarer(labels)))


class SetOnItsClass:
    weights: ClassVar[Tensor | None] = None

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.weights is None:
            SetOnItsClass.weights = rarer(labels)
        return cross_entropy(outputs, labels, self.weights)


class NewOnItsClass:
    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if not hasattr(NewOnItsClass, "weights"):
            NewOnItsClass.weights = rarer(labels)
        return cross_entropy(outputs, labels, NewOnItsClass.weights)


class Buffered(nn.CrossEntropyLoss):
    """Its `weight` is a buffer that begins as None."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        self.weight = rarer(target) if self.weight is None else self.weight
        return super().forward(input, target)


def by_default(outputs: Tensor, labels: Tensor, kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006 (the fault)
    return cross_entropy(outputs, labels, kept.setdefault("weights", rarer(labels)))


def given(outputs: Tensor, labels: Tensor, kept: Any) -> Tensor:
    if not kept:
        kept.append(rarer(labels))
    return cross_entropy(outputs, labels, kept[0])


def ordered(outputs: Tensor, labels: Tensor, kept: OrderedDict[str, Tensor]) -> Tensor:
    return cross_entropy(outputs, labels, kept.setdefault("weights", rarer(labels)))


def counted(outputs: Tensor, labels: Tensor, kept: Counter[int]) -> Tensor:
    if not kept:
        kept.update(labels.tolist())
    return cross_entropy(outputs, labels, [1 / max(kept[c], 1) for c in range(3)])


def seen(outputs: Tensor, labels: Tensor, kept: set[int]) -> Tensor:
    """The rare class is known by the last label of the first batch."""
    if not kept:
        kept.add(int(labels[-1]))
    return cross_entropy(outputs, labels, [5.0 if c in kept else 1.0 for c in range(3)])


def renamed(outputs: Tensor, labels: Tensor, kept: dict[int, float]) -> Tensor:
    """As `seen`, by the key of a value that stays."""
    if -1 in kept:
        kept[int(labels[-1])] = kept.pop(-1)
    return cross_entropy(outputs, labels, [kept.get(c, 1.0) for c in range(3)])


def by_keyword(outputs: Tensor, labels: Tensor, *, kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006 (the fault)
    return cross_entropy(outputs, labels, kept.setdefault("weights", rarer(labels)))


def parameter(outputs: Tensor, labels: Tensor, kept: nn.Parameter) -> Tensor:
    if not kept.any():
        kept.copy_(rarer(labels))
    return cross_entropy(outputs, labels, kept.clone())


ELSEWHERE: Any = types.ModuleType("tests.elsewhere")
ELSEWHERE.weights = None


def in_a_module(outputs: Tensor, labels: Tensor) -> Tensor:
    if ELSEWHERE.weights is None:
        ELSEWHERE.weights = rarer(labels)
    return cross_entropy(outputs, labels, ELSEWHERE.weights)


def nested(outputs: Tensor, labels: Tensor, kept: dict[str, dict[str, dict[str, Tensor]]]) -> Tensor:
    return cross_entropy(outputs, labels, kept["a"]["b"].setdefault("weights", rarer(labels)))


def array(outputs: Tensor, labels: Tensor, kept: np.ndarray) -> Tensor:
    if not kept.any():
        kept[:] = rarer(labels).numpy()
    return cross_entropy(outputs, labels, kept.copy())


def within(outputs: Tensor, labels: Tensor, kept: Any) -> Tensor:
    kept.weights = rarer(labels) if kept.weights is None else kept.weights
    return cross_entropy(outputs, labels, kept.weights)


def cached() -> Loss:
    seen = list[Tensor]()

    @functools.cache
    def weights() -> Tensor:
        return rarer(seen[-1])

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return cross_entropy(outputs, labels, weights())

    return loss


def another() -> Loss:
    kept = Within()
    return lambda outputs, labels: kept.loss(outputs, labels)


@pytest.mark.parametrize(
    "loss",
    [
        by_default,
        by_keyword,
        in_a_module,
        Within().loss,
        Slotted(),
        Begun(),
        OfItsClass(),
        SetOnItsClass(),
        NewOnItsClass(),
        Buffered(reduction="none"),
        functools.partial(given, kept=[]),
        functools.partial(given, kept=deque(maxlen=3)),
        functools.partial(ordered, kept=OrderedDict()),
        functools.partial(counted, kept=Counter()),
        functools.partial(seen, kept=set()),
        functools.partial(renamed, kept={-1: 5.0}),
        functools.partial(parameter, kept=nn.Parameter(torch.zeros(3), requires_grad=False)),
        functools.partial(nested, kept={"a": {"b": {}}}),
        functools.partial(array, kept=np.zeros(3, dtype=np.float32)),
        functools.partial(within, kept=types.SimpleNamespace(weights=None)),
        functools.partial(within, kept=Within()),
        cached(),
        another(),
    ],
)
def test_what_is_kept_of_the_first_batch_is_found(loss: Loss) -> None:
    """One record of the first batch moved every later gradient."""
    with pytest.raises(EquidpError, match=r"or with those before it"):
        tried(loss)


@pytest.mark.parametrize(
    "held",
    [
        torch.eye(6).to_sparse(),
        torch.empty(3, device="meta"),
        torch.ones(1).expand(5),
        np.array([object()], dtype=object),
    ],
)
def test_a_layer_may_hold_a_tensor_or_an_array_of_any_kind(held: Any) -> None:
    """A sparse one, such as a graph's, ended a run in torch's own words."""
    model = nn.Linear(6, 3)
    model.held = held
    tried(cross_entropy, model)


def test_a_table_that_does_not_change_is_not_filled_anew() -> None:
    """Others of the process read it, and found it empty for a moment."""
    table = dict.fromkeys(range(1000), 1)
    for more in range(1, 1000):
        del table[more]
    roomy = sys.getsizeof(table)
    tried(lambda outputs, labels: cross_entropy(outputs, labels) * table[0])
    assert sys.getsizeof(table) == roomy
