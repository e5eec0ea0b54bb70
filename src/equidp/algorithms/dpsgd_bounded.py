"""Bounded adaptive clipping (Zhao et al. 2025, "Mitigating Disparate Impact of DP Learning through Bounded Adaptive
Clipping", arXiv 2506.01396): adaptive clipping whose bound has a floor.

    b̃ = (Σ_i (1[n_i ≤ κ·C_t] − ½) + N(0, σ_b²))/B + ½,   C_{t+1} = max(C_LB, C_t·exp(−η_C·(b̃ − target)))

Without a floor the bound shrinks with the gradients of the well-fitted majority, and shortens those of rare groups to
almost nothing. w = min(1, C_t/n), Δ = C_t. Each record moves the centred count by ½, whether it is counted or not, and
the gradient by at most Δ. So a step is one event, (σ⁻² + (2σ_b)⁻²)^(−1/2).

The authors' code does not give the ε that it states. Where we depart from it:
- There records count as 0 or 1, which has sensitivity 1, but it is charged as ½.
- There the count is divided by |S|, which is private; here by the expected B.
- There every gradient is divided by C_t, as if the learning rate followed the bound; here it is not divided.
"""

from __future__ import annotations

from equidp.accounting.plan import Plan
from equidp.algorithms.dpsgd_quantile import DPSGDQuantile, QuantileCount, published
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, Positive


class BoundedCount(QuantileCount):
    """The quantile count with the authors' noise."""

    def noise(self, plan: Plan) -> float:
        """σ_b, B/10 unless given."""
        return plan.batch_size / 10 if self.count_noise_multiplier is None else super().noise(plan)


class DPSGDBounded(DPSGDQuantile):
    """Settings of bounded adaptive clipping."""

    min_clip_norm: Positive = 0.5
    """C_LB, the smallest bound, which the authors tune (0.001 to 50)."""
    centred: bool = True
    """Count each record as ±½: half the sensitivity, so σ_b counts double."""
    counts_below: Positive = 2.5
    """κ: count gradients within κ·C; then κ·C follows the quantile."""

    def build(self) -> Algorithm:
        """Flat clipping at a bound that follows a quantile, down to its floor."""
        return Algorithm(
            name="dpsgd_bounded",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            side_release=BoundedCount(**self.model_dump(exclude={"clip_norm"})),
            published=published,
        )
