"""Pieces of the loop's state and history: torch's generators, tensors on a device, plain numbers for JSON."""

from __future__ import annotations

import copy
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.system.threads import GLOBAL_RANDOM

WORDS, BEFORE_WORDS = 624, 3
"""The state of torch's CPU generator, in pieces of 8 bytes: how many words its Mersenne Twister has, one in each piece,
and how many pieces come before them."""

NEEDED = (
    *("steps_done", "epochs_begun", "model", "optimizer", "public", "shown", "random"),
    *("sampling", "contributing", "updating", "accepting"),
)
"""What a trainer's state always holds."""

P = ParamSpec("P")
T = TypeVar("T")


def one_at_a_time(steps: Callable[P, T]) -> Callable[P, T]:
    """Decorate a loop's method that takes steps: one thread at a time may call it, in the process that made the loop.

    With two threads, the weights of one batch would meet the gradients of another. A forked process has a copy of the
    loop, which would draw the same noise.

    Raises:
        EquidpError: while another thread takes steps, or in another process.
    """

    @wraps(steps)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        if os.getpid() != args[0].process:  # type: ignore[attr-defined]
            raise EquidpError(
                "This process was forked from the one that made the trainer, and has a copy of it: two would draw the "
                "same noise, and charge it once each. Make a trainer in the process that takes the steps."
            )
        # an RLock: where Ctrl-C leaves it locked, its thread can still take it
        lock = vars(args[0]).setdefault("_stepping", threading.RLock())
        if not lock.acquire(blocking=False):
            raise EquidpError("Another thread is taking steps with this trainer: let one thread train, or make two.")
        try:
            return steps(*args, **kwargs)
        finally:
            lock.release()

    return alone


def columns(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Columns of a history row; a value per group has a column for each group, `name/k`."""
    row: dict[str, float] = {}
    for name, value in values.items():
        entries = torch.as_tensor(value).detach().float().cpu()
        if entries.dim():
            row |= {f"{name}/{k}": float(v) for k, v in enumerate(entries)}
        else:
            row[name] = float(entries)
    return row


def global_random(device: torch.device) -> dict[str, Tensor]:
    """State of torch's own generators, from which a model with dropout draws."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_global_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue from `global_random`."""
    with GLOBAL_RANDOM:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)


def seed_unforeseen(device: torch.device) -> None:
    """Give torch's own generators, the CPU's and that device's, states of the operating system's randomness.

    The CPU's generator takes only 32 bits of a seed. Whoever has what every step released could try all of these. So
    the whole state of its Mersenne Twister is drawn.
    """
    fresh = torch.Generator().manual_seed(secrets.randbits(63)).get_state()
    words = np.frombuffer(secrets.token_bytes(4 * WORDS), np.uint32).astype(np.int64)
    fresh.view(torch.int64)[BEFORE_WORDS : BEFORE_WORDS + WORDS] = torch.from_numpy(words)
    states = {"cpu": fresh}
    if device.type == "cuda":
        states["cuda"] = torch.Generator(device).manual_seed(secrets.randbits(63)).get_state()
    set_global_random(states, device)


def checked(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a copy of a trainer's state, which is refused before any of it is taken over.

    Args:
        state: as `Trainer.state_dict` gives it.
        model: which shall take over the state's parameters and buffers.

    Raises:
        EquidpError: for another dict, and for the state of another model. To take over its random numbers alone would
            let this one draw noise again.
    """
    if lacking := [name for name in NEEDED if name not in state]:
        raise EquidpError(f"The state has no {lacking[0]!r}: give what trainer.state_dict() has returned.")
    own, theirs = (
        {name: getattr(value, "shape", ()) for name, value in values.items()}
        for values in (model.state_dict(), state["model"])
    )
    if other := next((name for name in [*own, *theirs] if own.get(name) != theirs.get(name)), ""):
        raise EquidpError(
            f"The state is of another model: {other!r} is in one of them alone, or has another shape. Make the trainer "
            "with the model of the run that it continues."
        )
    return copy.deepcopy(dict(state))


def joined(chunks: list[Tensor]) -> Tensor:
    """One tensor `[b, …]` from those of a step's chunks."""
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def moved(state: Any, device: torch.device) -> Any:
    """The state that a checkpoint gives, with its tensors on the run's device."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {name: moved(value, device) for name, value in state.items()}
    return [moved(value, device) for value in state] if isinstance(state, list) else state
