"""`make_private` on a GPU: seeded it has the CPU's result, and a secure loop runs; tried on a pretended one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.pretended import as_on_gpu, pretended_gpu
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.mechanism.sampling import Examples
from equidp.mechanism.trainer import Trainer
from equidp.training import make_private

RECORDS = 24


class Read(nn.Module):
    """Words and numbers of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.values, self.out = nn.Embedding(9, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, text: Tensor, numbers: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(text).mean(1) + self.values(numbers)))


def each(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def loop(device: str, seed: int | None, *, by_unit: bool) -> Trainer:
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(RECORDS, 4, generator=random)
    labels = torch.randint(0, 2, (RECORDS,), generator=random)
    text = torch.randint(0, 9, (RECORDS, 5), generator=random)
    features: Any = {"text": text, "numbers": numbers}
    unit = torch.arange(RECORDS) // 2 if by_unit else None
    torch.manual_seed(1)
    trainer = make_private(
        Read(), Examples(features, labels, unit=unit), each, algorithm="dpsgd_f", classes=2, noise_multiplier=1.0,
        delta=1e-4, epochs=4, batch_size=6, learning_rate=0.1, seed=seed, device=device,
    )  # fmt: skip
    trainer.run_steps(3)
    return trainer


class Windows(nn.Module):
    """A row for each of a record's windows, and a recurrence along them."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.along, self.out = nn.Linear(4, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        windows = torch.tanh(self.window(x.unflatten(1, (3, 4)).flatten(0, 1)))
        return self.out(self.along(windows.unflatten(0, (-1, 3)))[0][:, -1])


def test_windows_and_recurrence_have_the_cpus_result() -> None:
    """Their model is tried there, too, in the first batch and again in later ones."""
    random = torch.Generator().manual_seed(0)
    records = torch.randn(RECORDS, 12, generator=random), torch.randint(0, 2, (RECORDS,), generator=random)
    found = []
    for device, where in (("cpu", as_on_gpu), ("cuda", pretended_gpu)):
        torch.manual_seed(1)
        with where():
            trainer = make_private(
                Windows(), records, each, algorithm="dpsgd", noise_multiplier=1.0, delta=1e-4, epochs=4, batch_size=6,
                learning_rate=0.1, seed=1, device=device,
            )  # fmt: skip
            trainer.run_steps(2)
            found.append(trainer.engine.flatten().cpu())
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_unit", [False, True])
def test_a_loop_of_a_network_of_ones_own_on_a_gpu(by_unit: bool) -> None:
    with as_on_gpu():
        here = loop("cpu", 1, by_unit=by_unit)
    with pretended_gpu(), tried_once():
        there, secure = (loop("cuda", seed, by_unit=by_unit) for seed in (1, None))
    assert (there.engine.flatten().is_cuda, here.engine.flatten().is_cuda) == (True, False)
    torch.testing.assert_close(there.engine.flatten().cpu(), here.engine.flatten(), rtol=0, atol=1e-6)
    assert there.ledger.done == here.ledger.done == secure.ledger.done
    assert not torch.equal(secure.engine.flatten().cpu(), here.engine.flatten())
