"""Memory: how many records of a batch a GPU holds at once, if a run's settings do not say so.

    rows = ⌊(0.6·free − 24·d) / (2·a)⌋, rounded down to 1, 2, 3, 4, 6, 8, 12, …

- `free`: bytes that are left beside the training data, computed from the declared number of records (below).
- `d`: number of the model's trained parameters. Each takes 24 bytes: itself, its sum, gradient, noise and two moments
  of an optimiser, 4 bytes each.
- `a`: bytes that torch keeps of one record's forward pass for the backward pass. The gradients at the kept values take
  as much again.

The other 40 % are for gradients that are kept (`Workspace`: up to a quarter of the GPU's memory), and for windows and
libraries.

The driver's figure of free memory varies a little. Because of the coarse steps a resumed run still finds the same
number.

The number of records at once decides how all of them are rounded (`shape.py`), so it must not depend on the true number
of records: with one record more, the driver's figure could fall below a step. So everything that this process holds
counts as free, and the model and the *declared* number of records are subtracted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.layout import evaluating
from equidp.gradients.misfit import FAILURES
from equidp.gradients.shape import public_rows
from equidp.gradients.sites import OF_DEVICES

SHARE = 0.6
PER_PARAMETER = 24
"""Bytes for each trained parameter."""
SUM_PER_PARAMETER = 4
"""Bytes of them that no step does without: the sum."""


def rows_that_fit(free: int, parameters: int, per_record: int) -> int:
    """Return the number of rows by the formula above, at least 1.

    Args:
        free: bytes.
        parameters: how many the model trains.
        per_record: bytes that torch keeps of a record's forward pass.
    """
    rows = int((SHARE * free - PER_PARAMETER * parameters) // max(2 * per_record, 1))
    power = 1 << max(rows, 1).bit_length() - 1
    return power + power // 2 if power + power // 2 <= rows else power


def kept_per_record(model: nn.Module, features: Tensor) -> int:
    """Return the bytes that torch keeps of one more record in a forward pass, with the record's features.

    Args:
        model: on the device of the features; its parameters require gradients.
        features: `[n, …]`; only their shape and type are used, because the passes are of zeros.
    """
    with evaluating(model):  # so that no running statistic changes, and nothing is drawn at random
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
        # the graph refers to `note`, which refers to `kept`, whose tensors refer to the graph: without this they would
        # live for ever, and with them autograd's notes of the parameters, so that no step could be recorded
        kept.clear()


def room_for(
    model: nn.Module, features: Tensor, batch_size: int, views: int = 1, *, resident: int | None = None
) -> tuple[bool, int | None]:
    """Return whether a GPU has room for two steps, and the most records that fit at once.

    Recorded steps and others need memory of their own. The number is None if a whole batch fits, and on a CPU, whose
    system can swap memory. It is None, too, for a model that fails on records of zeros: the first step explains the
    error, unless the model takes real records.

    Args:
        model: on the device of the features.
        features: `[n, …]`, as of `kept_per_record`.
        batch_size: expected number of records in a batch.
        views: copies of each record in a pass.
        resident: bytes of the training data, from their declared number; None: use the driver's figure as it is.

    Raises:
        EquidpError: for a GPU whose free memory does not hold the pass of one record.
    """
    device = features.device
    if device.type != "cuda":
        return False, None
    free, _ = torch.cuda.mem_get_info(device)
    there = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if resident is not None:
        held = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
        free = max(0, free + torch.cuda.memory_reserved(device) - held - resident)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        kept = views * kept_per_record(model, features)
    except torch.OutOfMemoryError as error:
        raise EquidpError(_no_room(there)) from error
    except OF_DEVICES:
        raise
    except FAILURES:
        return False, None
    if there < kept // 2 + SUM_PER_PARAMETER * trained:  # half, because a tensor may have been counted twice
        raise EquidpError(_no_room(there))
    wanted = public_rows(batch_size, None)
    rows = rows_that_fit(free, trained, kept)
    return rows_that_fit(free // 2, trained, kept) >= wanted, rows if rows < wanted else None


def _no_room(free: int) -> str:
    return (
        f"The GPU has {free >> 20} MiB of free memory, too little for the pass of a single record: end what else uses "
        "it (nvidia-smi shows that), choose another by CUDA_VISIBLE_DEVICES, take a smaller model, or train on the CPU."
    )
