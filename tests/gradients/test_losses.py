"""A loss that knows its own gradient: the same digits as autograd's, and autograd itself where it cannot serve."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy, KnowsGradient
from equidp.training import record_loss

RECORDS, INPUTS, CLASSES = 7, 5, 3


def by_autograd(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def records() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, INPUTS), torch.randint(0, CLASSES, (RECORDS,))


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("size", [0.1, 1, 100])
@pytest.mark.parametrize("count", [0, 1, 251])
def test_cross_entropys_gradient_is_autograds_to_the_last_bit(classes: int, size: float, count: int) -> None:
    outputs, labels = size * torch.randn(count, classes), torch.randint(0, classes, (count,))
    leaf = outputs.clone().requires_grad_()
    losses = by_autograd(leaf, labels)
    (expected,) = torch.autograd.grad(losses.sum(), [leaf])
    found = CrossEntropy().gradient(outputs, labels)
    assert found is not None
    assert torch.equal(found, expected)
    assert torch.equal(CrossEntropy()(outputs, labels), losses)


def test_outputs_that_are_no_vectors_of_floats_are_left_to_autograd() -> None:
    assert CrossEntropy().gradient(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64)) is None
    assert CrossEntropy().gradient(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)) is None
    assert CrossEntropy().gradient(torch.zeros(2, 3), torch.full((2, 3), 1 / 3)) is None


def test_labels_may_be_shares_of_classes_in_a_model_of_one_layer() -> None:
    torch.manual_seed(0)
    layer, features, shares = nn.Linear(4, 3), torch.randn(5, 4), torch.rand(5, 3).softmax(1)
    engine = GradientEngine(layer, CrossEntropy())
    engine.norms(features, shares)
    torch.testing.assert_close(engine.weighted_sum(torch.ones(5)), engine.plain_sum(features, shares))


def test_the_runs_loss_knows_its_gradient_unless_classes_are_weighed() -> None:
    assert isinstance(record_loss(None, ("a", "b"), torch.device("cpu")), KnowsGradient)
    assert not isinstance(record_loss((1.0, 2.0), ("a", "b"), torch.device("cpu")), KnowsGradient)


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, INPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Doubled(nn.Module):
    """What the layer gave, changed in place: the same tensor, another value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mul_(2)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, CLASSES))
    model.register_forward_hook(lambda layer, inputs, output: 3 * output)
    return model


def frozen_below() -> nn.Module:
    model = nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    model[0].requires_grad_(False)
    return model


CLOSED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(INPUTS, CLASSES),
    "without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES, bias=False)),
    "frozen below": frozen_below,
}
OPEN: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
    "function after": lambda: nn.Sequential(nn.Linear(INPUTS, CLASSES), nn.Tanh()),
    "called twice": Twice,
    "changed in place": Doubled,
    "changed by a hook": hooked,
}


@pytest.mark.parametrize("name", [*CLOSED, *OPEN])
@pytest.mark.parametrize("how", ["records", "units", "iterates"])
def test_an_engine_gives_the_same_digits_with_and_without_it(name: str, how: str) -> None:
    model, (features, labels) = (CLOSED | OPEN)[name](), records()
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    asked = {
        "records": {},
        "units": {"owners": torch.tensor([0, 0, 1, 2, 2, 2, 3])},
        "iterates": {"iterates": [(None, 1.0), (torch.randn(size), -0.5)]},
    }[how]
    results = []
    for loss in (CrossEntropy(), by_autograd):
        engine = GradientEngine(copy.deepcopy(model), loss)
        norms = engine.norms(features, labels, **asked)  # type: ignore[arg-type]
        results.append((norms, engine.weighted_sum(torch.linspace(0, 1, len(norms)))))
    for closed, expected in zip(*results, strict=True):
        assert torch.equal(closed, expected)
    assert float(results[0][0].min()) > 0


def no_autograd(*args: object, **kwargs: object) -> None:
    raise AssertionError("autograd was asked")


@pytest.mark.parametrize("name", CLOSED)
def test_a_model_of_one_layer_asks_autograd_only_when_it_is_tried_out(name: str, monkeypatch) -> None:
    engine, (features, labels) = GradientEngine(CLOSED[name](), CrossEntropy()), records()
    engine.try_out(features, labels)
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    assert float(engine.norms(features, labels).min()) > 0


@pytest.mark.usefixtures("half_on_cpu")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_half_precision_and_other_models_ask_autograd(precision, monkeypatch) -> None:
    model = CLOSED["linear"]() if precision == "bf16" else OPEN["two layers"]()
    engine, (features, labels) = GradientEngine(model, CrossEntropy(), precision=precision), records()
    engine.try_out(features, labels)
    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    with pytest.raises(AssertionError, match="autograd was asked"):
        engine.norms(features, labels)


class Wrong(CrossEntropy):
    """A gradient that is not the loss's."""

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return 0.9 * torch.autograd.functional.jacobian(lambda z: self(z, labels).sum(), outputs)


def test_a_loss_that_is_wrong_about_its_gradient_is_refused() -> None:
    with pytest.raises(EquidpError, match="are not those of the loss"):
        GradientEngine(nn.Linear(INPUTS, CLASSES), Wrong()).norms(*records())


def test_a_loss_that_remembers_others_is_told_so() -> None:
    weights = torch.ones(CLASSES)

    def robust(outputs: Tensor, labels: Tensor) -> Tensor:
        """Classes of large exact losses count more from then on (group DRO)."""
        losses, seen = by_autograd(outputs, labels), weights[labels]
        weights.mul_(torch.bincount(labels, losses.detach(), minlength=CLASSES).exp())
        return seen * losses

    with pytest.raises(EquidpError, match="or with those before it"):
        GradientEngine(nn.Linear(INPUTS, CLASSES), robust).norms(*records())


class Careless(nn.Module):
    """The layer's input is changed after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        out: Tensor = self.layer(hidden)
        hidden += 1
        return out


class Merging(nn.Module):
    """Records do not stay along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(0, keepdim=True))


@pytest.mark.parametrize(("model", "reason"), [(Careless, "changed in place"), (Merging, "along the first dimension")])
def test_what_the_books_cannot_hold_is_refused_without_autograd_too(model: type[nn.Module], reason: str) -> None:
    with pytest.raises(EquidpError, match=reason):
        GradientEngine(model(), CrossEntropy()).norms(*records())
