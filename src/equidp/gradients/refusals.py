"""Refusals: models of which no per-record gradient can be had, and layers that mix records or remember them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

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


class Untrained:
    """What leaves with a model and is not trained, its buffers and frozen parameters: no pass may change it.

    What it learns of the records there would leave exact. It may begin so late that no trial of the model shows it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, dict[str, Any], str]] = []
        for path, layer in model.named_modules():
            frozen = [key for key, value in layer._parameters.items() if value is not None and not value.requires_grad]
            for holder, keys in ((layer._buffers, list(layer._buffers)), (layer._parameters, frozen)):
                self._held += [(f"{path}.{key}" if path else key, cast(dict[str, Any], holder), key) for key in keys]

    def now(self) -> list[tuple[Tensor | None, int]]:
        """Every tensor, and how often it was changed in place."""
        found = [holder.get(key) for _, holder, key in self._held]
        return [(value, -1 if value is None or value.is_inference() else value._version) for value in found]

    def refuse_changed(self, before: list[tuple[Tensor | None, int]]) -> None:
        """Refuse, by name, what is another one than `now` gave before; the same numbers in another tensor are no other.

        Raises:
            EquidpError: for a change.
        """
        for (name, _, _), (old, times), (new, times_now) in zip(self._held, before, self.now(), strict=True):
            if old is new and times == times_now:
                continue
            if old is None or new is None or old is new or not same(old, new):
                raise changed(name, isinstance(new, nn.Parameter))


def same(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors hold the same numbers; what is no number is the same as another."""
    return torch.equal(old.nan_to_num(), new.nan_to_num())


def changed(name: str, parameter: bool) -> EquidpError:
    """What is said of a model that changes something of its own in a forward pass."""
    return EquidpError(
        f"{'Parameter' if parameter else 'Buffer'} {name!r} of the model changes in a forward pass: what it learns of "
        "the records would leave with the model, without noise; switch off what changes it (running statistics, "
        "max_norm)."
    )
