"""Refusals: models of which no per-record gradient can be had, and layers that mix records or remember them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from equidp.errors import EquidpError

BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)


def refuse_unfit(model: nn.Module) -> None:
    """Refuse, by name, trainable parameters that a flat float32 vector cannot hold."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.UninitializedParameter):
            raise EquidpError(f"Parameter {name!r} has no shape before the first batch; give its layer all its sizes.")
        if parameter.dtype != torch.float32:
            raise EquidpError(
                f"Parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, and gradients are summed and "
                "noised in float32: make every trainable parameter one of that type (model.float() does); for cheaper "
                "passes there is training.precision=bf16."
            )


def refuse_mixing(model: nn.Module) -> None:
    """Refuse, by name, every layer in which one record can reach another's output."""
    for name, layer in model.named_modules():
        if isinstance(layer, BATCH_NORMS):
            refuse_batch_statistics([(name, layer)])
            continue
        if isinstance(layer, torch.jit.ScriptModule):
            raise EquidpError(
                f"Layer {name or 'model'!r} is TorchScript, which does not show its layers; give the model before "
                "torch.jit.script, or torch.jit.trace, and script what was trained."
            )
        if getattr(layer, "sparse", False) is True and any(p.requires_grad for p in layer.parameters()):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) has sparse gradients, and noise is added to all "
                "of them; switch sparse off."
            )
        if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.max_norm is not None):
            raise EquidpError(
                f"Layer {name!r}: an Embedding with scale_grad_by_freq or max_norm mixes records; switch both off."
            )
        trained = any(p.requires_grad for p in layer.parameters())
        if trained and isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) cannot be trained privately, as torch does not "
                "show what happens inside; for all but nn.RNN give rewritten(model) of equidp.gradients.rewriting, or "
                "write it from Linear layers."
            )
        if trained and getattr(layer, "track_running_stats", False):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) keeps statistics of the records, which would "
                "leave with the model, without noise; switch track_running_stats off."
            )


def refuse_batch_statistics(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse, by name, a BatchNorm that takes the batch's own statistics: in training, or where it keeps no others."""
    for name, layer in layers:
        if layer.training or layer.running_mean is None:
            raise EquidpError(
                f"Layer {name!r} is a BatchNorm that takes the batch's statistics, which mixes records; use GroupNorm, "
                "or freeze it, with the running statistics it has, by eval() before training."
            )
