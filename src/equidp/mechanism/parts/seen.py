"""What a part that charges nothing may see of a run: public facts, and values that were noised before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from equidp.accounting.plan import Plan
from equidp.errors import EquidpError
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.parts.acceptance import Acceptance
from equidp.mechanism.parts.base import Part, Run, listed
from equidp.mechanism.parts.contribution import Contribution
from equidp.mechanism.parts.sampler import Sampler

DRAWN: dict[str, Any] = dict.fromkeys(("bernoulli", "device", "normal", "perturb", "repeatable", "uniform", "words"))
"""Of the run's random numbers: draw the next ones. A part that could set them back might have one noise added to two
sums, or subtract it."""
FACTS: dict[str, Any] = dict.fromkeys(("combination", "plan", "sampling_rate", "ledger")) | {"random": DRAWN}
COINS: dict[str, Any] = FACTS | {"population": dict.fromkeys(("device", "size"))}
"""For a sampler: how many units there are, to toss a coin for each, but no records."""
BATCHES: dict[str, Any] = COINS | {"engine": None}
"""For a contribution: the engine. It is given the records of the batch; only these are bounded and charged."""
ITERATES: dict[str, Any] = FACTS | {
    "engine": dict.fromkeys(("device", "dimension", "flatten", "parameters")),
    "public_loss": None,
}
"""For parts that work after the noise: update, acceptance, released weights. They do not see the model, because hooks
on its layers would show records."""


class Tossed:
    """A run's random numbers for a sampler. Keeps whether it has asked for any: other coins could be foretold."""

    def __init__(self, random: RandomSource) -> None:
        self._random, self.asked = random, False

    def __getattr__(self, name: str) -> Any:
        self.asked = self.asked or name in ("bernoulli", "uniform", "words", "normal")
        return getattr(self._random, name)


class Seen:
    """An object of which only the attributes in `names` can be seen.

    Args:
        whole: the object.
        names: the attributes, each with the names that can be seen of it, or None for all.
        part: the part that looks, for the message.
        path: what the object is called in the message.
        instead: takes the place of the attribute `random`.
    """

    def __init__(
        self, whole: Any, names: Mapping[str, Any], part: Part, path: str = "run", instead: Tossed | None = None
    ) -> None:
        self._whole, self._names, self._part, self._path, self._instead = whole, names, part, path, instead

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise EquidpError(
                f"{type(self._part).__name__} asks for {self._path}.{name}, and charges nothing for it. What it makes "
                f"of training records there would be released without noise; it may see {listed(self._names)} of "
                f"{self._path}."
            )
        value, names = getattr(self._whole, name), self._names[name]
        if name == "random" and self._instead is not None:
            value = self._instead
        return value if names is None else Seen(value, names, self._part, f"{self._path}.{name}")


def seen_by(part: Part, run: Run, plan: Plan, tossed: Tossed | None = None) -> Run:
    """Return the run as this part may see it: the whole run if the part has events of its own, which are then charged.

    Args:
        part: the part.
        run: the run that it works in.
        plan: the run's plan.
        tossed: takes the place of the run's random numbers, unless the part sees the whole run.
    """
    if isinstance(part, Sampler):
        own, names = bool(part.releases(plan)) or part.budget(plan) is not None, COINS
    elif isinstance(part, Contribution):
        own, names = False, BATCHES
    else:
        own = isinstance(part, Acceptance) and bool(part.candidate_events(plan))
        names = ITERATES
    return run if own else cast(Run, Seen(run, names, part, instead=tossed))
