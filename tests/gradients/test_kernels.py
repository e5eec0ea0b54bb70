"""The GPU's own kernels are held to torch's operations, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.thorough import first
from torch import Tensor, nn

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")
if HERE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("torch cannot use the GPU: set TRITON_INTERPRET=1", allow_module_level=True)

from equidp.gradients import fused, kernels, rounding, together  # noqa: E402
from equidp.gradients.bookkeeping import BookKeeping  # noqa: E402
from equidp.gradients.layers import group_norm_at_once  # noqa: E402
from equidp.gradients.precision import as_precise_as_norms  # noqa: E402
from equidp.gradients.together import Together  # noqa: E402
from equidp.gradients.windows import Kernel  # noqa: E402
from equidp.gradients.workspace import Workspace  # noqa: E402


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is then several pieces, a set of rows several launches, and a group of channels several tiles."""
    for name, size in (("PIECE", 64), ("BLOCK", 32), ("MOST", 3), ("TILE", 16), ("WIDE", 16), ("PROGRAMS", 8)):
        monkeypatch.setattr(kernels, name, size)
    monkeypatch.setattr(fused, "TRIED", [(name, (2, 20), *how) for name, _, *how in fused.TRIED])


@pytest.fixture
def fresh() -> Iterator[None]:
    """Devices are tried anew, and forgotten afterwards."""
    fused._tried.cache_clear()
    yield
    fused._tried.cache_clear()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(HERE)


@pytest.mark.slow
def test_more_records_than_a_second_axis_holds_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has 65,535 programs at most along the second axis of a launch and the third; here it has two."""
    grids: list[tuple[int, ...]] = []

    class Limited:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return self.kernel[grid]

    for name in ("_squares", "_products", "_group_norm", "_form", "_weighted", "_silence"):
        monkeypatch.setattr(kernels, name, Limited(getattr(kernels, name)))
    rows, matrices, images = random(5, 70), random(5, 3, 3), random(5, 6, 3, 3)
    squares, pieces = kernels.row_squares([rows, rows], [70, 70])
    torch.testing.assert_close(squares.sum(0), 2 * rows.square().sum(1))
    assert pieces == [2, 2]
    parts = kernels.gram_parts([[(matrices, matrices)]], 5)[:, 0]
    torch.testing.assert_close(parts, torch.stack(rounding.gram_parts(matrices, matrices)))
    expected = group_norm_at_once(images, images.cos(), 3, 1e-5, images.new_ones(30))
    torch.testing.assert_close(kernels.group_norm(images, images.cos(), 3, 1e-5), expected, rtol=1e-5, atol=1e-5)
    tiles = kernels.Tiles(Kernel((1, 1), (1, 1), (1, 1), (6, 20)), images, random(5, 20, 3, 3), (0, 0), False)
    gradients = (tiles.backprops.flatten(2) @ images.flatten(2).transpose(1, 2)).flatten(1)
    sums, formed = random(tiles.count, 5), torch.empty_like(gradients)
    tiles.form(sums, formed)
    torch.testing.assert_close(formed, gradients, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.sum(0), gradients.square().sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tiles.weighted_sum(sums[0]), sums[0] @ gradients, rtol=1e-4, atol=1e-3)
    finite = rows[:, 0] > 0
    kernels.silence(formed, finite)
    assert torch.equal(formed.any(1), finite)
    assert len(grids) == 6
    assert all(max(grid[1:], default=1) <= 2 for grid in grids)


def test_squares_of_rows_are_torchs_whatever_their_length_and_layout() -> None:
    rows = [
        random(2, 150), random(2, 3, 4, 5), random(2, 90)[:, 7:80], random(2, 64),
        random(2, 8, 3, 3).contiguous(memory_format=torch.channels_last),
    ]  # fmt: skip
    rows[0][0] = 1e-30  # whose squares are lost: as much as they may have been is added
    squares, pieces = kernels.row_squares(rows, [row[0].numel() for row in rows])
    found = Workspace(HERE).segments(pieces, squares) @ squares
    assert pieces == [3, 1, 2, 1, 2]
    assert found[0, 0] == 150 * rounding.LOST
    expected = torch.stack([row.flatten(1).double().square().sum(1) for row in rows])[1:]
    torch.testing.assert_close(found[1:].double(), expected, rtol=1e-6, atol=0)


def test_long_rows_have_the_same_squares_by_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "LONG_ROW_ON_GPU", 40)
    rows = [random(3, 120), random(3, 127), random(3, 20)]  # in equal parts, in parts that are not, in one
    workspace = Workspace(HERE)
    squares, parts = rounding.row_squares(rows, [120, 127, 20], workspace)
    assert parts == [3, 4, 1]
    expected = torch.stack([row.double().square().sum(1) for row in rows])
    torch.testing.assert_close((workspace.segments(parts, squares) @ squares).double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(rounding._norms_on_gpu(rows[0]).double(), expected[0].sqrt(), rtol=1e-6, atol=0)


def test_a_record_that_is_not_finite_stays_so_alone() -> None:
    rows = [random(3, 100), random(3, 40)]
    rows[0][1, 70] = torch.inf
    squares, pieces = kernels.row_squares(rows, [100, 40])
    total = (Workspace(HERE).segments(pieces, squares) @ squares).sum(0)
    assert total.isfinite().tolist() == [True, False, True]


def test_products_of_gram_matrices_are_torchs_also_of_some_records_at_a_time() -> None:
    layers = [
        [(random(2, 9, 9), random(2, 9, 9).cos()), (random(1, 9, 9), random(1, 9, 9).cos())],
        [(random(3, 17, 17), random(3, 17, 17).cos())],
        [(random(3, 1, 1), random(3, 1, 1).cos())],
    ]
    expected = [torch.stack(rounding.all_parts(rounding.gram_parts(*pair) for pair in pairs)) for pairs in layers]
    torch.testing.assert_close(kernels.gram_parts(layers, 3), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "groups", "places"), [(6, 2, (5, 3)), (4, 4, (3,)), (3, 1, (2, 2, 2))])
def test_group_norms_gradients_are_torchs(channels: int, groups: int, places: tuple[int, ...]) -> None:
    values, backprop = random(2, channels, *places) * 2 + 1, random(2, channels, *places).cos()
    ones = torch.ones(2 * channels, device=HERE)
    expected = group_norm_at_once(values, backprop, groups, 1e-5, ones)
    torch.testing.assert_close(kernels.group_norm(values, backprop, groups, 1e-5), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("channels", "size", "stride", "dilation", "padding", "image"),
    [
        # several tiles of outputs and of inputs, several blocks of pixels; then windows that are a pixel
        pytest.param((3, 20), (3, 3), (1, 1), (1, 1), 1, (6, 7), marks=pytest.mark.slow),
        ((18, 20), (1, 1), (1, 1), (1, 1), 0, (6, 7)),
        ((18, 20), (1, 1), (1, 1), (1, 1), 0, (5, 4)),  # whose rows begin at 16 bytes
        ((2, 5), (3, 2), (2, 1), (1, 2), 1, (7, 8)),
        ((18, 4), (1, 1), (2, 2), (1, 1), 0, (5, 5)),
        ((1, 17), (4, 4), (1, 1), (1, 1), 0, (4, 4)),  # one output pixel
    ],
)
def test_convolutions_gradients_are_torchs_record_by_record(
    channels, size, stride, dilation, padding, image, turned, monkeypatch
) -> None:
    monkeypatch.setattr(kernels, "TURNED", turned)
    layer = nn.Conv2d(*channels, size, stride, padding, dilation, bias=False).to(HERE)
    images = random(5, channels[0], *image)
    backprops = random(*layer(images).shape).cos()
    expected = torch.stack([
        torch.nn.grad.conv2d_weight(
            x.double()[None], layer.weight.shape, b.double()[None], stride, padding, dilation
        ).flatten()
        for x, b in zip(images, backprops, strict=True)
    ])  # fmt: skip
    tiles = kernels.Tiles(Kernel(size, stride, dilation, channels), images, backprops, (padding, padding), padding > 0)
    with as_precise_as_norms():
        squares, kept = torch.full((tiles.count, 5), torch.nan, device=HERE), random(5, 7 + expected.shape[1])
        tiles.form(squares, kept[:, 7:])
        torch.testing.assert_close(kept[:, 7:].double(), expected, rtol=1e-4, atol=1e-5)
        squared = kept[:, 7:].double().square().sum(1)
        torch.testing.assert_close(squares.double().sum(0), squared, rtol=1e-6, atol=0)
        alone = torch.empty_like(squares)
        tiles.form(alone, None)
        assert torch.equal(alone, squares)
        weights = torch.tensor([0.5, 0.0, 2.0, 0.0, 1.0], device=HERE)
        images[3], backprops[1] = torch.nan, torch.inf  # who has no weight adds nothing, whatever it is
        torch.testing.assert_close(
            tiles.weighted_sum(weights).double(), weights.double() @ expected, rtol=1e-4, atol=1e-4
        )


def test_norms_and_sums_have_products_of_one_precision_whatever_other_threads_set_between() -> None:
    def made() -> kernels.Tiles:
        kernel = Kernel((1, 1), (1, 1), (1, 1), (2, 2))
        return kernels.Tiles(kernel, random(2, 2, 4, 4), random(2, 2, 4, 4), (0, 0), False)

    before = made()
    with as_precise_as_norms():
        assert [one._how()["PRECISION"] for one in (before, made())] == ["tf32", "ieee"]


def test_tiles_have_all_digits_where_cudnns_convolutions_have_them(monkeypatch) -> None:
    for allowed, precision in ((True, "tf32"), (False, "ieee")):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert kernels.products() == precision


def test_a_device_with_little_shared_memory_has_fewer_blocks_on_their_way_and_an_old_one_no_tiles(monkeypatch) -> None:
    tiles = kernels.Tiles(
        Kernel((3, 3), (1, 1), (1, 1), (16, 16)), random(2, 16, 5, 5), random(2, 16, 3, 3), (0, 0), False
    )
    for memory, stages in ((1 << 17, 3), (4_500, 2), (0, 0)):
        monkeypatch.setattr(kernels, "shared_memory", lambda device, memory=memory: memory)
        assert tiles._how()["num_stages"] == stages
        assert tiles.here == (stages > 0)


def test_rows_that_are_not_finite_are_silenced_alone() -> None:
    values = random(3, 150)
    values[1, 70], finite = torch.nan, torch.tensor([True, False, True], device=HERE)
    expected = torch.where(finite.unsqueeze(1), values, 0.0)
    kernels.silence(values, finite)
    assert torch.equal(values, expected)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1 << 20, 0, 100])
def test_a_networks_norms_and_sums_are_those_that_torchs_operations_give(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 24, 3), nn.Tanh(), nn.Conv2d(24, 24, 2, bias=False), nn.Flatten(),
        nn.Linear(24, 3),
    ).to(HERE)  # fmt: skip
    passes = BookKeeping(model, nn.CrossEntropyLoss(reduction="none"))
    features, labels = random(3, 1, 6, 6), torch.arange(3, device=HERE)
    kept = passes._kept_by(passes.calls(features, labels, [(None, 1.0)]), 3)
    monkeypatch.setattr(together, "WORTH_KEEPING", 9)
    weights, found = torch.tensor([0.5, 0.0, 2.0], device=HERE), []
    for given in (kernels, None):
        monkeypatch.setattr(fused, "kernels_for", lambda like, given=given: given)
        workspace = Workspace(HERE)
        workspace.keep_floats = 3 * room
        terms = [kept.get(parameter) for parameter in passes.parameters]
        both = Together(terms, passes._sizes, 3, passes.parameters[0], workspace)
        assert [len(both._formed), len(both._again), len(both._gram)] in (
            [[2, 1, 0], [1, 2, 0], [0, 3, 0]] if given else [[2, 0, 1], [1, 0, 1], [0, 0, 1]]
        )
        with as_precise_as_norms():
            found.append(both.squared_norms())
            if given:
                with torch.inference_mode():
                    total = torch.cat(both.weighted_sums(weights))
                expected = passes.plain_sum(features, labels, weights=weights)
                torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_a_device_too_old_for_tiles_takes_the_other_kernels_and_forms_by_torch(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "shared_memory", lambda device: 0)
    assert fused.differing(kernels, HERE) == ""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).to(HERE)
    passes = BookKeeping(model, nn.CrossEntropyLoss(reduction="none"))
    calls = passes.calls(random(3, 1, 6, 6), torch.arange(3, device=HERE), [(None, 1.0)])
    kept, found = passes._kept_by(calls, 3), []
    for given in (kernels, None):
        monkeypatch.setattr(fused, "kernels_for", lambda like, given=given: given)
        both = Together([kept[p] for p in passes.parameters], passes._sizes, 3, passes.parameters[0], Workspace(HERE))
        found.append(both.squared_norms())
        assert [len(both._formed), len(both._again)] == [1, 0]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_kernels_are_tried_before_they_are_used(fresh: None, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert fused.differing(kernels, HERE) == ""
    real = kernels.row_squares
    monkeypatch.setattr(kernels, "row_squares", lambda *given: (real(*given)[0] * 1.001, []))
    with caplog.at_level(logging.WARNING):
        assert fused._tried(HERE) is None
    assert "ArithmeticError: squares differ from torch's" in caplog.text  # and nothing else does
    assert "torch's operations" in caplog.text


@pytest.mark.slow
def test_a_device_whose_sums_are_not_of_the_gradients_that_norms_were_taken_of_is_found_out(monkeypatch) -> None:
    """By less than the digits that short products leave out."""
    for name, fault in (("form", "convolutions' squares"), ("weighted_sum", "convolutions' sums")):
        with monkeypatch.context() as patch:
            real = getattr(kernels.Tiles, name)

            def wrong(self: kernels.Tiles, first: Tensor, other: object, real: Any = real) -> Tensor:
                found = real(self, first, other)
                return first.mul_(0.999) if found is None else found * 1.001

            patch.setattr(kernels.Tiles, name, wrong)
            assert fused.differing(kernels, HERE) == f"{fault}, bare {fault}, 1×1 {fault}, short 1×1 {fault}"


@pytest.mark.parametrize("which", first([name for name, *_ in fused.TRIED], ("convolutions",)))
def test_a_device_that_reads_one_kind_of_convolution_wrongly_is_found_out(which: str, monkeypatch) -> None:
    """Whose rows it takes, and in which order, must show."""
    monkeypatch.setattr(fused, "TRIED", [one for one in fused.TRIED if one[0] == which])
    real = kernels.Tiles._factors
    for fault in (lambda b: b[:1].expand_as(b), lambda b: b.roll(4, 1)):

        def wrong(self: kernels.Tiles, fault: Any = fault) -> tuple[Tensor, Tensor]:
            images, backprops = real(self)
            return images, fault(backprops).contiguous()

        monkeypatch.setattr(kernels.Tiles, "_factors", wrong)
        assert which in fused.differing(kernels, HERE).split(", ")


@pytest.mark.parametrize("fault", ["no Triton", "no compiler"])
def test_without_triton_or_a_compiler_torchs_operations_are_taken(fault: str, fresh: None, monkeypatch, caplog) -> None:
    if fault == "no Triton":
        monkeypatch.setitem(sys.modules, "equidp.gradients.kernels", None)
        monkeypatch.delattr("equidp.gradients.kernels")
    else:
        monkeypatch.setattr(kernels, "launch", _failing)
    with caplog.at_level(logging.WARNING):
        assert [fused._tried(HERE), fused._tried(HERE)] == [None, None]
    assert caplog.text.count("Norms are taken by torch's operations") == 1


def test_on_a_cpu_and_in_double_precision_they_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_tried", _failing)
    assert fused.kernels_for(torch.zeros(1)) is None
    assert fused.version(torch.device("cpu")) == ""


COMPILE = """
import re
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from equidp.gradients import kernels
P, I, L, F = (((kind,) * 3) for kind in ("*fp32", "i32", "i64", "fp32"))
layer = kernels.Kernel((3, 3), (1, 1), (1, 1), (64, 128))
how = kernels.Tiles(layer, torch.zeros(2, 64, 9, 9), torch.zeros(2, 128, 9, 9), (1, 1), True)._how()
pixel = kernels.Kernel((1, 1), (1, 1), (1, 1), (128, 128))
around = kernels.Kernel((3, 3), (1, 1), (1, 1), (128, 128))
flat = kernels.Tiles(pixel, *[torch.zeros(2, 128, 8, 8)] * 2, (0, 0), False)._how()
for one in (how, flat):
    del one["num_warps"], one["num_stages"]
assert flat["FLAT"] and not how["FLAT"]
names = "positions outputs channels height width down along apart aside top left"
geometry = dict.fromkeys(names.split(), "i32")
fused = {"enable_fp_fusion": True}  # as they are launched
for kernel, given, constants in [
    (kernels._squares, dict(rows=P, lengths=I, strides=L, entries=F, starts=(*I, "i32"), out="*fp32", records="i32"),
     dict(COUNT=3, PIECE=kernels.PIECE, BLOCK=kernels.BLOCK)),
    (kernels._products, dict(lefts=P, rights=P, sides=I, places=I, counts=I, out="*fp32", each="i32"),
     dict(COUNT=3, LONGEST=4096, BLOCK=1024)),
    (kernels._group_norm, dict(values="*fp32", backprops="*fp32", weight="*fp32", bias="*fp32", eps="fp32"),
     dict(CHANNELS=4, PIXELS=1024, HIGH=4, WIDE=1024)),
    (kernels._form, dict(images="*fp32", backprops="*fp32", squares="*fp32", gradients="*fp32", stride="i32",
     lost="fp32", records="i32", **geometry), dict(KEEP=True, **how)),
    (kernels._form, dict(images="*fp32", backprops="*fp32", squares="*fp32", gradients="*fp32", stride="i32",
     lost="fp32", records="i32", **geometry), dict(KEEP=False, **flat)),
    (kernels._weighted, dict(images="*fp32", backprops="*fp32", weights="*fp32", sums="*fp32", records="i32",
     **geometry), dict(EACH=3, **how)),
    (kernels._silence, dict(values="*fp32", finite="*i8", stride="i32", length="i32"),
     dict(PIECE=kernels.PIECE, BLOCK=kernels.BLOCK)),
]:
    source = ASTSource(kernel, given | dict.fromkeys(constants, "constexpr"), constants)
    for capability in (80, 90):
        assert compile(source, target=GPUTarget("cuda", capability, 32), options=fused).asm["cubin"]
given = dict(images="*fp32", backprops="*fp32", squares="*fp32", gradients="*fp32", stride="i32", lost="fp32",
             records="i32", **geometry)
of_sixteen = [i for i, name in enumerate(given) if given[name] == "*fp32" or name in ("outputs", "channels")]
for layer, side, padding in ((pixel, 14, 0), (pixel, 7, 0), (around, 28, 1), (around, 14, 1), (around, 7, 1)):
    both = torch.zeros(2, layer.channels[0], side, side), torch.zeros(2, layer.channels[1], side, side)
    how = kernels.Tiles(layer, *both, (padding, padding), padding > 0)._how()
    options = {name: how.pop(name) for name in ("num_warps", "num_stages")} | fused
    constants = dict(KEEP=False, **how)
    source = ASTSource(kernels._form, given | dict.fromkeys(constants, "constexpr"), constants,
                       {(i,): [["tt.divisibility", 16]] for i in of_sixteen})
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    if side == 14 and not padding:  # no multiple of 16, which is all that Triton looks for; rows begin at 16 bytes
        assert "cp.async.cg" in code["ptx"] and "cp.async.ca" not in code["ptx"]
    blocks = set(re.findall(r"tensor<(32x128|128x32)x!tt.ptr<f32>, (#blocked\\d*)>", code["ttgir"]))
    assert blocks
    for shape, block in blocks:
        found = re.search(block + r" = .*threadsPerWarp = \\[(\\d+), (\\d+)\\].*order = \\[(\\d)", code["ttgir"])
        # threads side by side read pixels, 32 of a block, side by side, not channels, which lie far apart
        pixels = shape.split("x").index("32")
        assert int(found[1 + pixels]) >= 8 and int(found[3]) == pixels, (layer, side, found[0])
kernels.capability = lambda device: 10
for layer, side, padding in ((pixel, 14, 0), (around, 7, 1)):
    both = torch.zeros(2, layer.channels[0], side, side), torch.zeros(2, layer.channels[1], side, side)
    how = kernels.Tiles(layer, *both, (padding, padding), padding > 0)._how()
    options = {name: how.pop(name) for name in ("num_warps", "num_stages")} | fused
    summed = dict(images="*fp32", backprops="*fp32", weights="*fp32", sums="*fp32", records="i32", **geometry)
    for kernel, its, more in ((kernels._form, given, dict(KEEP=True)), (kernels._weighted, summed, dict(EACH=3))):
        constants = more | how
        source = ASTSource(kernel, its | dict.fromkeys(constants, "constexpr"), constants)
        assert compile(source, target=GPUTarget("cuda", 100, 32), options=options).asm["cubin"]
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(HERE.type == "cpu", reason="no GPU here")
def test_a_gpu_uses_them(fresh: None) -> None:
    assert isinstance(fused.kernels_for(torch.zeros(1, device=HERE)), ModuleType)


def _failing(*given: object, **more: object) -> None:
    raise RuntimeError("Failed to find C compiler")
