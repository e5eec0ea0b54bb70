"""Libraries: rules for layers of timm and transformers that are torch's layers written anew.

Neither library is imported. A class is known by its module and name, so a class of the same name in another module does
not get the rule. The rules assume what these layers compute; the probe compares their gradients with autograd's before
a run's first step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from equidp.gradients.layers import (
    Call,
    Page,
    Rule,
    convolution,
    exact,
    frozen_batch_norm,
    group_norm,
    in_rows,
    layer_norm,
    linear,
    over_places,
    scaled,
)
from equidp.gradients.products import Products
from equidp.gradients.terms import Term


def transposed_linear(page: Page) -> dict[str, Term]:
    """`y = x W + c`: a linear layer whose weight is transposed."""
    terms = linear(page)
    weight = terms.get("weight")
    if weight is not None:
        places = [(in_rows(call.inputs[0]), in_rows(call.backprop)) for call in page.calls]
        terms["weight"] = Products([d for _, d in places], [x for x, _ in places], page.workspace, page.layer)
    return terms


def channels_first(rule: Rule) -> Rule:
    """Turn a rule for values over the last dimension into a rule for a layer on images `[b, c, h, w]`."""

    def moved(call: Call) -> Call:
        return replace(
            call, inputs=tuple(x.permute(0, 2, 3, 1) for x in call.inputs), backprop=call.backprop.permute(0, 2, 3, 1)
        )

    return lambda page: rule(replace(page, calls=[moved(call) for call in page.calls]))


def layer_norm_either(page: Page) -> dict[str, Term]:
    """LayerNorm over channels, which are first or last as `data_format` says."""
    first = page.layer.data_format == "channels_first"
    return (channels_first(layer_norm) if first else layer_norm)(page)


def layer_scale(page: Page) -> dict[str, Term]:
    """`y = x·gamma` over the last dimension."""
    renamed = replace(page, names=frozenset({"weight"}))
    return {"gamma": scaled(renamed, lambda x: x, over_places(page.layer.gamma.shape))["weight"]}


def same_convolution(page: Page) -> dict[str, Term]:
    """A convolution that pads its input by an amount that depends on the input's size ("same" padding)."""
    layer = page.layer

    def padded(call: Call) -> Call:
        widths: list[int] = []
        for axis in (1, 0):
            size, stride = call.inputs[0].shape[2 + axis], layer.stride[axis]
            reach = (-(-size // stride) - 1) * stride + (layer.kernel_size[axis] - 1) * layer.dilation[axis] + 1
            total = max(0, reach - size)
            widths += [total // 2, total - total // 2]
        return replace(call, inputs=(F.pad(call.inputs[0], widths),))

    return convolution(replace(page, calls=[padded(call) for call in page.calls]))


def batch_norm_act(page: Page) -> dict[str, Term]:
    """Frozen BatchNorm with an activation behind it: the backprop first goes back through the activation."""
    layer = page.layer

    def before_activation(call: Call) -> Call:
        weight, bias = (call.parameters.get(name, getattr(layer, name)) for name in ("weight", "bias"))
        with torch.inference_mode(False), torch.enable_grad():
            x, d = exact(call.inputs[0]).clone(), exact(call.backprop).clone()
            normed = F.batch_norm(
                x, layer.running_mean, layer.running_var, weight.detach(), bias.detach(), eps=layer.eps
            ).requires_grad_()
            (back,) = torch.autograd.grad(layer.act(layer.drop(normed.clone())), normed, d)  # `act` may write in place
        return replace(call, backprop=back)

    if isinstance(layer.act, nn.Identity) and isinstance(layer.drop, nn.Identity):
        return frozen_batch_norm(page)
    return frozen_batch_norm(replace(page, calls=[before_activation(call) for call in page.calls]))


NAMED: dict[str, Rule] = {
    "transformers.pytorch_utils.Conv1D": transposed_linear,
    "transformers.models.convnext.modeling_convnext.ConvNextLayerNorm": layer_norm_either,
    "transformers.models.convnextv2.modeling_convnextv2.ConvNextV2LayerNorm": layer_norm_either,
    "timm.layers.norm.GroupNorm": group_norm,
    "timm.layers.norm.GroupNorm1": group_norm,
    "timm.layers.norm.LayerNorm": layer_norm,
    "timm.layers.norm.LayerNorm2d": channels_first(layer_norm),
    "timm.layers.norm_act.BatchNormAct2d": batch_norm_act,
    "timm.layers.conv2d_same.Conv2dSame": same_convolution,
    "timm.layers.layer_scale.LayerScale": layer_scale,
}
