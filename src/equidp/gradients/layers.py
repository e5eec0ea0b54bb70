"""Layers: what one layer adds to every record's gradient, from its inputs and the gradient at its outputs.

A layer's rule turns its calls (activation, backprop) into one term per trainable parameter (`terms.py`). A layer that
is called several times only has more positions. Which layer has which rule is in `sites.py`.

Shapes are written as b records, P positions, i inputs, o outputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equidp.gradients import fused
from equidp.gradients.convolutions import Convolutions
from equidp.gradients.lookups import Lookups
from equidp.gradients.products import GroupedProducts, Outer, Products
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
        parameters: the trainable parameters' values during this call (kept for the rules of `sites.READ_VALUES` alone).
        named: other arguments by name, of a layer without a rule of its own, which are the same for all records.
        names: of the last inputs, where such a layer is given them by name.
        several: whether inputs and backprop are `[b, w, …]`, of a layer that sees w rows of each record.
    """

    inputs: tuple[Tensor, ...]
    backprop: Tensor
    parameters: Mapping[str, Tensor]
    named: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    several: bool = False

    def times(self, coefficient: float) -> Call:
        """This call with its backprop scaled."""
        return replace(self, backprop=self.backprop * coefficient)

    def parted(self, count: int) -> list[Call]:
        """A call on several views of b records, one after the other, as that many calls on b records."""
        if count == 1:
            return [self]
        parts = zip(*(values.chunk(count) for values in (self.backprop, *self.inputs)), strict=True)
        return [replace(self, backprop=backprop, inputs=tuple(inputs)) for backprop, *inputs in parts]


def exact(values: Tensor) -> Tensor:
    """Half precisions become float32, in which all products and sums are taken."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


@dataclass(frozen=True, eq=False)
class Page:
    """What a rule reads: a layer's calls in one batch, the names of its trainable parameters, and room to work in."""

    layer: Any
    calls: Sequence[Call]
    names: frozenset[str]
    workspace: Workspace


Rule = Callable[[Page], dict[str, Term]]
"""One term per trainable parameter, by its name in the layer."""


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
    """`[b, …, n]` to float32 `[b, P, n]`."""
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
    """A convolution whose weight is standardised first: its weight's terms, put through the derivative of that."""
    terms = convolution(replace(page, names=page.names - {"weight"}))
    if "weight" in page.names:
        alike: dict[int, list[Call]] = defaultdict(list)
        for call in page.calls:  # those at one iterate have one weight
            alike[call.parameters["weight"].data_ptr() or id(call.parameters)].append(call)
        inner = [convolution(replace(page, calls=calls))["weight"] for calls in alike.values()]
        maps = [Standardisation.of(exact(calls[0].parameters["weight"])) for calls in alike.values()]
        terms["weight"] = Standardised(inner, maps, len(page.calls[0].backprop))
    return terms


def _image(values: Tensor) -> Tensor:
    """`[b, c, H, W]` (or `[b, c, W]`) to float32 `[b, c, H, W]`, laid out in memory either way but without gaps."""
    values = exact(values.unsqueeze(2) if values.dim() == 3 else values)
    return values if values.is_contiguous(memory_format=torch.channels_last) else values.contiguous()


def _convolved(page: Page, backprops: Sequence[Tensor]) -> Term:
    layer, zeros = page.layer, [0, 0, 0, 0]
    together = layer.groups == 1 and len({call.inputs[0].shape for call in page.calls}) == 1
    # a GPU's kernels read zeros that are not written
    bare = together and layer.padding_mode == "zeros" and backprops[0].device.type != "cpu"
    if bare:
        zeros[: 2 * len(layer.kernel_size)] = _padding(layer)
    images = [_image(call.inputs[0] if bare else padded(layer, call.inputs[0])) for call in page.calls]
    size, stride, dilation = ((1, *x)[-2:] for x in (layer.kernel_size, layer.stride, layer.dilation))
    kernel = Kernel(size, stride, dilation, (layer.in_channels, layer.out_channels))
    if together:
        return Convolutions(kernel, images, backprops, page.workspace, layer, zeros)
    if layer.groups == layer.in_channels and backprops[0].device.type == "cpu":
        pairs = [_by_channel(kernel, x, b, page.workspace) for x, b in zip(images, backprops, strict=True)]
        values, sizes = (_sum(parts) for parts in zip(*pairs, strict=True))
        return Formed(values.flatten(1), sizes)
    # [b, oh, ow, kh, kw, c] to [b, g, P, c/g·kernel], the layout of the layer's weight
    windows = [
        kernel.windows(x.contiguous(memory_format=torch.channels_last))
        .permute(0, 5, 1, 2, 3, 4)
        .unflatten(1, (layer.groups, -1))
        for x in images
    ]
    inputs = [w.permute(0, 1, 3, 4, 2, 5, 6).flatten(4).flatten(2, 3) for w in windows]
    grouped = [b.flatten(2).unflatten(1, (layer.groups, -1)).transpose(2, 3) for b in backprops]
    return GroupedProducts(along_positions(inputs, 2), along_positions(grouped, 2))


def _by_channel(kernel: Kernel, images: Tensor, backprops: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """`[b, o, kh·kw]` gradients where each group has one input channel, and `[b]` sizes of what they are summed from.

    They are smaller than what the layer sees, and formed a place of the kernel at a time: to write its windows out
    would take ten times as long.
    """
    seen, back = images.unsqueeze(2), backprops.unflatten(1, (images.shape[1], -1))  # [b, g, 1 or o/g, …]
    places = list(kernel.offsets(*images.shape[2:]))
    found = backprops.new_empty(*backprops.shape[:2], len(places))
    for start, stop in workspace.chunks(len(images), 4 * backprops[0].numel()):
        for place, (rows, columns) in enumerate(places):
            products = seen[start:stop, ..., rows, columns] * back[start:stop]
            found[start:stop, :, place] = products.sum((3, 4)).flatten(1)
    # at most, as in `Convolutions.sizes`; channels do not add up
    by_channel = (torch.linalg.vector_norm(x, dim=(2, 3, 4)).square() + x[0, 0].numel() * LOST for x in (seen, back))
    return found, (kernel.seen * math.prod(by_channel).sum(1)).sqrt()


def padded(layer: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    """The input with the layer's own padding made explicit, whatever its mode."""
    widths = _padding(layer)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(values, widths, mode=mode) if any(widths) else values


def _padding(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """As `F.pad` wants it."""
    widths: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":  # the odd one goes to the right, as in torch
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
    """`[b, c]` gradients of scale and of shift in two operations: torch's own, told that the batch is one record of b·c
    channels, so that it adds up no two records. `ones` `[b·c]`: the scale, which it asks for.
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
    """Scale (and shift) per element that was normalised, or divided by the root mean square."""
    layer, shape = page.layer, page.layer.normalized_shape
    norm = F.rms_norm if isinstance(layer, nn.RMSNorm) else F.layer_norm
    return scaled(page, lambda x: norm(x, shape, eps=layer.eps), over_places(shape))


def over_places(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """`[b, …, *shape]` to sums over what lies between, `[b, numel]`."""
    return lambda x: x.reshape(len(x), -1, math.prod(shape)).sum(1)


def prelu(page: Page) -> dict[str, Term]:
    """Slope of what is negative, one per channel or one for all."""
    one = page.layer.num_parameters == 1
    total = (lambda x: x.flatten(1).sum(1, keepdim=True)) if one else _over_pixels
    return scaled(page, lambda x: x.clamp(max=0), total)


def scaled(page: Page, normalise: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> dict[str, Term]:
    """Terms of `y = normalise(x)·weight + bias`, elementwise; `total` sums what shares a weight."""

    def product(x: Tensor, d: Tensor) -> Tensor:  # a few records at a time: what lies between never leaves the cache
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
    """`[b, c, …]` to `[b, c]` sums, in the order in which they lie in memory."""
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return values.permute(0, 2, 3, 1).flatten(1, 2).sum(1)
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def embedding(page: Page) -> dict[str, Term]:
    """A table read at the record's tokens; the padding token's row has no gradient."""
    ids = along_positions([call.inputs[0].reshape(len(call.backprop), -1) for call in page.calls])
    backprops = along_positions([in_rows(call.backprop) for call in page.calls])
    if page.layer.padding_idx is not None:
        backprops = backprops.masked_fill((ids == page.layer.padding_idx).unsqueeze(2), 0)
    return {"weight": Lookups(ids, backprops, page.layer.num_embeddings)}


def fallback(page: Page) -> dict[str, Term]:
    """Any other layer: a vector-Jacobian product per record through `torch.func`, materialised."""
    summed: dict[str, Tensor] = {}
    for call in page.calls:
        for name, gradient in _vjp_per_record(page.layer, call).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return {name: Vectors(exact(gradient).reshape(len(gradient), -1)) for name, gradient in summed.items()}


def only_tensor(output: Any) -> Any:
    """Of a tuple the one tensor beside what is None, as attention gives without its weights; else the output itself."""
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

    inputs = [exact(x) if x.is_floating_point() else x for x in call.inputs]  # as the parameters are
    return torch.func.vmap(one, randomness="error")(exact(call.backprop), *inputs)
