"""Memory: how many records of a batch a GPU holds at once, where a run does not say so itself.

    rows = ⌊(0.6·free − 24·d) / (2·a)⌋, then down to 1, 1.5, 2, 3, 4, 6, 8, 12, …

`free` is what is left once the training data are there, by their public number (below), `d` the model's trained numbers
(themselves, their sum, gradient, noise and two moments of an optimiser, 4 bytes each), and `a` what torch keeps of one
record's forward pass for the backward one, which is needed once more for the gradients at these values. Of the rest,
40 %, a quarter of all is for gradients that are kept (`Workspace`), and what remains for windows and libraries.

The coarse steps let a resumed run find the same number although the driver's figure wavers.

How many records are at once decides how all of them are rounded (`shape.py`), so it must not follow from how many there
are in all: with one more, the driver's figure could fall below a step. What this process holds counts as free, and the
model and the *declared* number of records are taken off.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equidp.gradients.layout import evaluating
from equidp.gradients.shape import public_rows

SHARE = 0.6
PER_PARAMETER = 24
"""Bytes."""


def rows_that_fit(free: int, parameters: int, per_record: int) -> int:
    """The formula above, in bytes; at least 1."""
    rows = int((SHARE * free - PER_PARAMETER * parameters) // max(2 * per_record, 1))
    power = 1 << max(rows, 1).bit_length() - 1
    return power + power // 2 if power + power // 2 <= rows else power


def kept_per_record(model: nn.Module, features: Tensor) -> int:
    """Bytes that torch keeps of one more record in a forward pass, its own features included.

    Args:
        model: on the device of the features, its parameters still asking for gradients.
        features: `[n, …]`, of which none is looked at: the passes are of zeros.
    """
    with evaluating(model):  # so that no statistic moves, and nothing is drawn
        one, three = (_kept(model, features.new_zeros(records, *features.shape[1:])) for records in (1, 3))
    return -(-(three - one) // 2)


def _kept(model: nn.Module, features: Tensor) -> int:
    kept: dict[int, Tensor] = {}

    def note(values: Tensor) -> Tensor:
        kept[id(values)] = values
        return values.detach()

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda values: values):
            outputs = model(features)
        return sum(values.numel() * values.element_size() for values in (features, outputs, *kept.values()))
    finally:
        # the graph has `note`, and `kept` the outputs, which have the graph: it would live for good, and autograd's own
        # notes of the parameters with it, so that no step of theirs could be recorded
        kept.clear()


def room_for(
    model: nn.Module, features: Tensor, batch_size: int, views: int = 1, *, resident: int | None = None
) -> tuple[bool, int | None]:
    """Whether a GPU holds a step twice, as recorded ones and those afresh have their own memory, and the most records
    at once, `views` of each: None where all of a batch fit, and on a CPU, whose system has a way out.

    Args:
        resident: bytes of the training data, by their public number; None: what the driver has left is taken as it is.
    """
    device = features.device
    if device.type != "cuda":
        return False, None
    free, _ = torch.cuda.mem_get_info(device)
    if resident is not None:
        held = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
        free = max(0, free + torch.cuda.memory_reserved(device) - held - resident)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = views * kept_per_record(model, features)
    wanted = public_rows(batch_size, None)
    rows = rows_that_fit(free, trained, kept)
    return rows_that_fit(free // 2, trained, kept) >= wanted, rows if rows < wanted else None
