"""Drawn: the random numbers that a model draws while it is tried, which leave those of the run as they are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


def seeded_norms(
    passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, owners: Tensor | None = None
) -> Tensor:
    """Return the norms `[b]` (or `[U]`) of a model that draws from generators of this seed."""
    reseed(passes, seed)
    return passes.norms(features.clone(), labels.clone(), owners=owners)  # copies: a model may write into its records


def drawn_norms(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, bool]:
    """As `seeded_norms`, and whether the model has drawn random numbers."""
    reseed(passes, seed)
    undrawn = generators(passes)
    norms = passes.norms(features.clone(), labels.clone())
    return norms, not generators(passes).equal(undrawn)


def draws(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> bool:
    """Whether the model draws random numbers."""
    return drawn_norms(passes, features, labels, seed)[1]


DRAWING = frozenset(
    {"rand", "rand_like", "randn", "randn_like", "normal", "bernoulli"}
    | {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"}
)
"""Functions of torch that return the numbers they have drawn, where these are no whole numbers."""

CHANCE = {"scaled_dot_product_attention": (4, "dropout_p")}
"""Where a function takes the chance of dropout, by place and name, if not second, as `p`."""

WHOLE = frozenset({"randint", "randint_like", "random_"})
"""Functions of torch that draw whole numbers between bounds."""

MIDDLE = 0.3
"""The number that takes the place of those drawn, if no other is given; of whole numbers, that share of their range.

It is none that mirroring leaves as it is: with ½ the antithetic pairs `u, 1 - u` would not show.
"""

HALF = 0.5
"""The chance of dropout where none is given."""

Kept = Callable[[Tensor, Tensor], Tensor]
"""Says, of the numbers that a call has drawn and of those in their place, which are to stay as they were drawn."""

REDRAWN = 8
"""At most so many times numbers are drawn anew, until others come."""


class Drawing(TorchFunctionMode):
    """Within this mode: one number takes the place of what torch's functions draw, and dropout keeps everything.

    What TorchScript draws, and what torch samples of further laws (Beta, permutations) remain as drawn.

    Args:
        passes: their device's generators count.
        by: the number; above `MIDDLE`, dropout remains. None: all numbers are drawn anew, and dropout remains.
        only: which of the calls that draw; None for all.
        kept: which numbers of these calls stay as drawn; None for none.
    """

    def __init__(
        self,
        passes: BookKeeping,
        by: float | None = MIDDLE,
        only: Collection[int] | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__()
        self.sizes: list[float] = []
        """How many numbers each call has drawn; NaN, which is like no other, if `torch.vmap` draws for each row."""
        self.permutations: set[int] = set()
        """Which of the calls have drawn a permutation."""
        self._passes, self._by, self._only, self._kept = passes, by, only, kept

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what the function returns, with other numbers in the place of those drawn."""
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in CHANCE or "dropout" in name:
            return self._dropped(func, list(args), named, *CHANCE.get(name, (1, "p")))
        before = generators(self._passes)
        found = func(*args, **named)
        if not isinstance(found, Tensor) or generators(self._passes).equal(before):
            return found
        if name == "randperm":
            self.permutations.add(len(self.sizes))
        if not self._chosen(found):
            return found
        first = found.clone()
        if self._by is None:
            with drawn_apart(self._passes):  # so that later calls draw what they would have drawn
                for _ in range(REDRAWN):
                    found = func(*args, **named)
                    if in_vmap(found) or not found.equal(first):
                        break
        elif (number := self._number(name, found, args, named)) is not None:
            with torch.no_grad():
                found.fill_(number)
        if self._kept is not None and not in_vmap(found):
            partly = torch.where(self._kept(first, found), first, found)
            if found.requires_grad:  # of a function that draws and goes on, such as gumbel_softmax
                return partly
            found.copy_(partly)
        return found

    def _number(self, name: str, drawn: Tensor, args: tuple[Any, ...], named: Mapping[str, Any]) -> float | None:
        """Return the number that takes the place of what a function has drawn; None for a law that is left alone."""
        assert self._by is not None
        if name in WHOLE and (bounds := _bounds(args, named)):
            low, high = bounds
            return low + int(self._by * (high - low))
        return self._by if name in DRAWING and drawn.is_floating_point() else None

    def _dropped(self, func: Callable[..., Any], args: list[Any], named: dict[str, Any], at: int, name: str) -> Any:
        given = named.get("input", named.get("query", args[0] if args else None))
        off = named.get("training", named.get("train", args[2] if at == 1 and len(args) > 2 else True)) is False
        chance = args[at] if len(args) > at else named.get(name, 0.0 if at > 1 else HALF)
        if not off and chance and self._chosen(given) and self._by is not None and self._by <= MIDDLE:
            if len(args) > at:
                args[at] = 0.0
            else:
                named[name] = 0.0
        return func(*args, **named)

    def _chosen(self, drawn: Any) -> bool:
        """Note a call that draws so many numbers; whether they are to be replaced."""
        with drawn_apart(self._passes):  # torch shows by what it draws whether vmap was given randomness="different"
            self.sizes.append(math.nan if in_vmap(torch.rand([])) else drawn.numel())
        return self._only is None or len(self.sizes) - 1 in self._only


def _bounds(args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the lowest whole number that a call may draw, and the one after the highest; None if it names none."""
    given = [one for one in args if isinstance(one, int)]
    high = named.get("high", named.get("to", given[-1] if given else None))
    low = named.get("low", named.get("from", given[0] if len(given) > 1 else 0))
    return (low, high) if isinstance(low, int) and isinstance(high, int) else None


def in_vmap(values: Tensor) -> bool:
    """Whether these values stand for those of many rows, within `torch.vmap`."""
    try:
        values.untyped_storage()
    except NotImplementedError:
        return True
    return False
