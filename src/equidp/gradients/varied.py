"""Varied records, on which a model is tried beside those of its first batch: shorter ones, darker ones, full ones."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.misfit import FAILURES
from equidp.gradients.packing import Packed


def varied(passes: BookKeeping, features: Tensor, labels: Tensor) -> Tensor:
    """The records varied, as far as the model takes them."""
    for numbers in (True, False):
        with contextlib.suppress(*FAILURES):  # torch halves no such numbers
            found = _changed(passes.model, features, numbers=numbers)
            if takes(passes, found, labels):
                return found
    return features


def takes(passes: BookKeeping, features: Tensor, labels: Tensor) -> bool:
    """Whether the model takes such records."""
    with contextlib.suppress(*FAILURES):
        passes.norms(features.clone(), labels.clone())
        return True
    return False


def filled(model: nn.Module, features: Tensor) -> Tensor:
    """Every first sequence of numbers without its zeros: padded no more, a model may leave its mask out."""
    if isinstance(model, Packed):
        parts = [filled(model.model, part) for part in model.packing.parts(features)]
        return model.packing.joined(parts)
    found = features.clone()
    if not features.is_floating_point() and features.dim() == 2:
        first = found[::2]
        found[::2] = torch.where(first == 0, first[:, :1], first)
    return found


def _changed(model: nn.Module, features: Tensor, *, numbers: bool) -> Tensor:
    """Every second sequence shorter, all else (images, lengths) halved: between records alike in this, mixing may not
    show. Without `numbers`, those that are no sequence's and no image's are left: a length of 0 may be none.
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
