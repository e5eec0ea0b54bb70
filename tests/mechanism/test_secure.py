"""SecureRandom: right distributions, exact coins, a grid that hides the summands, nothing that can be repeated."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.pretended import nothing_waits, pretended_gpu
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.errors import EquidpError
from equidp.gradients import shape
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism import secure
from equidp.mechanism.noise import RandomSource, SeededRandom
from equidp.mechanism.sampling import Examples, Population
from equidp.mechanism.secure import GRID_BITS, SecureRandom, grid_step
from equidp.mechanism.trainer import Trainer

SURE = 1e-6
"""Level of every test on fresh randomness: a run of the suite fails by chance about once in 10⁵."""

SOURCES = {"secure": lambda: SecureRandom("cpu"), "seeded": lambda: SeededRandom(3, "cpu")}


@pytest.fixture(params=sorted(SOURCES))
def source(request: pytest.FixtureRequest) -> RandomSource:
    return SOURCES[request.param]()


class Scripted(SecureRandom):
    """The same, with chosen random words instead of fresh ones."""

    def __init__(self, *words: int) -> None:
        super().__init__("cpu")
        self.script = list(words)

    def _drawn(self, size: int) -> torch.Tensor:
        taken, self.script = self.script[:size], self.script[size:]
        return torch.from_numpy(np.array(taken, dtype=np.uint64).view(np.int64))


def test_normal_is_standard_normal(source: RandomSource) -> None:
    sample = source.normal(200_000)
    assert sample.dtype == torch.float32
    assert stats.kstest(sample.double().numpy(), "norm").pvalue > SURE


def test_perturb_is_the_asked_gaussian(source: RandomSource) -> None:
    noised = source.perturb(torch.full((200_000,), 5.0), sensitivity=0.5, noise_multiplier=3.0)
    assert stats.kstest(noised.double().numpy(), stats.norm(5.0, 1.5).cdf).pvalue > SURE


def test_neighbours_in_a_vector_are_independent(source: RandomSource) -> None:
    noise = source.perturb(torch.zeros(200_000), sensitivity=1.0, noise_multiplier=1.0).double()
    for transform in (lambda x: x, torch.square, torch.abs):
        values = transform(noise) - transform(noise).mean()
        correlation = (values[1:] * values[:-1]).mean() / values.square().mean()
        assert abs(float(correlation)) * math.sqrt(200_000) < stats.norm.isf(SURE)


def test_tails_are_there(source: RandomSource) -> None:
    # P(|x| > 4) = 6.33e-5: 126.7 of 2,000,000
    beyond = int((source.normal(2_000_000).abs() > 4).sum())
    assert stats.binomtest(beyond, 2_000_000, 2 * stats.norm.sf(4)).pvalue > SURE


@pytest.mark.parametrize("probability", [0.0, 1.0, 0.5, 1 / 214, 1e-3])
def test_coins_have_the_asked_bias(source: RandomSource, probability: float) -> None:
    heads = int(source.bernoulli(probability, 300_000).sum())
    assert stats.binomtest(heads, 300_000, probability).pvalue > SURE


def test_one_probability_per_coin(source: RandomSource) -> None:
    probability = torch.tensor([0.0, 1.0, 0.2, 0.7]).repeat(50_000)
    coins = source.bernoulli(probability, 200_000).view(-1, 4).sum(0)
    assert int(coins[0]) == 0
    assert int(coins[1]) == 50_000
    for heads, chance in ((int(coins[2]), 0.2), (int(coins[3]), 0.7)):
        assert stats.binomtest(heads, 50_000, chance).pvalue > SURE


def test_coins_compare_integers_exactly() -> None:
    # p = 2⁻²: heads for words below 2⁶², tails from 2⁶² on; float64 could not tell these two words apart
    assert Scripted(2**62 - 1, 2**62).bernoulli(0.25, 2).tolist() == [True, False]
    # p = 3·2⁻⁶⁴ is beyond float32 and beyond a 53-bit uniform: words 0, 1, 2 and no other
    assert Scripted(0, 2, 3, 2**63).bernoulli(3 * 2.0**-64, 4).tolist() == [True, True, False, False]
    # a rate just below 1 is not 1: the last 2¹¹ words are tails
    assert Scripted(2**64 - 2**11 - 1, 2**64 - 2**11).bernoulli(1 - 2.0**-53, 2).tolist() == [True, False]
    assert Scripted(2**64 - 1).bernoulli(1.0, 1).tolist() == [True]
    assert Scripted(0).bernoulli(0.0, 1).tolist() == [False]


def test_probabilities_that_rounding_took_out_of_range_are_the_nearest_ones(source: RandomSource) -> None:
    # below 0 as an unsigned integer would be nearly 1
    assert not source.bernoulli(-1e-9, 1000).any()
    assert source.bernoulli(1 + 1e-9, 1000).all()


def test_a_coin_without_a_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        SecureRandom("cpu").bernoulli(float("nan"), 3)


def test_extreme_words_give_finite_noise() -> None:
    # words of 0: the largest radius, √(64·ln 2) = 6.66, in both halves; of −2⁶³: radius 0
    assert float(Scripted(0, 0, 0, 0)._gaussian(1)) == pytest.approx(2 * math.sqrt(64 * math.log(2)))
    assert float(Scripted(2**63, 2**63, 2**62, 5)._gaussian(1)) == 0.0


@pytest.mark.parametrize("size", [0, 3, 10])
def test_numbers_noised_in_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "CHUNK", 3)
    values = torch.arange(size, dtype=torch.float64) * 1e8
    noised = SecureRandom("cpu").perturb(values, sensitivity=1.0, noise_multiplier=1e5)
    noise, multiples = noised - values, noised / grid_step(1.0, size)
    assert torch.equal(multiples, multiples.round())  # the grid is the whole vector's
    assert noise.shape == values.shape
    assert (noise.abs() < 2e6).all()  # each with its own value
    assert len(set(noise.tolist())) == size  # two of 2.6·10¹⁰ alike: once in 10⁹ runs
    assert len(set(SecureRandom("cpu").normal(size).tolist())) >= size - 1  # two of float32 may be, once in 10⁶


@pytest.mark.parametrize("exact", [0.0, 1e-9, 1.0, -17.25, 1e4 / 3, 1e7 / 3])
def test_every_output_lies_on_the_public_grid(exact: float) -> None:
    # The grid is the same whatever the exact value is; in floating point an exact value of 0 would show digits that
    # an exact value of 10⁴/3 cannot produce.
    noised = SecureRandom("cpu").perturb(
        torch.full((10_000,), exact, dtype=torch.float64), sensitivity=1.0, noise_multiplier=1.0
    )
    multiples = noised / grid_step(1.0, 10_000)
    assert torch.equal(multiples, multiples.round())
    assert (multiples % 2 == 1).any()  # and on no coarser one, whose step would tell how large the value is


def test_floating_point_noise_would_not_pass_the_grid_test() -> None:
    noised = SeededRandom(0, "cpu").perturb(torch.zeros(10_000), sensitivity=1.0, noise_multiplier=1.0).double()
    multiples = noised / grid_step(1.0, 10_000)
    assert not torch.equal(multiples, multiples.round())


def test_the_last_grid_digits_do_not_depend_on_the_exact_value() -> None:
    # exact values a quarter of a thousand grid steps apart leave the last ten bits of the released integer uniform
    step = grid_step(1.0, 100_000)
    for exact in (0.0, 257 * step, 0.3):
        noised = SecureRandom("cpu").perturb(
            torch.full((100_000,), exact, dtype=torch.float64), sensitivity=1.0, noise_multiplier=1.0
        )
        last = (noised / step).long() % 1024
        assert stats.chisquare(torch.bincount(last, minlength=1024).numpy()).pvalue > SURE


@pytest.mark.parametrize("size", [1, 2, 1000, 10**7])
@pytest.mark.parametrize("sensitivity", [1e-4, 0.37, 1.0, 400.0])
def test_rounding_costs_at_most_its_share_of_the_sensitivity(size: int, sensitivity: float) -> None:
    step = grid_step(sensitivity, size)
    assert step * math.sqrt(size) <= sensitivity * 2**-GRID_BITS < 2.01 * step * math.sqrt(size)
    assert math.frexp(step)[0] == 0.5  # a power of two: dividing by it loses nothing


def test_rounded_neighbours_are_no_further_apart_than_the_noise_is_made_for() -> None:
    generator = torch.Generator().manual_seed(5)
    for size in (3, 1000):
        left = torch.randn(size, generator=generator, dtype=torch.float64)
        shift = torch.randn(size, generator=generator, dtype=torch.float64)
        right = left + shift / shift.norm()
        step = grid_step(1.0, size)
        silent = [_noiseless(v) for v in (left, right)]
        assert float((silent[0] - silent[1]).norm()) <= 1.0 + step * math.sqrt(size)


@given(a=st.floats(0, 1), sigma=st.floats(0.3, 5), other=st.floats(0.3, 50), r=st.floats(0, 1))
def test_two_rounded_releases_of_one_sample_stay_within_their_joint_charge(
    a: float, sigma: float, other: float, r: float
) -> None:
    """A record moves the sum by a·Δ and a count by what is left of the charge M; rounding, each by r more."""
    charge = max(sigma**-2, other**-2)
    h = min(1.0, other * math.sqrt(max(0.0, charge - (a / sigma) ** 2)))
    made_for = 1 + 2 * r
    assert ((a + r) / (sigma * made_for)) ** 2 + ((h + r) / (other * made_for)) ** 2 <= charge * (1 + 1e-12)


def test_the_noise_is_made_for_rounded_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding doubles the sensitivity, three times the noise: as much again for two releases of one sample."""
    monkeypatch.setattr(secure, "GRID_BITS", 0)
    size, sensitivity = 4**7, 1.0
    assert grid_step(sensitivity, size) * math.sqrt(size) == sensitivity
    noised = SecureRandom("cpu").perturb(torch.zeros(size), sensitivity=sensitivity, noise_multiplier=3.0)
    assert float(noised.std()) == pytest.approx(9.0, rel=0.05)  # nine standard deviations


def test_the_noise_is_made_for_sums_that_float32_has_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin as large as the sensitivity doubles the noise; the one in use covers 1.6e-3, the most that was measured,
    in each of two releases of one sample."""
    monkeypatch.setattr(SecureRandom, "margin", 1.0)
    noised = SecureRandom("cpu").perturb(torch.zeros(2**14), sensitivity=0.5, noise_multiplier=3.0)
    assert float(noised.std()) == pytest.approx(3.0, rel=0.05)  # nine standard deviations
    monkeypatch.undo()
    assert math.sqrt(2) * 1.6e-3 < SecureRandom.margin < 0.005


def _noiseless(values: torch.Tensor) -> torch.Tensor:
    """What perturb releases when the noise happens to be 0."""
    silence = 2**63  # a radius of 0
    return Scripted(*[silence] * 4 * len(values)).perturb(values, sensitivity=1.0, noise_multiplier=1.0)


def test_absurd_values_are_clamped_not_wrapped() -> None:
    noised = SecureRandom("cpu").perturb(torch.tensor([1e38, -1e38]), sensitivity=1.0, noise_multiplier=1.0)
    assert noised.isfinite().all()
    assert noised[0] > 1e9
    assert noised[1] < -1e9


def test_clamped_values_leave_their_noise_all_its_digits() -> None:
    # from 2⁵³ on float64 has even integers only: added there, noise would be rounded once more
    noised = SecureRandom("cpu").perturb(
        torch.full((200,), 1e38, dtype=torch.float64), sensitivity=1.0, noise_multiplier=1.0
    )
    multiples = noised / grid_step(1.0, 200)
    assert ((multiples - secure.LARGEST).abs() < 2**30).all()  # 13.3 standard deviations are fewer
    assert (multiples[multiples > secure.LARGEST] % 2 == 1).any()  # of about a hundred


@pytest.mark.parametrize("sensitivity", [0.0, -1.0, float("nan"), float("inf")])
def test_a_sensitivity_that_is_none_is_refused(sensitivity: float) -> None:
    with pytest.raises(EquidpError, match="secure mode"):
        SecureRandom("cpu").perturb(torch.zeros(2), sensitivity=sensitivity, noise_multiplier=1.0)


def test_dtype_and_size_are_kept() -> None:
    random = SecureRandom("cpu")
    assert random.perturb(torch.zeros(0), sensitivity=1.0, noise_multiplier=1.0).shape == (0,)
    assert random.perturb(torch.zeros(3), sensitivity=torch.tensor(2.0), noise_multiplier=1.0).dtype == torch.float32
    assert random.bernoulli(0.5, 0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_stay_as_they_were(dtype: torch.dtype, source: RandomSource) -> None:
    values = torch.ones(5, dtype=dtype)
    source.perturb(values, sensitivity=1.0, noise_multiplier=1.0)
    assert torch.equal(values, torch.ones(5, dtype=dtype))


def test_two_generators_differ() -> None:
    assert not torch.equal(SecureRandom("cpu").normal(100), SecureRandom("cpu").normal(100))


def test_the_key_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that share nonce and counter differ by the 256 bits of their keys alone."""
    keys: list[bytes] = [b"a" * 32, b"b" * 32, b"a" * 32]
    monkeypatch.setattr(os, "urandom", lambda size: keys.pop(0) if size == 32 else b"n" * size)
    first, other, again = (SecureRandom("cpu").words(4).tolist() for _ in range(3))
    assert first == again != other


@pytest.mark.parametrize("size", [1, 1000, 1001, 5003])
def test_threads_fill_every_word_once_with_a_key_of_their_own(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "ZEROS", bytes(64))  # a thread for each 8 words, blocks of 8
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    random = SecureRandom("cpu")
    first, again = random.words(size), random.words(size)
    assert len(set(map(id, random._streams))) == min(3, size)  # two threads in one stream may draw the same words
    assert len({*first.tolist(), *again.tolist()}) == 2 * size  # a word left out, or drawn twice, shows
    bits = sum(int(word).bit_count() for word in first)
    assert stats.binomtest(bits, 64 * size).pvalue > SURE


def test_a_draw_after_the_end_of_the_main_thread_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "ZEROS", bytes(64))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    random = SecureRandom("cpu")
    random._threads.shutdown()  # as the interpreter does
    assert len(set(random.words(1000).tolist())) == 1000


@pytest.mark.parametrize("size", [3, 5000])
def test_a_pretended_gpu_makes_the_noise_itself(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "GPU_CHUNK", 1 << 11)
    with pretended_gpu():
        random = SecureRandom("cuda")
        values = torch.full((size,), 5.0, device="cuda")
        with nothing_waits():
            noised = random.perturb(values, sensitivity=0.5, noise_multiplier=3.0)
            normal = random.normal(size)
        assert noised.device.type == normal.device.type == "cuda"
        multiples = noised.cpu().double() / grid_step(0.5, size)
    assert torch.equal(multiples, multiples.round())
    assert stats.kstest(noised.cpu().double().numpy(), stats.norm(5.0, 1.5).cdf).pvalue > SURE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_the_asked_gaussian_on_the_grid() -> None:
    size, random = (1 << 23) + 5, SecureRandom("cuda")
    noised = random.perturb(torch.full((size,), 5.0, device="cuda"), sensitivity=0.5, noise_multiplier=3.0)
    assert noised.device.type == "cuda"
    found = noised.cpu().double()
    multiples = found / grid_step(0.5, size)
    assert torch.equal(multiples, multiples.round())
    assert stats.kstest(found.numpy(), stats.norm(5.0, 1.5).cdf).pvalue > SURE
    assert stats.kstest(random.normal(size).cpu().double().numpy(), "norm").pvalue > SURE


def test_nothing_can_be_saved_or_copied() -> None:
    random = SecureRandom("cpu")
    assert random.state_dict() == {}
    random.load_state_dict({})
    with pytest.raises(EquidpError, match="secure mode refuses"):
        random.load_state_dict(SeededRandom(0, "cpu").state_dict())
    with pytest.raises(TypeError, match="drawn twice"):
        copy.deepcopy(random)
    with pytest.raises(TypeError, match="drawn twice"):
        pickle.dumps(random)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_draws_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    random = SecureRandom("cpu")
    random.normal(1)
    (stream,), threads = random._streams, random._threads
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as seen from a child; forking under threads is no fun in a test
    random.normal(1)
    assert stream not in random._streams
    assert random._threads is not threads  # a child has none of its parent's


def test_nothing_but_a_random_source_adds_noise() -> None:
    # secure mode protects what goes through `perturb`; noise that some module draws and adds itself would not be safe
    engine = Path(secure.__file__).parent
    offenders = [
        f"{path.name}:{number}"
        for path in [*engine.rglob("*.py"), *(engine.parent / "algorithms").rglob("*.py")]
        if path.name not in ("noise.py", "secure.py", "augmentation.py")  # views' noise protects nobody, and is public
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\.normal\(|randn|normal_\(", line)
    ]
    assert offenders == []


def test_uniforms_are_uniform(source: RandomSource) -> None:
    sample = source.uniform(200_000)
    assert sample.dtype == torch.float64
    assert float(sample.max()) < 1.0
    assert stats.kstest(sample.numpy(), "uniform").pvalue > SURE
    assert float(Scripted(2**64 - 1).uniform(1)) == 1 - 2**-53
    assert float(Scripted(2047).uniform(1)) == 0.0


def test_a_checkpoint_of_a_secure_run_holds_no_state_that_foretells_dropout() -> None:
    data = torch.randn(8, 4)
    labels = torch.arange(8) % 2
    schema = Schema("toy", "tabular", (4,), ("a", "b"), {"class": ("a", "b")})
    for source, kept in ((SecureRandom("cpu"), set()), (SeededRandom(0, "cpu"), {"cpu"})):
        trainer = Trainer(
            model=torch.nn.Linear(4, 2),
            loss=lambda outputs, of: torch.nn.functional.cross_entropy(outputs, of, reduction="none"),
            algorithm=algorithm_settings("dpsgd").build(),
            plan=Plan(8, 4, 1, 2, 1e-5, 1.0),
            population=Population(Records(data, labels, {"class": labels}, schema), labels),
            random=source,
            ledger=Ledger(),
            learning_rate=1.0,
        )
        assert trainer.state_dict()["global_random"].keys() == kept


class Seen(SecureRandom):
    """Takes every record, and notes what was exact before it was noised."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.exact: list[Tensor] = []

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bool)

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        self.exact.append(values.double() / float(sensitivity))
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)


@pytest.fixture(scope="module")
def thresholds() -> tuple[nn.Module, Tensor, float]:
    """A model, a record, and its norm beside two others where it is another one beside three: libraries take another
    kernel for so few rows. It is no secret: the first weights are public.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
    engine = GradientEngine(copy.deepcopy(model), CrossEntropy())
    for _ in range(100):
        record = torch.randn(20)
        few, more = (float(engine.norms(record.repeat(n, 1), torch.zeros(n).long()).min()) for n in (3, 4))
        if few != more:
            return model, record, min(few, more)
    pytest.skip("this processor rounds batches of every size alike")


@pytest.mark.parametrize(
    ("name", "option", "physical"),
    [
        ("dpsgd_f", "base_clip_norm", None),
        ("dpsgd_quantile", "clip_norm", None),
        ("dpsgd_quantile", "clip_norm", 32),
        ("dpsgd_global", "strict_clip_norm", None),
    ],
)
def test_one_record_more_moves_no_other_across_a_threshold(
    thresholds: tuple[nn.Module, Tensor, float], name: str, option: str, physical: int | None
) -> None:
    model, record, threshold = thresholds
    there = [3, 4] if physical is None else [physical + 3, physical + 4]
    released = []
    for count in there:
        labels = torch.zeros(count, dtype=torch.int64)
        random = Seen()
        trainer = Trainer(
            model=copy.deepcopy(model),
            loss=CrossEntropy(),
            algorithm=algorithm_settings(name, {option: threshold}).build(),
            plan=Plan(records=40, batch_size=20, epochs=1, groups=3, delta=1e-5, noise_multiplier=1.0),
            population=Population(Examples(record.repeat(count, 1), labels), labels),
            random=random,
            ledger=Ledger(),
            learning_rate=0.1,
            physical_batch_size=physical,
        )
        trainer.run_steps(1)
        released.append(random.exact[0])
    assert float((released[1] - released[0]).norm()) <= 1 + 1e-4


@pytest.fixture
def kink() -> tuple[nn.Module, Tensor, Tensor]:
    """A model of one output, a record, and a label that is its output in a full block of rows or beside one, where it
    is another one. It is no secret: the first weights are public.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 1), nn.Flatten(0))
    for _ in range(100):
        record = torch.randn(100)
        with torch.no_grad():
            outputs = model(record.repeat(5, 1))
        if outputs[4] != outputs[0]:
            return model, record, outputs[0]
    pytest.skip("this processor rounds rows of every place alike")


@pytest.mark.parametrize("physical", [None, 20])
@pytest.mark.parametrize("name", ["dpsgd", "auto_s", "dpsgd_quantile"])
def test_one_record_more_turns_no_other_at_a_kink(
    kink: tuple[nn.Module, Tensor, Tensor], name: str, physical: int | None
) -> None:
    """The gradient of |z − y| turns at z = y, by whatever bit: no weight rule makes up for that."""
    model, record, label = kink
    released = []
    for count in (39, 40):
        random = Seen()
        trainer = Trainer(
            model=copy.deepcopy(model),
            loss=nn.L1Loss(reduction="none"),
            algorithm=algorithm_settings(name).build(),
            plan=Plan(records=40, batch_size=20, epochs=1, groups=1, delta=1e-5, noise_multiplier=1.0),
            population=Population(
                Examples(record.repeat(count, 1), label.repeat(count)), torch.zeros(count, dtype=torch.int64)
            ),
            random=random,
            ledger=Ledger(),
            learning_rate=0.1,
            physical_batch_size=physical,
        )
        trainer.run_steps(1)
        released.append(random.exact[-1])
    assert float((released[1] - released[0]).norm()) <= 1 + 1e-4


PLACES = """
import {first}
import {second}
import torch
from equidp.gradients.shape import warn_of_rounding_by_place
warn_of_rounding_by_place()
"""


@pytest.mark.parametrize(
    ("first", "second"), [("equidp", "torch"), pytest.param("torch", "equidp", marks=pytest.mark.slow)]
)
def test_a_row_of_a_small_layer_is_rounded_alike_wherever_it_stands(first: str, second: str) -> None:
    """One record less moves those after it by a place; at a kink or a threshold each would turn."""
    rest = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    code = PLACES.format(first=first, second=second)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=rest, timeout=120, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_secure_run_is_told_of_a_library_that_rounds_by_place(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    unlike = SimpleNamespace(linear=lambda rows, _: torch.arange(len(rows)).unsqueeze(1))
    monkeypatch.setattr(shape, "F", unlike)
    labels = torch.zeros(40, dtype=torch.int64)
    for random, told in ((SeededRandom(0, "cpu"), 0), (SecureRandom("cpu"), 1)):
        trainer = Trainer(
            model=nn.Linear(6, 3),
            loss=CrossEntropy(),
            algorithm=algorithm_settings("dpsgd").build(),
            plan=Plan(records=40, batch_size=20, epochs=1, groups=1, delta=1e-5, noise_multiplier=1.0),
            population=Population(Examples(torch.randn(40, 6), labels), labels),
            random=random,
            ledger=Ledger(),
            learning_rate=0.1,
        )
        shape.warn_of_rounding_by_place.cache_clear()
        for _ in range(2):
            trainer.run_steps(1)
        assert caplog.text.count("MKL_CBWR=AUTO") == told
