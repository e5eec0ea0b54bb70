"""DP-PSASC and DP-PSAC: weights that neither clip nor inflate ("Non-monotonous Adaptive Scaling Gradient Weight").

    w = C/(s·n + r/(n + r)),   Δ = C/s

w(0) = C, the maximum C/(1 − (1 − √(s·r))²) lies at a small norm (if r ≤ 1/s), and large gradients get C/(s·n). Δ = C/s,
because w·n < C/s strictly (Eq. 6). s = 1 is DP-PSAC (Xia et al. 2023; Eq. 4). The paper samples without replacement but
accounts as if it sampled by Poisson coins. Here sampling *is* Poisson; the rest is Algorithm 1.
"""

from __future__ import annotations

from torch import Tensor

from equidp.algorithms.auto_s import Stability
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Positive, Public, WeightRule


class AdaptiveScaling(WeightRule):
    """w = C/(s·n + r/(n + r))."""

    stability: Stability = 1e-4
    """r."""
    scale: Positive = 1.0
    """s."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        """C/(s·n + r/(n + r))."""
        return public["clip_norm"] / (self.scale * norms + self.stability / (norms + self.stability))

    def bound(self, public: Public) -> Tensor:
        """C/s, which w·n approaches as n grows."""
        return public["clip_norm"] / self.scale


class PSAC(AlgorithmSettings):
    """Settings of DP-PSAC."""

    clip_norm: Positive = 0.1
    """C; a larger C acts as a larger learning rate."""
    stability: Stability = 1e-4
    """r."""

    def build(self) -> Algorithm:
        """Adaptive scaling with s = 1."""
        return Algorithm(
            name="psac", weights=AdaptiveScaling(stability=self.stability), initial={"clip_norm": self.clip_norm}
        )


class PSASC(PSAC):
    """Settings of DP-PSASC."""

    scale: Positive = 0.8
    """s, by which the sensitivity C/s is divided; below 1, small gradients count more."""

    def rule(self) -> AdaptiveScaling:
        """Return the weight rule of these settings."""
        return AdaptiveScaling(stability=self.stability, scale=self.scale)

    def build(self) -> Algorithm:
        """Adaptive scaling, constant noise."""
        return Algorithm(name="psasc", weights=self.rule(), initial={"clip_norm": self.clip_norm})
