"""Every layer rule against torch.func, over the settings that change its books."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.pretended import pretended_gpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equidp.errors import EquidpError
from equidp.gradients import compiled, convolutions, grouped, lookups, products, rounding, terms, units
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.engine import GradientEngine
from equidp.gradients.lookups import Lookups
from equidp.gradients.products import Products
from equidp.gradients.rounding import SLACK, gram_norms, norms_of
from equidp.gradients.terms import Term, Vectors
from equidp.gradients.units import Units, UnitSums
from equidp.gradients.windows import Kernel

TOLERANCE = 1e-5


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss for outputs of any shape."""
    target = labels.view(-1, *[1] * (outputs.dim() - 1)).to(outputs.dtype)
    return (torch.sin(outputs) - 0.1 * target).square().flatten(1).sum(1)


def close(a: Tensor, b: Tensor) -> None:
    """Equal up to the tolerance times the vector's size."""
    assert a.shape == b.shape
    assert float((a - b).norm()) <= TOLERANCE * max(float(b.norm()), 1e-8)


@pytest.fixture
def holds(materialise) -> Callable[[nn.Module, Tensor], None]:
    return lambda layer, features: equals_reference(layer, features, materialise)


def equals_reference(layer: nn.Module, features: Tensor, materialise: Callable[..., Tensor]) -> None:
    """Norms and a weighted sum equal those of materialised gradients."""
    layer = copy.deepcopy(layer)  # an engine takes its parameters from autograd
    labels = torch.arange(len(features)) % 3
    expected = materialise(layer, features, labels, squared_error)
    engine = GradientEngine(layer, squared_error)
    torch.testing.assert_close(engine.norms(features, labels), expected.norm(dim=1), rtol=TOLERANCE, atol=1e-7)
    weights = torch.rand(len(features))
    weights[1] = 0
    close(engine.weighted_sum(weights), weights @ expected)


pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 2, 5), (40, 5)])
def test_linear(shape, bias, holds) -> None:
    holds(nn.Linear(5, 6, bias=bias), torch.randn(4, *shape))


def test_linear_by_gram_and_by_gradient(holds) -> None:
    for positions in (2, 60):
        holds(nn.Linear(30, 30), torch.randn(3, positions, 30))


@pytest.mark.parametrize(
    ("layer", "features"),
    [
        (lambda: nn.Linear(5, 6), lambda: torch.randn(4, 7, 5)),
        (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), lambda: torch.randn(4, 4, 8, 8)),
        (lambda: nn.Conv2d(2, 6, 3), lambda: torch.randn(4, 2, 8, 8)),
        (lambda: nn.Conv2d(3, 5, 3), lambda: torch.randn(4, 3, 8, 8)),
        (lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: torch.randn(4, 4, 8, 8)),
        (lambda: nn.Conv1d(4, 6, 3), lambda: torch.randn(4, 4, 9)),
        (lambda: nn.Embedding(9, 4), lambda: torch.randint(0, 9, (4, 8))),
    ],
    ids=["linear", "strided", "windows", "odd", "groups", "line", "embedding"],
)
def test_many_positions_are_summed_as_their_norms_were_formed(layer, features, materialise, monkeypatch) -> None:
    """Here all are many, gradients are formed a record or two at a time, and none are kept."""
    for module in (convolutions, grouped, lookups, products):
        monkeypatch.setattr(module, "MANY", 3)
    monkeypatch.setattr(terms, "CHUNK_FLOATS", 300)
    layer, features, labels = layer(), features(), torch.tensor([0, 1, 2, 0])
    expected = materialise(layer, features, labels, squared_error)
    engine = GradientEngine(layer, squared_error)
    engine.passes.workspace.keep_floats, engine.passes.workspace.scratch_floats = 0, 300
    torch.testing.assert_close(engine.norms(features, labels), expected.norm(dim=1), rtol=TOLERANCE, atol=1e-7)
    weights = torch.tensor([0.3, 0.0, 1.2, 0.7])
    for _ in range(2):
        close(engine.weighted_sum(weights), weights @ expected)
    if features.is_floating_point():
        features[1] = torch.nan
        assert engine.norms(features, labels).isnan().tolist() == [False, True, False, False]
        close(engine.weighted_sum(weights), weights @ expected.nan_to_num())


def test_weight_gradients_of_convolutions_do_without_tf32(monkeypatch) -> None:
    """On a GPU; here only the switch can be seen."""
    seen, before = [], torch.backends.cudnn.conv.fp32_precision
    backward = convolutions.conv2d_weight

    def listening(*arguments):
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        return backward(*arguments)

    monkeypatch.setattr(compiled, "gradients_of", lambda *_: None)
    engine = GradientEngine(nn.Sequential(nn.Conv2d(64, 64, 3), nn.Flatten()), squared_error)
    engine.norms(torch.randn(2, 64, 5, 5), torch.arange(2))
    monkeypatch.setattr(convolutions, "conv2d_weight", listening)
    engine.weighted_sum(torch.ones(2))
    assert seen == ["ieee"]
    assert torch.backends.cudnn.conv.fp32_precision == before


@pytest.mark.parametrize("entry", [0.1, 1.1])
def test_norms_of_long_rows_are_not_too_small(entry: float) -> None:
    """Equal entries are the worst case of a float32 sum: in one go a million of them come out 0.17 % short."""
    rows = torch.full((2, 1_000_000), entry)
    ratios = norms_of(rows).double() / rows.double().square().sum(1)
    assert ((ratios - 1).abs() < 1e-4).all()


def test_norms_are_not_too_small_where_no_square_is_held() -> None:
    """A machine may count squares below 2⁻¹²⁶ as 0, each of a row's."""
    rows = torch.full((2, 1000), 1e-19)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine holds them")
    try:
        squared = norms_of(rows)
    finally:
        torch.set_flush_denormal(False)
    assert (squared.double() >= rows.double().square().sum(1)).all()


CONVOLUTIONS = [
    {},
    {"stride": 2},
    {"stride": (1, 2), "padding": (2, 0)},
    {"padding": 1, "bias": False},
    {"dilation": 2},
    {"dilation": (1, 2), "stride": 2, "padding": 3},
    {"groups": 2},
    {"groups": 4, "padding": 1, "stride": 2, "bias": False},
    {"padding": "same"},
    {"padding": "same", "dilation": 2, "groups": 2},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": (2, 1), "padding_mode": "replicate", "stride": 2},
    {"padding": "same", "padding_mode": "circular"},
]


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize(
    ("kernel", "layout"),
    [
        (3, torch.contiguous_format),
        ((2, 4), torch.channels_last),
        (1, torch.contiguous_format),
        pytest.param(3, torch.channels_last, marks=pytest.mark.slow),
        pytest.param((2, 4), torch.contiguous_format, marks=pytest.mark.slow),
        pytest.param(1, torch.channels_last, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("settings", CONVOLUTIONS)
def test_conv2d(settings, kernel, layout, holds, untried) -> None:
    holds(nn.Conv2d(4, 8, kernel, **settings), torch.randn(4, 4, 9, 10).to(memory_format=layout))


@pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "groups": 2}, {"padding": "same"}]
)
def test_conv1d(settings, holds) -> None:
    holds(nn.Conv1d(4, 6, 4, **settings), torch.randn(4, 4, 11))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_windows_of_a_depthwise_convolution_are_not_written_out(layout) -> None:
    """Nothing that its gradients are made of is larger than what the layer sees and gives."""
    features = torch.randn(16, 8, 20, 20).to(memory_format=layout)
    engine = GradientEngine(nn.Conv2d(8, 8, 3, groups=8), lambda outputs, labels: outputs.flatten(1).square().sum(1))
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                largest = max(largest, made.untyped_storage().nbytes())
            return made

    with Sizes():
        norms = engine.passes.norms(features, torch.zeros(16))
        engine.weighted_sum(torch.ones_like(norms))
    assert 0 < largest <= features.untyped_storage().nbytes()


def test_nor_are_they_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all layers would lie there at once: up to 49 times what the layers see."""
    monkeypatch.setattr(Kernel, "windows", None)
    layer, features = nn.Conv2d(4, 8, 3, groups=4, padding=1), torch.randn(3, 4, 6, 6)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.flatten(1).square().sum(1)

    found = BookKeeping(copy.deepcopy(layer), loss).norms(features, torch.zeros(3))
    with pretended_gpu():
        there = BookKeeping(layer.to("cuda"), loss).norms(features.to("cuda"), torch.zeros(3).to("cuda"))
        close(there.cpu(), found)


def test_a_wide_convolution_of_few_pixels(holds) -> None:
    holds(nn.Conv2d(32, 32, 3, padding=1), torch.randn(3, 32, 2, 2))


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 4)])
def test_group_norm(shape, holds) -> None:
    layer = nn.GroupNorm(3, 6)
    nn.init.normal_(layer.weight)
    holds(layer, torch.randn(4, *shape))


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(shape, bias, holds) -> None:
    holds(nn.LayerNorm(6, bias=bias), torch.randn(4, *shape))
    holds(nn.LayerNorm(shape), torch.randn(4, *shape))


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_rms_norm(shape, eps, holds) -> None:
    holds(nn.RMSNorm(6, eps=eps), torch.randn(4, *shape))
    holds(nn.RMSNorm(shape, eps=eps), torch.randn(4, *shape))


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 4)])
@pytest.mark.parametrize("slopes", [1, 6])
def test_prelu(slopes, shape, holds) -> None:
    holds(nn.PReLU(slopes), torch.randn(4, *shape))


def test_frozen_batch_norm(holds) -> None:
    layer = nn.BatchNorm2d(3)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    holds(layer.eval(), torch.randn(4, 3, 5, 5))


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4)])
def test_embedding(shape, padding, holds) -> None:
    holds(nn.Embedding(5, 6, padding_idx=padding), torch.randint(0, 5, (4, *shape)))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "layer", [nn.Linear(5, 3), nn.GroupNorm(1, 5), nn.LayerNorm(5)], ids=lambda m: type(m).__name__
)
def test_either_parameter_may_be_frozen(layer, name, holds) -> None:
    layer.requires_grad_(True).get_parameter(name).requires_grad_(False)
    holds(layer, torch.randn(4, 5))


@pytest.mark.filterwarnings("ignore:Layer .* has no gradient rule")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.InstanceNorm1d(6, affine=True), (6, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_without_a_rule(layer, shape, holds) -> None:
    holds(layer, torch.randn(4, *shape))


@pytest.mark.parametrize(
    "term",
    [
        lambda: Products([torch.randn(4, 3, 5)], [torch.randn(4, 3, 6)]),
        lambda: Products([torch.randn(4, 50, 5)], [torch.randn(4, 50, 6)]),
        lambda: Lookups(torch.randint(0, 3, (4, 8)), torch.randn(4, 8, 2), 3),
        lambda: Vectors(torch.randn(4, 9)),
    ],
)
def test_a_term_agrees_with_its_own_gradients(term) -> None:
    term: Term = term()
    rows = term.gradients(0, 4)
    torch.testing.assert_close(term.squared_norms().float(), rows.square().sum(1), rtol=1e-5, atol=1e-6)
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5])
    for silent in (None, weights == 0):
        close(term.weighted_sum(weights, silent), weights @ rows)
    expected = torch.stack([rows[0], rows[1:].mean(0)]).square().sum(1)
    sums = UnitSums([term], Units.of(torch.tensor([0, 1, 1, 1])), rows.shape[1])
    torch.testing.assert_close(sums.squared_norms(), expected, rtol=1e-5, atol=1e-6)
    means = torch.stack([rows[0], rows[1:].mean(0)])
    for shares in (torch.tensor([0.5, 2.0]), torch.tensor([0.0, 2.0])):
        for silent in (None, shares == 0):
            close(sums.weighted_sum(shares, silent), shares @ means)


def test_sums_of_units_are_kept_or_formed_again_to_the_same_bit(monkeypatch) -> None:
    engine = GradientEngine(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), squared_error)
    features, labels, owners = torch.randn(9, 6), torch.arange(9) % 3, torch.tensor([0, 1, 1, 2, 3, 3, 3, 3, 4])
    found = []
    for kept in (units.KEPT_SUMS, 0):
        monkeypatch.setattr(units, "KEPT_SUMS", kept)
        norms = engine.norms(features, labels, owners=owners)
        found.append(torch.cat([norms, engine.weighted_sum(1 / (norms + 0.01))]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(lambda: nn.Linear(6, 5), (6,)), (lambda: nn.Linear(6, 5), (3, 6)), (lambda: nn.Conv2d(2, 3, 2), (2, 4, 4))],
    ids=["vectors", "sequences", "images"],
)
def test_units_may_be_formed_a_few_at_a_time(layer, shape, materialise, monkeypatch) -> None:
    """Two of a weight here, and two records at a time of a unit of five."""
    monkeypatch.setattr(terms, "CHUNK_FLOATS", 70)
    model, features, owners = layer(), torch.randn(15, *shape), torch.tensor([0, 0, 1, 2, 2, 3, 3, *[4] * 5, 5, 6, 6])
    labels, weights = torch.arange(15) % 3, torch.rand(7)
    rows = materialise(model, features, labels, squared_error)
    expected = torch.stack([rows[owners == u].mean(0) for u in range(7)])
    engine = GradientEngine(model, squared_error)
    for kept in (units.KEPT_SUMS, 0):
        monkeypatch.setattr(units, "KEPT_SUMS", kept)
        norms = engine.norms(features, labels, owners=owners)
        torch.testing.assert_close(norms, expected.norm(dim=1), rtol=TOLERANCE, atol=1e-7)
        close(engine.weighted_sum(weights), weights @ expected)


def test_records_of_a_unit_stand_together() -> None:
    with pytest.raises(EquidpError, match="stand together"):
        Units.of(torch.tensor([0, 1, 0]))


def test_cancellation_in_a_gram_sum_never_understates_a_norm() -> None:
    """Where positions cancel up to rounding the Gram sum may lose every digit; the norm may not fall below truth."""
    inputs = torch.randn(50, 1, 64).mul(1e4).repeat(1, 2, 1)
    backprops = torch.randn(50, 1, 64).repeat(1, 2, 1)
    backprops[:, 1] *= -(1 + 1e-6)
    term = Products([inputs], [backprops])
    truth = (backprops.double().transpose(1, 2) @ inputs.double()).flatten(1).square().sum(1)
    assert (term.squared_norms().double() >= truth * (1 - 1e-4)).all()


def test_equal_products_in_a_gram_sum_never_understate_a_norm() -> None:
    """All entries equal is what float32 sums worst: by 1.4e-6 of the terms' size here, where 2.3e-5 of it is left."""
    inputs, backprops = torch.ones(1, 64, 512), torch.ones(1, 64, 512)
    inputs[:, :32], backprops[:, 32:] = 1.3, -1.3 * 1.01
    term = Products([inputs], [backprops])
    truth = (backprops.double().transpose(1, 2) @ inputs.double()).square().sum()
    assert term.squared_norms().double() >= truth * (1 - 1e-4)


def test_a_gram_sum_below_zero_is_rounding_of_a_norm_that_is_not() -> None:
    left, right = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]]), torch.tensor([[[1.0, 1.0001], [1.0001, 1.0]]])
    assert gram_norms(left, right, 4).tolist() == pytest.approx([SLACK * 4], rel=1e-5)


def test_a_gram_sum_that_was_rounded_upwards_is_within_its_overstatement() -> None:
    """Positions that cancel, and every product above 0 one last digit larger, as another processor may round it."""
    signs = torch.ones(1, 16, 4).index_fill(1, torch.arange(8), -1.0)
    term = Products([torch.ones(1, 16, 4)], [signs])
    ((left, right),) = term.grams()
    upwards = torch.where(left * right > 0, left * (1 + 2**-23), left)
    assert gram_norms(left, right, term.width) < gram_norms(upwards, right, term.width) <= term.overstatement()


def test_where_a_gram_sum_begins_to_be_raised_it_does_not_jump() -> None:
    """At a thousandth of the terms' size, by a few last digits of a product: no norm may move by a thousandth."""
    products = torch.tensor([0.998 - 2**-22, 0.998 + 2**-22])
    left = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) - products[:, None, None] * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    sums = left.sum((1, 2))
    assert sums[1] < rounding.CANCELLATION * 4 < sums[0]
    found = gram_norms(left, torch.ones(2, 2, 2), 4)
    torch.testing.assert_close(found, sums, rtol=1e-5, atol=0)


def test_convolutions_that_share_a_weight_and_one_that_is_called_at_two_sizes(holds) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(torch.tanh(self.first(x)))
            return self.first(x[:, :, ::2, 1:]).flatten(1)

    holds(Shared(), torch.randn(4, 3, 6, 5))


def test_on_a_gpu_too_a_padded_convolution_may_see_images_of_two_sizes() -> None:
    class TwoSizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(2, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.convolution(self.convolution(x)[:, :2, :4, :3]).mean((2, 3))

    model, features, labels = TwoSizes(), torch.randn(3, 2, 5, 5), torch.arange(3)
    with pretended_gpu():
        there = BookKeeping(copy.deepcopy(model).to("cuda"), squared_error)
        found = there.norms(features.to("cuda"), labels.to("cuda")).cpu()
    close(found, BookKeeping(model, squared_error).norms(features, labels))


@pytest.mark.parametrize("kind", [torch.float64, torch.bool])
def test_on_a_gpu_too_weights_may_be_of_another_type(kind: torch.dtype) -> None:
    model, features = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten(), nn.Linear(3, 3)), torch.randn(4, 1, 4, 4)
    labels, weights = torch.arange(4) % 3, torch.tensor([1, 0, 1, 1]).to(kind)
    here = BookKeeping(copy.deepcopy(model), squared_error)
    here.norms(features, labels)
    with pretended_gpu():
        there = BookKeeping(model.to("cuda"), squared_error)
        there.norms(features.to("cuda"), labels.to("cuda"))
        found = there.weighted_sum(weights.to("cuda")).cpu()
    close(found, here.weighted_sum(weights))


def test_on_a_gpu_too_a_pass_may_leave_out_all_that_is_trained() -> None:
    """As stochastic depth does by chance."""
    model = nn.Sequential(nn.Linear(3, 3))
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pretended_gpu():
        there = BookKeeping(model.to("cuda"), squared_error)
        norms = there.norms(torch.randn(4, 3).to("cuda"), (torch.arange(4) % 3).to("cuda"))
        total = there.weighted_sum(torch.ones_like(norms)).cpu()
    assert not norms.cpu().any()
    assert not total.any()


def test_a_weight_that_three_layers_share(holds) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
            for layer in self.layers[1:]:
                layer.weight = self.layers[0].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    holds(Shared(), torch.randn(4, 5))


def test_a_layer_that_is_called_on_sequences_of_two_lengths(holds) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x), self.layer(x[:, ::2])], 1)

    holds(Twice(), torch.randn(4, 40, 5))
