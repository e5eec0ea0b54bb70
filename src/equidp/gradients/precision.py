"""Precision: norms and sums of gradients are taken in float32 with all its digits, or not at all.

torch can be set to shorten products: by autocast, by TF32, by other default types. If a sum has fewer digits than the
norms, it may exceed the bound to which it was clipped. The model's own passes may have fewer digits. So may a gradient
that is formed first (`kernels.Tiles`), because its norm and the sum are then both taken of what was formed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from equidp.errors import EquidpError


def refuse_around(kind: str) -> None:
    """Refuse a training loop inside a mode of torch that does not allow sound gradients."""
    if torch.is_inference_mode_enabled():
        raise EquidpError(
            "Inside torch.inference_mode no gradients can be taken: train outside it, and leave it to evaluation."
        )
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise EquidpError(
            "Inside torch.autograd.detect_anomaly a record whose gradient is no number ends the run, and so tells that "
            "it is there; without it such a record counts as 0. Leave it out, or give it check_nan=False."
        )
    refuse_autocast(kind)


def refuse_autocast(kind: str) -> None:
    """Refuse to take norms or sums in half precision. Call it before either.

    Measured in half precision: one of 512 equal records moved the sum by 1.6 times its bound, and a gradient that
    cancels to 6 % got a thirtieth of its norm. `kind` is the type of the device.

    Raises:
        EquidpError: inside `torch.autocast`.
    """
    if torch.is_autocast_enabled(kind):
        raise EquidpError(
            "Inside torch.autocast norms and sums of gradients would be taken in half precision: leave it out, and set "
            'precision="bf16" (training.precision=bf16) on a GPU, which runs the model alone under it.'
        )


def refuse_half_on_cpu(model: nn.Module, precision: str) -> None:
    """Refuse passes in half precision on a CPU, in which a record may reach the one before it.

    If rows are longer than 32 and no multiple of it, oneDNN's products in bf16 seem to multiply the numbers behind a
    row's end by 0. If the next row is not finite, the result is NaN. Measured with AMX: a record of NaN made up to
    three other records NaN, and so moved a sum by three times its bound.

    Raises:
        EquidpError: the precision, or the type of a parameter, is half.
    """
    cpu = [(name, p) for name, p in model.named_parameters() if p.device.type == "cpu"]
    for name, parameter in cpu:
        refuse_half(name, parameter)
    if cpu and precision == "bf16":
        raise spoiling('precision="bf16" (training.precision=bf16)', "leave it out")


def refuse_half(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter that is in half precision on a CPU, trained or not."""
    if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.device.type == "cpu":
        raise spoiling(f"Parameter {name!r} is in half precision", "make it float32 (model.float())")


def spoiling(what: str, remedy: str) -> EquidpError:
    """Return the error for half precision on a CPU."""
    return EquidpError(
        f"{what}: in a CPU's products of half precision a record whose numbers are not finite spoils the record before "
        f"it, and so moves the sum by more than its bound; {remedy}, or train on a GPU."
    )


def refuse_short_products(device: torch.device) -> None:
    """Refuse to begin if torch is set to shorten float32 products, or to make new tensors of another type.

    New tensors include the noise. The setting is not changed here, because it would change for all threads.

    Raises:
        EquidpError: the precision of products is lower than torch's default, or the default type is not float32.
    """
    if torch.get_default_dtype() != torch.float32:
        name = str(torch.get_default_dtype()).removeprefix("torch.")
        raise EquidpError(
            f"torch is set to make new tensors {name}, noise and sums among them, which are computed in float32: "
            "leave out torch.set_default_dtype, and give your own tensors their dtype."
        )
    cpu: Any = torch.backends.mkldnn  # torch does not declare them
    kinds = (torch.backends.cuda.matmul,) if device.type == "cuda" else (cpu.matmul, cpu.conv)  # cuDNN's: see below
    if any(kind.fp32_precision not in ("ieee", "none") for kind in kinds):
        raise EquidpError(
            "torch is set to shorten float32's products, and norms and sums of gradients want all digits: leave out "
            "torch.set_float32_matmul_precision, torch.backends' fp32_precision and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE; "
            'for cheaper passes on a GPU there is precision="bf16" (training.precision=bf16).'
        )


_TF32 = threading.RLock()
"""The switch is global: of two threads, the first to finish would turn TF32 on again while the other still works.

The lock is reentrant, because a trial of the model holds it and takes weighted sums inside, which hold it, too.
"""


@contextmanager
def as_precise_as_norms() -> Iterator[None]:
    """Within this context cuDNN's convolutions do not use TF32, which is their default.

    With TF32 a sum could exceed the norms by which it was clipped by up to a thousandth.
    """
    convolutions: Any = cast(Any, torch.backends.cudnn).conv
    with _TF32:
        before, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"
        try:
            yield
        finally:
            convolutions.fp32_precision = before
