"""DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1).

    ĝ = (1/B)·(Σ_{i∈S} min(1, C/n_i)·g_i + σ·C·ξ),   ξ ~ N(0, I)

Sensitivity C, one Poisson-sampled Gaussian event (B/N, σ) per step. The paper divides by the lot size; so do we, and
never by |S|, which is private.
"""

from __future__ import annotations

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, Positive


class DPSGD(AlgorithmSettings):
    """Settings of DP-SGD."""

    clip_norm: Positive = 1.0
    """C, the bound on each record's gradient."""

    def build(self) -> Algorithm:
        """Flat clipping, constant noise."""
        return Algorithm(name="dpsgd", weights=FlatClip(), initial={"clip_norm": self.clip_norm})
