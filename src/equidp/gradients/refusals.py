"""Refusals: models of which no per-record gradient can be had, and layers that mix records or remember them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError

T = TypeVar("T")

SHOWN = 5
"""So many names a message has."""

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


START = torch.zeros((), requires_grad=True)


class Untrained:
    """What leaves with a model and is not trained, its buffers and frozen parameters: no pass may change it.

    What it learns of the records there would leave exact. It may begin so late that no trial of the model shows it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, nn.Module, str]] = []
        for path, layer in model.named_modules():
            frozen = [key for key, value in layer.named_parameters(recurse=False) if not value.requires_grad]
            keys = [*frozen, *(key for key, _ in layer.named_buffers(recurse=False))]
            self._held += [(f"{path}.{key}" if path else key, layer, key) for key in keys]
        self._before: list[Tensor | None] = []
        self._kept: Tensor | None = None  # of those, from pass to pass: to keep them anew takes ten times as long

    def watched(self, passes: Callable[[], T]) -> T:
        """What the model's `passes` give.

        Raises:
            EquidpError: for a tensor that is another one after them; the same numbers in another tensor are no other.
        """
        before = self._now()
        # between passes a model's owner may change it
        if _changed(self._kept) or list(map(id, before)) != list(map(id, self._before)):
            self._before, self._kept = before, _kept_together(before)
        found = passes()
        self._refuse_replaced(before)
        if _changed(self._kept):  # some of them: autograd does not say which
            before = self._now()
            alone = [_kept_together([value]) for value in before]
            passes()
            self._refuse_replaced(before)
            again = [one for one, kept in zip(self._held, alone, strict=True) if _changed(kept)]
            raise changed([name for name, _, _ in again[:1] or self._held])
        return found

    def _now(self) -> list[Tensor | None]:
        return [getattr(layer, key, None) for _, layer, key in self._held]

    def _refuse_replaced(self, before: list[Tensor | None]) -> None:
        for (name, _, _), old, new in zip(self._held, before, self._now(), strict=True):
            if old is not new and (old is None or new is None or not same(old, new)):
                raise changed([name])


def _kept_together(values: list[Tensor | None]) -> Tensor | None:
    known = [value.detach() for value in values if value is not None and not value.is_inference()]
    with torch.enable_grad():
        return _Kept.apply(START, *known) if known else None


def _changed(kept: Any) -> bool:
    """Whether one of those that `_kept_together` gave was changed in place since."""
    try:
        _ = None if kept is None else kept.grad_fn.saved_tensors
    except RuntimeError:
        return True
    return False


class _Kept(torch.autograd.Function):
    """Keeps tensors as for a backward pass: asked for them, autograd refuses what was changed in place."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return start.view_as(start)


def same(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors hold the same numbers; what is no number is the same as another."""
    return torch.equal(old.nan_to_num(), new.nan_to_num())


def changed(names: Sequence[str]) -> EquidpError:
    """What is said of a model that changes one of these of its own in a forward pass."""
    some = ", ".join(map(repr, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
    what = some if len(names) == 1 else f"one of {some}"
    return EquidpError(
        f"Buffer or parameter {what} of the model changes in a forward pass: what it learns of the records "
        "would leave with the model, without noise; switch off what changes it (running statistics, max_norm)."
    )
