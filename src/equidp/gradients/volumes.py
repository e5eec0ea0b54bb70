"""Convolutions of volumes, and transposed ones: as products over places, of windows that are written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.layers import Page, exact, padded
from equidp.gradients.products import GroupedProducts
from equidp.gradients.terms import Term, Vectors, along_positions


def volume_convolution(page: Page) -> dict[str, Term]:
    """`nn.Conv3d`: the places are those of the output, the windows those of the input."""
    layer, backprops = page.layer, [exact(call.backprop) for call in page.calls]
    terms = _bias(page, backprops)
    if "weight" in page.names:
        images = [padded(layer, exact(call.inputs[0])) for call in page.calls]
        inputs = [_windows(layer, image, d) for image, d in zip(images, backprops, strict=True)]
        seen = [_places(layer.groups, d) for d in backprops]
        terms["weight"] = GroupedProducts(along_positions(inputs, 2), along_positions(seen, 2))
    return terms


def transposed_convolution(page: Page) -> dict[str, Term]:
    """`nn.ConvTranspose…`: an input place is multiplied into a window of the output, whose gradient is so read."""
    layer, backprops = page.layer, [exact(call.backprop) for call in page.calls]
    terms = _bias(page, backprops)
    if "weight" in page.names:
        sides = [side for padding in reversed(layer.padding) for side in (padding, padding)]
        inputs = [exact(call.inputs[0]) for call in page.calls]
        seen = [_windows(layer, F.pad(d, sides), x) for d, x in zip(backprops, inputs, strict=True)]
        places = [_places(layer.groups, x) for x in inputs]
        terms["weight"] = GroupedProducts(along_positions(seen, 2), along_positions(places, 2))
    return terms


def _bias(page: Page, backprops: list[Tensor]) -> dict[str, Term]:
    if "bias" not in page.names:
        return {}
    return {"bias": Vectors(torch.stack([d.flatten(2).sum(2) for d in backprops]).sum(0))}


def _places(groups: int, values: Tensor) -> Tensor:
    """`[b, c, …]` to `[b, g, P, c/g]`."""
    return values.flatten(2).unflatten(1, (groups, -1)).transpose(2, 3)


def _windows(layer: Any, values: Tensor, like: Tensor) -> Tensor:
    """`[b, c, …]` to `[b, g, P, c/g·kernel]`: what the kernel covers from each of the places of `like`."""
    axes = zip(layer.kernel_size, layer.stride, layer.dilation, like.shape[2:], strict=True)
    for axis, (size, stride, dilation, places) in enumerate(axes):
        values = values.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        values = values.narrow(2 + axis, 0, places)  # padding of the output may leave room for one more
    dims = len(layer.kernel_size)
    grouped = values.unflatten(1, (layer.groups, -1))  # [b, g, c/g, places…, kernel…]
    grouped = grouped.flatten(3 + dims).flatten(3, 2 + dims)  # [b, g, c/g, P, kernel]
    return grouped.transpose(2, 3).flatten(3)
