"""The engine against a reference that materialises every gradient with torch.func."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.models.conftest import SCHEMAS, batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equidp.errors import EquidpError
from equidp.gradients import bookkeeping, layers, sites
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.engine import GradientEngine
from equidp.gradients.layers import Page
from equidp.gradients.products import Outer
from equidp.gradients.terms import Term
from equidp.gradients.together import Together
from equidp.gradients.units import UnitSums
from equidp.gradients.workspace import Workspace
from equidp.mechanism.noise import SeededRandom
from equidp.models import build_model

TOLERANCE = 1e-5


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def close(a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal up to `tolerance` of the larger vector's size."""
    assert a.shape == b.shape
    assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-8)


@pytest.fixture
def reference(materialise) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    return lambda model, features, labels: materialise(model, features, labels, cross_entropy)


@pytest.fixture
def check(reference) -> Callable[[nn.Module, Tensor], GradientEngine]:
    return lambda model, features: equals_reference(model, features, reference)


def equals_reference(model: nn.Module, features: Tensor, reference: Callable[..., Tensor]) -> GradientEngine:
    """Norms, weighted sums (twice, zeros included) and the plain sum equal the reference's."""
    labels = torch.arange(len(features)) % 3
    expected = reference(model, features, labels)
    engine = GradientEngine(model, cross_entropy)
    norms = engine.norms(features, labels)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=TOLERANCE, atol=1e-7)
    weights = torch.rand(len(features))
    weights[0] = 0
    for w in (weights, torch.ones(len(features))):
        close(engine.weighted_sum(w), w @ expected)
    close(engine.plain_sum(features, labels), expected.sum(0))
    return engine


class Residual(nn.Module):
    """A block whose sum is taken in place, as torchvision's are."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        out += x
        return self.act(out)


class Recurrent(nn.Module):
    """Embedding, one Linear over all steps, one Linear called at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.into, self.again, self.out = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        projected = self.into(self.table(tokens))
        state = projected.new_zeros(len(tokens), 8)
        for step in projected.unbind(1):
            state = torch.tanh(step + self.again(state))
        return self.out(state)


class Tied(nn.Module):
    """An embedding whose table is also the output layer, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(torch.tanh(self.mix(self.table(tokens)))).mean(1))


class Scaled(nn.Module):
    """A layer with parameters of its own and a child: no rule fits it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


def images(b: int = 5, channels: int = 3, side: int = 8) -> Tensor:
    return torch.randn(b, channels, side, side)


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Tanh(), nn.Linear(9, 3, bias=False)), images()


def cnn() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 6, 4, stride=2, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 1)]
    return nn.Sequential(*layers, nn.Conv2d(6, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), images()


def resnet() -> tuple[nn.Module, Tensor]:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(inplace=True))
    return nn.Sequential(
        stem, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    ), images()


def recurrent() -> tuple[nn.Module, Tensor]:
    return Recurrent(), torch.randint(0, 11, (5, 9))


def tied() -> tuple[nn.Module, Tensor]:
    return Tied(), torch.randint(0, 7, (5, 6))


FAMILIES: list[Callable[[], tuple[nn.Module, Tensor]]] = [mlp, cnn, resnet, recurrent, tied]


pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_torch_func_on_whole_models(family, check, untried) -> None:
    check(*family())


def test_a_tie_between_modules_adds_gradients_before_the_norm(check) -> None:
    model, tokens = tied()
    engine = check(model, tokens)
    assert engine.dimension == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn_small", "cnn4", "cnn9", "resnet9", "bilstm"])
def test_equals_exact_gradients_on_the_projects_models(name, materialise, untried) -> None:
    """Against float64: what differs is the engine's rounding. Pretrained and fixed-feature models: tests/models."""
    kind = {"logistic": "table", "bilstm": "reviews", "cnn9": "cifar10", "resnet9": "cifar10"}.get(name, "mnist")
    options = {"resnet9": {"width": 16}}.get(name, {})
    model = build_model(name, SCHEMAS[kind], options=options, seed=3)
    features, labels = batch(SCHEMAS[kind], 4), torch.tensor([0, 1, 1, 0])
    exact = copy.deepcopy(model).double()
    stored = features.double() if features.is_floating_point() else features
    expected = materialise(exact, stored, labels, cross_entropy)
    engine = GradientEngine(model, cross_entropy)
    norms = engine.norms(features, labels)
    torch.testing.assert_close(norms.double(), expected.norm(dim=1), rtol=TOLERANCE, atol=1e-9)
    weights = torch.tensor([0.5, 0.0, 1.0, 2.0])
    close(engine.weighted_sum(weights).double(), weights.double() @ expected)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "3.weight"])
def test_frozen_parameters_take_no_part(frozen, check) -> None:
    model, features = cnn()
    model.get_parameter(frozen).requires_grad_(False)
    engine = check(model, features)
    assert engine.dimension == sum(p.numel() for k, p in model.named_parameters() if k != frozen)


def test_a_frozen_backbone_costs_no_books(check) -> None:
    model, features = cnn()
    model[0].requires_grad_(False)
    assert [site.name for site in check(model, features).passes.sites] == ["3", "6"]


def test_a_layer_without_a_rule_goes_through_torch_func_and_is_named(check) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match="'1' .Scaled. has no gradient rule"):
        check(model, torch.randn(4, 6))


def test_a_lone_number_is_a_parameter_too(check) -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x) * self.temperature

    with pytest.warns(UserWarning, match=r"'model' \(Tempered\) has no gradient rule for temperature"):
        check(Tempered(), torch.randn(4, 6))


def test_a_parametrised_layer_is_not_mistaken_for_a_plain_one(check) -> None:
    first = nn.Linear(6, 4)
    nn.utils.parametrize.register_parametrization(first, "weight", nn.Tanh())
    model = nn.Sequential(first, nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="no gradient rule"):
        check(model, torch.randn(4, 6))


def test_an_empty_batch_has_no_norms_and_a_zero_sum() -> None:
    model, features = cnn()
    engine = GradientEngine(model, cross_entropy)
    assert engine.norms(features[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert engine.weighted_sum(torch.zeros(0)).equal(torch.zeros(engine.dimension))
    assert engine.plain_sum(features[:0], torch.zeros(0, dtype=torch.int64)).equal(torch.zeros(engine.dimension))


@pytest.mark.parametrize("rows", [None, 4])
def test_a_model_that_fails_on_no_records_has_outputs_of_an_empty_batch(rows: int | None) -> None:
    """A run that failed would tell that a batch was empty, which no event pays for."""
    model = nn.Linear(6, 3)

    def refuse_none(_: nn.Module, given: tuple[Tensor, ...]) -> None:  # as Fourier transforms do
        assert len(given[0])

    model.register_forward_pre_hook(refuse_none)
    engine = GradientEngine(model, cross_entropy, rows=rows)
    assert engine.outputs(torch.zeros(0, 6)).shape == (0, 3)
    assert engine.outputs_at(torch.zeros(0, 6), torch.zeros(engine.dimension)).shape == (0, 3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("family", [mlp, cnn, resnet])
def test_a_silenced_record_leaves_no_trace(family, poison, reference, untried) -> None:
    model, features = family()
    labels = torch.arange(len(features)) % 3
    expected = reference(model, features, labels)
    features[1] = poison
    engine = GradientEngine(model, cross_entropy)
    norms = engine.norms(features, labels)
    assert not norms[1].isfinite() or family is resnet  # normalisation may tame 1e38
    assert norms[[0, 2, 3, 4]].isfinite().all()
    weights = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0])
    close(engine.weighted_sum(weights), weights @ expected)


@pytest.mark.parametrize("places", [3, 200])
def test_a_record_with_infinite_backprops_in_a_table_leaves_no_trace(places: int) -> None:
    engine = GradientEngine(nn.Embedding(5, 4), signed)
    ids, signs, weights = torch.randint(0, 5, (4, places)), torch.randn(4, places, 4), torch.tensor([1, 0, 0.5, 2])
    engine.passes.norms(ids, signs)
    expected = engine.weighted_sum(weights)
    signs[1] = torch.inf
    assert engine.passes.norms(ids, signs).isfinite().tolist() == [True, False, True, True]
    assert torch.equal(engine.weighted_sum(weights), expected)


def plain() -> tuple[nn.Module, Tensor]:
    """One product, nothing beside it."""
    torch.manual_seed(1)
    return nn.Linear(40, 3, bias=False), torch.randn(5, 40)


def words() -> tuple[nn.Module, Tensor]:
    """Norms by Gram matrices, of one layer alone: another's share would cover what is lost in it."""
    torch.manual_seed(1)
    last = nn.Linear(80, 3).requires_grad_(False)
    return nn.Sequential(nn.Linear(40, 40, bias=False), nn.Flatten(), last), torch.randn(5, 2, 40)


def pixels() -> tuple[nn.Module, Tensor]:
    """And of pixels."""
    torch.manual_seed(2)
    last = nn.Linear(256, 3).requires_grad_(False)
    return nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.Flatten(), last), torch.randn(5, 64, 4, 4)


def windows() -> tuple[nn.Module, Tensor]:
    """And by gradients."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten()), torch.randn(5, 3, 12, 12)


@pytest.mark.parametrize("family", [mlp, cnn, plain, words, pixels, windows])
@pytest.mark.parametrize("features_by", [1e-30, 1e-21, 1.0, 1e10, 1e18])
@pytest.mark.parametrize("loss_by", [1e-35, 1e-28, 1e-22, 1.0, 1e15])
def test_no_norm_is_lost_in_squares_that_float32_does_not_hold(family, features_by: float, loss_by: float) -> None:
    """Divided by its norm, no gradient is longer than 1, however small what it is made of, or that beside it.

    A norm that is not finite has no weight.
    """
    model, features = family()
    engine = GradientEngine(model, lambda outputs, labels: loss_by * outputs.sum(1))
    norms = engine.passes.norms(features_by * features, torch.zeros(5, dtype=torch.int64))
    assert not (norms == 0).any()
    for record in norms.isfinite().nonzero():
        weights = torch.zeros(5).index_fill(0, record, float(1 / norms[record]))
        assert float(engine.weighted_sum(weights).double().norm()) <= 1 + 1e-4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(1e-12, 1e-12), (1e-30, 1e-3), (1e-3, 1e-30), (1.0, 1.0)])
def test_nor_is_it_where_a_gpu_takes_all_layers_together(bias: bool, sizes: tuple[float, float]) -> None:
    torch.manual_seed(0)
    model, labels = nn.Linear(4, 3, bias=bias), torch.zeros(5)
    passes = BookKeeping(model, lambda outputs, labels: sizes[1] * outputs.square().sum(1).sqrt())
    kept = passes._kept_by(passes.calls(sizes[0] * torch.randn(5, 4), labels, [(None, 1.0)]), 5)
    entries = [p.numel() for p in passes.parameters]
    with torch.inference_mode():
        both = Together(
            [kept[p] for p in passes.parameters], entries, 5, passes.parameters[0], Workspace(passes.device)
        )
        norms = both.squared_norms().sqrt()
        for weights in (1 / norms).diag():
            assert float(torch.cat(both.weighted_sums(weights)).double().norm()) <= 1 + 1e-4


def test_a_gradient_that_overflows_without_a_nan_is_silenced_too() -> None:
    """Its norm is infinite, and zero times infinity is none."""
    torch.manual_seed(0)
    model, features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), torch.randn(5, 1, 12, 12)
    features[1] = 1e25
    engine = GradientEngine(model, lambda outputs, labels: 1e15 * outputs.sum(1))
    norms = engine.norms(features, torch.zeros(5, dtype=torch.int64))
    assert norms.isinf().tolist() == [False, True, False, False, False]
    total = engine.weighted_sum(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    engine.norms(features[[0, 2, 3, 4]], torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(total, engine.weighted_sum(torch.ones(4)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_unit_is_the_mean_of_its_records(family, reference, untried) -> None:
    model, features = family()
    labels, owners = torch.arange(5) % 3, torch.tensor([0, 1, 2, 2, 2])
    rows = reference(model, features, labels)
    expected = torch.stack([rows[owners == u].mean(0) for u in range(3)])
    engine = GradientEngine(model, cross_entropy)
    norms = engine.norms(features, labels, owners=owners)
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=TOLERANCE, atol=1e-7)
    weights = torch.rand(3)
    close(engine.weighted_sum(weights), weights @ expected)


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("family", [mlp, cnn, resnet])
def test_a_silenced_unit_leaves_no_trace(family, unit: int, reference, untried) -> None:
    """One of a single record, and one of three of which one has no finite gradient."""
    model, features = family()
    labels, owners = torch.arange(5) % 3, torch.tensor([0, 1, 2, 2, 2])
    rows = reference(model, features, labels)
    weights = torch.tensor([0.5, 1.5, 2.0]).index_fill(0, torch.tensor(unit), 0.0)
    expected = weights @ torch.stack([rows[owners == u].mean(0) for u in range(3)])
    features[2 * unit - 1] = torch.nan
    engine = GradientEngine(model, cross_entropy)
    norms = engine.norms(features, labels, owners=owners)
    assert norms.isfinite().tolist() == [True, unit != 1, unit != 2]
    close(engine.weighted_sum(weights), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_units_norm_is_its_own_to_the_last_bit(family, untried) -> None:
    """A unit of many records, and one whose records cancel, beside it: rounding must not tell who else is there."""
    model, features = family()
    labels = torch.arange(5) % 3
    first = torch.tensor([0, 0, 1])
    engine = GradientEngine(model, cross_entropy)
    alone = engine.norms(features[:3], labels[:3], owners=first).clone()
    more, owners = features[[0, 1, 2, *[3, 4] * 20]], torch.cat([first, torch.full((40,), 2)])
    together = engine.norms(more, labels[[0, 1, 2, *[3, 4] * 20]], owners=owners)
    torch.testing.assert_close(together[:2], alone, rtol=1e-6, atol=0)


def test_a_unit_whose_records_cancel_has_a_norm_that_rounding_cannot_reach() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).requires_grad_(True)
    nn.init.zeros_(model[0].weight), nn.init.zeros_(model[0].bias)
    features, labels = torch.ones(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])  # at equal logits their gradients sum to 0
    engine = GradientEngine(model, cross_entropy)
    single = engine.norms(features[:1], labels[:1])
    norms = engine.norms(features, labels, owners=torch.zeros(6, dtype=torch.int64))
    assert 0.9e-3 * single < norms < 1.1e-3 * single


def signed(outputs: Tensor, signs: Tensor) -> Tensor:
    """A loss whose backprops are the labels."""
    return (outputs * signs).flatten(1).sum(1)


class Halves(nn.Module):
    """One weight, two layers that each see a half of the record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x[:, 0]), self.second(x[:, 1])], 1)


@pytest.mark.parametrize(
    ("layer", "shape", "copies"),
    [
        (lambda: nn.Linear(8, 8, bias=False), (16, 8), 1),
        (lambda: nn.Conv2d(16, 16, 3, bias=False, groups=4), (16, 10, 10), 1),
        (lambda: nn.Conv2d(4, 4, 3, bias=False), (4, 10, 10), 1),
        (lambda: nn.Conv2d(16, 32, 3, bias=False, groups=16), (16, 10, 10), 1),
        (Halves, (2, 8), 1),
        (lambda: nn.Linear(8, 8, bias=False), (16, 8), 2),
    ],
    ids=["sequence", "groups of channels", "windows", "depthwise", "shared weight", "unit"],
)
def test_a_record_whose_gradient_cancels_does_not_move_the_sum_by_its_rounding(layer, shape, copies) -> None:
    """All of its inputs alike and half of its backprops negative: a norm of 0, and 10⁴ times that beneath it."""
    torch.manual_seed(0)
    engine = GradientEngine(layer().requires_grad_(True), signed)
    engine.passes.workspace.keep_floats = 0
    outputs = engine.model(torch.zeros(1, *shape)).shape[1:]
    places = 0 if len(shape) == 2 else 2
    signs = torch.ones(outputs).index_fill(places, torch.arange(outputs[places] // 2), -1.0)
    alike = torch.randn(1, shape[1]) if places == 0 else torch.randn(shape[0], 1, 1)
    others, labels = torch.randn(15, *shape), torch.randn(15, *outputs)
    features = torch.cat([others, 1e4 * alike.expand(copies, *shape)])
    owners = None if copies == 1 else torch.arange(15 + copies).clamp(max=15)

    def total(features: Tensor, labels: Tensor, owners: Tensor | None) -> Tensor:
        norms = engine.passes.norms(features, labels, owners=owners)
        return engine.weighted_sum(1 / (norms + 0.01))  # AUTO-S, whose bound is 1

    before = total(others, labels, None if owners is None else torch.arange(15))
    after = total(features, torch.cat([labels, signs.expand(copies, *outputs)]), owners)
    assert (after - before).norm() < 1e-4


@pytest.mark.parametrize(
    ("layer", "shape", "copies"),
    [
        (lambda: nn.Linear(8, 8, bias=False), (1024, 8), 1),
        (lambda: nn.Linear(8, 8, bias=False), (1024, 8), 3),
        (lambda: nn.Linear(8, 8, bias=False), (4, 8), 2000),
        (lambda: nn.Linear(8, 8), (8,), 2000),
        (lambda: nn.Conv2d(3, 8, 3, bias=False), (3, 34, 34), 1),
        (lambda: nn.Conv2d(3, 8, 3, bias=False), (3, 34, 34), 3),
        (lambda: nn.Conv2d(4, 8, 3, bias=False, groups=2), (4, 66, 66), 3),
        (lambda: nn.Conv2d(4, 8, 3, bias=False, groups=4), (4, 66, 66), 3),
    ],
    ids=[
        "sequence",
        "unit of sequences",
        "of 2000",
        "of 2000 vectors",
        "windows",
        "unit of images",
        "groups",
        "depthwise",
    ],
)
def test_a_record_that_nearly_cancels_over_a_thousand_positions_moves_no_sum_by_its_rounding(
    layer, shape, copies
) -> None:
    """To a thousandth or two, where rounding is a part of the norm: float32 sums of other steps differ by up to 1 %."""
    torch.manual_seed(0)
    engine = GradientEngine(layer().requires_grad_(True), signed)
    engine.passes.workspace.keep_floats = 0
    outputs = engine.model(torch.zeros(1, *shape)).shape[1:]
    others, labels = torch.randn(7, *shape), torch.randn(7, *outputs)
    owners = None if copies == 1 else torch.arange(7 + copies).clamp(max=7)
    across = outputs[1:] if len(shape) == 3 else outputs[:1]  # what changes its sign within a record, else between some
    places = across.numel() if copies < 2000 else copies

    def total(features: Tensor, labels: Tensor, owners: Tensor | None) -> Tensor:
        norms = engine.passes.norms(features, labels, owners=owners)
        return engine.weighted_sum(1 / (norms + 0.01)).double()

    before = total(others, labels, None if owners is None else torch.arange(7))
    for share, entry, backprop, balance in torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).tolist():
        signs, first = torch.full((places,), 0.5 + backprop), int((0.2 + 0.6 * share) * places)
        signs[first:] *= -(1 + 0.004 * (2 * balance - 1)) * first / (places - first)
        if copies == places:
            signs = signs.view(-1, *[1] * len(outputs))
        else:
            signs = signs.view(across) if len(shape) == 3 else signs[:, None]
        one, its = torch.full((copies, *shape), 1e3 * (0.5 + entry)), signs.expand(copies, *outputs)
        assert (total(torch.cat([others, one]), torch.cat([labels, its]), owners) - before).norm() < 1 + 1e-5


@pytest.mark.parametrize(
    ("layer", "shape", "unit"),
    [
        (lambda: nn.Linear(9, 1, bias=False), (2001, 9), 1),
        (lambda: nn.Linear(9, 1, bias=False), (9,), 2001),
        (lambda: nn.Linear(129, 129, bias=False), (7, 129), 1),
        (lambda: nn.Conv2d(3, 5, 3, bias=False), (3, 33, 33), 1),
        (lambda: nn.Conv2d(7, 1, 1, bias=False), (7, 33, 33), 1),
        (lambda: nn.Conv2d(3, 8, 3, bias=False), (3, 33, 33), 1),
        (lambda: nn.Conv2d(5, 5, 3, bias=False, groups=5), (5, 33, 33), 1),
        (lambda: nn.Conv1d(1, 1, 3, bias=False), (1, 333), 1),
        (lambda: nn.Conv3d(2, 3, 3, bias=False), (2, 9, 7, 9), 1),
        (lambda: nn.ConvTranspose2d(3, 5, 3, bias=False), (3, 17, 17), 1),
    ],
    ids=["sequence", "unit", "gram", "bands", "one output", "image", "depthwise", "line", "volume", "transposed"],
)
def test_who_joins_does_not_round_the_others_otherwise(layer, shape, unit) -> None:
    """Records whose gradients are next to nothing but rounding, wherever in memory they stand: the same to the bit."""
    torch.manual_seed(0)
    engine = GradientEngine(layer(), signed)
    outputs = engine.model(torch.zeros(1, *shape)).shape[1:]
    features, signs = 3 + torch.randn(8 * unit, *shape), torch.randn(8 * unit, *outputs)
    owners = None if unit == 1 else torch.arange(8).repeat_interleave(unit)

    def found(first: int) -> tuple[Tensor, Tensor]:
        rows = slice(first * unit, None)
        norms = engine.passes.norms(
            features[rows], signs[rows], owners=None if owners is None else owners[rows] - first
        )
        weights = torch.cat([torch.zeros(3 - first), torch.linspace(1, 2, 5)])
        return norms[3 - first :], engine.weighted_sum(weights)

    norms, total = found(3)
    for first in range(3):
        assert torch.equal(found(first)[0], norms)
        torch.testing.assert_close(found(first)[1], total, rtol=0, atol=2e-6 * float(norms.sum()))


def _excess(engine: GradientEngine, features: Tensor, signs: Tensor) -> float:
    """By how much of Δ one record alone moves the sum too far."""
    norms = engine.passes.norms(features, signs)
    return float(engine.weighted_sum(1 / (norms + 0.01)).double().norm() - norms / (norms + 0.01))


def test_a_wide_layer_by_gram_matrices_loses_no_more_than_a_narrow_one() -> None:
    """Where gradients cancel to a few percent, sums of thousands of equal products have lost digits."""
    engine = GradientEngine(nn.Linear(2048, 2048, bias=False), signed)
    for entry, share in torch.rand(8, 2, generator=torch.Generator().manual_seed(0)).tolist():
        inputs, signs = torch.tensor([1.0, 0.5 + entry]), torch.tensor([1.0, -(0.95 - 0.05 * share) / (0.5 + entry)])
        features, signs = (x.view(1, 2, 1).expand(1, 2, 2048) for x in (100 * inputs, signs))
        assert _excess(engine, features, signs) < 8e-4


def test_a_table_read_at_many_places_is_summed_exactly() -> None:
    """One row read 200 times, by backprops of equal entries that cancel to about three percent."""
    engine = GradientEngine(nn.Embedding(4, 128), signed)
    for first, value, balance in torch.rand(12, 3, generator=torch.Generator().manual_seed(0)).tolist():
        places = int(200 * (0.1 + 0.8 * first))
        signs = torch.full((200, 1), 1e3 * (1 + value))
        signs[places:] *= -places / (200 - places) * (1 - 0.12 * balance)
        ids = torch.zeros(1, 200, dtype=torch.int64)
        assert _excess(engine, ids, signs.expand(1, 200, 128)) < 1e-5


@pytest.mark.parametrize("places", [100, 102])
def test_a_table_whose_gradient_cancels_has_a_norm_that_rounding_cannot_reach(places: int) -> None:
    """By Gram matrices, and beyond a hundred places by the gradient itself."""
    engine = GradientEngine(nn.Embedding(4, 8), signed)
    signs = ((-1.0) ** torch.arange(places)).view(1, places, 1).expand(1, places, 8)
    norms = engine.passes.norms(torch.zeros(1, places, dtype=torch.int64), signs)
    assert float(norms) == pytest.approx(1e-3 * places * 8**0.5, rel=0.01)


@pytest.mark.parametrize(("entry", "backprop"), [(1.0, 1.0), (1e15, 1e-24), (1e-24, 1e15)])
def test_windows_that_overlap_cancel_from_all_that_they_see(entry: float, backprop: float) -> None:
    """Nine of them see each pixel, whoever sums them. Squares that float32 does not hold make it more, never less."""
    engine = GradientEngine(nn.Conv2d(4, 4, 3, bias=False), signed)
    signs = torch.full((1, 4, 8, 8), backprop)
    signs[:, :, :4] *= -1
    norms = engine.passes.norms(torch.full((1, 4, 10, 10), entry), signs)
    least = 1e-3 * (9 * 400 * 256) ** 0.5 * entry * backprop
    assert float(norms) >= 0.99 * least
    assert entry != 1 or float(norms) < 1.01 * least


def test_layers_that_share_a_weight_cancel_as_positions_do() -> None:
    """Two layers' parts are each a thousand times what is left of them."""
    engine = GradientEngine(Halves(), signed)
    for entry, backprop, balance in torch.rand(20, 3, generator=torch.Generator().manual_seed(0)).tolist():
        signs = (1 + backprop) * torch.tensor([1.0, -1 - 0.004 * balance]).view(1, 2, 1, 1)
        assert _excess(engine, torch.full((1, 2, 100, 8), 1e3 * (0.5 + entry)), signs.expand(1, 2, 100, 8)) < 1e-5


def test_layers_that_share_a_weight_have_the_least_norm_of_all_their_terms() -> None:
    engine = GradientEngine(Halves(), signed)
    signs = torch.tensor([1.0, -1.0]).view(1, 2, 1).expand(1, 2, 8)  # each layer's gradient has a norm of 8
    assert float(engine.passes.norms(torch.ones(1, 2, 8), signs)) == pytest.approx(1e-3 * 16, rel=0.01)


def test_the_number_of_records_does_not_choose_how_norms_are_formed(monkeypatch) -> None:
    """Six records do not fit where five do; the five's norms are the same, though their windows cancel."""
    torch.manual_seed(3)
    layer = nn.Conv2d(64, 128, 3)  # where it matters: Gram matrices cost less than gradients, unless these are kept
    model = nn.Sequential(layer, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 3))
    sign = (-1.0) ** torch.arange(10)
    images = (sign[:, None] * sign).expand(6, 64, 10, 10) * 3.0  # a chessboard: windows' gradients cancel in pairs
    labels = torch.arange(6) % 3
    norms = []
    for records in (5, 6):
        engine = GradientEngine(copy.deepcopy(model), cross_entropy)
        engine.passes.workspace.keep_floats = 5 * layer.weight.numel()
        norms.append(engine.passes.norms(images[:records], labels[:records])[:5].clone())
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def cancelling_words(records: int, words: int) -> tuple[GradientEngine, Tensor, Tensor]:
    """Words whose gradients cancel to 0: Gram matrices say so only to a thousandth, and round upwards."""
    torch.manual_seed(3)
    mean = nn.AdaptiveAvgPool2d((1, 24))  # over a record's words
    engine = GradientEngine(nn.Sequential(nn.Linear(24, 24), mean, nn.Flatten(), nn.Linear(24, 3)), cross_entropy)
    signs = ((-1.0) ** torch.arange(words))[:, None]
    return engine, signs.expand(records, words, 24) * 3.0, torch.arange(records) % 3


@pytest.mark.parametrize("words", [2, 10, 12, 14, 40])
def test_the_number_of_records_does_not_change_norms_of_a_layer_over_sequences(words: int) -> None:
    """With 12 words Gram matrices and gradients cost the same: a batch's size could decide between them."""
    found = []
    for records in (1, 4, 200):
        engine, features, labels = cancelling_words(records, words)
        found.append(engine.passes.norms(features, labels)[:1].clone())
    torch.testing.assert_close(torch.cat(found), found[0].expand(3), rtol=1e-6, atol=0)


def test_a_unit_of_several_records_does_not_change_norms_of_other_units() -> None:
    """A unit of one record has a gradient of its own: were it taken for a record wherever all are, it would tell."""
    engine, features, labels = cancelling_words(4, words=4)
    alone = engine.passes.norms(features[:2], labels[:2], owners=torch.tensor([0, 1])).clone()
    beside = engine.passes.norms(features, labels, owners=torch.tensor([0, 1, 2, 2]))
    torch.testing.assert_close(beside[:2], alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("share", [0.4, 1.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_iterates_equal_a_materialised_sum_of_gradients(family, share: float, reference, untried) -> None:
    model, features = family()
    labels = torch.arange(5) % 3
    current = reference(model, features, labels)
    engine = GradientEngine(model, cross_entropy)
    here = engine.flatten()
    past = here + 0.3 * torch.randn_like(here)
    engine.load_(past)
    for parameter in engine.parameters:
        parameter.requires_grad_(True)
    expected = current + share * reference(model, features, labels)
    for parameter in engine.parameters:
        parameter.requires_grad_(False)
    engine.load_(here)
    norms = engine.norms(features, labels, iterates=[(past, share), (None, 1.0)])
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=TOLERANCE, atol=1e-7)
    weights = torch.rand(5)
    close(engine.weighted_sum(weights), weights @ expected)
    assert engine.flatten().equal(here)


def test_iterates_through_a_layer_without_a_rule(reference) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 3))
    features, labels = torch.randn(4, 6), torch.arange(4) % 3
    current = reference(model, features, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = GradientEngine(model, cross_entropy)
    here = engine.flatten()
    doubled = engine.norms(features, labels, iterates=[(here, 1.0), (None, 1.0)])
    torch.testing.assert_close(doubled, 2 * current.norm(dim=1), rtol=TOLERANCE, atol=1e-7)


def test_no_parameter_gradient_is_ever_formed() -> None:
    model, features = cnn()
    engine = GradientEngine(model, cross_entropy)
    engine.norms(features, torch.zeros(5, dtype=torch.int64))
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_flat_vectors_go_in_and_out() -> None:
    engine = GradientEngine(mlp()[0], cross_entropy)
    before = engine.flatten()
    step = torch.randn(engine.dimension)
    engine.apply_gradient(step)
    torch.optim.SGD(engine.parameters, lr=0.5).step()
    close(engine.flatten(), before - 0.5 * step)
    engine.load_(before)
    assert engine.flatten().equal(before)


@pytest.mark.parametrize("when", ["before", "between", "another engine"])
def test_what_was_differentiated_without_the_engine_moves_nothing(when) -> None:
    model, features = mlp()
    labels = torch.zeros(len(features), dtype=torch.int64)
    if when == "before":  # a model that learnt from public records first
        cross_entropy(model(features), labels).sum().backward()
    engine = GradientEngine(model, cross_entropy)
    optimizer = torch.optim.SGD(engine.parameters, lr=1.0)
    if when != "before":
        engine.apply_gradient(torch.ones(engine.dimension))
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        if when == "between":
            cross_entropy(model(features), labels).sum().backward()
        else:
            GradientEngine(model, cross_entropy).apply_gradient(torch.ones(engine.dimension))
    before, step = engine.flatten(), torch.randn(engine.dimension)
    engine.apply_gradient(step)
    optimizer.step()
    close(engine.flatten(), before - step)


@pytest.mark.parametrize("records", [0, 3])
def test_norms_and_sums_may_be_changed_in_place_and_differentiated(records) -> None:
    engine = GradientEngine(nn.Linear(4, 3), cross_entropy)
    norms = engine.norms(torch.randn(records, 4), torch.zeros(records, dtype=torch.int64))
    total = engine.weighted_sum(torch.ones(records))
    for found in (norms, total):
        found.add_(1)
        (found.requires_grad_() ** 2).sum().backward()
        torch.testing.assert_close(found.grad, 2 * found.detach())


def test_weighted_sum_without_norms_is_refused() -> None:
    engine = GradientEngine(mlp()[0], cross_entropy)
    with pytest.raises(EquidpError, match="call norms first"):
        engine.weighted_sum(torch.ones(5))


def test_a_twin_knows_nothing_of_the_last_batch() -> None:
    model, features = mlp()
    engine = GradientEngine(model, cross_entropy)
    engine.norms(features, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(EquidpError, match="call norms first"):
        engine.passes.twin().weighted_sum(torch.ones(5))


def test_a_twin_does_not_overwrite_what_its_original_keeps() -> None:
    model, features = windows()
    engine, labels, weights = GradientEngine(model, cross_entropy), torch.arange(5) % 3, torch.rand(5)
    engine.norms(features, labels)
    expected = engine.weighted_sum(weights)
    engine.passes.twin().norms(torch.randn_like(features), labels)
    assert torch.equal(engine.weighted_sum(weights), expected)


def test_a_wrong_number_of_weights_is_refused() -> None:
    model, features = mlp()
    engine = GradientEngine(model, cross_entropy)
    engine.norms(features, torch.zeros(5, dtype=torch.int64))
    for given, number in ((torch.ones(4), 4), (torch.ones(6), 6), (torch.tensor(1.0), 1)):
        with pytest.raises(EquidpError, match=f"{number} weights for 5 records"):
            engine.weighted_sum(given)


def test_batch_norm_is_refused_in_training_mode_only(check) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    with pytest.raises(EquidpError, match="'1' is a BatchNorm that takes the batch's statistics"):
        GradientEngine(model, cross_entropy)
    model[1].running_mean.normal_()
    engine = check(model.eval(), images())
    before = model[1].running_mean.clone()
    model.train()
    with pytest.raises(EquidpError, match="'1' is a BatchNorm that takes the batch's statistics"):
        engine.norms(images(), torch.zeros(5, dtype=torch.int64))
    assert torch.equal(model[1].running_mean, before)  # else a loop that goes on after eval() releases the records' own


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LSTM(3, 3), r"Layer 'model' \(LSTM\) cannot be trained privately.* write it from Linear layers"),
        (nn.Sequential(nn.RNN(3, 3)), r"'0' \(RNN\) cannot be trained privately"),
        (nn.Sequential(nn.TransformerEncoderLayer(4, 2)), r"'0.self_attn' \(MultiheadAttention\) cannot"),
        (nn.InstanceNorm2d(2, affine=True, track_running_stats=True), "keeps statistics of the records"),
        (nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True)), "mixes records"),
        (nn.Sequential(nn.Embedding(4, 3, sparse=True)), r"'0' \(Embedding\) has sparse gradients.*switch sparse off"),
        (nn.Sequential(nn.Flatten()), "no trainable parameters"),
        (nn.Sequential(nn.Linear(2, 2).double()), r"Parameter '0\.weight' is float64, and .* float32"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), r"Parameter '1\.weight' is bfloat16"),
        (nn.Sequential(nn.LazyLinear(2)), r"Parameter '0\.weight' has no shape before the first batch"),
    ],
)
def test_layers_that_cannot_be_private_are_refused(model, message) -> None:
    with pytest.raises(EquidpError, match=message):
        GradientEngine(model, cross_entropy)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_in_torchscript_is_refused_as_its_layers_do_not_show() -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(EquidpError, match=r"Layer '0' is TorchScript, .* script what was trained"):
        GradientEngine(nn.Sequential(traced, nn.Linear(2, 2)), cross_entropy)


class Shifted(nn.Module):
    """A parameter of its own beside dropout, as in many a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.dropout, self.last = nn.Parameter(torch.zeros(6)), nn.Dropout(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x + self.shift))


def test_what_torch_func_cannot_take_is_refused_by_name() -> None:
    with pytest.warns(UserWarning, match="no gradient rule for shift"):
        engine = GradientEngine(Shifted(), cross_entropy)
    with pytest.raises(EquidpError, match=r"'model' \(Shifted\) has no gradient rule, and .*\(vmap: .*random"):
        engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("units", [False, True])
def test_norms_and_weights_by_parameter_equal_the_reference(family, units: bool, reference, untried) -> None:
    model, features = family()
    labels, owners = torch.arange(len(features)) % 3, torch.arange(len(features)) // 2
    expected = reference(model, features, labels)
    if units:  # a unit's gradient is the mean of its records'
        expected = torch.stack([expected[owners == unit].mean(0) for unit in owners.unique()])
    engine = GradientEngine(model, cross_entropy)
    asked = {"owners": owners} if units else {}
    parts = expected.split([p.numel() for p in engine.parameters], dim=1)

    norms = engine.norms_by_parameter(features, labels, **asked)

    torch.testing.assert_close(norms, torch.stack([part.norm(dim=1) for part in parts]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norms.norm(dim=0), engine.norms(features, labels, **asked), rtol=1e-4, atol=1e-6)
    engine.norms_by_parameter(features, labels, **asked)
    weights = torch.rand(norms.shape)
    close(engine.weighted_sum(weights), torch.cat([w @ part for w, part in zip(weights, parts, strict=True)]))
    close(engine.weighted_sum(weights[0]), weights[0] @ expected)


def test_a_part_that_is_no_number_adds_nothing_and_leaves_the_others() -> None:
    model, features = mlp()
    engine = GradientEngine(model, lambda outputs, labels: outputs.square().sum(1))
    labels = torch.zeros(len(features), dtype=torch.int64)
    engine.norms_by_parameter(features, labels)  # tried out on numbers
    engine.weighted_sum(torch.ones(len(engine.parameters), len(features)))
    features = features.clone()
    features[1] = torch.nan
    norms = engine.norms_by_parameter(features, labels)
    assert not norms[:, 1].isfinite().all()
    weights = torch.where(norms.isfinite(), 1.0, 0.0)
    assert engine.weighted_sum(weights).isfinite().all()


def test_norms_by_parameter_of_an_empty_batch_and_misfits_are_told() -> None:
    model, features = mlp()
    engine, labels = GradientEngine(model, cross_entropy), torch.arange(len(features)) % 3
    assert engine.norms_by_parameter(features[:0], labels[:0]).shape == (len(engine.parameters), 0)
    assert not engine.weighted_sum(torch.zeros(len(engine.parameters), 0)).any()
    engine.norms_by_parameter(features, labels)
    with pytest.raises(EquidpError, match=r"Weights of \[2, \d+\] follow norms_by_parameter, and are"):
        engine.weighted_sum(torch.ones(2, len(features)))
    with pytest.raises(EquidpError, match="without `rows`"):
        GradientEngine(mlp()[0], cross_entropy, rows=8).norms_by_parameter(features, labels)


class Placed(nn.Module):
    """Positions of its own beside dropout, of a shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.places, self.dropout, self.last = nn.Parameter(torch.randn(shape)), nn.Dropout(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x + self.places).mean(1))


def test_positions_are_told_the_shape_that_has_a_rule_and_have_it_there(check) -> None:
    advice = r"If places is added to every record's values, as positions are, .* the shape \[1, 4, 6\]\."
    with pytest.warns(UserWarning, match=advice):
        engine = GradientEngine(Placed(4, 6), cross_entropy)
    with pytest.raises(EquidpError, match=advice):
        engine.norms(torch.randn(5, 4, 6), torch.arange(5) % 3)
    check(Placed(1, 4, 6).eval(), torch.randn(5, 4, 6))  # warnings are errors here
    assert GradientEngine(Placed(1, 4, 6), cross_entropy).norms(torch.randn(5, 4, 6), torch.arange(5) % 3).all()


class Rescaled(nn.Module):
    """Channels that are scaled beside dropout, as in torchvision's ConvNeXt, whose blocks are left out by chance."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer_scale, self.dropout = nn.Parameter(torch.rand(shape)), nn.Dropout()
        self.inner, self.last = nn.Conv2d(2, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.layer_scale * self.inner(x)).mean((2, 3)))


def test_a_layers_scale_is_told_the_shape_that_has_a_rule_and_has_it_there(check) -> None:
    advice = r"or multiplies them entry by entry, it is enough to give it the shape \[1, 6, 1, 1\]\."
    with pytest.warns(UserWarning, match=advice):
        GradientEngine(Rescaled(6, 1, 1), cross_entropy)
    check(Rescaled(1, 6, 1, 1).eval(), torch.randn(5, 2, 4, 4))


class Headed(nn.Module):
    """A token of its own before those of each record."""

    def __init__(self, *, repeat: bool) -> None:
        super().__init__()
        self.repeat, self.token, self.last = repeat, nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.repeat(len(x), 1, 1) if self.repeat else self.token.expand(len(x), -1, -1)
        return self.last(torch.cat([token, x], 1).tanh().mean(1))


def test_a_token_that_is_repeated_for_the_records_is_told_to_be_expanded(check) -> None:
    features = torch.randn(5, 4, 6)
    with pytest.raises(EquidpError, match=r"given 'token' as its own.* expand\(len\(x\), -1, -1\)"):
        GradientEngine(Headed(repeat=True), cross_entropy).norms(features, torch.arange(5) % 3)
    check(Headed(repeat=False), features)


def test_a_warning_shows_the_line_that_called(recwarn) -> None:
    GradientEngine(nn.Sequential(nn.Linear(6, 6), Shifted()), cross_entropy)
    assert {warning.filename for warning in recwarn} == {__file__}


def test_no_shape_is_told_where_none_would_help() -> None:
    with pytest.warns(UserWarning, match=r"each record of a chunk\.$"):
        GradientEngine(Shifted(), cross_entropy)


def test_a_loss_that_averages_is_refused() -> None:
    model, features = mlp()
    engine = GradientEngine(model, F.cross_entropy)
    with pytest.raises(EquidpError, match="one number per record"):
        engine.norms(features, torch.zeros(5, dtype=torch.int64))


class Enlarged(nn.Module):
    """Multiplies in place what it has looked up, as CTRL's does; `listed`: scales it by a list of its numbers, too."""

    def __init__(self, *, listed: bool = False) -> None:
        super().__init__()
        self.listed, self.table, self.last = listed, nn.Embedding(9, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4)) if listed else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids)
        found *= 2.0
        by = sum(found.sum((1, 2)).tolist()) if self.listed else 1.0
        return self.last((found * self.scale).mean(1)) * by


def test_what_is_looked_up_first_may_be_changed_in_place(check) -> None:
    check(Enlarged(), torch.randint(0, 9, (5, 4)))


class LookedUp(nn.Module):
    """Without a rule, first of all, and with nothing beside what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4))

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        return self.weight[ids].mean(1), None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = LookedUp(), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found, nothing = self.first(ids)
        assert nothing is None
        return self.last(found)


@pytest.mark.filterwarnings("ignore:Layer 'first'")
def test_a_layer_may_give_its_tensor_beside_nothing(check) -> None:
    check(Pair(), torch.randint(0, 9, (5, 4)))


@pytest.mark.filterwarnings("ignore:Layer 'model'")
def test_a_layer_that_makes_lists_is_told_to_have_no_rule() -> None:
    engine = GradientEngine(Enlarged(listed=True), cross_entropy)
    with pytest.raises(EquidpError, match=r"Enlarged. has no gradient rule, and torch.func cannot take it"):
        engine.norms(torch.randint(0, 9, (5, 4)), torch.arange(5) % 3)


class TimeFirst(nn.Module):
    """Has time along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.transpose(0, 1)).tanh().mean(0)


@pytest.mark.parametrize("times", [3, 4, 6])
def test_records_must_stay_along_the_first_dimension(times: int) -> None:
    with pytest.raises(EquidpError, match="records must stay along the first dimension"):
        GradientEngine(TimeFirst(), cross_entropy).norms(torch.randn(2, times, 4), torch.zeros(2, dtype=torch.int64))


class Between(nn.Module):
    """A bias for each pair of places, looked up once for all records, as of T5 and MPNet."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.last = nn.Embedding(9, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4)
        shares = self.bias(places[:, None] - places + 4).squeeze(2).softmax(1)
        return self.last((shares @ x).mean(1))


def test_a_layer_that_sees_no_records_may_be_frozen() -> None:
    features, labels = torch.randn(5, 4, 6), torch.arange(5) % 3
    model = Between()
    with pytest.raises(EquidpError, match=r"'bias'.* sees \(4, 4\) .*freeze its parameters"):
        GradientEngine(model, cross_entropy).norms(features, labels)
    model = Between()
    model.bias.requires_grad_(False)
    assert GradientEngine(model, cross_entropy).norms(features, labels).all()


def test_a_model_is_tried_out_without_the_gpus_shortened_floats() -> None:
    seen = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cudnn.conv.fp32_precision)
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a layer with a forward of its own has no rule
        engine = GradientEngine(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), Watching(8, 3)), cross_entropy)
    features, labels = torch.randn(4, 1, 4, 4), torch.arange(4) % 3
    for _ in range(2):  # the second time it is looked at again, as one layer is not torch's
        engine.try_out(features, labels)
    assert set(seen) == {"ieee"}
    seen.clear()
    engine.norms(features, labels)
    assert set(seen) == {"tf32"}


def test_an_input_changed_in_place_after_use_is_refused() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out = self.second(hidden)
            hidden += 1
            return out

    with pytest.raises(EquidpError, match="changed in place"):
        GradientEngine(Careless(), cross_entropy).norms(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))


@pytest.mark.usefixtures("half_on_cpu")
def test_clipping_bound_holds_under_bf16() -> None:
    model, features = resnet()
    labels = torch.arange(5) % 3
    engine = GradientEngine(model, cross_entropy, precision="bf16")
    norms = engine.norms(features * 10, labels)
    weights = (1.0 / norms).clamp(max=1.0)
    for record in range(5):
        alone = torch.zeros(5)
        alone[record] = weights[record]
        assert float(engine.weighted_sum(alone).norm()) <= 1 + 1e-5


HOSTILE = [
    (width, places, number)
    for width in (20, 33, 54, 100, 130, 784)
    for places in ((), (5,))
    for number in (math.nan, math.inf, 1e30)
]


def reaches_no_other(width: int, places: tuple[int, ...], number: float, device: str, precision: Any) -> None:
    """Whether all norms but those of a record of such numbers are what they are beside an ordinary one."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, 100), nn.ReLU(), nn.Linear(100, 54), nn.Tanh(), nn.Flatten(1)]
    model = nn.Sequential(*layers, nn.Linear(54 * math.prod(places), 10)).to(device)
    engine = GradientEngine(model, cross_entropy, precision=precision)
    features, labels = torch.randn(24, *places, width, device=device), torch.arange(24, device=device) % 10
    expected = engine.norms(features, labels)
    for at in (0, 6, 23):
        others = torch.arange(24, device=device) != at
        norms = engine.norms(features.masked_fill(~others.view(24, *[1] * len(places), 1), number), labels)
        torch.testing.assert_close(norms[others], expected[others])


@pytest.mark.parametrize(
    ("width", "places", "number"),
    [case if case[0] in (33, 784) else pytest.param(*case, marks=pytest.mark.slow) for case in HOSTILE],
)
def test_a_record_that_is_not_finite_reaches_no_other(width: int, places: tuple[int, ...], number: float) -> None:
    """In a CPU's bf16 it took the record before it along, in every layer one more."""
    reaches_no_other(width, places, number, "cpu", "float32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_on_a_gpu_a_record_that_is_not_finite_reaches_no_other(precision: str) -> None:
    for width, places, number in HOSTILE:
        reaches_no_other(width, places, number, "cuda", precision)


def test_half_precision_on_a_cpu_is_refused() -> None:
    with pytest.raises(EquidpError, match=r"precision=\"bf16\" .*leave it out, or train on a GPU"):
        GradientEngine(nn.Linear(4, 3), cross_entropy, precision="bf16")
    frozen = nn.Linear(4, 4).bfloat16().requires_grad_(False)
    with pytest.raises(EquidpError, match=r"Parameter '0\.weight' is in half precision.*make it float32"):
        GradientEngine(nn.Sequential(frozen, nn.Linear(4, 3)), cross_entropy)


def test_norms_and_sums_inside_somebodys_autocast_are_refused() -> None:
    """In half precision one of 512 records that agree moved this sum by 1.6 times its bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    engine = GradientEngine(model, cross_entropy)
    features, labels = torch.randn(4, 64), torch.arange(4) % 3
    with torch.autocast("cpu", torch.bfloat16):
        for batch in (slice(4), slice(0)):
            with pytest.raises(EquidpError, match=r"leave it out, and set precision=\"bf16\""):
                engine.norms(features[batch], labels[batch])
    norms = engine.norms(features, labels)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(EquidpError, match="half precision"):
        engine.weighted_sum(1 / norms)


@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_shortened_products_are_refused(kind: str) -> None:
    engine, switch = GradientEngine(nn.Linear(4, 3), cross_entropy), getattr(torch.backends.mkldnn, kind)
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        with pytest.raises(EquidpError, match=r"leave out torch\.set_float32_matmul_precision"):
            engine.norms(torch.randn(2, 4), torch.tensor([0, 1]))
    finally:
        switch.fp32_precision = before
    assert engine.norms(torch.randn(2, 4), torch.tensor([0, 1])).isfinite().all()


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float64])
def test_another_default_type_is_refused(other: torch.dtype) -> None:
    engine, features = GradientEngine(nn.Linear(4, 3), cross_entropy), torch.randn(2, 4)
    torch.set_default_dtype(other)
    try:
        assert SeededRandom(0, "cpu").normal(3).dtype == torch.float32
        with pytest.raises(EquidpError, match=r"leave out torch\.set_default_dtype"):
            engine.norms(features, torch.tensor([0, 1]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert engine.norms(features, torch.tensor([0, 1])).isfinite().all()


@pytest.mark.usefixtures("half_on_cpu")
def test_bf16_norms_are_near_those_of_float32() -> None:
    model, features = resnet()
    labels = torch.arange(5) % 3
    rough = GradientEngine(copy.deepcopy(model), cross_entropy, precision="bf16").norms(features, labels)
    torch.testing.assert_close(
        rough, GradientEngine(model, cross_entropy).norms(features, labels), rtol=0.05, atol=1e-3
    )


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) @ self.first.weight)


def planted(squares_by: Callable[[Tensor], Tensor]) -> Callable[[Page], dict[str, Term]]:
    """The rule of a linear layer whose sums are right and whose squared norms are so many times what they should be."""

    class Planted(Outer):
        def squared_norms(self) -> Tensor:
            return super().squared_norms() * squares_by(self.inputs)

    def rule(page: Page) -> dict[str, Term]:
        terms = layers.linear(page)
        right = terms["weight"]
        assert isinstance(right, Outer)
        return terms | {"weight": Planted(right.inputs, right.backprops)}

    return rule


@pytest.mark.parametrize("by", [0.0, 0.5, 0.98, 1.02, 2.0, 100.0])
@pytest.mark.parametrize("which", ["both records", "the second record"])
def test_a_rule_whose_norms_are_wrong_and_whose_sums_are_right_is_refused(by: float, which: str, monkeypatch) -> None:
    features, labels = torch.randn(4, 6), torch.arange(4) % 3
    features[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])

    def squares_by(inputs: Tensor) -> Tensor:
        return torch.where((inputs[:, 0] < 0) | (which == "both records"), by, 1.0)

    monkeypatch.setitem(sites.RULES, nn.Linear, planted(squares_by))
    engine = GradientEngine(nn.Linear(6, 3, bias=False), cross_entropy)
    for _ in range(2):
        with pytest.raises(EquidpError, match=r"norms of records' gradients are not those of autograd"):
            engine.norms(features, labels)
    monkeypatch.setitem(sites.RULES, nn.Linear, planted(lambda inputs: torch.ones(len(inputs))))
    assert GradientEngine(nn.Linear(6, 3, bias=False), cross_entropy).norms(features, labels).isfinite().all()


@pytest.mark.parametrize("by", [0.5, 2.0])
def test_norms_that_are_wrong_for_units_of_several_records_alone_are_refused(by: float, monkeypatch) -> None:
    class Planted(UnitSums):
        def squared_norms(self) -> Tensor:
            counts = self._units.counts
            return super().squared_norms() * torch.where(counts > 1, by, 1.0)

    monkeypatch.setattr(bookkeeping, "UnitSums", Planted)
    engine = GradientEngine(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), cross_entropy)
    with pytest.raises(EquidpError, match=r"norms of units' gradients are not those of autograd"):
        engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(8, 8, bias=False), (16, 8)),
        (lambda: nn.Linear(64, 64, bias=False), (4, 64)),
        (lambda: nn.Conv2d(4, 4, 3, bias=False), (4, 10, 10)),
        (lambda: nn.Conv2d(3, 8, 3, bias=False), (3, 34, 34)),
        (lambda: nn.Conv2d(64, 64, 3, bias=False), (64, 4, 6)),
        (lambda: nn.Conv2d(16, 16, 3, bias=False, groups=4), (16, 10, 10)),
        (Halves, (2, 8)),
    ],
    ids=["sequence", "gram", "windows", "many windows", "pixels", "groups of channels", "shared weight"],
)
@pytest.mark.parametrize("left", [0.0, 1e-6, 1e-4, 1e-2])
def test_a_norm_that_is_raised_because_the_gradient_cancels_is_no_reason_to_refuse_a_model(layer, shape, left) -> None:
    """All inputs of a record alike, and backprops that cancel to so little of their size."""
    engine = GradientEngine(layer().requires_grad_(True), signed)
    outputs = engine.model(torch.zeros(1, *shape)).shape[1:]
    places = 0 if len(shape) == 2 else 2
    signs = torch.ones(outputs).index_fill(places, torch.arange(outputs[places] // 2), left - 1)
    features = torch.tensor([1.0, 3.0]).view(2, *[1] * len(shape)).expand(2, *shape).contiguous()
    assert engine.norms(features, signs.expand(2, *outputs)).isfinite().all()


class Mixing(nn.Module):
    """Centres a batch on its own mean."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x - x.mean(0))


class Counting(nn.Module):
    """Scales what it sees by how many see it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) / len(x)


class Standardising(nn.Module):
    """Scales a batch by its own spread: a record on its own, or beside its like, is 0/0."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x - x.mean(0)) / x.std(0, correction=0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Borrowed(), "'first.weight' are not those"),
        (Mixing(), "mixes records"),
        (Counting(), "mixes records"),
        (Standardising(), "mixes records"),
    ],
)
def test_the_first_batch_finds_out_models_whose_books_would_be_wrong(model, message) -> None:
    engine = GradientEngine(copy.deepcopy(model), cross_entropy)
    for _ in range(2):
        with pytest.raises(EquidpError, match=message):
            engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


class Remembering(nn.Module):
    """Keeps a running mean of what it sees, as a layer of somebody's own might."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.last(x)


class Collecting(nn.Module):
    """Makes its buffer only when it sees the first records."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("seen", x.detach().mean(0))
        return self.last(x)


@pytest.mark.parametrize(
    ("model", "shape", "buffer"),
    [
        (Remembering(), (6,), "seen"),
        (Collecting(), (6,), "seen"),
        (
            nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten(), nn.Linear(32, 3)),
            (2, 4, 4),
            "0.running_mean",
        ),
    ],
)
def test_a_buffer_that_learns_of_the_records_is_found_out(model, shape, buffer) -> None:
    engine = GradientEngine(copy.deepcopy(model), cross_entropy)
    with pytest.raises(
        EquidpError, match=f"Buffer or parameter '{buffer}' of the model or its loss changes in a forward pass"
    ):
        engine.norms(torch.randn(4, *shape), torch.arange(4) % 3)


def test_a_buffer_of_sizes_may_be_set_beforehand(check) -> None:
    class Placed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "places"):
                self.register_buffer("places", torch.linspace(0, 1, x.shape[1]))
            return super().forward(x * self.places)

    features = torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a layer with a forward of its own has no rule
        with pytest.raises(EquidpError, match=r"'places' .* set beforehand: model\(torch.zeros\(1, …\)\)"):
            GradientEngine(Placed(6, 3), cross_entropy).norms(features, torch.arange(5) % 3)
        model = Placed(6, 3)
        model(torch.zeros(1, 6))
        check(model, features)


class Capped(nn.Module):
    """Looks features up in a frozen table, whose rows torch shortens as they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.embedding(x, self.table.weight, max_norm=0.5).mean(1))


def test_a_parameter_that_learns_of_the_records_is_found_out_too() -> None:
    engine = GradientEngine(Capped(), cross_entropy)
    with pytest.raises(
        EquidpError, match=r"Buffer or parameter 'table\.weight' of the model or its loss changes in a forward"
    ):
        engine.norms(torch.tensor([[0, 1], [2, 3], [4, 4]]), torch.arange(3))


class Mixup(nn.Module):
    """Half of another record, drawn anew in every batch; of two records each is its own in half of the draws."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


@pytest.mark.parametrize("seed", range(8))
def test_records_that_meet_by_chance_are_found_out_whatever_the_seed(seed: int) -> None:
    torch.manual_seed(seed)
    engine = GradientEngine(nn.Sequential(nn.Linear(6, 8), Mixup(), nn.Linear(8, 3)), cross_entropy)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


def test_mixing_is_found_out_where_the_first_records_are_alike() -> None:
    features = torch.randn(2, 6)[[0, 0, 0, 1]]
    with pytest.raises(EquidpError, match="mixes records"):
        GradientEngine(Mixing(), cross_entropy).norms(features, torch.arange(4) % 3)


@pytest.mark.parametrize("layers", [[], [nn.Dropout(0.1)]], ids=["", "dropout"])
@pytest.mark.parametrize("labels", [[0, 1, 2, 0], [1, 1, 2, 0]], ids=["different", "alike"])
def test_a_loss_that_counts_classes_or_records_mixes_them(layers, labels) -> None:
    def by_class(outputs: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(outputs, classes) / torch.bincount(classes, minlength=3)[classes]

    def by_size(outputs: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(outputs, classes) / len(classes)

    for loss in (by_class, by_size):
        engine = GradientEngine(nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3)), loss)
        with pytest.raises(EquidpError, match="mixes records"):
            engine.norms(torch.randn(4, 6), torch.tensor(labels))


def test_the_probe_leaves_every_layer_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Dropout().eval(), nn.Linear(8, 3))
    modes = [layer.training for layer in model.modules()]
    GradientEngine(model, cross_entropy).norms(torch.randn(4, 6), torch.arange(4) % 3)
    assert [layer.training for layer in model.modules()] == modes


def test_dropout_is_trained_and_the_probe_leaves_its_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(), nn.Linear(40, 3))
    engine = GradientEngine(model, cross_entropy)
    features, labels = torch.randn(4, 6), torch.arange(4) % 3
    torch.manual_seed(3)
    first = engine.norms(features, labels)
    torch.manual_seed(3)
    assert engine.norms(features, labels).equal(first)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Averaging(nn.Module):
    """A running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9999 * self.mean + 1e-4 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("layers", [[Centred(), nn.Dropout(0.1)], [nn.Softmax(0), nn.Dropout(0.1)], [Averaging()]])
def test_dropout_does_not_hide_that_records_mix(layers) -> None:
    torch.manual_seed(0)
    engine = GradientEngine(nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3)), cross_entropy)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


def test_a_batch_norm_without_statistics_of_its_own_is_refused_even_frozen() -> None:
    layer = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
    with pytest.raises(EquidpError, match="'1' is a BatchNorm that takes the batch's statistics"):
        GradientEngine(nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)).eval(), cross_entropy)


def test_a_first_batch_whose_gradients_cancel_is_no_reason_to_refuse_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    nn.init.zeros_(model[0].weight)
    features = torch.rand(1, 4).expand(2, 4)  # at equal logits the gradients of the two labels sum to 0
    assert GradientEngine(model, cross_entropy).norms(features, torch.tensor([0, 1])).isfinite().all()


@pytest.mark.parametrize("first", [torch.full((4, 6), float("nan")), torch.ones(1, 6)], ids=["nan", "one record"])
def test_a_first_batch_that_cannot_be_tried_leaves_the_trial_to_the_next(first) -> None:
    engine = GradientEngine(Mixing(), cross_entropy)
    engine.norms(first, torch.arange(len(first)) % 3)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        ({"text": torch.zeros(2, 4)}, torch.zeros(2)),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), torch.zeros(2)),
        (torch.zeros(2, 4), (torch.zeros(2), torch.zeros(2))),
    ],
)
def test_several_tensors_are_refused_in_a_sentence(features: Any, labels: Any) -> None:
    engine = GradientEngine(nn.Linear(4, 2), cross_entropy)
    with pytest.raises(EquidpError, match="must be one tensor each"):
        engine.norms(features, labels)


class Tokens(nn.Module):
    """A class token and positions beside the layers, and a table looked up once for all records."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last, self.order = nn.Linear(4, 4), nn.Linear(4, 3), nn.Embedding(3, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        places = self.embed(x.unflatten(1, (3, 2, 2)).flatten(2)) + self.order(torch.arange(3).unsqueeze(0))
        places = torch.cat((self.token.expand(len(x), -1, -1), places), 1) + self.positions
        return self.last(torch.tanh(places).mean(1))


def test_what_is_there_once_for_all_records_has_each_ones_gradient(check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no torch.func
        engine = check(Tokens(), torch.randn(5, 12))
    assert {"token", "positions", "order"} <= {site.name for site in engine.passes.sites}
    assert isinstance(engine.model.token, nn.Parameter)  # as it was


def test_a_parameter_that_the_loss_does_not_depend_on_is_refused_by_its_name() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    engine = GradientEngine(Idle(), cross_entropy)
    with pytest.raises(EquidpError, match=r"Parameter 'idle\.weight' and 1 more would be trained and gets no gradient"):
        engine.norms(torch.randn(4, 6), torch.arange(4) % 3)


class Gain(nn.Module):
    """A gain `[1, T, D]` for all records of which the mean over records is used: they meet in the backward pass."""

    def __init__(self, *, zero: bool) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.ones(1, 6, 8)), nn.Linear(8, 2)
        if zero:
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x * self.gain.mean(0)).mean(1).tanh())


@pytest.mark.parametrize("zero", [False, True])
def test_records_that_meet_below_a_last_layer_of_zeros_are_found(zero: bool) -> None:
    engine = GradientEngine(Gain(zero=zero), cross_entropy)
    with pytest.raises(EquidpError):
        engine.norms(torch.randn(8, 6, 8), torch.arange(8) % 2)


def test_a_model_is_tried_out_again_in_another_mode() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    engine = GradientEngine(nn.Sequential(nn.Linear(4, 4), Mixing(), nn.Linear(4, 2)).eval(), cross_entropy)
    batch = torch.randn(8, 4), torch.arange(8) % 2
    engine.norms(*batch)
    engine.train()
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(*batch)


def test_the_parts_of_a_weighted_sum_are_not_all_there_at_once() -> None:
    """Each goes where it belongs as soon as it is made: of a large model all would take as much room as the sum."""
    engine = GradientEngine(nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 60)), signed)
    norms = engine.norms(torch.randn(6, 40), torch.randn(6, 60))
    made, most = list[weakref.ref[Tensor]](), 0

    class Room(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most
            found = function(*args, **(kwargs or {}))
            made.extend(weakref.ref(one) for one in (found if isinstance(found, list) else [found]))
            there = [one.untyped_storage() for ref in made if (one := ref()) is not None]
            most = max(most, sum({one.data_ptr(): one.nbytes() for one in there}.values()))
            return found

    with Room():
        total = engine.weighted_sum(torch.ones_like(norms))
    assert 4 * engine.dimension < most < 2 * 4 * engine.dimension
    assert not total.is_inference()


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not function.is_view:
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize(("width", "copied"), [(4096, 1), (128, 16)], ids=["one by one", "together"])
def test_a_look_copies_the_views_that_have_a_pass_and_no_others(width: int, copied: int) -> None:
    views, records = 16, 4
    engine = GradientEngine(nn.Linear(width, 3), cross_entropy)
    features, labels = torch.randn(views * records, width), torch.arange(records) % 3
    engine.norms(features, labels, views=views)
    with Largest() as seen:
        engine.look(features, labels, views)
    assert seen.most == copied * records * width
