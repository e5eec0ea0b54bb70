"""Volumes: rules for convolutions of volumes (`Conv3d`), and for transposed convolutions.

On a CPU, convolutions without groups are taken as convolutions of images. For a volume, each plane of the kernel is a
convolution of images. For a transposed convolution of images, backprops and inputs change roles: the backprop is the
image, and the input is the backprop. All other convolutions are products over places, of windows that are written out
for a few records at a time (`grouped.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.gradients.convolutions import Convolutions
from equidp.gradients.grouped import GroupedProducts
from equidp.gradients.layers import Page, exact, padded
from equidp.gradients.terms import Term, Vectors, summed
from equidp.gradients.windows import Kernel


def volume_convolution(page: Page) -> dict[str, Term]:
    """`nn.Conv3d`: the places are the output's, and the windows are parts of the input."""
    layer, backprops = page.layer, [exact(call.backprop) for call in page.calls]
    terms = _bias(page, backprops)
    if "weight" in page.names:
        inputs = [call.inputs[0] for call in page.calls]
        if _as_images(layer, inputs):
            images = [padded(layer, exact(values)) for values in inputs]
            return terms | {"weight": Planes.of(page, images, backprops)}
        seen = [partial(_seen, layer, values, d.shape[2:]) for values, d in zip(inputs, backprops, strict=True)]
        terms["weight"] = GroupedProducts(seen, backprops, layer, page.workspace)
    return terms


def transposed_convolution(page: Page) -> dict[str, Term]:
    """`nn.ConvTranspose…`: each input place writes a window of the output, so windows are read from the backprop."""
    layer, backprops = page.layer, [exact(call.backprop) for call in page.calls]
    terms = _bias(page, backprops)
    if "weight" in page.names:
        sides = [side for padding in reversed(layer.padding) for side in (padding, padding)]
        inputs = [exact(call.inputs[0]) for call in page.calls]
        if layer.weight.dim() <= 4 and _as_images(layer, inputs):
            spread = [F.pad(d, sides) for d in backprops]
            return terms | {"weight": _turned_round(page, spread, inputs)}
        seen = [partial(_written_to, layer, d, sides, x.shape[2:]) for d, x in zip(backprops, inputs, strict=True)]
        terms["weight"] = GroupedProducts(seen, inputs, layer, page.workspace)
    return terms


class Planes(Term):
    """Gradients of a volume's kernel `[o, c, kd, kh, kw]`, with a term for each of its kd planes `[o, c, kh, kw]`."""

    def __init__(self, planes: Sequence[Convolutions], rows: int) -> None:
        self._planes, self._rows = planes, rows  # o·c

    @classmethod
    def of(cls, page: Page, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> Planes:
        """Make the terms of padded volumes `[b, c, D, H, W]` and backprops `[b, o, od, oh, ow]`.

        Each plane of the output counts as one call of a convolution of images.
        """
        layer = page.layer
        (depth, *size), (step, *stride), (apart, *dilation) = layer.kernel_size, layer.stride, layer.dilation
        kernel = _kernel(size, stride, dilation, (layer.in_channels, layer.out_channels))
        volumes, back = (list(map(_planes_of, values)) for values in (images, backprops))
        returned = [image for planes in back for image in planes]

        def seen_by(plane: int) -> list[Tensor]:
            pairs = zip(volumes, back, strict=True)
            return [image for seen, planes in pairs for image in seen[plane * apart :: step][: len(planes)]]

        terms = [Convolutions(kernel, seen_by(i), returned, page.workspace, (layer, i)) for i in range(depth)]
        return cls(terms, layer.in_channels * layer.out_channels)

    def squared_norms(self) -> Tensor:
        return summed([plane.squared_norms() for plane in self._planes])

    def sizes(self) -> Tensor:
        return summed([plane.sizes() for plane in self._planes])

    def overstatement(self) -> Tensor:
        return summed([plane.overstatement() for plane in self._planes])

    def weighted_sum(self, weights: Tensor, silent: Tensor | None) -> Tensor:
        sums = [plane.weighted_sum(weights, silent).view(self._rows, -1) for plane in self._planes]
        return torch.stack(sums, 1).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        found = [plane.gradients(start, stop).unflatten(1, (self._rows, -1)) for plane in self._planes]
        return torch.stack(found, 2).flatten(1)


def _as_images(layer: Any, inputs: Sequence[Tensor]) -> bool:
    alike = len({values.shape for values in inputs}) == 1
    return bool(layer.groups == 1 and alike and inputs[0].device.type == "cpu")


def _planes_of(values: Tensor) -> Sequence[Tensor]:
    """Return volumes `[b, c, D, H, W]` as D images `[b, c, H, W]`, each channels-last and without gaps."""
    return values.permute(2, 0, 3, 4, 1).contiguous().permute(0, 1, 4, 2, 3).unbind()


def _turned_round(page: Page, images: Sequence[Tensor], backprops: Sequence[Tensor]) -> Convolutions:
    """Return the gradients of a transposed convolution of images or lines.

    Args:
        page: the layer's.
        images: padded backprops `[b, o, …]`, which are the images here.
        backprops: inputs `[b, i, …]`, which are the backprops here.
    """
    layer = page.layer
    one = (1,) * (4 - layer.weight.dim())
    size, stride, dilation = ([*one, *values] for values in (layer.kernel_size, layer.stride, layer.dilation))
    kernel = _kernel(size, stride, dilation, (layer.out_channels, layer.in_channels))
    seen, back = ([x.unsqueeze(2) if one else x for x in values] for values in (images, backprops))
    ends = [kernel.reach(axis) + kernel.stride[axis] * (back[0].shape[2 + axis] - 1) for axis in range(2)]
    # `output_padding` may leave room for one more place, which no input wrote
    whole = [x[:, :, : ends[0], : ends[1]].contiguous() for x in seen]
    return Convolutions(kernel, whole, [x.contiguous() for x in back], page.workspace, layer)


def _kernel(size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], channels: tuple[int, int]) -> Kernel:
    return Kernel((size[0], size[1]), (stride[0], stride[1]), (dilation[0], dilation[1]), channels)


def _bias(page: Page, backprops: list[Tensor]) -> dict[str, Term]:
    if "bias" not in page.names:
        return {}
    return {"bias": Vectors(torch.stack([d.flatten(2).sum(2) for d in backprops]).sum(0))}


def _seen(layer: Any, inputs: Tensor, places: Sequence[int], some: slice) -> Tensor:
    """Return some records' windows of inputs `[b, c, …]`, which the kernel covers at each place of the output."""
    return _windows(layer, padded(layer, exact(inputs[some])), places)


def _written_to(layer: Any, backprops: Tensor, sides: Sequence[int], places: Sequence[int], some: slice) -> Tensor:
    """Return some records' windows of a transposed convolution's backprops, to which each place of the input writes."""
    return _windows(layer, F.pad(backprops[some], list(sides)), places)


def _windows(layer: Any, values: Tensor, places: Sequence[int]) -> Tensor:
    """Return the windows of `[m, c, …]` at so many places along each axis, as `grouped.Windows` says."""
    axes = zip(layer.kernel_size, layer.stride, layer.dilation, places, strict=True)
    for axis, (size, stride, dilation, length) in enumerate(axes):
        values = values.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        values = values.narrow(2 + axis, 0, length)  # `output_padding` may leave room for one more
    return values.unflatten(1, (layer.groups, -1)).movedim(2, 2 + len(places))
