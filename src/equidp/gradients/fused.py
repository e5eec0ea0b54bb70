"""Fused: decides whether our own kernels for a GPU (`kernels.py`) are used.

They are used on a CUDA device with Triton, if they give the same as torch on a few numbers. This follows from the
machine alone. A checkpoint records it (`training/checkpoint.py`), because the kernels round differently from torch's
operations.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.errors import first_line
from equidp.gradients import rounding
from equidp.gradients.windows import Kernel

logger = logging.getLogger(__name__)

TOLERANCE = 1e-5
SHORT = 5e-3  # tolerance for products in TF32, which have 11 of 24 binary digits


def kernels_for(like: Tensor) -> ModuleType | None:
    """Return the kernels for tensors such as `like`; None if torch's operations are used instead."""
    if like.device.type != "cuda" or like.dtype != torch.float32:
        return None
    return _tried(like.device)


def version(device: torch.device) -> str:
    """Return the version of the kernels that a device uses; empty if it uses none."""
    kernels = kernels_for(torch.empty(0, device=device))
    return f"Triton {kernels.triton.__version__}" if kernels else ""


@cache
def _tried(device: torch.device) -> ModuleType | None:
    try:
        from equidp.gradients import kernels

        if off := differing(kernels, device):
            raise ArithmeticError(f"{off} differ from torch's")
    except Exception as error:  # any error of a compiler, a driver or a card
        why = "Norms are taken by torch's operations, as Triton's kernels do not run here (%s)."
        logger.warning(why, first_line(error))
        return None
    return kernels


@torch.no_grad()
def differing(kernels: ModuleType, device: torch.device) -> str:
    """Return the names of the kernels that differ from torch on a few numbers; empty if none does."""
    from equidp.gradients.layers import group_norm_at_once

    # no random numbers, because a draw would change the run's own generator
    ramp = torch.arange(2 * 6 * 25, device=device, dtype=torch.float32).mul(0.37).sin().view(2, 6, 5, 5)
    other, matrices = ramp.cos(), ramp.view(2, 6, 25)
    left, right = matrices.transpose(1, 2) @ matrices, other.view(2, 6, 25).transpose(1, 2) @ matrices
    rows = ramp.flatten(1), other.flatten(1)[:, 3:]
    silenced, finite = rows[0].clone(), ramp[:, 0, 0, 0] == 0
    kernels.silence(silenced, finite)
    found = {
        "squares": (
            kernels.row_squares(rows, [150, 147])[0].sum(0),
            torch.stack([rounding.norms_of(row) for row in rows]).sum(0),
        ),
        "Gram matrices": (
            kernels.gram_parts([[(left, right)]], 2),
            torch.stack(rounding.gram_parts(left, right)).unsqueeze(1),
        ),
        "GroupNorms": (
            torch.stack(kernels.group_norm(ramp, other, 3, 1e-5)),
            torch.stack(group_norm_at_once(ramp, other, 3, 1e-5, ramp.new_ones(12))),
        ),
        "silenced rows": (silenced, rows[0] * finite.unsqueeze(1)),
    }
    found |= _convolutions(kernels, device)
    return ", ".join(
        name
        for name, (one, two) in found.items()
        if not (one - two).abs().max() <= (SHORT if name.endswith("convolutions") else TOLERANCE) * two.abs().max()
    )


TRIED = (
    ("convolutions", (22, 70), (3, 2), (2, 1), 1, (5, 14)),  # padded; several tiles, among them the largest
    ("bare convolutions", (3, 20), (3, 3), (1, 1), 0, (5, 18)),
    ("1×1 convolutions", (20, 36), (1, 1), (1, 1), 0, (4, 16)),  # rows begin at multiples of 16 bytes
    ("short 1×1 convolutions", (20, 36), (1, 1), (1, 1), 0, (5, 4)),  # and not at multiples of 64 bytes
)
"""Name, channels, kernel, stride, padding and image size of the convolutions that a device is tried with."""


def _convolutions(kernels: ModuleType, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of results of the kernels for convolutions, and of torch, by name.

    The gradients may have few digits, because their products are in TF32. Norms and sums are compared with those of the
    gradients that the kernels formed, so they must have all digits. Of three records the last has weight 0, and is not
    finite when the sum is taken.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, channels, size, stride, padding, sides in TRIED:
        images = _numbers(0.37, device, 3, channels[0], *sides)
        windows = F.unfold(images, size, padding=padding, stride=stride)
        pixels = [(side + 2 * padding - k) // step + 1 for side, k, step in zip(sides, size, stride, strict=True)]
        backprops = _numbers(0.73, device, 3, channels[1], *pixels)
        tiles = kernels.Tiles(
            Kernel(size, stride, (1, 1), channels), images, backprops, (padding, padding), padding > 0, "tf32"
        )
        if not tiles.here:
            return {}
        gradients = (backprops.flatten(2) @ windows.transpose(1, 2)).flatten(1)
        formed, weights = torch.empty_like(gradients), images.new_tensor([3, 2, 0])
        squares, alone = gradients.new_empty(2, tiles.count, 3)
        tiles.form(squares, formed)
        tiles.form(alone, None)
        images[2] = torch.nan
        squared = torch.stack([squares, alone]).sum(1), rounding.norms_of(formed).expand(2, -1)
        summed = tiles.weighted_sum(weights, 1), (weights.unsqueeze(1) * formed).sum(0)
        found |= {name: (formed, gradients), f"{name}' squares": squared, f"{name}' sums": summed}
    return found


def _numbers(frequency: float, device: torch.device, *shape: int) -> Tensor:
    """Return numbers without a short period, so that no two records or channels are alike."""
    return torch.arange(math.prod(shape), device=device, dtype=torch.float32).mul(frequency).sin().view(shape)
