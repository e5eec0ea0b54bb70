"""Several views of a record: its gradient is the mean of theirs, its norm the mean's norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equidp.gradients import bookkeeping
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy
from equidp.gradients.standardised import StandardisedConv2d

VIEWS, LABELS = 3, torch.tensor([0, 1, 2, 1])
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0])


class Scaled(nn.Module):
    """A layer that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(36))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def convolutional() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def standardised() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 6, 6)), StandardisedConv2d(1, 4, 3), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one linear layer, without autograd": lambda: nn.Linear(36, 3),
    "convolutions": convolutional,
    "standardised convolutions": standardised,
    "a layer without a rule": lambda: nn.Sequential(Scaled(), nn.LayerNorm(36), nn.Linear(36, 3)),
}


def made(name: str, views: int = VIEWS) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(views * 4, 36)


@pytest.mark.filterwarnings("ignore:Layer .* has no gradient rule")
@pytest.mark.parametrize("few", [0, 1 << 17], ids=["a pass each", "one pass"])
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_autograds_on_the_mean_of_views(
    name: str, few: int, materialise: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeping, "FEW_FLOATS", few)
    network, features = made(name)
    rows = materialise(network, features, LABELS.repeat(VIEWS), CrossEntropy())
    each = rows.unflatten(0, (VIEWS, 4)).mean(0)
    engine = GradientEngine(network, CrossEntropy())
    norms = engine.norms(features, LABELS, views=VIEWS)
    torch.testing.assert_close(norms, each.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(engine.weighted_sum(WEIGHTS), WEIGHTS @ each, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(engine.plain_sum(features, LABELS, views=VIEWS), each.sum(0), rtol=1e-4, atol=1e-5)
    owners = torch.tensor([0, 0, 0, 1])
    units = torch.stack([each[:3].mean(0), each[3]])
    norms = engine.norms(features, LABELS, views=VIEWS, owners=owners)
    torch.testing.assert_close(norms, units.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(engine.weighted_sum(WEIGHTS[2:]), WEIGHTS[2:] @ units, rtol=1e-4, atol=1e-6)
    total = engine.plain_sum(features, LABELS, views=VIEWS, owners=owners)
    torch.testing.assert_close(total, units.sum(0), rtol=1e-4, atol=1e-5)


def test_views_that_are_all_the_record_itself_change_nothing() -> None:
    network, features = made("convolutions", views=1)
    engine = GradientEngine(network, CrossEntropy())
    plain, total = engine.norms(features, LABELS), engine.weighted_sum(WEIGHTS)
    torch.testing.assert_close(engine.norms(features.repeat(4, 1), LABELS, views=4), plain)
    torch.testing.assert_close(engine.weighted_sum(WEIGHTS), total)


def test_views_of_no_record_are_none() -> None:
    network, features = made("convolutions")
    engine = GradientEngine(network, CrossEntropy())
    assert engine.norms(features[:0], LABELS[:0], views=VIEWS).shape == (0,)
    assert not engine.weighted_sum(WEIGHTS[:0]).any()
    assert not engine.plain_sum(features[:0], LABELS[:0], views=VIEWS).any()


def test_a_record_whose_views_cancel_has_a_norm_that_is_not_below_its_gradients() -> None:
    """Its two views' gradients are opposite: what is left of their sum is rounding."""
    network = nn.Linear(36, 3, bias=False)
    features = torch.randn(4, 36) * 100
    engine = GradientEngine(network, lambda outputs, labels: outputs.sum(1))
    norms = engine.norms(torch.cat([features, -features]), LABELS, views=2)
    assert (norms >= torch.stack([engine.weighted_sum(one) for one in torch.eye(4)]).norm(dim=1)).all()
