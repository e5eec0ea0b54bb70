"""Optimisers by name. Each sees nothing but the noisy mean, so any of them is post-processing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch


class _Uncompiled(torch.optim.Optimizer):
    """An optimiser without torch's markers "do not compile this", which import the compiler: half a second."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


def _bare(step: Any) -> Any:
    """A step without what torch wraps around it for its profiler: more work than a small model's whole update."""
    step = torch.no_grad()(inspect.unwrap(step))
    step.hooked = True  # torch wraps none that says so
    return step


class _SGD(_Uncompiled, torch.optim.SGD):
    step = _bare(torch.optim.SGD.step)


class _Adam(_Uncompiled, torch.optim.Adam):
    step = _bare(torch.optim.Adam.step)


class _AdamW(_Uncompiled, torch.optim.AdamW):
    step = _bare(torch.optim.AdamW.step)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: _SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: _SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: _Adam(parameters, lr=lr),
    "adamw": lambda parameters, lr: _AdamW(parameters, lr=lr),
}
"""Optimisers by name, of parameters and a learning rate."""
