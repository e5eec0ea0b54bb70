"""Drawn: the random numbers that a model draws while it is tried, which leave those of the run as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from equidp.gradients.bookkeeping import BookKeeping
from equidp.system.threads import GLOBAL_RANDOM


@contextlib.contextmanager
def drawn_apart(passes: BookKeeping) -> Iterator[int]:
    """Within this context passes leave the random generators as they were. Yields the seed to give to `reseed`."""
    devices = [passes.device] if passes.device.type == "cuda" else []
    with GLOBAL_RANDOM, torch.random.fork_rng(devices=devices):
        yield torch.random.initial_seed()


def reseed(passes: BookKeeping, seed: int) -> None:
    """Set the generators that the model may draw from to this seed."""
    torch.random.default_generator.manual_seed(seed)
    if passes.device.type == "cuda":
        # torch.cuda.manual_seed would set the current device's generator, which may be another
        torch.cuda.set_rng_state(torch.Generator(passes.device).manual_seed(seed).get_state(), passes.device)


def generators(passes: BookKeeping) -> Tensor:
    """Return the state of the generators that the model may draw from."""
    states = [torch.get_rng_state()]
    return torch.cat([*states, torch.cuda.get_rng_state(passes.device)] if passes.device.type == "cuda" else states)
