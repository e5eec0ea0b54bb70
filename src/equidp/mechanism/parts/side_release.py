"""A noised statistic of the batch that the gradient is computed from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.events import fuse
from equidp.accounting.plan import Plan
from equidp.mechanism.parts.base import Combination, Part, listed
from equidp.mechanism.parts.facts import StepFacts
from equidp.mechanism.parts.public import Public
from equidp.mechanism.parts.weights import FlatClip, WeightRule


@dataclass(frozen=True)
class Added:
    """What a record of norm n ≤ `upto`·public[`unit`] adds to a statistic, in L2.

    Attributes:
        most: it adds at most this.
        upto: the largest norm that this holds for, as a multiple of the unit.
        unit: name of a public value.
        slack: whether it also adds at most √(1 − (n/unit)²), which clipping to that unit leaves unused.
    """

    most: float
    upto: float = math.inf
    unit: str = "clip_norm"
    slack: bool = False


class SideRelease(Part, ABC):
    """A noised statistic of the norms and groups of the batch that the gradient is computed from.

    The trainer adds N(0, `noise(plan)`²) to each entry of `statistic` before anything else sees it; `now` and `later`
    are post-processing of the noised values.
    """

    every: Annotated[int, Field(ge=1)] = 1
    """Steps from one release to the next. What it gives holds until the next one; steps between do not pay for it."""

    of_errors: ClassVar[bool] = False
    """Whether `statistic` is given, instead of norms, the share of each unit's records that are classified wrongly."""

    additive: ClassVar[bool] = False
    """Whether `statistic` of a batch is the sum of its records' own. If not, steps are not recorded for replay."""

    keeps: ClassVar[frozenset[str]] = frozenset()
    """Names of carried values that `later` sets for the release's own use; the history does not show them."""

    defaults: ClassVar[Mapping[str, float]] = {}
    """Start values of what it steers or compares with, unless given otherwise."""

    promised = (
        ("additive", ("statistic",)),
        ("added", ("statistic", "sensitivity")),
        ("joint_noise", ("statistic", "sensitivity", "noise", "added")),
    )

    @abstractmethod
    def noise(self, plan: Plan) -> float:
        """Standard deviation of the noise on each entry."""

    def sensitivity(self) -> float:
        """L2 sensitivity of `statistic` to one record."""
        return 1.0

    def added(self) -> tuple[Added, ...]:
        """h(n): by how much a record of norm n moves `statistic` when it joins or leaves, as a function in pieces.

        The first piece whose `upto` covers the norm n is the record's. The last piece must cover every n. `unit` is the
        public value as `statistic` sees it, that of the record's group if there is one per group. A record that is not
        counted may move the statistic, too: every record moves a centred count by ½.
        """
        return (Added(self.sensitivity()),)

    @abstractmethod
    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """`[m]` exact statistic of `[u]` norms (non-finite ones set to 0) and group ids; on an empty batch too."""

    def at(self, plan: Plan) -> range:
        """The steps t, from 0, at which it is released: fixed before training, as the events follow from it."""
        return range(0, plan.steps, self.every)

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Public values that hold from the next step on."""
        return {}

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Public values that hold from this step to the next release; `public` has those of `keeps` from `later`."""
        return {}

    def consequences(
        self, noised: Tensor, carried: Public, public: Public, facts: StepFacts
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`later`, made of the carried values, and `now`, made of this step's public values."""
        later = self.later(noised, carried, facts)
        return later, self.now(noised, {**public, **{name: later[name] for name in self.keeps}}, facts)

    def joint_noise(self, rule: WeightRule, plan: Plan, noise_multiplier: float) -> float:
        """σ^eff = (max_n [ (w(n)·n/Δ)²/σ² + h(n)²/σ_1² ])^(−1/2) of a weighted sum and a release of the same sample.

        Proof. Fix the run so far and what the model draws; this fixes the model, all carried values, and a record's
        norm n. Compare a sample with the record and without it. The noises of statistic and sum are independent, with
        standard deviations σ_1 and σ·Δ per coordinate. Divided by σ_1, the statistic is a Gaussian of variance 1, which
        the record moves by at most h(n)/σ_1. Given whatever value of it came out, the sum divided by σ·Δ is another
        one, which the record moves by at most w(n)·n/(σ·Δ), whatever weights and Δ were made of that value. Together
        they are one Gaussian of variance 1 whose coordinates may be chosen as it is released, and the record moves it
        by at most the root of the sum of both squares. If that is at most μ in every outcome, N(0, 1) against N(μ, 1)
        dominates. 1/σ^eff is such a μ, because it holds for every n. A record that joins moves both by as much as one
        that leaves, and Poisson sampling preserves domination in both directions.

        The maximum. `added` cuts n ≥ 0 into finitely many pieces. On each piece h is at most a constant, and n ≤ upto·u
        for a public value u. There w(n)·n/Δ is at most `rule.reach(unit, upto)`, for every value that u could have had.
        So each piece is bounded by the sum of two constants, and all n by the largest of these sums: no n is tried out.
        A bound by u needs weights that are made of the same u. So it is not used where the release itself gives another
        u to the weights of this step. The norm that is counted must be the norm that is weighed, also in chunks, whose
        norms are computed twice (`Looking.first_norms`).

        Slack. Let the rule be min(1, u/n) itself. A record with n ≤ u adds n to the sum, where Δ ≥ u, and adds h(n) to
        a statistic with slack, where (n/u)² + h(n)² ≤ 1. Then (n/Δ)²/σ² + h(n)²/σ_1² ≤ max(1/σ², 1/σ_1²). With σ_1 = σ
        the statistic is a few more coordinates of the gradient's own release, and costs nothing.

        With one piece this is `fuse`, as if one record moved both by all it may.
        """
        return min(_of_piece(piece, self, rule, self.noise(plan), noise_multiplier) for piece in _whole(self))

    @property
    def tied(self) -> bool:
        """Whether `joint_noise` rests on a record's norm, so that the norm weighed must be the norm that was counted.

        It may also do so if a class has a `joint_noise` of its own.
        """
        return len(self.added()) > 1 or type(self).joint_noise is not SideRelease.joint_noise

    def objection(self, combination: Combination) -> str | None:
        """Refuse a statistic that no other part uses: it would cost privacy for nothing."""
        rule, objective = combination.weights, combination.objective
        used = rule.reads | {"scale"} | objective.reads if rule else frozenset()
        if used & (self.gives | self.steers):
            return None
        if not self.gives | self.steers:
            return "it declares no `steers` and no `gives`: name the values that its `later` or `now` returns"
        return (
            f"it releases {listed(self.gives | self.steers)}, which {type(rule).__name__} does not use (a rule that "
            "does names it in its `reads`)"
        )


def _whole(release: SideRelease) -> tuple[Added, ...]:
    pieces = release.added()
    if not pieces or pieces[-1].upto != math.inf:
        raise ValueError(f"{type(release).__name__}.added must end with a piece for every norm: leave its `upto` out.")
    return pieces


def _of_piece(piece: Added, release: SideRelease, rule: WeightRule, noise: float, noise_multiplier: float) -> float:
    """The noise multiplier of both releases for records of one piece; a release that they do not move costs nothing."""
    bounded = piece.upto < math.inf and piece.unit not in release.gives
    if bounded and piece.slack and piece.unit == "clip_norm" and type(rule).reach is FlatClip.reach:
        return min(noise_multiplier, noise)
    reach = rule.reach(piece.unit, piece.upto) if bounded else 1.0
    moved = [level / share for level, share in ((noise_multiplier, reach), (noise, piece.most)) if share > 0]
    return fuse(*moved) if len(moved) > 1 else min(moved, default=math.inf)


def counts(ids: Tensor, size: int, shares: Tensor | None = None) -> Tensor:
    """`[size]` float32: how often each of `[u]` ids below `size` occurs, or the sum of its `[u]` shares."""
    if ids.device.type == "cpu":
        return torch.bincount(ids, shares, minlength=size).float()  # on a GPU `bincount` would wait for the device
    each = ids.unsqueeze(1) == _places(size, ids.device)
    return (each if shares is None else each * shares.unsqueeze(1)).sum(0, dtype=torch.float32)


@lru_cache(maxsize=8)
def _places(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def noise_level(level: float | str, plan: Plan) -> float:
    """Resolve a `NoiseLevel`: a number stays, a ratio `"10x"` multiplies the gradient's noise multiplier."""
    return float(level.removesuffix("x")) * plan.noise_multiplier if isinstance(level, str) else float(level)
