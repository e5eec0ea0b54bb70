"""Varied: variants of the first batch's records on which a model is tried, too: shorter, darker, without padding."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.misfit import FAILURES
from equidp.gradients.packing import Packed


def varied(passes: BookKeeping, features: Tensor, labels: Tensor) -> Tensor:
    """Return variants of the records that the model accepts; the records themselves if it accepts none."""
    for numbers in (True, False):
        with contextlib.suppress(*FAILURES):  # torch cannot halve numbers of every type
            found = _changed(passes.model, features, numbers=numbers)
            if takes(passes, found, labels):
                return found
    return features


def takes(passes: BookKeeping, features: Tensor, labels: Tensor) -> bool:
    """Whether the model accepts these records."""
    with contextlib.suppress(*FAILURES):
        passes.norms(features.clone(), labels.clone())
        return True
    return False


def filled(model: nn.Module, features: Tensor) -> Tensor:
    """Fill the padding (zeros) of every other sequence of ids: if none is padded, a model may leave its mask out."""
    if isinstance(model, Packed):
        parts = [filled(model.model, part) for part in model.packing.parts(features)]
        return model.packing.joined(parts)
    found = features.clone()
    if not features.is_floating_point() and features.dim() == 2:
        first = found[::2]
        found[::2] = torch.where(first == 0, first[:, :1], first)
    return found


def _changed(model: nn.Module, features: Tensor, *, numbers: bool) -> Tensor:
    """Shorten every second sequence, and halve every second record of other kinds (images, lengths).

    Mixing may not show between records that are alike in length or brightness. Without `numbers`, features that are
    neither sequences nor images stay as they are, because the model may not accept a length of 0.
    """
    if isinstance(model, Packed):
        parts = [_changed(model.model, part, numbers=numbers) for part in model.packing.parts(features)]
        return model.packing.joined(parts)
    found, whole = features.clone(), not features.is_floating_point()
    if features.dim() == 3 or (whole and features.dim() == 2 and features.shape[1] > 1):
        found[1::2, (features.shape[1] + 1) // 2 :].zero_()
    elif features.dim() < 3 and not numbers:
        return found
    elif features.dtype == torch.bool:
        found[1::2].zero_()
    else:
        found[1::2].div_(2, rounding_mode="floor" if whole else None)
    return found
