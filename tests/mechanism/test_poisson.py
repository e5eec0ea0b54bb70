"""Poisson samples by counting: the law is that of N coins, to 2⁻¹²⁸; what small populations draw is what it was."""

from __future__ import annotations

import decimal
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from equidp.data.records import Records, Schema
from equidp.mechanism import poisson
from equidp.mechanism.noise import RandomSource, SeededRandom
from equidp.mechanism.poisson import (
    MANY,
    SPARSE,
    below,
    count_table,
    counted_sample,
    poisson_sample,
    positions,
    sample_on_host,
)
from equidp.mechanism.sampling import Population
from equidp.mechanism.secure import SecureRandom

SURE = 1e-6
CPU = torch.device("cpu")


class Scripted:
    """Words one after another."""

    def __init__(self, *words: int) -> None:
        self._words = list(words)

    def __call__(self, size: int) -> np.ndarray:
        taken, self._words = self._words[:size], self._words[size:]
        return np.array(taken, dtype=np.uint64)


@pytest.fixture(params=["seeded", "secure"])
def source(request: pytest.FixtureRequest) -> RandomSource:
    return SeededRandom(5, "cpu") if request.param == "seeded" else SecureRandom("cpu")


@pytest.mark.parametrize(("size", "probability"), [(1, 0.5), (3, 0.25), (40, 0.01), (7, 0.9), (500, 0.1)])
def test_the_table_is_the_binomial_distribution_function_rounded_up(size: int, probability: float) -> None:
    p, total, exact = Fraction(probability), Fraction(0), []
    for k in range(size + 1):
        total += math.comb(size, k) * p**k * (1 - p) ** (size - k)
        exact.append(math.ceil(total * 2**128))
    entries = [int(high) * 2**64 + int(low) for high, low in zip(*count_table(size, probability), strict=True)]
    assert entries == [entry - 1 for entry in exact if entry < 2**128]


@pytest.mark.parametrize("size", [MANY, 10_000_000])
def test_the_table_of_a_large_population_has_the_mean_and_variance_of_its_coins(size: int) -> None:
    rate = 256 / size
    table = [*(int(entry) / 2**64 for entry in count_table(size, rate)[0]), 1.0]
    mass = np.diff([0.0, *table])
    counts = np.arange(len(mass))
    assert mass @ counts == pytest.approx(256, rel=1e-12)
    assert mass @ (counts - 256) ** 2 == pytest.approx(size * rate * (1 - rate), rel=1e-10)


def test_the_table_ends_and_refuses_what_is_no_rate() -> None:
    assert [part.tolist() for part in count_table(5, 0.0)] == [[], []]  # no head, ever
    for rate in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="sampling rate"):
            count_table(5, rate)


def test_the_table_begins_however_unlikely_it_is_that_nobody_comes() -> None:
    # 10⁻¹¹¹⁶⁸²¹ here; it would be 0 to the numbers of `decimal`'s own range, and then so would all others: no end
    with decimal.localcontext() as context:
        context.traps[decimal.Underflow] = True
        assert len(count_table(70_000, 1 - 2.0**-53)[0]) == 70_000


def test_the_count_is_the_number_of_entries_a_word_is_above() -> None:
    # one coin of 1/2: words below 2⁶³ are no head, from 2⁶³ on one, and the next word chooses among one unit
    assert counted_sample(Scripted(2**63 - 2), 0.5, 1).tolist() == []
    assert counted_sample(Scripted(2**63, 17), 0.5, 1).tolist() == [0]


def test_where_a_word_is_in_the_table_the_next_one_decides() -> None:
    # two coins of 1/10, as a float is: the lower bits say how much of the last of 2⁶⁴ words is no head
    upper, lower = (part.tolist() for part in count_table(2, 0.1))
    assert counted_sample(Scripted(upper[0], lower[0]), 0.1, 2).tolist() == []
    assert counted_sample(Scripted(upper[0], lower[0] + 1, 7), 0.1, 2).tolist() == [1]
    assert counted_sample(Scripted(upper[1], lower[1], 6), 0.1, 2).tolist() == [0]
    assert counted_sample(Scripted(upper[1], lower[1] + 1, 6, 7), 0.1, 2).tolist() == [0, 1]
    # and of ten coins that are hardly ever heads, three entries begin with the same 64 bits
    upper, lower = (part.tolist() for part in count_table(10, 1e-6))
    same = [k for k, high in enumerate(upper) if high == 2**64 - 1]
    assert len(same) == 3
    for k in same:
        assert len(counted_sample(Scripted(2**64 - 1, lower[k], *range(k)), 1e-6, 10)) == k
        assert len(counted_sample(Scripted(2**64 - 1, lower[k] + 1, *range(k + 1)), 1e-6, 10)) == k + 1


def test_a_position_drawn_twice_is_drawn_again() -> None:
    three = count_table(6, 0.5)[0][2] + np.uint64(1)  # exactly the first word with three heads
    words = Scripted(int(three), 4, 4, 1, 1, 10, 2)  # 4, 4, 1: one short; 1 again: still; 10 is 4 again; 2
    assert counted_sample(words, 0.5, 6).tolist() == [1, 2, 4]


def test_words_beyond_the_last_multiple_are_dropped() -> None:
    # 2⁶⁴ = 1 (mod 3): the largest word would make 0 likelier than 1 and 2
    last = 2**64 - 1
    assert below(np.array([last, last - 1, 0, 5], dtype=np.uint64), 3).tolist() == [2, 0, 2]
    assert below(np.array([last], dtype=np.uint64), 4).tolist() == [3]  # 2⁶⁴ is a multiple of 4


@pytest.mark.parametrize("source", [pytest.param("seeded", marks=pytest.mark.slow), "secure"], indirect=True)
@pytest.mark.parametrize("probability", [pytest.param(0.1, marks=pytest.mark.slow), 0.45])
def test_every_set_is_as_likely_as_with_coins(source: RandomSource, probability: float) -> None:
    size, draws = 4, 20_000
    seen = {subset: 0 for k in range(size + 1) for subset in itertools.combinations(range(size), k)}
    for _ in range(draws):
        seen[tuple(counted_sample(source.words, probability, size).tolist())] += 1
    expected = [draws * probability ** len(s) * (1 - probability) ** (size - len(s)) for s in seen]
    assert stats.chisquare(list(seen.values()), expected).pvalue > SURE


def test_a_large_population_is_drawn_without_its_coins(source: RandomSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "bernoulli", None)  # calling it would fail
    size, rate, draws = 4 * MANY, 64 / (4 * MANY), 2_000
    found = [poisson_sample(source, rate, size, CPU) for _ in range(draws)]
    for units in found:
        assert units.dtype == torch.int64
        assert bool((units[1:] > units[:-1]).all())
    every = torch.cat(found)
    assert 0 <= int(every.min()) <= int(every.max()) < size
    assert stats.binomtest(len(every), draws * size, rate).pvalue > SURE
    # no stretch of the population is preferred
    assert stats.chisquare(torch.bincount(every // (size // 20), minlength=20).numpy()).pvalue > SURE
    # counts vary as a binomial's do: their scaled sum of squares is χ²
    counts = np.array([len(units) for units in found])
    spread = float(((counts - 64) ** 2).sum() / (64 * (1 - rate)))
    assert stats.chi2.cdf(spread, draws) > SURE
    assert stats.chi2.sf(spread, draws) > SURE


@pytest.mark.parametrize(("size", "rate"), [(MANY - 1, 0.001), (MANY, SPARSE + 0.01)])
def test_small_populations_and_high_rates_toss_the_coins_they_always_did(size: int, rate: float) -> None:
    drawn = poisson_sample(SeededRandom(3, "cpu"), rate, size, CPU)
    assert torch.equal(drawn, positions(SeededRandom(3, "cpu").bernoulli(rate, size)))


def test_a_stream_that_continues_draws_what_it_would_have_drawn() -> None:
    first, second = SeededRandom(3, "cpu"), SeededRandom(4, "cpu")
    poisson_sample(first, 1e-4, MANY, CPU)
    second.load_state_dict(first.state_dict())
    assert torch.equal(poisson_sample(first, 1e-4, MANY, CPU), poisson_sample(second, 1e-4, MANY, CPU))


def test_words_reach_all_their_bits(source: RandomSource) -> None:
    words = source.words(20_000)
    assert words.dtype == np.uint64
    heads = np.unpackbits(words.view(np.uint8)).reshape(len(words), 64).sum(0)
    assert min(stats.binomtest(int(n), len(words), 0.5).pvalue for n in heads) > SURE


def test_who_is_there_decides_and_not_how_many_were_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A population one record short draws at the same rate, among those present."""
    monkeypatch.setattr(poisson, "MANY", 1)
    monkeypatch.setattr(poisson, "SPARSE", 0.1)
    schema = Schema("few", "tabular", (1,), ("a", "b"), {"class": ("a", "b")})
    labels = torch.zeros(3, dtype=torch.int64)
    population = Population(Records(torch.zeros(3, 1), labels, {"class": labels}, schema), labels)
    random, rate, draws = SeededRandom(0, "cpu"), 0.09, 4_000
    counts = torch.zeros(3)
    for _ in range(draws):
        counts[poisson_sample(random, rate, population.size, population.device)] += 1
    assert min(stats.binomtest(int(n), draws, rate).pvalue for n in counts) > SURE


@pytest.mark.parametrize("probability", [0.0, 0.004, 0.3, 0.5, 0.7, 1.0])
def test_for_a_gpu_the_host_draws_each_position_with_the_probability(probability: float) -> None:
    random, size, turns = SeededRandom(5, "cpu"), 400, 200
    found = torch.zeros(size)
    for _ in range(turns):
        positions = sample_on_host(random, probability, size)
        assert positions.dtype == torch.int64
        assert (positions[1:] > positions[:-1]).all()
        found[positions] += 1
    off = (found / turns - probability) / max((probability * (1 - probability) / turns) ** 0.5, 1e-9)
    assert off.abs().max() < 5
    assert abs(off.sum()) < 5 * size**0.5


def test_a_coin_of_the_host_has_no_more_than_its_probability() -> None:
    """p = ¾: heads for words below 3·2⁶², tails from there on."""

    class Words:
        words = Scripted(3 * 2**62 - 1, 3 * 2**62, 0, 2**64 - 1)

    assert sample_on_host(Words(), 0.75, 4).tolist() == [0, 2]  # type: ignore[arg-type]
