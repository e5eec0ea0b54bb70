"""Standardised convolutions: the derived rule against autograd, record by record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy
from equidp.gradients.standardised import Standardisation, StandardisedConv2d

IMAGES = torch.randn(4, 4, 7, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1])
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0])


def model(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        StandardisedConv2d(4, 6, 3, **settings), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("settings", [{"padding": 1, "bias": False}, {"stride": 2, "groups": 2}, {"dilation": 2}])
def test_norms_and_sums_are_autograds(settings: dict[str, Any], materialise: Callable[..., Tensor]) -> None:
    network = model(**settings)
    gradients = materialise(network, IMAGES, LABELS, CrossEntropy())
    engine = GradientEngine(network, CrossEntropy())
    torch.testing.assert_close(engine.norms(IMAGES, LABELS), gradients.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(engine.weighted_sum(WEIGHTS), WEIGHTS @ gradients, rtol=1e-4, atol=1e-6)


def test_so_are_those_at_older_iterates(materialise: Callable[..., Tensor]) -> None:
    network = model()
    engine = GradientEngine(network, CrossEntropy())
    now = engine.flatten()
    older = now + 0.3 * torch.randn(len(now), generator=torch.Generator().manual_seed(2))
    norms = engine.norms(IMAGES, LABELS, iterates=[(None, 1.0), (older, 0.5)])
    total = engine.weighted_sum(WEIGHTS)
    expected = 0
    for values, share in ((now, 1.0), (older, 0.5)):
        engine.load_(values)
        for parameter in engine.parameters:
            parameter.requires_grad_(True)
        expected = expected + share * materialise(network, IMAGES, LABELS, CrossEntropy())
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total, WEIGHTS @ expected, rtol=1e-4, atol=1e-6)


def test_every_channel_has_mean_zero_and_norm_one_and_equal_weights_give_zeros() -> None:
    weight = torch.randn(5, 3, 2, 2) * 7 + 3
    weight[0] = 2.5
    standardised = Standardisation.of(weight).weight
    torch.testing.assert_close(standardised.sum(1), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(standardised.norm(dim=1), torch.tensor([0.0, 1, 1, 1, 1]), atol=1e-3, rtol=0)


def test_other_padding_than_zeros_is_refused() -> None:
    with pytest.raises(EquidpError, match="pads with zeros alone, not by 'reflect'"):
        StandardisedConv2d(1, 1, 3, padding=1, padding_mode="reflect")
