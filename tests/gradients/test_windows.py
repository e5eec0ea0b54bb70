"""Every cut forms the gradients that unfolding would, and the cheapest one is chosen by shape and layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.convolutions import Convolutions
from equidp.gradients.terms import weighted_rows
from equidp.gradients.windows import Bands, Cut, Kernel, Layout, WholeWindows, cheapest
from equidp.gradients.workspace import Workspace

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
    room = torch.full((m, backprops.shape[1] * cut.kernel.fan_in), math.nan)
    view, backprops = cut.view(images), backprops.flatten(2)
    cut.multiply(view, 0.25 * backprops, room, False, workspace)
    cut.multiply(view, 0.75 * backprops, room, True, workspace)
    return cut.as_weight(room)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("size", [(12, 13), (11, 12)])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("kind", [WholeWindows, Bands])
def test_every_cut_equals_unfolding(kind, kernel, size, last) -> None:
    torch.manual_seed(5)
    cut: Cut = kind(kernel, *size)
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
    ("kernel", "side", "expected"),
    [
        (Kernel((4, 4), (2, 2), (1, 1), (16, 32)), 12, WholeWindows),
        (Kernel((5, 5), (1, 1), (1, 1), (1, 20)), 28, Bands),
        (Kernel((5, 5), (1, 1), (1, 1), (20, 50)), 12, WholeWindows),
    ],
    ids=str,
)
def test_the_models_convolutions_get_the_cut_that_was_fastest(kernel, side, expected) -> None:
    images = torch.randn(2, kernel.channels[0], side, side).to(memory_format=torch.channels_last)
    cut, cost = cheapest(kernel, side, side, (Layout.of(images),))
    assert type(cut) is expected
    assert cost == cut.cost(Layout.of(images))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "kernel", [KERNELS[0], Kernel((3, 3), (1, 1), (1, 1), (3, 2)), KERNELS[3]], ids=["odd", "even", "strided"]
)
def test_kept_gradients_are_summed_by_weight_and_a_weight_of_zero_silences_what_is_not_finite(kernel) -> None:
    torch.manual_seed(5)
    images, weights = torch.randn(4, kernel.channels[0], 20, 21), torch.tensor([0.5, 0.0, 2.0, 1.0])
    backprops = torch.randn(4, kernel.channels[1], *kernel.outputs(20, 21))
    images[1] = math.inf
    term = Convolutions(kernel, [images], [backprops], Workspace(images.device), "layer")
    assert term.squared_norms()[[0, 2, 3]].isfinite().all()
    seen = weights != 0
    expected = torch.einsum("b,b...->...", weights[seen], unfolded(kernel, images[seen], backprops[seen])).flatten()
    images.zero_()  # gradients that are kept need them no more
    torch.testing.assert_close(term.weighted_sum(weights, weights == 0), expected, rtol=1e-4, atol=1e-4)


def test_a_buffer_grows_with_the_batch_and_is_found_again() -> None:
    workspace, like = Workspace(torch.device("cpu")), torch.zeros(0)
    first = workspace.take("a", 10, 8, like=like)
    assert workspace.take("a", 5, 8, like=like).data_ptr() == first.data_ptr()
    assert workspace.take("b", 5, 8, like=like).data_ptr() != first.data_ptr()
    assert workspace.take("a", 1000, 8, like=like).shape == (1000, 8)
    assert workspace.take("a", 3, like=like.double()).dtype == torch.float64


@pytest.mark.parametrize(("records", "floats"), [(7, 5), (6, 4), (1, 3), (2, 6)])
def test_kept_rows_are_weighed_in_halves(records: int, floats: int) -> None:
    rows, weights = torch.randn(records, floats), torch.rand(records)
    torch.testing.assert_close(weighted_rows(rows, weights), weights @ rows)
