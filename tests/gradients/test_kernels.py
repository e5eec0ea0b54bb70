"""The GPU's own kernels are held to torch's operations, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")
if HERE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("torch cannot use the GPU: set TRITON_INTERPRET=1", allow_module_level=True)

from equidp.gradients import fused, kernels, rounding  # noqa: E402
from equidp.gradients.bookkeeping import BookKeeping  # noqa: E402
from equidp.gradients.layers import group_norm_at_once  # noqa: E402
from equidp.gradients.together import Together  # noqa: E402
from equidp.gradients.workspace import Workspace  # noqa: E402


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is then several pieces, a set of rows several launches, and a group of channels several tiles."""
    for name, size in (("PIECE", 64), ("BLOCK", 32), ("MOST", 3), ("TILE", 16)):
        monkeypatch.setattr(kernels, name, size)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Devices are tried anew, and forgotten afterwards."""
    fused._tried.cache_clear()
    yield
    fused._tried.cache_clear()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(HERE)


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


def test_a_networks_norms_are_those_that_torchs_operations_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 24, 3), nn.Tanh(), nn.Conv2d(24, 24, 2, bias=False), nn.Flatten(),
        nn.Linear(24, 3),
    ).to(HERE)  # fmt: skip
    passes = BookKeeping(model, nn.CrossEntropyLoss(reduction="none"))
    kept = passes._kept_by(passes.calls(random(3, 1, 6, 6), torch.arange(3, device=HERE), [(None, 1.0)]), 3)
    found = []
    for given in (kernels, None):
        monkeypatch.setattr(fused, "kernels_for", lambda like, given=given: given)
        terms = [kept.get(parameter) for parameter in passes.parameters]
        together = Together(terms, passes._sizes, 3, passes.parameters[0], Workspace(HERE))
        assert together._gram
        assert together._formed
        found.append(together.squared_norms())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_kernels_are_tried_before_they_are_used(fresh: None, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert fused.differing(kernels, HERE) == ""
    real = kernels.row_squares
    monkeypatch.setattr(kernels, "row_squares", lambda *given: (real(*given)[0] * 1.001, []))
    assert fused.differing(kernels, HERE) == "squares"
    with caplog.at_level(logging.WARNING):
        assert fused._tried(HERE) is None
    assert "squares differ from torch's" in caplog.text
    assert "torch's operations" in caplog.text


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
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from equidp.gradients import kernels
P, I, L, F = (((kind,) * 3) for kind in ("*fp32", "i32", "i64", "fp32"))
for kernel, given, constants in [
    (kernels._squares, dict(rows=P, lengths=I, strides=L, entries=F, starts=(*I, "i32"), out="*fp32", records="i32"),
     dict(COUNT=3, PIECE=kernels.PIECE, BLOCK=kernels.BLOCK)),
    (kernels._products, dict(lefts=P, rights=P, sides=I, places=I, counts=I, out="*fp32", each="i32"),
     dict(COUNT=3, LONGEST=4096, BLOCK=1024)),
    (kernels._group_norm, dict(values="*fp32", backprops="*fp32", weight="*fp32", bias="*fp32", eps="fp32"),
     dict(CHANNELS=4, PIXELS=1024, GROUPS=16, HIGH=4, WIDE=1024)),
]:
    source = ASTSource(kernel, given | dict.fromkeys(constants, "constexpr"), constants)
    assert compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
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
