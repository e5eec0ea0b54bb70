"""SoftAdaClip: adaptive clipping with a smooth edge (Soleymani et al. 2025, "SoftAdaClip: A Smooth Clipping Strategy
for Fair and Private Model Training", arXiv 2510.01447).

    w = C_t·tanh(n/C_t)/n,   C_t follows a quantile of the norms as in `dpsgd_quantile`

tanh grows and stays below 1, so w·n < C_t for every n: Δ = C_t, and it is never reached. tanh(x) ≤ x, so no gradient
is made longer. Gradients near C_t are shortened, too: to 0.76·C_t at n = C_t. Count and gradient are one event, as in
`dpsgd_quantile`. With `counts_below` κ a gradient that is counted adds at most tanh(κ)·Δ, so the event is

    σ^eff = max(tanh(κ)²/σ² + 1/σ_b², 1/σ²)^(−1/2)        (proof: `joint_noise`)

and the count costs nothing from σ_b = σ/√(1 − tanh(κ)²) = σ·cosh(κ) on. Where we depart from the text: count and
gradient are one event; the count is divided by the expected B; and its settings have the defaults of `dpsgd_quantile`.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from equidp.algorithms.dpsgd_quantile import DPSGDQuantile
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Public, WeightRule


class SoftClip(WeightRule):
    """w = C·tanh(n/C)/n."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """tanh(n/C)/(n/C), and its limit 1 for gradients so short that float32 shows no difference."""
        share = norms / public["clip_norm"]
        return torch.where(share > 1e-4, torch.tanh(share) / share, 1.0)

    def bound(self, public: Public) -> Tensor:
        """C, which no gradient reaches."""
        return public["clip_norm"]

    def reach(self, unit: str, upto: float) -> float:
        """n ≤ κ·C adds at most tanh(κ)·C."""
        return math.tanh(upto) if unit == "clip_norm" else 1.0


class SoftAdaClip(DPSGDQuantile):
    """Settings of SoftAdaClip."""

    def build(self) -> Algorithm:
        """Smooth clipping at a bound that follows a quantile."""
        # the published figure of adaptive clipping does not hold for this algorithm
        return dataclasses.replace(super().build(), name="soft_adaclip", weights=SoftClip(), published=None)
