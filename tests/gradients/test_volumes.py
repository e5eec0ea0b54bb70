"""Convolutions of volumes and transposed ones: norms and sums are autograd's, record by record."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from equidp.gradients import grouped, terms, volumes
from equidp.gradients.engine import GradientEngine
from equidp.system.machine_code import registers_here

LAYERS = {
    "volume": (nn.Conv3d(2, 4, 2), (2, 4, 3, 5)),
    "volume, all settings": (
        nn.Conv3d(4, 6, (3, 2, 1), stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1), groups=2, bias=False),
        (4, 5, 5, 4),
    ),
    "volume, strided and dilated": (
        nn.Conv3d(2, 4, (2, 3, 2), stride=(2, 1, 2), padding=(1, 0, 1), dilation=(2, 1, 1)),
        (2, 7, 5, 6),
    ),
    "volume of many places": (nn.Conv3d(1, 2, 3, padding=1), (1, 6, 6, 7)),
    "volume, padded by its edge": (nn.Conv3d(2, 2, 3, padding="same", padding_mode="replicate"), (2, 3, 3, 3)),
    "transposed line": (nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 5)),
    "transposed image": (nn.ConvTranspose2d(2, 3, 2), (2, 4, 4)),
    "transposed image, all settings": (
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(2, 1), output_padding=(1, 2), dilation=2, groups=2),
        (4, 4, 3),
    ),
    "transposed image, strided and dilated": (
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(2, 1), output_padding=(1, 2), dilation=2),
        (4, 4, 3),
    ),
    "transposed line, all settings": (
        nn.ConvTranspose1d(3, 2, 4, stride=3, padding=1, output_padding=2, dilation=2, bias=False),
        (3, 40),
    ),
    "transposed image of many places": (nn.ConvTranspose2d(3, 2, 2, stride=2), (3, 11, 10)),
    "transposed image, room for one place more": (
        nn.ConvTranspose2d(2, 2, 3, stride=1, dilation=2, output_padding=1, bias=False),
        (2, 4, 4),
    ),
    "transposed volume": (nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 3, 2)),
    "frozen batch norm of volumes": (nn.BatchNorm3d(2).eval(), (2, 2, 3, 2)),
}


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.sin().flatten(1) - labels.unsqueeze(1)).square().sum(1)


class Sizes(TorchDispatchMode):
    """Finds the most floats of the memory behind a tensor."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.untyped_storage().nbytes() // 4)
        return made


@pytest.mark.usefixtures("way", "untried")
@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_sums_are_those_of_autograd(name: str) -> None:
    torch.manual_seed(3)
    layer, shape = LAYERS[name]
    features, labels = torch.randn(3, *shape), torch.tensor([0.1, 0.0, 0.3])
    twice = nn.Sequential(copy.deepcopy(layer)).eval()  # a name, as layers in a model have
    weights, each = torch.tensor([1.0, 0.5, 0.0]), []
    for x, y in zip(features, labels, strict=True):
        found = torch.autograd.grad(loss(twice(x[None]), y[None]).sum(), tuple(twice.parameters()))
        each.append(torch.cat([gradient.flatten() for gradient in found]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none goes through torch.func
        engine = GradientEngine(twice, loss)
    torch.testing.assert_close(engine.norms(features, labels), torch.stack(each).norm(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        engine.weighted_sum(weights), weights @ torch.stack(each), rtol=1e-4, atol=1e-5 * float(each[0].norm())
    )


@pytest.mark.usefixtures("way", "untried")
@pytest.mark.parametrize("name", LAYERS)
def test_units_of_records_too(name: str) -> None:
    torch.manual_seed(4)
    layer, shape = LAYERS[name]
    model = nn.Sequential(copy.deepcopy(layer)).eval()
    features, labels, owners = torch.randn(4, *shape), torch.randn(4), torch.tensor([0, 0, 1, 1])
    engine = GradientEngine(model, loss)
    each = [engine.plain_sum(features[some], labels[some]) / 2 for some in (slice(2), slice(2, 4))]
    norms = engine.norms(features, labels, owners=owners)
    torch.testing.assert_close(norms, torch.stack(each).norm(dim=1), rtol=1e-5, atol=1e-6)
    total = engine.weighted_sum(torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(total, 0.5 * each[0] + 2 * each[1], rtol=1e-4, atol=1e-5 * float(norms.sum()))


@pytest.fixture
def on_gpu_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No convolution is taken as one of images, as on a GPU."""
    monkeypatch.setattr(volumes, "_as_images", lambda *_: False)


@pytest.mark.usefixtures("on_gpu_way", "untried")
@pytest.mark.parametrize("many", [1, 1000])
@pytest.mark.parametrize("name", [*LAYERS, "called twice"])
def test_windows_may_be_cut_by_records_and_by_positions(name: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits are those of windows that are written out at once, whether their gradients are kept or not."""
    for module in (grouped, terms):
        monkeypatch.setattr(module, "MANY", many)
    layer, shape = LAYERS.get(name) or (nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2), (4, 5, 4))
    engine = GradientEngine(nn.Sequential(*[copy.deepcopy(layer)] * (1 + (name not in LAYERS))).eval(), loss)
    torch.manual_seed(5)
    features, labels, weights = torch.randn(5, *shape), torch.randn(5), torch.tensor([0.3, 0.0, 1.2, 0.7, 0.1])
    spoilt, found = features.clone(), []
    spoilt[1] = torch.nan
    for scratch, windows, room in ((1 << 20, 1 << 26, 1 << 26), (1, 1 << 26, 0), (1, 200, 0), (1, 1, 1 << 26)):
        workspace = engine.passes.workspace
        workspace.scratch_floats, workspace.window_floats, workspace.roomy_floats = scratch, windows, room
        norms, total = engine.norms(features, labels), engine.weighted_sum(weights)
        engine.norms(spoilt, labels)
        found.append((norms, total, engine.weighted_sum(weights)))
    for one in found[1:]:
        for mine, expected in zip(one, found[0], strict=True):
            assert (mine - expected).norm() <= 1e-5 * expected.norm()
    assert all(map(torch.equal, found[0][:2], found[1][:2]))


@pytest.mark.usefixtures("on_gpu_way", "untried")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(8, 8, 3, padding=1, groups=2), (8, 12, 12)),
        (nn.Conv3d(4, 4, 3, padding=1), (4, 6, 6, 6)),
        (nn.ConvTranspose2d(4, 4, 3, padding=1), (4, 12, 12)),
    ],
)
def test_no_windows_are_held_from_norms_to_sum(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Those of a whole batch would take 9 times the memory of images, and 27 times that of volumes."""
    engine, features = GradientEngine(nn.Sequential(layer), loss), torch.randn(32, *shape)
    workspace = engine.passes.workspace
    engine.norms(features, torch.zeros(32))
    workspace.scratch_floats = features.numel() // 2
    workspace._buffers.clear()
    with Sizes() as sizes:
        norms = engine.passes.norms(features, torch.zeros(32))
        engine.weighted_sum(torch.ones_like(norms))
    assert 0 < sizes.largest <= 2 * features.numel()


def test_windows_are_written_once_for_the_norms_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are known from the gradients: both are of the same windows."""
    engine, written = GradientEngine(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), loss), list[int]()
    write = grouped._written
    monkeypatch.setattr(grouped, "_written", lambda views, room: written.append(len(room)) or write(views, room))
    features, owners = torch.randn(6, 4, 9, 9), torch.tensor([0, 0, 1, 1, 1, 2])
    engine.passes.norms(features, torch.zeros(6), owners=owners)
    assert sum(written) == 6


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv3d(4, 8, 3, padding=1), (4, 6, 8, 8)), (nn.ConvTranspose2d(8, 4, 3), (8, 12, 12))]
)
def test_their_windows_are_not_written_out(layer, shape) -> None:
    """These are 27 times as large as the volumes, and 9 times as the images."""
    engine, features = GradientEngine(nn.Sequential(layer), loss), torch.randn(16, *shape)
    engine.norms(features, torch.zeros(16))  # what is kept from step to step
    if registers_here() is None:
        pytest.skip("no compiled code on this machine")
    allowed = 2 * max(features.numel(), layer(features).numel())
    with Sizes() as sizes:
        norms = engine.passes.norms(features, torch.zeros(16))
        engine.weighted_sum(torch.ones_like(norms))
    assert 0 < sizes.largest <= allowed
