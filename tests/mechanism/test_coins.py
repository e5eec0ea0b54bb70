"""Batches of a sampler of one's own, judged: just at each limit, just beyond it, and by true coins never."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equidp.mechanism import coins
from equidp.mechanism.coins import Coins

TWICE = "units that are not distinct and in ascending order"
ONE_SIZE = "batches of one size"


def told(size: int, rate: float | None, *batches: Tensor | range) -> list[str]:
    """What is told of each batch in turn, up to its comma or colon."""
    judge = Coins(size)
    found = [judge.unlike(torch.as_tensor(batch, dtype=torch.int64), rate) for batch in batches]
    return [words.partition(":")[0].partition(",")[0] for words in found]


@pytest.mark.parametrize("rate", [0.5, None])
def test_a_unit_that_is_drawn_twice_and_one_that_is_not_there_are_told(rate: float | None) -> None:
    for batch in ([1, 1], [2, 1], [0, 3, 3]):
        assert told(10, rate, torch.tensor(batch)) == [TWICE]
    for batch in ([0, 10], [-1, 3]):
        assert told(10, rate, torch.tensor(batch)) == [f"units from {batch[0]} to {batch[-1]}"]
    assert told(10, rate, torch.tensor([0, 9]), range(0)) == ["", ""]


def test_of_units_with_rates_of_their_own_neither_sizes_nor_turns_are_judged() -> None:
    assert not any(told(100, None, *[range(100)] * 40))


def test_more_units_than_expected_are_told_in_one_batch_and_over_several() -> None:
    """Ten standard deviations and 20: of 100 expected 220, of 200 after two batches 361."""
    assert told(1000, 0.1, range(220)) == [""]
    assert told(1000, 0.1, range(221)) == ["221 units by step 1"]
    assert told(1000, 0.1, range(200), range(800, 961)) == ["", ""]
    assert told(1000, 0.1, range(200), range(800, 962)) == ["", "362 units by step 2"]


@pytest.mark.parametrize(
    ("alike", "size", "found"), [(14, 1000, ""), (15, 1000, ONE_SIZE), (15, 100, ONE_SIZE), (20, 40, "")]
)
def test_sizes_that_hardly_differ_are_told_where_those_of_coins_would(alike: int, size: int, found: str) -> None:
    """Of 40 units a batch has 4 ± 1.9 by coins: many of one size are no wonder."""
    stream = torch.Generator().manual_seed(0)
    sizes = [size // 10] * alike + [size // 10 + 1 + k for k in range(20 - alike)]
    batches = [torch.randperm(size, generator=stream)[:taken].sort().values for taken in sizes]
    assert told(size, 0.1, *batches) == [""] * 19 + [found]


def test_a_unit_that_is_always_there_is_told_even_among_few() -> None:
    """Too few are drawn to say anything of the spread, until it alone is more than its rate gives."""
    assert told(100, 0.01, *[range(1)] * 30) == [""] * 29 + ["one unit in 30 of 30 batches"]


def test_units_in_turn_are_told_after_the_first_epoch() -> None:
    epoch = [range(start, start + 100) for start in range(0, 1000, 100)]
    assert told(1000, 0.1, *epoch) == [""] * 9 + ["every unit about as often as every other"]


@pytest.mark.parametrize(("more", "found"), [(0.7, ""), (0.85, "some units more often than others")])
def test_units_with_more_than_the_rate_are_told_though_others_have_less(more: float, found: str) -> None:
    """Batches are as large as they should be: by half of the units at 1.85 times the rate, and half at 0.15 times."""
    rates = 0.1 * (1 + more * (1 - 2 * (torch.arange(1000) % 2)))
    stream = torch.Generator().manual_seed(0)
    batches = [(torch.rand(1000, generator=stream) < rates).nonzero().squeeze(1) for _ in range(10)]
    assert told(1000, 0.1, *batches) == [""] * 9 + [found]


@pytest.mark.parametrize(("size", "rate"), [(2000, 0.02), (400, 0.5)])
def test_coins_are_within_three_standard_deviations(size: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So often as standard deviations say, which the limits are given in: of 100 runs one at most is beyond."""
    monkeypatch.setattr(coins, "EVENLY", -3)
    monkeypatch.setattr(coins, "UNEVENLY", 3)
    stream = torch.Generator().manual_seed(0)
    beyond = 0
    for _ in range(100):
        drawn = (torch.rand(10, size, generator=stream) < rate).unbind()
        beyond += any(told(size, rate, *[one.nonzero().squeeze(1) for one in drawn]))
    assert beyond <= 1
