"""Rewriting: torch's attention and recurrence, made of layers that have gradient rules.

`nn.MultiheadAttention`, `nn.LSTM`, `nn.GRU` and `nn.RNN` do not show their inner calls, so they cannot have a rule.
Their replacements (attention here, recurrence in `recurrence.py`) compute the same from Linear layers with the same
weights. The weights get other names.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.recurrence import Recurrence
from equidp.gradients.refusals import HOOKED

logger = logging.getLogger(__name__)


def rewritten(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """Return the model with every trained attention and recurrence replaced.

    Layers inside the model are replaced in place, and the log names them. If the model itself is such a layer, its
    replacement is returned.

    Args:
        model: any module.
        frozen: also replace layers that are not trained.

    Raises:
        EquidpError: a layer has settings or parameters that its replacement does not have.
    """
    held = Counter(
        id(of) for layer in model.modules() for _, of in layer.named_parameters(recurse=False, remove_duplicate=False)
    )
    if (replace := REPLACEMENTS.get(type(model))) and (frozen or _trained(model)):
        return _replaced(model, "model", replace, held)
    made: dict[nn.Module, nn.Module] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # with nested tensors it would read the attention's weights by itself
        if (replace := REPLACEMENTS.get(type(layer))) and (frozen or _trained(layer)):
            if layer not in made:
                made[layer] = _replaced(layer, path, replace, held)
                logger.info(
                    "Layer %r (%s) is rewritten from Linear layers, which compute the same and show every gradient.",
                    path,
                    type(layer).__name__,
                )
            model.set_submodule(path, made[layer])
    return model


def _replaced(layer: nn.Module, name: str, replace: Callable[..., nn.Module], held: Mapping[int, int]) -> nn.Module:
    """Return what `replace` makes of a layer, in the same mode and with the same hooks.

    Args:
        layer: of the model.
        name: its name there.
        replace: makes the other layer.
        held: in how many places of the model each parameter is, by its id.
    """
    if tied := [key for key, of in layer.named_parameters() if held[id(of)] > 1]:
        raise EquidpError(
            f"Layer {name!r} ({type(layer).__name__}) shares {tied[0]} with another place of the model, and would have "
            "a parameter of its own where it is rewritten from Linear layers: give each place its own, or tie the "
            "weights of what rewritten(model) gives."
        )
    if "forward" in vars(layer):
        raise EquidpError(
            f"Layer {name!r} ({type(layer).__name__}) has a forward of its own, which would be lost where it is "
            "rewritten from Linear layers: take it off, or put it on what rewritten(model) gives."
        )
    made = replace(layer, name).train(layer.training)
    vars(made).update({key: of for key, of in vars(layer).items() if key in HOOKED})
    return made


def _trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _refuse_others(layer: nn.Module, weights: Iterable[Tensor | None], name: str) -> None:
    """Refuse a layer with other parameters than `weights`, because they would be lost and not be trained."""
    if set(layer.parameters()) != {weight for weight in weights if weight is not None}:
        raise EquidpError(
            f"Layer {name!r} ({type(layer).__name__}) has other parameters than torch's own, which would be lost where "
            "it is rewritten from Linear layers: take off what added them (weight_norm, prune, an adapter)."
        )


class Attention(nn.Module):
    """`nn.MultiheadAttention` for batches, with a layer's weights.

    Args:
        layer: whose weights are copied.
        name: the layer's name, for messages.
    """

    in_proj_bias = None
    """nn.TransformerEncoderLayer reads this; if it is None, it does not use its own fused kernel."""

    def __init__(self, layer: nn.MultiheadAttention, name: str) -> None:
        super().__init__()
        if layer.bias_k is not None or layer.add_zero_attn:
            raise EquidpError(f"Layer {name!r} (MultiheadAttention): leave add_bias_kv and add_zero_attn out.")
        self.num_heads, self.batch_first, self.dropout = layer.num_heads, layer.batch_first, layer.dropout
        whole, parts = layer.in_proj_weight, (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        _refuse_others(layer, (whole, *parts, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias), name)
        given = parts if whole is None else whole.chunk(3)
        biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        self.query, self.key, self.value = (_linear(w, b) for w, b in zip(given, biases, strict=True))
        self.outward = _linear(layer.out_proj.weight, layer.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the same as torch's layer: a mask is true, or −∞, at places that may not be seen."""
        if query.dim() != 3:
            raise EquidpError(f"Attention takes batches of sequences, not {tuple(query.shape)}.")
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            project(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for project, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        if attn_mask is not None:
            mask = attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, self.num_heads))
            scores = scores + _added(mask, scores)
        if key_padding_mask is not None:
            scores = scores + _added(key_padding_mask, scores)[:, None, None]
        shares = nn.functional.dropout(scores.softmax(3), self.dropout, self.training)
        found = self.outward((shares @ v).transpose(1, 2).flatten(2))
        weights = (shares.mean(1) if average_attn_weights else shares) if need_weights else None
        return (found if self.batch_first else found.transpose(0, 1)), weights


def _added(mask: Tensor, scores: Tensor) -> Tensor:
    """Return what a mask adds to the scores: −∞ where a boolean mask is true, or the mask itself."""
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask


def _recurrence(layer: nn.RNNBase, name: str) -> Recurrence:
    _refuse_others(layer, chain.from_iterable(layer.all_weights), name)
    return Recurrence(layer, name, _linear)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of these weights, which are trained if the given ones are."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            setattr(made, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
    return made


REPLACEMENTS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.MultiheadAttention: Attention,
    nn.LSTM: _recurrence,
    nn.GRU: _recurrence,
    nn.RNN: _recurrence,
}
