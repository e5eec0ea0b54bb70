"""SlaClip: a bound that follows the part of it that gradients leave unused (Zou et al. 2026, "SlaClip: Gradient Norm
Slacks can be Indicator for Adaptive Clipping in DP-SGD", ICML; Opacus pull request 824).

A gradient that is shorter than C_t leaves slack. K more coordinates of the same release (slots) carry it. Slot j of a
record is

    s_j = clamp(K·(1 − n/C_t) − (j − 1), 0, 1)·C_t/√K,   so the first f = K·(1 − n/C_t) slots are filled, in their order
    ŝ = (Σ_i s_i + σ·C_t·ξ)·√K/(C_t·B)                    ŝ_1: the share of n below C_t, ŝ_K: of n close to 0
    C_{t+1} = clamp(C_t·exp(η·(1 − β·(1 − min(max(ŝ_K, 0)/C_t, 1)) − ŝ_1)), C_min, C_max)

The bound. Let x = min(n/C_t, 1) and f = m + r with m full slots and the fraction r < 1 of one. Then
‖s‖² = C_t²·(m + r²)/K ≤ C_t²·(m + r)/K = C_t²·(1 − x) ≤ C_t²·(1 − x²). So ‖w·g‖² + ‖s‖² ≤ C_t² for every n: gradient
and slots are one vector of d + K coordinates and at most length C_t, with the same noise σ·C_t on all of them. The
event is (q, σ), as for DP-SGD (`joint_noise`, slack).

Nothing that affects ε differs from the authors' code. The noise of the slots is drawn separately, which has the same
law. ŝ_K is divided by C_t as in that code, although it is a share already.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Added, FlatClip, Positive, Public, SideRelease, StepFacts

Slots = Annotated[int, Field(ge=2, le=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Slack(SideRelease):
    """The slots, in units of C, by which C is adapted. With flat clipping they are free; other rules pay for them."""

    additive: ClassVar[bool] = True
    steers: ClassVar[frozenset[str]] = frozenset({"clip_norm"})
    defaults: ClassVar[dict[str, float]] = {"clip_norm": 1.0}

    slots: Slots = 8
    clip_learning_rate: Positive = 0.5
    target_fall: Fraction = 0.5
    min_clip_norm: Positive = 0.1
    max_clip_norm: Positive = 50.0

    @property
    def released(self) -> str:
        """The slots."""
        return "The noised sum of what gradients leave unused of the bound, in every batch."

    def noise(self, plan: Plan) -> float:
        """σ, the same as on the gradient's coordinates in units of C."""
        return plan.noise_multiplier

    def added(self) -> tuple[Added, ...]:
        """The slack of a gradient within C; nothing beyond it."""
        return Added(1.0, 1.0, "clip_norm", slack=True), Added(0.0)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """`[slots]`: Σ s_i/C."""
        filled = self.slots * (1 - norms / public["clip_norm"])
        before = torch.arange(self.slots, device=norms.device)
        return (filled[:, None] - before).clamp(0, 1).sum(0) / self.slots**0.5

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """C_{t+1}."""
        bound, shares = public["clip_norm"], noised * (self.slots**0.5 / facts.plan.batch_size)
        target = 1 - self.target_fall * (1 - (shares[-1].clamp(min=0) / bound).clamp(max=1))
        led = bound * (self.clip_learning_rate * (target - shares[0])).clamp(-50, 50).exp()
        return {"clip_norm": led.clamp(self.min_clip_norm, self.max_clip_norm)}


class SlaClip(AlgorithmSettings):
    """Settings of SlaClip."""

    clip_norm: Positive = 1.0
    """C_0, the first bound."""
    slots: Slots = 8
    """K, the number of coordinates that carry the slack."""
    clip_learning_rate: Positive = 0.5
    """η, how fast the bound moves."""
    target_fall: Fraction = 0.5
    """β: the share of gradients within the bound is led to 1 − β if no gradient is close to 0."""
    min_clip_norm: Positive = 0.1
    """C_min, the smallest bound."""
    max_clip_norm: Positive = 50.0
    """C_max, the largest bound."""

    @model_validator(mode="after")
    def _ordered(self) -> SlaClip:
        if self.max_clip_norm < self.min_clip_norm:
            raise ValueError("max_clip_norm must not be below min_clip_norm")
        return self

    def build(self) -> Algorithm:
        """Flat clipping at a bound that follows the slack."""
        slack = Slack(**self.model_dump(exclude={"clip_norm"}))
        return Algorithm(name="slaclip", weights=FlatClip(), initial={"clip_norm": self.clip_norm}, side_release=slack)
