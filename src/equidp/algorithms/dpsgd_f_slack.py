"""DPSGD-F whose counts use the slack of the gradients: this project's own. The counts cost almost nothing.

DPSGD-F charges its counts as if a record could move its count and also the sum of gradients by the whole Δ. Few records
could do both. Here the bounds C^k of a step are made of the counts of *earlier* steps, averaged as in `dpsgd_f_smooth`
(C^k = C_0 in the first step). So C^k and Δ = max_k C^k are known before the step. A record with n ≤ C_0 adds at most
C_0 to the sum, and a record of group k with n > C_0 at most C^k. The rest of Δ is the record's slack. It pays for
counts with less noise:

    R = 1/σ² + 1/σ_m²,   σ_o^k = (R − (min(C_0, C^k)/Δ)²/σ²)^(−1/2),   σ_m^k = (R − (C^k/Δ)²/σ²)^(−1/2)

are the noises on o^k and m^k, and w_i = min(1, C^{k(i)}/n_i). Every step is charged R^(−1/2), as for `dpsgd_f_smooth`
with σ_1 = σ_m. But only one count has as much noise as σ_m: m of the group with C^k = Δ. At Δ = 2C_0 all o^k have about
1.15σ, at 3C_0 1.06σ.

Proof. Fix the outputs so far, and what the model draws. C^k, Δ and so all noises are functions of these, the same with
and without any record. Take any record, of norm n in group k. If n ≤ C_0, it moves o^k by one and the sum by
w·n = min(n, C^k) ≤ min(C_0, C^k). In units of the noise the square of this is at most
(min(C_0, C^k)/Δ)²/σ² + 1/(σ_o^k)² = R. If n > C_0, it moves m^k by one and the sum by min(n, C^k) ≤ C^k, and the square
is at most (C^k/Δ)²/σ² + 1/(σ_m^k)² = R. A gradient that is not finite has weight 0 and counts as n = 0. So step by
step, in *every* outcome of the memory, both releases are one Gaussian that no record moves by more than R^(1/2).
N(0, 1) against N(R^(1/2), 1) on a Poisson sample of rate q dominates them. Adaptive composition needs this domination
for every outcome of earlier steps, for Rényi divergences and for privacy loss distributions alike.

One vector is released, with one noise R^(−1/2) = σ_f: o^k and m^k are multiplied by h = σ_f/σ_o^k and σ_f/σ_m^k. So a
record moves it by h ≤ 1, where h² = (σ_f/σ_m)² + (σ_f/σ)²·(1 − (C/Δ)²). Dividing by h afterwards is post-processing. If
the gradient's noise were σ' and not the σ of the plan, R would be 1/σ_f² + max(0, 1/σ'² − 1/σ²).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from equidp.accounting.events import fuse
from equidp.accounting.plan import Plan
from equidp.algorithms.dpsgd_f_smooth import DPSGDFSmooth, SmoothedClipCounts
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Combination, Constant, FlatClip, Positive, Public, StepFacts, WeightRule


class SlackClipCounts(SmoothedClipCounts):
    """Remembered counts, whose noise follows from their records' slack; they set the next step's bounds."""

    additive: ClassVar[bool] = True
    gives: ClassVar[frozenset[str]] = frozenset()
    steers: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    base_clip_norm: Positive = 1.0
    """C_0."""

    def noise(self, plan: Plan) -> float:
        """σ_f = R^(−1/2), on entries that are multiplied by `shares`."""
        return fuse(plan.noise_multiplier, super().noise(plan))

    def shares(self, public: Public, plan: Plan) -> Tensor:
        """h of m^1..m^K and o^1..o^K, `[2K]`."""
        bounds = public["clip_norm"].double().expand(plan.groups)
        longest = torch.cat([bounds, bounds.clamp(max=self.base_clip_norm)]) / bounds.max()
        full, left = ((self.noise(plan) / noise) ** 2 for noise in (plan.noise_multiplier, super().noise(plan)))
        return (left + full * (1 - longest**2)).sqrt().float()  # full + left = 1

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """(m, o)·h, `[2K]`: a record moves one entry, by its h."""
        return super().statistic(norms, groups, self._base(public), plan) * self.shares(public, plan)

    def joint_noise(self, rule: WeightRule, plan: Plan, noise_multiplier: float) -> float:
        """R^(−1/2), as the module's docstring proves."""
        more = max(0.0, noise_multiplier**-2 - plan.noise_multiplier**-2)
        return (self.noise(plan) ** -2 + more) ** -0.5

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """The average that the next step continues, and the next step's C^k, `[K]`."""
        remembered = super().later(noised / self.shares(public, facts.plan), public, facts)
        return remembered | super().now(noised, {**self._base(public), **remembered}, facts)

    def now(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """Nothing: this step's bounds were known before it."""
        return {}

    def _base(self, public: Public) -> dict[str, Tensor]:
        return {"clip_norm": public["clip_norm"].new_full((), self.base_clip_norm)}

    def objection(self, combination: Combination) -> str | None:
        """Refuse other weight rules, and schedules that change the bounds: the noise is made for flat clipping."""
        if combination.weights is not None and type(combination.weights) is not FlatClip:
            return "its noise is made for what flat clipping leaves of the bound"
        if type(combination.schedule) is not Constant:
            return "it moves the bounds itself, so the schedule must be constant"
        return super().objection(combination)


class DPSGDFSlack(DPSGDFSmooth):
    """Settings of DPSGD-F with counts in the slack."""

    def build(self) -> Algorithm:
        """`dpsgd_f_smooth` with its side release replaced."""
        own = {"memory": self.memory, "base_clip_norm": self.base_clip_norm}
        return self.with_counts("dpsgd_f_slack", SlackClipCounts, **own)
