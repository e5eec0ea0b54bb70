"""Seeded randomness: its streams are the ones their names promise, and share nothing with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equidp.errors import EquidpError
from equidp.mechanism.noise import RandomSource, SeededRandom, Stream
from equidp.mechanism.secure import SecureRandom

STREAMS = get_args(Stream)


def start_of(random: SeededRandom) -> dict[str, list[float]]:
    """The first values of every stream; nothing is drawn twice."""
    return {stream: random.uniform(4, stream).tolist() for stream in STREAMS}


class TestStreams:
    """One seed, several streams: who knows one knows nothing of the others."""

    def test_no_two_have_a_value_in_common(self) -> None:
        first = start_of(SeededRandom(0, "cpu"))
        assert len({value for values in first.values() for value in values}) == 4 * len(STREAMS)

    def test_seeds_repeat_and_differ(self) -> None:
        assert start_of(SeededRandom(1, "cpu")) == start_of(SeededRandom(1, "cpu"))
        assert start_of(SeededRandom(1, "cpu")) != start_of(SeededRandom(2, "cpu"))

    @pytest.mark.parametrize("draw", [lambda r: r.bernoulli(0.5, 9), lambda r: r.uniform(9), lambda r: r.words(9)])
    def test_batches_do_not_move_the_noise(self, draw: Callable[[SeededRandom], Tensor]) -> None:
        moved, still = SeededRandom(3, "cpu"), SeededRandom(3, "cpu")
        draw(moved)
        assert torch.equal(moved.normal(5), still.normal(5))

    def test_noise_does_not_move_batches_or_decisions(self) -> None:
        moved, still = SeededRandom(3, "cpu"), SeededRandom(3, "cpu")
        moved.perturb(torch.zeros(7), sensitivity=1.0, noise_multiplier=1.0)
        assert moved.uniform(5).tolist() == still.uniform(5).tolist()
        assert moved.uniform(5, "acceptance").tolist() == still.uniform(5, "acceptance").tolist()

    def test_every_life_has_streams_of_its_own(self) -> None:
        """Noise drawn twice at two states of the model would cancel in their difference."""
        lives = []
        for life in (None, 1, 2):
            random = SeededRandom(4, "cpu")
            if life is not None:
                random.renew(life)
            lives.append(start_of(random))
        values = [value for life in lives for stream in life.values() for value in stream]
        assert len(set(values)) == len(values) == 3 * 4 * len(STREAMS)


def test_a_noised_sum_takes_no_memory_beside_its_noise() -> None:
    """Of a large model each tensor more costs as much as a pass over it."""
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            made.append(found.untyped_storage().data_ptr())
            return found

    values, exact = torch.randn(5000), torch.randn(5000, dtype=torch.float64)
    before = values.clone()
    with Made():
        noised = SeededRandom(0, "cpu").perturb(values, sensitivity=2.0, noise_multiplier=3.0)
    assert len(set(made)) == 1
    assert torch.equal(values, before)
    assert torch.equal(noised, values + 6.0 * SeededRandom(0, "cpu").normal(5000))
    assert SeededRandom(0, "cpu").perturb(exact, sensitivity=2.0, noise_multiplier=3.0).dtype == torch.float64


def test_coins_are_finer_than_float32() -> None:
    """With steps of 2⁻²⁴ a rate of a millionth would be off by some per cent."""
    steps = SeededRandom(0, "cpu").uniform(100) * 2**24
    assert (steps != steps.round()).all()


@pytest.mark.parametrize("rate", [0.0, torch.zeros(3, dtype=torch.float64)], ids=["of all", "of each"])
def test_who_may_not_come_never_does(rate: float | Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on the lowest coin that there is."""
    random = SeededRandom(0, "cpu")
    monkeypatch.setattr(random, "uniform", lambda size: torch.zeros(size, dtype=torch.float64))
    assert not random.bernoulli(rate, 3).any()


@pytest.mark.parametrize("sensitivity", [3.0, torch.tensor(3.0)])
def test_noise_is_scaled_by_multiplier_and_sensitivity(sensitivity: float | Tensor) -> None:
    values = torch.arange(5.0)
    noised = SeededRandom(5, "cpu").perturb(values, sensitivity=sensitivity, noise_multiplier=2.0)
    torch.testing.assert_close(noised, values + 6.0 * SeededRandom(5, "cpu").normal(5))


@pytest.mark.parametrize("random", [SeededRandom(0, "cpu"), SecureRandom("cpu")])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), ()])
def test_what_is_noised_is_a_vector(random: RandomSource, shape: tuple[int, ...]) -> None:
    """Of a table the rows would share their noise."""
    with pytest.raises(EquidpError, match="noise is drawn for a vector"):
        random.perturb(torch.zeros(shape), sensitivity=1.0, noise_multiplier=1.0)
