"""Every cut forms the gradients that unfolding would, and the cheapest one is chosen by shape and layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.engine.terms import Convolutions, weighted_rows
from equidp.engine.windows import Bands, Cut, Kernel, Layout, WholeWindows, cheapest, cuts
from equidp.engine.workspace import Workspace

KERNELS = [
    Kernel((3, 3), (1, 1), (1, 1), (3, 5)),
    Kernel((3, 2), (1, 1), (2, 1), (2, 4)),
    Kernel((4, 4), (2, 2), (1, 1), (4, 3)),
    Kernel((8, 8), (2, 2), (1, 1), (1, 6)),
    Kernel((4, 6), (2, 3), (1, 1), (2, 3)),
    Kernel((2, 4), (1, 2), (1, 1), (3, 2)),
    Kernel((3, 3), (2, 2), (1, 1), (2, 3)),
    Kernel((2, 2), (3, 1), (1, 2), (3, 3)),
    Kernel((4, 4), (2, 2), (2, 1), (4, 3)),
]


def unfolded(kernel: Kernel, images: Tensor, backprops: Tensor) -> Tensor:
    """`[m, o, c, kh, kw]` the long way."""
    windows = F.unfold(images, kernel.size, dilation=kernel.dilation, stride=kernel.stride)
    found = backprops.flatten(2) @ windows.transpose(1, 2)
    return found.view(len(images), kernel.channels[1], kernel.channels[0], *kernel.size)


def formed(cut: Cut, images: Tensor, backprops: Tensor) -> Tensor:
    workspace, m = Workspace(images.device), len(images)
    room = torch.full((cut.taps, m, backprops.shape[1] * cut.kernel.fan_in // cut.taps), math.nan)
    view, backprops = cut.view(images), backprops.flatten(2)
    cut.multiply(view, 0.25 * backprops, room, False, workspace)
    cut.multiply(view, 0.75 * backprops, room, True, workspace)
    return cut.as_weight(room)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("size", [(12, 13), (11, 12)])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("in_taps", [False, True])
@pytest.mark.parametrize("kind", [WholeWindows, Bands])
def test_every_cut_equals_unfolding(kind, in_taps, kernel, size, last) -> None:
    torch.manual_seed(5)
    taps, left = divmod(kernel.size[0], kernel.stride[0])
    if in_taps and (left or kernel.dilation[0] > 1):
        assert not any(cut.taps > 1 for cut in cuts(kernel, *size))
        return
    cut: Cut = kind(kernel, *size, taps if in_taps else 1)
    layout = torch.channels_last if last else torch.contiguous_format
    images = torch.randn(4, kernel.channels[0], *size).to(memory_format=layout)
    backprops = torch.randn(4, kernel.channels[1], *kernel.outputs(*size)).to(memory_format=layout)
    torch.testing.assert_close(
        formed(cut, images, backprops), unfolded(kernel, images, backprops), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_pixel_is_seen_at_most_so_often(kernel) -> None:
    seen = torch.zeros(24, 24)
    for rows, columns in kernel.offsets(24, 24):
        seen[rows, columns] += 1
    assert seen.max() <= kernel.seen
    assert seen.max() == kernel.seen or kernel.dilation != (1, 1)


@pytest.mark.parametrize("cut", [WholeWindows, Bands])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_images_that_begin_in_the_midst_of_memory_are_cut_where_they_are(cut, layout) -> None:
    kernel, size = KERNELS[0], (6, 7)
    images = torch.randn(5, 3, *size).to(memory_format=layout)[2:]  # as a layer gets what its model has split
    backprops = torch.randn(3, 5, *kernel.outputs(*size))
    torch.testing.assert_close(
        formed(cut(kernel, *size), images, backprops), unfolded(kernel, images, backprops), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("kernel", "side", "expected", "taps"),
    [
        (Kernel((8, 8), (2, 2), (1, 1), (1, 16)), 32, Bands, 4),
        (Kernel((4, 4), (2, 2), (1, 1), (16, 32)), 12, WholeWindows, 2),
        (Kernel((5, 5), (1, 1), (1, 1), (1, 20)), 28, Bands, 1),
        (Kernel((5, 5), (1, 1), (1, 1), (20, 50)), 12, WholeWindows, 1),
    ],
    ids=str,
)
def test_the_models_convolutions_get_the_cut_that_was_fastest(kernel, side, expected, taps) -> None:
    images = torch.randn(2, kernel.channels[0], side, side).to(memory_format=torch.channels_last)
    cut, cost = cheapest(kernel, side, side, (Layout.of(images),))
    assert (type(cut), cut.taps) == (expected, taps)
    assert cost == cut.cost(Layout.of(images))


@pytest.mark.parametrize(
    ("kernel", "taps"),
    [(KERNELS[0], 1), (Kernel((3, 3), (1, 1), (1, 1), (3, 2)), 1), (KERNELS[3], 4)],
    ids=["odd", "even", "in taps"],
)
def test_kept_gradients_are_summed_by_weight_and_a_weight_of_zero_silences_what_is_not_finite(kernel, taps) -> None:
    torch.manual_seed(5)
    images, weights = torch.randn(4, kernel.channels[0], 20, 21), torch.tensor([0.5, 0.0, 2.0, 1.0])
    backprops = torch.randn(4, kernel.channels[1], *kernel.outputs(20, 21))
    images[1] = math.inf
    term = Convolutions(kernel, [images], [backprops], Workspace(images.device), "layer")
    assert term._cut.taps == taps
    assert term._materialised()[[0, 2, 3]].isfinite().all()
    assert term._kept is not None
    seen = weights != 0
    expected = torch.einsum("b,b...->...", weights[seen], unfolded(kernel, images[seen], backprops[seen])).flatten()
    torch.testing.assert_close(term.weighted_sum(weights, clean=False), expected, rtol=1e-4, atol=1e-4)


def test_a_buffer_grows_with_the_batch_and_is_found_again() -> None:
    workspace, like = Workspace(torch.device("cpu")), torch.zeros(0)
    first = workspace.take("a", 10, 8, like=like)
    assert workspace.take("a", 5, 8, like=like).data_ptr() == first.data_ptr()
    assert workspace.take("b", 5, 8, like=like).data_ptr() != first.data_ptr()
    assert workspace.take("a", 1000, 8, like=like).shape == (1000, 8)
    assert workspace.take("a", 3, like=like.double()).dtype == torch.float64


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("taps", "records", "floats"), [(1, 7, 5), (1, 6, 4), (2, 9, 8), (4, 1, 3), (2, 2, 6)])
def test_kept_rows_are_weighed_alike_however_the_threads_share_them(
    at_once: bool, taps: int, records: int, floats: int
) -> None:
    rows, weights = torch.randn(taps, records, floats), torch.rand(records)
    expected = torch.einsum("tbn,b->tn", rows, weights).unsqueeze(1)
    torch.testing.assert_close(weighted_rows(rows, weights, at_once), expected)


@pytest.mark.parametrize("broken", [False, True])
def test_gradients_formed_at_once_or_in_pieces_are_the_same(broken: bool) -> None:
    kernel = Kernel((4, 4), (2, 2), (1, 1), (16, 32))
    images = torch.randn(23, 16, 13, 13).contiguous(memory_format=torch.channels_last)
    backprops, weights, found = torch.randn(23, 32, 5, 5), torch.rand(23), []
    if broken:
        images[11], weights[11] = torch.nan, 0.0
    for at_once in (1 << 22, 0):  # all, or five at a time
        workspace = Workspace(torch.device("cpu"))
        workspace.at_once_floats, workspace.scratch_floats = at_once, 1 << 16
        term = Convolutions(kernel, [images], [backprops], workspace, "layer")
        found.append((term.squared_norms(), term.weighted_sum(weights, clean=not broken)))
        assert found[-1][1].isfinite().all()
    torch.testing.assert_close(*found, equal_nan=True)
