"""The device to train on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from equidp.errors import EquidpError

logger = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/version")
"""What a machine with NVIDIA's driver says of it (Linux)."""


def choose_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is CUDA where there is one, else the CPU.

    Apple's GPUs (MPS) are not supported: they have no float64, in which coins are tossed.

    Raises:
        EquidpError: for a device of another kind, or one that this machine does not have.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            _tell_of_idle_gpu()
            return torch.device("cpu")
        return torch.device("cuda")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise EquidpError(f"training.device={name!r} is not supported: use auto, cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EquidpError(f"training.device={name!r} is not available here: use auto or cpu.") from error
    return device


def _tell_of_idle_gpu() -> None:
    if driver := driver_version():
        built = (
            f"torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch was built without CUDA"
        )
        logger.warning(
            "This machine has a GPU that torch cannot use, so training runs on the CPU: %s, and the driver is %s. "
            "Install a torch that fits the driver, or set training.device=cpu.",
            built,
            driver,
        )


def driver_version() -> str:
    """NVIDIA's driver as the machine names it; empty where there is none, or another system."""
    try:
        return DRIVER.read_text(errors="replace").partition("\n")[0].removeprefix("NVRM version:").strip()
    except OSError:
        return ""


@contextmanager
def fixed_order(wanted: bool, device: torch.device) -> Iterator[None]:
    """Within the context, let a GPU add in a fixed order, so that a step done again gives the very same values.

    A CPU always does. The switch is for the whole process; its earlier setting comes back afterwards.

    Raises:
        EquidpError: where the model has an operation without such a kernel.
    """
    if not wanted or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    # torch need not fill new memory: all of it is written before it is read
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(".")[0]
        raise EquidpError(
            f"training.deterministic=true, and the model has an operation that adds in no fixed order ({reason}): "
            "leave it out, or take another model."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
