"""Compiled convolutions are held against unfolding, to the bit where privacy rests on it."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from tests.gradients.test_windows import KERNELS, unfolded
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients import compiled
from equidp.gradients.compiled import CompiledGradients, code
from equidp.gradients.compiled.code import Code, Operands, code_for
from equidp.gradients.compiled.writer import tiles
from equidp.gradients.products import Products
from equidp.gradients.windows import Kernel
from equidp.gradients.workspace import Workspace
from equidp.system import machine_code
from equidp.system.machine_code import Registers, openmp, registers_here

if registers_here() is None:
    pytest.skip("no compiled code on this machine", allow_module_level=True)

SHAPES = [
    *KERNELS,
    Kernel((8, 8), (2, 2), (1, 1), (1, 16)),
    Kernel((3, 3), (1, 1), (1, 1), (17, 53)),  # two vectors of outputs, one, and a rest
    Kernel((1, 1), (1, 1), (1, 1), (9, 33)),
    Kernel((1, 5), (1, 1), (1, 1), (7, 1)),
]


def batch(kernel: Kernel, records: int = 7, calls: int = 1, size: tuple[int, int] = (17, 18)) -> list[list[Tensor]]:
    """Images and backprops, channels first."""
    torch.manual_seed(3)
    images = [torch.randn(records, kernel.channels[0], *size) for _ in range(calls)]
    return [images, [torch.randn(records, kernel.channels[1], *kernel.outputs(*size)) for _ in range(calls)]]


def rows(images: list[Tensor]) -> list[Tensor]:
    return [x.permute(0, 2, 3, 1) for x in images]


def gradients_of(kernel: Kernel, images: list[Tensor], backprops: list[Tensor]) -> CompiledGradients:
    found = compiled.gradients_of(kernel, rows(images), rows(backprops))
    assert found is not None
    return found


@pytest.mark.parametrize("registers", [Registers(16, 8), Registers(8, 6), Registers(4, 8)], ids=str)
@pytest.mark.parametrize("kernel", SHAPES, ids=str)
def test_every_geometry_equals_unfolding_whatever_the_vectors(kernel, registers) -> None:
    made = Code(kernel, registers)
    for calls in (1, 2):
        equals_unfolding(made, kernel, calls)


def equals_unfolding(made: Code, kernel: Kernel, calls: int) -> None:
    images, backprops = batch(kernel, calls=calls)
    found = CompiledGradients(made, rows(images), rows(backprops))
    expected = sum(unfolded(kernel, x.double(), b.double()) for x, b in zip(images, backprops, strict=True))
    torch.testing.assert_close(found.as_weight(found.gradients(2, 6)).double(), expected[2:6], rtol=1e-5, atol=1e-4)
    kept = torch.full((7, kernel.fan_in * kernel.channels[1]), math.nan)
    squares, sizes = found.squared_norms(kept)
    torch.testing.assert_close(squares, expected.flatten(1).square().sum(1), rtol=1e-5, atol=0)
    lengths = ([x.double().flatten(1).norm(dim=1) for x in calls] for calls in (images, backprops))
    torch.testing.assert_close(sizes, sum(i * o for i, o in zip(*lengths, strict=True)))
    assert torch.equal(kept[2:6], found.gradients(2, 6))
    weights = torch.rand(7)
    torch.testing.assert_close(found.weighted_sum(weights), weights @ kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", SHAPES[:4] + SHAPES[-3:], ids=str)
def test_sums_hold_the_gradients_that_norms_were_taken_of_to_the_bit(kernel, threads) -> None:
    found = gradients_of(kernel, *batch(kernel))
    kept = torch.empty(7, kernel.fan_in * kernel.channels[1])
    squares, _ = found.squared_norms(kept)
    assert torch.equal(squares, found.squared_norms()[0])
    torch.testing.assert_close(squares, kept.double().square().sum(1), rtol=3e-7, atol=0)
    for record in range(7):
        assert torch.equal(found.weighted_sum(torch.eye(7)[record]), kept[record])


def test_a_record_is_rounded_alike_wherever_it_stands_and_however_many_threads_there_are(threads) -> None:
    kernel = SHAPES[-3]
    images, backprops = batch(kernel, records=9)
    squares, sizes = gradients_of(kernel, images, backprops).squared_norms()
    for first, last in ((0, 1), (3, 9), (2, 5), (8, 9)):
        some = gradients_of(kernel, *([x[first:last] for x in calls] for calls in (images, backprops)))
        assert torch.equal(some.squared_norms()[0], squares[first:last])
        assert torch.equal(some.squared_norms()[1], sizes[first:last])
    total = gradients_of(kernel, images, backprops).weighted_sum(torch.linspace(0, 2, 9))
    torch.set_num_threads(1)
    assert torch.equal(gradients_of(kernel, images, backprops).squared_norms()[0], squares)
    assert torch.equal(gradients_of(kernel, images, backprops).weighted_sum(torch.linspace(0, 2, 9)), total)


LOADED = """
import torch
from equidp.gradients.compiled import gradients_of
from equidp.gradients.windows import Kernel

torch.manual_seed(0)
torch.set_num_threads(3)
found = gradients_of(Kernel((1, 1), (1, 1), (1, 1), (2, 5)), [torch.randn(10, 1, 50, 2)], [torch.randn(10, 1, 50, 5)])
print(found.weighted_sum(torch.rand(10)).tolist(), found.squared_norms()[0].tolist())
"""


@pytest.mark.slow
def test_fewer_threads_than_were_called_do_the_same() -> None:
    """OpenMP sends as many as it sees fit where the environment lets it, by the load of the machine."""
    told = [{}, {"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "2"}]
    runs = [
        subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, env=os.environ | t)
        for t in told
    ]
    assert len({run.stdout for run in runs}) == 1


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e30])
def test_a_record_of_weight_zero_adds_exactly_nothing(broken, threads) -> None:
    kernel, weights = SHAPES[0], torch.tensor([1.0, 0.5, 0.0, 2.0])
    images, backprops = batch(kernel, records=4)
    expected = gradients_of(kernel, images, backprops).weighted_sum(weights)
    images[0][2] = broken
    backprops[0][2] *= 1e30
    found = gradients_of(kernel, images, backprops)
    assert torch.equal(found.weighted_sum(weights), expected)
    assert found.squared_norms()[0].isfinite().tolist() == [True, True, False, True]


def test_equal_entries_lose_nothing_of_their_squares() -> None:
    """Which a float32 sum of so many would, by a thousandth: a norm must not be understated."""
    kernel = Kernel((3, 3), (1, 1), (1, 1), (256, 400))
    images, backprops = [torch.full((1, 256, 3, 3), 1.1)], [torch.full((1, 400, 1, 1), 1.3)]
    squares, _ = gradients_of(kernel, images, backprops).squared_norms()
    entry = float(torch.tensor(1.1) * torch.tensor(1.3))
    assert float(squares) == pytest.approx(kernel.fan_in * 400 * entry**2, rel=1e-6)


def test_nobody_has_no_norms_and_a_zero_sum() -> None:
    kernel = SHAPES[0]
    found = gradients_of(kernel, *batch(kernel, records=0))
    assert [x.shape for x in found.squared_norms()] == [(0,), (0,)]
    assert not found.weighted_sum(torch.zeros(0)).any()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda images, backprops: (images, [b[:, :, 1:] for b in backprops]),
        lambda images, backprops: ([x[1:] for x in images], backprops),
        lambda images, backprops: ([x[:, 1:] for x in images], backprops),
        lambda images, backprops: (images * 2, backprops),
        lambda images, backprops: ([images[0], images[0][:, :, 1:]], backprops * 2),
    ],
    ids=["outputs", "records", "channels", "calls", "sizes"],
)
def test_what_does_not_belong_together_is_refused_before_the_code_reads_it(spoil) -> None:
    found = gradients_of(SHAPES[0], *spoil(*batch(SHAPES[0])))
    with pytest.raises(ValueError, match="Not every call has"):
        found.squared_norms()


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_other_numbers_are_left_to_torch(other) -> None:
    images, backprops = batch(SHAPES[0])
    assert compiled.gradients_of(SHAPES[0], rows(images), [b.to(other) for b in rows(backprops)]) is None
    assert compiled.gradients_of(SHAPES[0], [x.to("meta") for x in rows(images)], rows(backprops)) is None


@pytest.mark.parametrize(
    "left_out", [lambda b: torch._neg_view(b), lambda b: torch._efficientzerotensor(b.shape)], ids=["minus", "zeros"]
)
def test_numbers_that_are_not_in_memory_as_they_count_are_left_to_torch(left_out) -> None:
    images, backprops = map(rows, batch(SHAPES[0]))
    assert compiled.gradients_of(SHAPES[0], images, [left_out(b) for b in backprops]) is None


@pytest.mark.parametrize("shape", [(6, 0, 3, 4), (6, 200, 0, 4), (6, 200, 3, 0), (0, 200, 3, 4)], ids=str)
def test_nothing_at_all_is_no_place_to_read_from(shape) -> None:
    """Without positions the code read some all the same, where units or layers that share want gradients."""
    records, positions, i, o = shape
    term = Products([torch.randn(records, positions, i)], [torch.randn(records, positions, o)])
    assert not term.squared_norms().gt(1e-30).any()
    assert not term.weighted_sum(torch.ones(records), None).any()
    gradients = term.gradients(0, records)
    assert gradients.shape == (records, i * o)
    assert not gradients.any()


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("sizes", [(7, 130, 257, 129), (33, 101, 37, 51), (70, 120, 300, 200)], ids=str)
def test_gradients_of_linear_layers_that_are_kept_have_the_same_sum_to_the_last_bit(
    sizes: tuple[int, ...], by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torch:
        monkeypatch.setattr(compiled, "gradients_of", lambda *_: None)
    records, positions, i, o = sizes
    workspace = Workspace(torch.device("cpu"))
    for _ in range(2):  # the second batch is in the first one's place
        inputs, backprops, weights = (
            torch.randn(records, positions, i),
            torch.randn(records, positions, o),
            torch.rand(records),
        )
        inputs[1], weights[1] = torch.nan, 0.0
        kept, formed = Products([inputs], [backprops], workspace, "layer"), Products([inputs], [backprops])
        assert not kept.by_gram()
        torch.testing.assert_close(kept.squared_norms(), formed.squared_norms(), rtol=0, atol=0, equal_nan=True)
        expected = formed.weighted_sum(weights, weights == 0)
        with monkeypatch.context() as context:
            for forming, name in ((CompiledGradients, "weighted_sum"), (Products, "gradients")):
                context.setattr(forming, name, lambda *_: pytest.fail("formed again"))
            found = kept.weighted_sum(weights, weights == 0)
        assert found.isfinite().all()
        assert torch.equal(found, expected)


UNFUSED = """
import torch
from equidp.gradients.products import Products
from equidp.gradients.workspace import Workspace

torch.manual_seed(0)
inputs, backprops, weights = torch.randn(9, 130, 57), torch.randn(9, 130, 59), torch.rand(9)
with torch.inference_mode():
    kept, formed = (Products([inputs], [backprops], *room) for room in ((Workspace(torch.device("cpu")), "layer"), ()))
    norms = torch.equal(kept.squared_norms(), formed.squared_norms())
    print(norms, torch.equal(kept.weighted_sum(weights, None), formed.weighted_sum(weights, None)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processor", [{}, {"ATEN_CPU_CAPABILITY": "default"}])
def test_where_torch_does_not_fuse_its_additions_room_changes_no_digit(processor: dict[str, str]) -> None:
    run = [sys.executable, "-c", UNFUSED]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=os.environ | processor)
    assert done.stdout.split() == ["True", "True"]


def test_where_there_is_no_room_gradients_of_linear_layers_are_formed_again() -> None:
    inputs, backprops, weights = torch.randn(4, 120, 40), torch.randn(4, 120, 50), torch.rand(4)
    workspace = Workspace(torch.device("cpu"))
    workspace.roomy_floats = 12_000
    first, second = (Products([inputs], [backprops], workspace, owner) for owner in ("first", "second"))
    assert torch.equal(first.squared_norms(), second.squared_norms())
    assert workspace.take_if_roomy("third", 4_000, like=inputs) is None
    assert torch.equal(first.weighted_sum(weights, None), second.weighted_sum(weights, None))


def test_nothing_is_compiled_for_norms_from_gram_matrices(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "gradients_of", lambda *_: pytest.fail("compiled"))
    term = Products([torch.randn(6, 5, 40)], [torch.randn(6, 5, 30)])
    assert term.squared_norms().shape == (6,)
    assert term.weighted_sum(torch.ones(6), None).shape == (1200,)


def test_images_smaller_than_the_kernel_are_refused() -> None:
    kernel = Kernel((3, 1), (1, 1), (1, 1), (2, 4))
    found = CompiledGradients(code_for(kernel), [torch.zeros(2, 2, 5, 2)], [torch.zeros(2, 0, 5, 4)])
    with pytest.raises(ValueError, match="no windows"):
        found.squared_norms()


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.device("meta")], ids=str)
def test_torchs_defaults_do_not_decide_where_the_code_writes(default) -> None:
    """Room for half precision is half as much as the code writes to: this used to end the process."""
    kernel, weights = SHAPES[-3], torch.rand(7)
    images, backprops = batch(kernel)

    def found() -> list[Tensor]:
        gradients = gradients_of(kernel, images, backprops)
        return [*gradients.squared_norms(), gradients.weighted_sum(weights), gradients.gradients(2, 6)]

    expected, before = found(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(default) if isinstance(default, torch.dtype) else torch.set_default_device(default)
        got = found()
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "wanted",
    [
        {"weights": torch.ones(6), "sums": torch.zeros(1, 45)},
        {"weights": torch.ones(7), "sums": torch.zeros(9, 45)},
        {"gradients": torch.zeros(7, 44)},
        {"gradients": torch.zeros(7, 45, dtype=torch.float64)},
        {"gradients": torch.zeros(7, 90)[:, ::2]},
        {"squares": torch.zeros(7)},
        {"sizes": torch.zeros(8, dtype=torch.float64)},
        {"squares": torch.zeros(7, dtype=torch.float64, device="meta")},
    ],
    ids=lambda wanted: " ".join(wanted),
)
def test_room_that_is_not_its_own_is_refused_before_the_code_writes(wanted) -> None:
    kernel = Kernel((3, 3), (1, 1), (1, 1), (1, 5))
    operands = Operands(kernel, *map(rows, batch(kernel)))
    with pytest.raises(ValueError, match="must be"):
        operands.work(**wanted)


@pytest.mark.parametrize("lacking", ["openmp", "registers_here"])
def test_a_machine_without_openmp_or_known_registers_leaves_gradients_to_torch(lacking, monkeypatch) -> None:
    kernel = Kernel((2, 3), (1, 1), (1, 1), (2, 7))
    monkeypatch.setattr(machine_code if lacking == "openmp" else code, lacking, lambda: None)
    if lacking == "openmp":  # where llvmlite is not installed either
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    for known in (registers_here, code_for):
        known.cache_clear()
    assert compiled.gradients_of(kernel, *map(rows, batch(kernel))) is None
    for known in (registers_here, code_for):
        known.cache_clear()


def test_an_environment_without_the_compiler_is_told_what_to_do(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(EquidpError, match=r"llvmlite.*install the project again"):
        registers_here.__wrapped__()


@pytest.mark.parametrize(("system", "processor"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64")])
def test_only_linux_on_x86_has_the_threads(system, processor, monkeypatch) -> None:
    monkeypatch.setattr(machine_code.sys, "platform", system)
    monkeypatch.setattr(machine_code.platform, "machine", lambda: processor)
    assert openmp.__wrapped__() is None


@pytest.mark.parametrize(("extent", "most"), [(1, 8), (8, 8), (9, 8), (27, 8), (64, 8), (100, 6), (5, 8)])
def test_tiles_cover_an_extent_once_and_are_nearly_equal(extent, most) -> None:
    covered = [k for start, size, count in tiles(extent, most) for k in range(start, start + size * count)]
    assert covered == list(range(extent))
    sizes = [size for _, size, _ in tiles(extent, most)]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("size", [(3, 3), (1, 1), (2, 5)])
def test_large_gradients_come_into_a_weights_order_as_small_ones_do(size, monkeypatch) -> None:
    kernel = Kernel(size, (1, 1), (1, 1), (6, 8))
    found = gradients_of(kernel, *batch(kernel))
    for gradients in (torch.randn(1, kernel.numel), torch.randn(3, kernel.numel)):
        monkeypatch.setattr(compiled, "BEYOND_CACHES", kernel.numel * 4)
        small = found.as_weight(gradients)
        monkeypatch.setattr(compiled, "BEYOND_CACHES", 1)
        assert small.shape == (len(gradients), 8, 6, *size)
        assert torch.equal(found.as_weight(gradients), small)
