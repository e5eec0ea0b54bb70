"""Pairs of Gaussians: what Box and Muller's formulas say, by torch and compiled, and both of a pair independent."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from equidp.mechanism import box_muller
from equidp.mechanism.box_muller import Loop, vector_functions
from equidp.mechanism.secure import SecureRandom
from equidp.system import machine_code
from equidp.system.machine_code import registers_here

SURE = 1e-6
"""Level of every test on fresh randomness."""

COMPILED = registers_here() is not None and vector_functions(4) is not None


def loop(lanes: int) -> Loop:
    """The compiled one for vectors of so many numbers, or skip: this processor has none."""
    registers = registers_here() if COMPILED else None
    if registers is None or lanes > registers.lanes // 2:
        pytest.skip("no such code on this machine")
    return Loop(lanes, vector_functions(lanes) or {})


@pytest.fixture(params=["torch", 4, 8])
def made(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """By torch, and compiled for every length of a processor's vectors."""
    return box_muller._by_torch if request.param == "torch" else loop(request.param)


def fresh(pairs: int) -> Tensor:
    return torch.from_numpy(SecureRandom("cpu").words(4 * pairs).view(np.int64)).view(2, 2, pairs)


def exactly(words: Tensor) -> np.ndarray:
    """By the formulas, in long doubles."""
    radius, angle = words.numpy().astype(np.longdouble)
    uniform, turn = (np.abs(radius) + 0.5) / 2.0**63, angle / 2.0**63 * np.longdouble(math.pi)
    length = np.sqrt(-2 * np.log(np.minimum(uniform, 1)))
    return np.concatenate([(length * f(turn)).sum(0) for f in (np.cos, np.sin)]) / np.sqrt(np.longdouble(2))


def test_words_become_the_sums_of_two_pairs(made: Callable[[Tensor], Tensor]) -> None:
    words = fresh(1000)
    extremes = [0, 1, -1, 3, 2**33, -(2**40), 2**62, -(2**62) - 2**61, 2**63 - 1, -(2**63)]
    words[0, :, : len(extremes)] = torch.tensor(extremes)
    words[1, :, : len(extremes)] = torch.tensor([extremes, extremes[::-1]])
    np.testing.assert_allclose(made(words).numpy(), exactly(words).astype(np.float64), rtol=0, atol=2e-14)


@pytest.mark.parametrize("pairs", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 1001])
def test_every_number_is_written_whatever_the_threads(
    pairs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_muller, "PAIRS_EACH", 1)
    words = fresh(pairs)
    for lanes in (4, 8):
        torch.testing.assert_close(loop(lanes)(words), box_muller._by_torch(words), rtol=0, atol=2e-14)


FORKED = """
import os, torch
from equidp.mechanism.secure import SecureRandom
torch.set_num_threads(2)
random = SecureRandom("cpu")
random.normal(100_000)
child = os.fork()
if not child:
    random.normal(1000)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_does_not_wait_for_its_parents_threads_to_make_few_numbers() -> None:
    process = subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.communicate(timeout=120)[0].strip() == b"0"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_both_of_a_pair_are_independent_standard_gaussians(made: Callable[[Tensor], Tensor]) -> None:
    """Alone, their sum, and their joint law: an exponential square and, whatever that is, a uniform direction."""
    x, y = made(fresh(400_000)).view(2, -1).numpy()
    for sample in (x, y, (x + y) / math.sqrt(2)):
        assert stats.kstest(sample, "norm").pvalue > SURE
    square, direction = (x**2 + y**2) / 2, np.arctan2(y, x) / (2 * math.pi) + 0.5
    assert stats.kstest(square, "expon").pvalue > SURE
    table, _, _ = np.histogram2d(np.exp(-square), direction, bins=20, range=[[0, 1], [0, 1]])
    assert stats.chisquare(table.ravel()).pvalue > SURE


def test_noise_comes_from_the_loop_where_there_is_one_and_else_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def compiled(words: Tensor) -> Tensor:
        made.append(words.shape[2])
        return box_muller._by_torch(words)

    random = SecureRandom("cpu")
    monkeypatch.setattr(box_muller, "compiled_loop", lambda: compiled)
    for size in (1, 5000):
        random.normal(size)
    assert made == [1, 2500]
    monkeypatch.setattr(box_muller, "compiled_loop", lambda: None)
    assert stats.kstest(random.normal(5000).numpy(), "norm").pvalue > SURE


def test_an_interrupt_waits_until_code_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within llvmlite's `close` it had the same memory freed twice, which ended the process: a notebook's kernel."""
    if not COMPILED:
        pytest.skip("no such code on this machine")
    import llvmlite.binding as llvm

    parse, compiled = llvm.parse_assembly, []

    def interrupted(text: str) -> object:
        signal.raise_signal(signal.SIGINT)
        compiled.append(text)
        return parse(text)

    monkeypatch.setattr(llvm, "parse_assembly", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop(4)
    assert len(compiled) == 1


def test_a_machine_that_has_the_code_takes_it_for_its_own_vectors() -> None:
    """Else nothing says so but the time: torch's operations do the same."""
    registers = registers_here()
    try:
        ctypes.CDLL("libmvec.so.1")
    except OSError:
        registers = None
    if registers is None:
        pytest.skip("no such code on this machine")
    made = box_muller.compiled_loop.__wrapped__()
    assert made is not None
    assert made._lanes * 2 == registers.lanes


@pytest.mark.parametrize("lacking", ["openmp", "registers_here", "vector_functions"])
def test_a_machine_without_the_code_has_torchs_operations(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code if lacking == "openmp" else box_muller, lacking, lambda *_: None)
    registers_here.cache_clear()
    assert box_muller.compiled_loop.__wrapped__() is None
    registers_here.cache_clear()


@pytest.mark.parametrize("fault", ["no such library", "no such function"])
def test_a_c_library_without_vectors_has_none(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str) -> object:
        if fault == "no such library":
            raise OSError(name)
        return object()

    monkeypatch.setattr(box_muller.ctypes, "CDLL", opened)
    assert vector_functions(4) is None


@pytest.mark.parametrize(
    "words",
    [torch.zeros(2, 2, 8), torch.zeros(2, 8, 2, dtype=torch.int64).mT, torch.zeros(4, 8, dtype=torch.int64)],
    ids=["floats", "another order", "another shape"],
)
def test_words_that_the_code_would_read_wrongly_are_refused(words: Tensor) -> None:
    with pytest.raises(ValueError, match="words must be"):
        loop(4)(words)
