"""Misfit: errors from inside a model or a loss, told in a sentence with what it was given and what to give instead."""

from __future__ import annotations

import copy
from typing import NoReturn

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError, shortened
from equidp.gradients.blocks import Blocks
from equidp.gradients.bookkeeping import BookKeeping, one_each
from equidp.gradients.layers import embedding
from equidp.gradients.losses import Loss
from equidp.gradients.packing import SEVERAL, Packed, kind_of, several
from equidp.gradients.sites import OF_DEVICES, held
from equidp.gradients.tape import Tape

FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""Errors that torch and models raise on records that they do not accept, or where a model has a mistake."""

ELSEWHERE = (
    "A tensor of its own, or of yours that it uses, is on another device: let a layer hold it (register_buffer), or "
    "bring it there (it.to(x.device))."
)

PARTS = "Their names are the arguments of the model's forward; without names they are in its order."

MOST_KINDS = 10_000
"""At most so many different labels are tried."""


def raise_told(error: Exception, passes: BookKeeping, features: Tensor, labels: Tensor) -> NoReturn:
    """Raise the error of a pass on these records again, in a clear sentence where the model or the loss is its cause.

    Raises:
        EquidpError: it says whether the model or the loss fails, on what, and what to give it.
    """
    if "torch.utils.checkpoint" in str(error):
        raise EquidpError(
            "Gradient checkpointing computes layers a second time, unseen: leave it out, or give it "
            "use_reentrant=False and let a trained layer come before what it wraps."
        ) from error
    if "backward through the graph a second time" in str(error):
        raise EquidpError(
            "The model or the loss keep what they computed of trained parameters in an earlier pass, as attention that "
            "caches its biases in evaluation mode does: put the model into training mode, model.train(), and its "
            "BatchNorms back into eval(); or freeze those parameters."
        ) from error
    if "does not require grad and does not have a grad_fn" in str(error):
        raise EquidpError(
            "The model or its loss takes gradients of its own (torch.autograd.grad, backward()), as for a penalty on "
            "them, and what depends on trained parameters in this way is not seen: leave it out, or take them of "
            "frozen layers alone, inside torch.enable_grad()."
        ) from error
    if "being transformed by a functorch transform" in str(error):
        raise EquidpError(
            "A trained layer is called within torch.vmap (or another transform of torch.func), where nobody sees which "
            "record it is given: call it on all rows, which may be several of each record, as x.flatten(0, 1)."
        ) from error
    passed_on = isinstance(error, OF_DEVICES) or "deterministic" in str(error)  # `fixed_order` has its own message
    some = features[: len(labels)]
    if sentence := "" if passed_on else _sentence(passes, some, labels) or _of_held(passes, some):
        raise EquidpError(sentence) from error
    raise error


def refuse_odd_records(model: nn.Module, loss: Loss, features: Tensor, labels: Tensor) -> None:
    """Refuse records and labels that would stop the run hours later, in the first batch that has them.

    Nothing is charged yet. The records with the largest and the smallest number are tried, because one of them may be
    an id beyond a vocabulary; and so is each class. Copies of the model and the loss are tried on the CPU: whatever
    these remember stays in the copies, and a failure does no harm, as it would on a GPU. The records are copied, too,
    because a model may write into them, and the choice of the largest depends on all records.

    Raises:
        EquidpError: the loss does not give one number for each record; or the model or the loss fails on a record or a
            label, although it accepts the first.
    """
    try:
        tried, judged = copy.deepcopy(model), copy.deepcopy(loss)
    except Exception:  # anything may forbid copies; scripted functions do
        return
    try:
        tried, judged = tried.cpu(), judged.cpu() if isinstance(judged, nn.Module) else judged
        with torch.no_grad():
            outputs = tried(_copied(features, 0))
            losses = judged(outputs, _copied(labels, 0))
    except FAILURES:  # the first step explains this error
        return
    if torch.is_tensor(losses):
        one_each(losses, features[:1])
    for row in sorted(set().union(*map(_extremes, several(model, features)))):
        try:
            with torch.no_grad():
                tried(_copied(features, row))
        except FAILURES as error:
            raise EquidpError(
                f"The model fails on record {row} (from 0), and not on the first one: {_reason(error)}. Correct the "
                "record, leave it out, or make the model for all numbers that may occur (an Embedding for all ids)."
            ) from error
    if labels.dim() != 1 or labels.dtype != torch.int64:
        return
    for kind in labels.unique().cpu()[:MOST_KINDS]:
        try:
            with torch.no_grad():
                judged(outputs, kind.view(1))
        except FAILURES as error:
            row = int((labels == kind.to(labels.device)).int().argmax())
            raise EquidpError(
                f"The loss fails on the label of record {row} (from 0), and not on the first one's: {_reason(error)}. "
                f"{_of_loss(error)}"
            ) from error


def _copied(values: Tensor, row: int) -> Tensor:
    return values[row : row + 1].to("cpu", copy=True)


def _extremes(features: Tensor) -> set[int]:
    """Return the rows of the largest and the smallest number; no row for numbers without an order, such as booleans."""
    try:
        return {int(at) // features[0].numel() for at in (features.argmax(), features.argmin())}
    except FAILURES:
        return set()


def _sentence(passes: BookKeeping, features: Tensor, labels: Tensor) -> str:
    try:
        outputs = passes.outputs_at(features, None)
    except FAILURES as error:
        packing = passes.model.packing if isinstance(passes.model, Packed) else None
        given, advice = packing or kind_of(features), PARTS if packing else _of_model(error, features)
        return f"The model fails on the features, {given}: {_reason(error)}. {advice}"
    if not torch.is_tensor(outputs):
        alone = "return outputs.logits" if hasattr(outputs, "logits") else "return that alone"
        if (name := getattr(passes.model, "main_input_name", None)) and hasattr(outputs, "logits"):  # a transformer
            alone += f", or give the features by name, {{{name!r}: features}}, of which `make_private` takes the logits"
        return f"The model gives a {type(outputs).__name__}, and must give one tensor [b, …]: let its forward {alone}."
    try:
        losses = passes.loss(outputs, labels)
    except FAILURES as error:
        given = f"outputs, {kind_of(outputs)}, and labels, {kind_of(labels)}"
        return f"The loss fails on {given}: {_reason(error)}. {_of_loss(error)}"
    if not torch.is_tensor(losses):
        return f"The loss gives a {type(losses).__name__}, and must give a tensor [b], one number per record."
    return ""


def _of_model(error: Exception, features: Tensor) -> str:
    if _wants_more(error):
        return f"It is called with the features alone. Give all that it takes: {SEVERAL}."
    if "same device" in str(error):
        return ELSEWHERE
    if features.dtype != torch.float32:
        return "Most layers take float32: give features.float(), scaled by public bounds, or let the model do so."
    return "The records come first; the other sizes and the type must be its first layer's (of an Embedding: int64)."


def _of_loss(error: Exception) -> str:
    if _wants_more(error):
        return "It is called with outputs and labels alone: put what else it takes beside the labels (torch.stack)."
    if "same device" in str(error):
        return ELSEWHERE
    return "Classes are [b] int64 from 0 to below the number of outputs, other labels float32 of the outputs' shape."


def _of_held(passes: BookKeeping, features: Tensor) -> str:
    """Return a sentence for a model that fails because each record is given its own copy of what all records share.

    That is a parameter used as a tensor, or the rows of a table that the model looks up once for the whole batch. The
    typical failure: there are more windows than records, so the copies do not fit them.
    """
    for site in (one for one in passes.sites if one.rule in (held, embedding)):
        blocks = Blocks()
        blocks.trying = True
        try:
            with torch.enable_grad(), Tape([site], len(features), blocks=blocks):
                passes.outputs(features)
        except FAILURES as error:
            if site.rule is held:
                what = repr(site.name)
                advice = "Widen it by expand(len(x), -1, -1), which takes both, in place of repeat"
            else:
                what = f"what is read once for all in {site.name!r}"
                advice = "Read it for every row, at places.expand(len(x), -1), or freeze it by requires_grad_(False)"
            return (
                f"The model fails where every record is given {what} as its own, [b, …]: {_reason(error)}. {advice}; "
                "to windows of a record add it before they are rows, [b, windows, …] + it.unsqueeze(1)."
            )
    return ""


def _wants_more(error: Exception) -> bool:
    return isinstance(error, TypeError) and "missing" in str(error) and "argument" in str(error)


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return shortened(text) or type(error).__name__


def halved_by_itself(passes: BookKeeping, features: Tensor) -> bool:
    """Whether the model turns autocast on in its own forward, so that it computes layers in half precision."""
    if passes.precision != "float32":
        return False
    found: list[bool] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: found.append(torch.is_autocast_enabled(passes.autocast_kind)))
        for layer in passes.model.modules()
    ]
    try:
        passes.outputs_at(features.clone(), None)  # a copy, because a model may write into its records
    finally:
        for hook in hooks:
            hook.remove()
    return any(found)
