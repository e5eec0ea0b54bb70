"""`make_private` on a GPU: seeded it has the CPU's result, and a secure loop runs; tried on a pretended one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.pretended import MEMORY, as_on_gpu, pretended_gpu
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.memory import PER_PARAMETER, SHARE, kept_per_record
from equidp.mechanism.noise import HOST, SeededRandom
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


@pytest.mark.slow
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


def on_gpu(model: nn.Module, loss: Any = each, *, whole: bool = False) -> Trainer:
    """A trainer of 24 records, `[4]` numbers each, or whole numbers from 1 to 3."""
    features = torch.arange(4 * RECORDS).view(RECORDS, 4)
    given = features % 3 + 1 if whole else features.sin()
    return make_private(
        model, (given, torch.arange(RECORDS) % 2), loss, noise_multiplier=1.0, delta=1e-4, epochs=4, batch_size=6,
        learning_rate=0.1, seed=1, device="cuda",
    )  # fmt: skip


def test_a_loss_goes_where_the_model_goes() -> None:
    """With its weights of classes, which lie on the CPU."""
    with pretended_gpu(), tried_once():
        trainer = on_gpu(nn.Linear(4, 2), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), reduction="none"))
        trainer.run_steps(1)
    assert trainer.steps_done == 1


class Around(nn.Module):
    """A layer, and what a function makes of its outputs."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 2), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.layer(x))


class Divided(nn.Module):
    """Fails on records without a number other than zero, as packing of texts without a word does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        if not words.any():
            raise RuntimeError("Length of all samples has to be greater than 0")
        return self.table(words).mean(1)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Around(lambda x: (x, None)), each, "The model gives a tuple, and must give one tensor"),
        (Around(torch.ones(2).mul), each, "The model fails on the features.*another device: let a layer hold it"),
        (Around(torch.clone), lambda o, y: each(o * torch.ones(2), y), "The loss fails on.*bring it there"),
    ],
    ids=["tuple", "model", "loss"],
)
def test_what_a_gpu_does_not_take_is_told_in_a_sentence(model: nn.Module, loss: Any, message: str) -> None:
    """Its memory is measured by a pass of the model: this failed first, and without a word on why."""
    with pretended_gpu(), pytest.raises(EquidpError, match=message):
        on_gpu(model, loss).run_steps(1)


def test_a_model_that_fails_on_zeros_takes_whole_batches() -> None:
    with pretended_gpu():
        trainer = on_gpu(Divided(), whole=True)
    assert trainer.physical_batch_size is None


def test_where_the_number_of_records_is_protected_it_does_not_show_in_how_many_are_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their true number did: with one record more less memory is free, and all sums are rounded differently."""
    found = set()
    with pretended_gpu(), tried_once():
        model = nn.Linear(4, 2)
        kept, trained = kept_per_record(model.to("cuda"), torch.zeros(1, 4).to("cuda")), 10
        left = math.ceil((2 * 8 * kept + PER_PARAMETER * trained) / SHARE)  # exactly enough for 8
        for there in (RECORDS - 1, RECORDS, RECORDS + 1):
            each_of = 4 * 4 + 2 * 8
            free, held = left + (RECORDS - there) * each_of, there * each_of + 4 * trained
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, MEMORY))
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, held=held: held)
            trainer = make_private(
                nn.Linear(4, 2), (torch.ones(there, 4), torch.arange(there) % 2), each, algorithm="dpis",
                options={"declared_records": RECORDS}, noise_multiplier=5.0, delta=1e-4, epochs=1, batch_size=6,
                learning_rate=0.1, seed=1, device="cuda",
            )  # fmt: skip
            found.add(trainer.physical_batch_size)
    assert found == {8}


def test_the_state_of_a_run_on_a_gpu_is_refused_on_a_cpu_as_a_whole() -> None:
    random = SeededRandom(1, "cpu")
    state = random.state_dict() | {HOST: torch.get_rng_state(), "noise": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(EquidpError, match="on another device"):
        random.load_state_dict(state)
    with as_on_gpu():
        one, other = (loop("cpu", seed, by_unit=False) for seed in (1, 2))
    before = other.engine.flatten()
    with pytest.raises(EquidpError, match="on another device"):
        other.load_state_dict(one.state_dict() | {"random": state})
    assert torch.equal(other.engine.flatten(), before)


@pytest.mark.parametrize("by_unit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_loop_of_a_network_of_ones_own_on_a_gpu(by_unit: bool) -> None:
    with as_on_gpu():
        here = loop("cpu", 1, by_unit=by_unit)
    with pretended_gpu(), tried_once():
        there, secure = (loop("cuda", seed, by_unit=by_unit) for seed in (1, None))
    assert (there.engine.flatten().is_cuda, here.engine.flatten().is_cuda) == (True, False)
    torch.testing.assert_close(there.engine.flatten().cpu(), here.engine.flatten(), rtol=0, atol=1e-6)
    assert there.ledger.done == here.ledger.done == secure.ledger.done
    assert not torch.equal(secure.engine.flatten().cpu(), here.engine.flatten())
