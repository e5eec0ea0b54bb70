"""Where to train."""

from __future__ import annotations

import torch

from equidp.errors import EquidpError


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA, then the CPU.

    Apple's GPUs (MPS) are not among them: they have no float64, in which coins are tossed.

    Raises:
        EquidpError: for a device of another kind, or one that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise EquidpError(f"training.device={name!r} is not supported: use auto, cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EquidpError(f"training.device={name!r} is not available here: use auto or cpu.") from error
    return device
