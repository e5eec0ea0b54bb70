"""DP-AdamBC: Adam, with the noise subtracted from its second moment (Tang, Shpilevskiy, Lécuyer 2024, "DP-AdamBC: Your
DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)", AAAI, arXiv 2312.14334).

    ĝ_t as in `dpsgd`;   m_t = β₁·m_{t−1} + (1 − β₁)·ĝ_t,   v_t = β₂·v_{t−1} + (1 − β₂)·ĝ_t²   per coordinate
    φ_t = β₂·φ_{t−1} + (1 − β₂)·(σ_t·Δ_t/B)²,   all three divided by 1 − β^t
    θ_{t+1} = θ_t − η·m̂_t/√max(v̂_t − φ̂_t, γ')

The noise of ĝ_t has the variance (σ_t·Δ_t/B)², a public number. So E v̂ exceeds the second moment of the clipped
gradients by exactly φ̂. Plain Adam would divide every coordinate by nearly the same noise, and so be DP-SGD. All of
this is made of released values, so Δ = C and the event (q, σ) are those of `dpsgd`.

Where we depart from the text:
- φ is averaged as v is, with the σ_t and Δ_t of each step. So it is right for schedules and adaptive bounds, too; with
  constant ones it is the paper's constant.
- γ' is a setting. Without it a coordinate that is nearly all noise would move by the square root of the noise's error.

DP-AdamBC is the optimiser. It takes no other optimiser beside it, and no weight decay, for which the correction was not
derived.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.parts import FlatClip, Positive, Run, StepFacts, Update, Updating

Decay = Annotated[float, Field(ge=0, lt=1)]


class CorrectedAdam(Update):
    """Adam's direction, with the noise subtracted from its second moment: post-processing."""

    first_decay: Decay = 0.9
    """β₁."""
    second_decay: Decay = 0.999
    """β₂."""
    variance_floor: Positive = 1e-6
    """γ'."""

    def start(self, run: Run) -> Updating:
        """Keeps both moments."""
        return Correcting(self)


class Correcting(Updating):
    """The corrected Adam during one run."""

    remembered = ("taken", "moments")

    def __init__(self, part: CorrectedAdam) -> None:
        self.part, self.taken = part, 0
        self.moments: list[Tensor] = []  # m and v, `[d]` each, and φ, `()`

    def direction(self, noisy_sum: Tensor, facts: StepFacts) -> Tensor:
        """B·m̂/√max(v̂ − φ̂, γ'), `[d]`."""
        part, size = self.part, facts.plan.batch_size
        mean, noise = noisy_sum / size, facts.sensitivity * (facts.noise_multiplier / size)
        latest, decays = (mean, mean**2, noise**2), (part.first_decay, part.second_decay, part.second_decay)
        before = self.moments or [torch.zeros_like(moment) for moment in latest]
        self.moments = [torch.lerp(new, old, decay) for new, old, decay in zip(latest, before, decays, strict=True)]
        self.taken += 1
        first, second, bias = (m / (1 - decay**self.taken) for m, decay in zip(self.moments, decays, strict=True))
        return size * first / (second - bias).clamp(min=part.variance_floor).sqrt()


def along_corrected_adam(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    """Return an optimiser that steps along the update's direction, because the update is the optimiser itself."""
    return Descent("sgd").make(parameters, rate)


class DPAdamBC(AlgorithmSettings):
    """Settings of DP-AdamBC."""

    clip_norm: Positive = 1.0
    """C, the bound on each record's gradient."""
    first_decay: Decay = 0.9
    """β₁, of the mean gradient."""
    second_decay: Decay = 0.999
    """β₂, of the squared mean gradient and of the noise's variance."""
    variance_floor: Positive = 1e-6
    """γ', the lower limit of a coordinate's corrected second moment."""
    learning_rate: Positive | None = None
    """η; the run's learning rate unless given."""

    def build(self) -> Algorithm:
        """Flat clipping, corrected Adam."""
        return Algorithm(
            name="dp_adambc",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm},
            update=CorrectedAdam(**self.model_dump(exclude={"clip_norm", "learning_rate"})),
            learning_rate=self.learning_rate,
            optimizer=along_corrected_adam,
        )
