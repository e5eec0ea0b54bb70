"""The reference that every gradient of the engine is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests import tried
from torch import Tensor, nn

from equidp.gradients import bookkeeping, compiled
from equidp.system.machine_code import registers_here


def _materialise(model: nn.Module, features: Tensor, labels: Tensor, loss: Callable[..., Tensor]) -> Tensor:
    named = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0)).sum()

    rows = [torch.func.grad(one)(named, x, y) for x, y in zip(features, labels, strict=True)]
    return torch.stack([torch.cat([g.flatten() for g in row.values()]) for row in rows])


@pytest.fixture(scope="session")
def materialise() -> Callable[..., Tensor]:
    """`(model, features, labels, loss)` to `[b, d]`: every record's gradient by torch.func, one record at a time."""
    return _materialise


@pytest.fixture
def untried() -> Iterator[None]:
    """No model is tried: the test holds its gradients to autograd's itself."""
    with tried.untried():
        yield


@pytest.fixture
def half_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision on a CPU, in the place of a GPU's: all numbers are finite."""
    monkeypatch.setattr(bookkeeping, "refuse_half_on_cpu", lambda *_: None)


@pytest.fixture(params=["compiled", "by torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over positions by compiled code, where this machine has any, and by torch's operations."""
    if request.param == "by torch":
        monkeypatch.setattr(compiled, "gradients_of", lambda *_: None)
    elif registers_here() is None:
        pytest.skip("no compiled code on this machine")
