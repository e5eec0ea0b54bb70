"""Layers: a rule for each kind of layer, which gives the per-record gradients of the layer's parameters.

A rule makes one term for each trainable parameter (`terms.py`) from the layer's calls: their inputs, and their
backprops, which are the gradients at the outputs. A layer that is called several times has more positions. `sites.py`
says which layer has which rule.

Shapes are written as b records, P positions, i inputs, o outputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equidp.gradients import fused
from equidp.gradients.convolutions import Convolutions
from equidp.gradients.grouped import GroupedProducts
from equidp.gradients.lookups import Lookups
from equidp.gradients.products import Outer, Products
from equidp.gradients.rounding import LOST
from equidp.gradients.standardised import Standardisation, Standardised
from equidp.gradients.terms import Formed, Term, Vectors, along_positions
from equidp.gradients.windows import Kernel
from equidp.gradients.workspace import Workspace


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer on b records.

    Attributes:
        inputs: its positional arguments, `[b, …]` each, detached.
        backprop: gradient of the summed losses at its output, `[b, …]`, already scaled by the iterate's coefficient.
        parameters: the trainable parameters' values during this call, for the rules of `sites.READ_VALUES` alone.
        named: arguments by name that are the same for all records; only for a layer without a rule of its own.
        names: names of the last inputs, if such a layer is given them by name.
        several: whether inputs and backprop are `[b, w, …]`, because the layer sees w rows of each record.
    """

    inputs: tuple[Tensor, ...]
    backprop: Tensor
    parameters: Mapping[str, Tensor]
    named: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    several: bool = False

    def times(self, coefficient: float) -> Call:
        """Return this call with its backprop scaled."""
        return replace(self, backprop=self.backprop * coefficient)

    def parted(self, count: int) -> list[Call]:
        """Cut a call on `count` views of b records, one view after the other, into `count` calls on b records.

        Views are augmented copies of the records.
        """
        if count == 1:
            return [self]
        parts = zip(*(values.chunk(count) for values in (self.backprop, *self.inputs)), strict=True)
        return [replace(self, backprop=backprop, inputs=tuple(inputs)) for backprop, *inputs in parts]


def exact(values: Tensor) -> Tensor:
    """Return values of half precision as float32, in which all products and sums are taken."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


@dataclass(frozen=True, eq=False)
class Page:
    """The input of a rule.

    Attributes:
        layer: the layer.
        calls: its calls in one batch.
        names: names of its trainable parameters.
        workspace: buffers to work in.
    """

    layer: Any
    calls: Sequence[Call]
    names: frozenset[str]
    workspace: Workspace


Rule = Callable[[Page], dict[str, Term]]
"""Gives one term for each trainable parameter, by its name in the layer."""


def linear(page: Page) -> dict[str, Term]:
    """`y = x Wᵀ + c` on `x [b, …, i]`: every place between the first and last dimension is a position."""
    if len(page.calls) == 1 and page.calls[0].backprop.dim() == 2:
        call = page.calls[0]
        bias = Vectors(exact(call.backprop))
        both: dict[str, Term] = {"weight": Outer(exact(call.inputs[0]), bias), "bias": bias}
        return {name: term for name, term in both.items() if name in page.names}
    backprops = [in_rows(call.backprop) for call in page.calls]
    terms: dict[str, Term] = {}
    if "weight" in page.names:
        inputs = [in_rows(call.inputs[0]) for call in page.calls]
        terms["weight"] = Products(inputs, backprops, page.workspace, page.layer)
    if "bias" in page.names:
        terms["bias"] = Vectors(_sum([b.sum(1) for b in backprops]))
    return terms


def in_rows(values: Tensor) -> Tensor:
    """Return `[b, …, n]` as float32 `[b, P, n]`."""
    return exact(values).reshape(len(values), -1, values.shape[-1])


def convolution(page: Page) -> dict[str, Term]:
    """A convolution is a linear map of windows: its positions are the pixels of the output."""
    backprops = [_image(call.backprop) for call in page.calls]
    terms: dict[str, Term] = {}
    if "weight" in page.names:
        terms["weight"] = _convolved(page, backprops)
    if "bias" in page.names:
        terms["bias"] = Vectors(_sum([_over_pixels(b) for b in backprops]))
    return terms


def standardised_convolution(page: Page) -> dict[str, Term]:
    """A convolution whose weight is standardised first; the weight's terms go back through that step's derivative."""
    terms = convolution(replace(page, names=page.names - {"weight"}))
    if "weight" in page.names:
        alike: dict[int, list[Call]] = defaultdict(list)
        for call in page.calls:  # calls at the same iterate have the same weight
            alike[call.parameters["weight"].data_ptr() or id(call.parameters)].append(call)
        inner = [convolution(replace(page, calls=calls))["weight"] for calls in alike.values()]
        maps = [Standardisation.of(exact(calls[0].parameters["weight"])) for calls in alike.values()]
        terms["weight"] = Standardised(inner, maps, len(page.calls[0].backprop))
    return terms


def _image(values: Tensor) -> Tensor:
    """Return `[b, c, H, W]` (or `[b, c, W]`) as float32 `[b, c, H, W]`, channels first or last, without gaps."""
    values = exact(values.unsqueeze(2) if values.dim() == 3 else values)
    return values if values.is_contiguous(memory_format=torch.channels_last) else values.contiguous()


def _convolved(page: Page, backprops: Sequence[Tensor]) -> Term:
    layer, zeros = page.layer, [0, 0, 0, 0]
    together = layer.groups == 1 and len({call.inputs[0].shape for call in page.calls}) == 1
    # a GPU's kernels read padding that is not in memory
    bare = together and layer.padding_mode == "zeros" and backprops[0].device.type != "cpu"
    if bare:
        zeros[: 2 * len(layer.kernel_size)] = _padding(layer)
    size, stride, dilation = ((1, *x)[-2:] for x in (layer.kernel_size, layer.stride, layer.dilation))
    kernel = Kernel(size, stride, dilation, (layer.in_channels, layer.out_channels))
    if not together and layer.groups < layer.in_channels:
        windows = [partial(_windows, kernel, layer, call.inputs[0]) for call in page.calls]
        return GroupedProducts(windows, backprops, layer, page.workspace)
    images = [_image(call.inputs[0] if bare else padded(layer, call.inputs[0])) for call in page.calls]
    if together:
        return Convolutions(kernel, images, backprops, page.workspace, layer, zeros)
    pairs = [_by_channel(kernel, x, b, page.workspace) for x, b in zip(images, backprops, strict=True)]
    values, sizes = (_sum(parts) for parts in zip(*pairs, strict=True))
    return Formed(values.flatten(1), sizes)


def _windows(kernel: Kernel, layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, some: slice) -> Tensor:
    """Return some records' windows as `grouped.Windows` says: `[m, g, oh, ow, c/g, kh, kw]`."""
    windows = kernel.windows(_image(padded(layer, inputs[some]))).permute(0, 5, 1, 2, 3, 4)
    return windows.unflatten(1, (layer.groups, -1)).permute(0, 1, 3, 4, 2, 5, 6)


def _by_channel(kernel: Kernel, images: Tensor, backprops: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Return gradients `[b, o, kh·kw]` for groups of one input channel, and the sizes `[b]` of their summands.

    Gradients are formed for one place of the kernel at a time. To write the windows out would take ten times as long on
    a CPU, and on a GPU the windows of all layers at once would take its memory: ConvNeXt-T's at 224×224 have 0.4 GB for
    each record.
    """
    seen, back = images.unsqueeze(2), backprops.unflatten(1, (images.shape[1], -1))  # [b, g, 1 or o/g, …]
    places = list(kernel.offsets(*images.shape[2:]))
    found = backprops.new_empty(*backprops.shape[:2], len(places))
    for start, stop in workspace.chunks(len(images), 4 * backprops[0].numel()):
        for place, (rows, columns) in enumerate(places):
            products = seen[start:stop, ..., rows, columns] * back[start:stop]
            found[start:stop, :, place] = products.sum((3, 4)).flatten(1)
    # an upper bound, as in `Convolutions.sizes`; here sums do not go over channels
    by_channel = (torch.linalg.vector_norm(x, dim=(2, 3, 4)).square() + x[0, 0].numel() * LOST for x in (seen, back))
    return found, (kernel.seen * math.prod(by_channel).sum(1)).sqrt()


def padded(layer: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    """Return the input with the layer's own padding, whatever the padding's mode."""
    widths = _padding(layer)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(values, widths, mode=mode) if any(widths) else values


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """Return the widths of the padding, as arguments of `F.pad`."""
    widths: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":  # if the total is odd, the right side gets one more, as in torch
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            widths += [total // 2, total - total // 2]
        else:
            widths += [0, 0] if layer.padding == "valid" else [int(layer.padding[axis])] * 2
    return widths


def group_norm(page: Page) -> dict[str, Term]:
    """Scale and shift per channel of group-normalised activations."""
    if page.calls[0].backprop.device.type != "cpu" and len(page.calls) == 1:
        (call,) = page.calls
        values, backprop, layer = exact(call.inputs[0]), exact(call.backprop), page.layer
        if kernels := fused.kernels_for(values):
            both = kernels.group_norm(values, backprop, layer.num_groups, layer.eps)
        else:
            ones = page.workspace.ones(len(values) * layer.num_channels, values)
            both = group_norm_at_once(values, backprop, layer.num_groups, layer.eps, ones)
        pairs = zip(("weight", "bias"), both, strict=True)
        return {name: Vectors(values) for name, values in pairs if name in page.names}
    return scaled(page, lambda x: F.group_norm(x, page.layer.num_groups, eps=page.layer.eps), _over_pixels)


def group_norm_at_once(x: Tensor, backprop: Tensor, groups: int, eps: float, ones: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of scale and of shift, `[b, c]` each, by two operations of torch.

    torch would sum over the records. So it is told that the batch is a single record with b·c channels. `ones` `[b·c]`
    is the scale that the operation requires.
    """
    records, channels, pixels = len(x), x.shape[1], x[0, 0].numel()
    one = (1, records * channels, pixels)
    x, backprop = x.reshape(one), backprop.reshape(one)
    _, mean, scale = torch.native_group_norm(x, None, None, *one, records * groups, eps)
    _, weight, bias = torch.ops.aten.native_group_norm_backward(
        backprop, x, mean, scale, ones, *one, records * groups, [False, True, True]
    )
    return weight.view(records, channels), bias.view(records, channels)


def frozen_batch_norm(page: Page) -> dict[str, Term]:
    """BatchNorm in evaluation mode: a fixed map per channel, then scale and shift."""
    layer = page.layer
    return scaled(page, lambda x: F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps), _over_pixels)


def layer_norm(page: Page) -> dict[str, Term]:
    """Scale (and shift) per element of LayerNorm or RMSNorm."""
    layer, shape = page.layer, page.layer.normalized_shape
    norm = F.rms_norm if isinstance(layer, nn.RMSNorm) else F.layer_norm
    return scaled(page, lambda x: norm(x, shape, eps=layer.eps), over_places(shape))


def over_places(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that sums `[b, …, *shape]` over the dimensions in between, to `[b, numel]`."""
    return lambda x: x.reshape(len(x), -1, math.prod(shape)).sum(1)


def prelu(page: Page) -> dict[str, Term]:
    """Slope for negative values, one per channel or one for all channels."""
    one = page.layer.num_parameters == 1
    total = (lambda x: x.flatten(1).sum(1, keepdim=True)) if one else _over_pixels
    return scaled(page, lambda x: x.clamp(max=0), total)


def scaled(page: Page, normalise: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> dict[str, Term]:
    """Return the terms of `y = normalise(x)·weight + bias`, elementwise; `total` sums entries with the same weight."""

    def product(x: Tensor, d: Tensor) -> Tensor:  # a few records at a time, whose products stay in the cache
        ranges = list(page.workspace.chunks(len(x), x[0].numel()))
        if len(ranges) == 1:
            return total(normalise(x) * d)
        return torch.cat([total(normalise(x[start:stop]) * d[start:stop]) for start, stop in ranges])

    backprops = [exact(call.backprop) for call in page.calls]
    terms: dict[str, Term] = {}
    if "weight" in page.names:
        pairs = [(exact(call.inputs[0]), d) for call, d in zip(page.calls, backprops, strict=True)]
        terms["weight"] = Vectors(_sum([product(x, d) for x, d in pairs]))
    if "bias" in page.names:
        terms["bias"] = Vectors(_sum([total(d) for d in backprops]))
    return terms


def _over_pixels(values: Tensor) -> Tensor:
    """Return the sums `[b, c]` of `[b, c, …]`, added in the order in which the entries lie in memory."""
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return values.permute(0, 2, 3, 1).flatten(1, 2).sum(1)
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def embedding(page: Page) -> dict[str, Term]:
    """A table, of which a record's tokens read rows; the row of the padding token has no gradient."""
    ids = along_positions([call.inputs[0].reshape(len(call.backprop), -1) for call in page.calls])
    backprops = along_positions([in_rows(call.backprop) for call in page.calls])
    if page.layer.padding_idx is not None:
        backprops = backprops.masked_fill((ids == page.layer.padding_idx).unsqueeze(2), 0)
    return {"weight": Lookups(ids, backprops, page.layer.num_embeddings)}


def fallback(page: Page) -> dict[str, Term]:
    """Any other layer: `torch.func` forms each record's gradient, by one vector-Jacobian product per record."""
    summed: dict[str, Tensor] = {}
    for call in page.calls:
        for name, gradient in _vjp_per_record(page.layer, call).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return {name: Vectors(exact(gradient).reshape(len(gradient), -1)) for name, gradient in summed.items()}


def only_tensor(output: Any) -> Any:
    """Return a tuple's only tensor if the rest is None, such as attention without its weights; else the output."""
    given = [x for x in output if x is not None] if isinstance(output, tuple) else []
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else output


def _vjp_per_record(layer: nn.Module, call: Call) -> dict[str, Tensor]:
    def one(backprop: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            given = inputs if call.several else tuple(x.unsqueeze(0) for x in inputs)
            first = len(given) - len(call.names)
            named = {**call.named, **dict(zip(call.names, given[first:], strict=True))}
            found: Tensor = only_tensor(torch.func.functional_call(layer, parameters, given[:first], named))
            return found if call.several else found.squeeze(0)

        return torch.func.vjp(forward, dict(call.parameters))[1](backprop)[0]

    inputs = [exact(x) if x.is_floating_point() else x for x in call.inputs]  # the type of the parameters
    return torch.func.vmap(one, randomness="error")(exact(call.backprop), *inputs)
