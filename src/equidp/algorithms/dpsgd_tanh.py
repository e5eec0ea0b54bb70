"""DP-SGD with bounded activations (Papernot et al. 2021, "Tempered Sigmoid Activations for Deep Learning with DP").

The mechanism is DP-SGD's. Only the model changes: every activation becomes φ(x) = s/(1 + e^{−T·x}) − o, which keeps
activations and so gradients from growing. Then less of them is clipped away. s = 2, T = 2, o = 1 is tanh.
"""

from __future__ import annotations

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, Positive


class DPSGDTanh(AlgorithmSettings):
    """Settings of DP-SGD with tempered sigmoids (DP-SGD-TS)."""

    clip_norm: Positive = 1.0
    """C, the bound on each record's gradient."""
    scale: Positive = 2.0
    """s, the height of the activation."""
    temperature: Positive = 2.0
    """T, its steepness."""
    offset: float = 1.0
    """o, subtracted from it."""

    def build(self) -> Algorithm:
        """Flat clipping, constant noise, and the activation imposed on the model."""
        return Algorithm(
            name="dpsgd_tanh",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            model_options={"activation": "tempered_sigmoid", **self.model_dump(exclude={"clip_norm"})},
        )
