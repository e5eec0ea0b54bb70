"""Convolutions of volumes and transposed ones: norms and sums are autograd's, record by record."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from equidp.gradients.engine import GradientEngine

LAYERS = {
    "volume": (nn.Conv3d(2, 4, 2), (2, 4, 3, 5)),
    "volume, all settings": (
        nn.Conv3d(4, 6, (3, 2, 1), stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1), groups=2, bias=False),
        (4, 5, 5, 4),
    ),
    "volume, padded by its edge": (nn.Conv3d(2, 2, 3, padding="same", padding_mode="replicate"), (2, 3, 3, 3)),
    "transposed line": (nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 5)),
    "transposed image": (nn.ConvTranspose2d(2, 3, 2), (2, 4, 4)),
    "transposed image, all settings": (
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(2, 1), output_padding=(1, 2), dilation=2, groups=2),
        (4, 4, 3),
    ),
    "transposed image, room for one place more": (
        nn.ConvTranspose2d(2, 2, 3, stride=1, dilation=2, output_padding=1, bias=False),
        (2, 4, 4),
    ),
    "transposed volume": (nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 3, 2)),
    "frozen batch norm of volumes": (nn.BatchNorm3d(2).eval(), (2, 2, 3, 2)),
}


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.sin().flatten(1) - labels.unsqueeze(1)).square().sum(1)


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
