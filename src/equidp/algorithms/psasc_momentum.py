"""DP-PSASC*: momentum inside and outside ("Non-monotonous Adaptive Scaling Gradient Weight", Algorithm 3).

    m_i = Σ_{l=t−K_0}^{t} γ_0^{t−l}·∇f(θ_l; x_i)        i in the batch; the sum starts at max(0, t−K_0)
    w_i = C/(s·‖m_i‖ + r/(‖m_i‖ + r)),   Δ = C/s
    M_t = (1 − γ_1)·M_{t−1} + Σ w_i·m_i + σ·Δ·ξ,   update by M_t/B

m_i is made of the *sampled* record's gradients at the last K_0 + 1 iterates, which are released already. Given them it
depends on x_i alone, and the batch is freshly sampled, so the event is PSASC's. M is post-processing. The gradient
engine counts the iterates as positions of a layer and sums over them, so no per-record gradient is kept from step to
step.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from equidp.algorithms.psasc import PSASC
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Contributing, Contribution, Run, StepFacts, Update, Updating
from equidp.mechanism.sampling import Batch

Fraction = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[int, Field(ge=0, le=64)]


class InnerMomentum(Contribution):
    """A record contributes the decaying sum of its gradients at the last K_0 + 1 iterates."""

    inner_momentum: Fraction = 0.1
    """γ_0."""
    momentum_length: Length = 1
    """K_0."""

    def start(self, run: Run) -> Contributing:
        """Begin to keep the last K_0 iterates."""
        return PastIterates(self, run)


class PastIterates(Contributing):
    """Inner momentum during one run: the last iterates, newest first."""

    remembered = ("past",)

    def __init__(self, part: InnerMomentum, run: Run) -> None:
        super().__init__(run)
        self.part, self.past = part, list[Tensor]()
        self.remembers = part.momentum_length > 0

    def norms(self, batch: Batch) -> Tensor:
        """‖m_i‖, `[u]`."""
        decay = self.part.inner_momentum
        past = [(theta, decay ** (age + 1)) for age, theta in enumerate(self.past) if decay > 0]
        return self.run.engine.norms(
            batch.features,
            batch.labels,
            owners=batch.owners,
            iterates=[(None, 1.0), *past] if past else None,
            views=batch.views,
        )

    def advance(self, previous: Tensor) -> None:
        """Remember θ_t, forget θ_{t−K_0}."""
        self.past = [previous, *self.past][: self.part.momentum_length]


class OuterMomentum(Update):
    """M_t = (1 − γ_1)·M_{t−1} + noisy sum: post-processing."""

    outer_momentum: Fraction = 0.2
    """γ_1; with 1 nothing is remembered."""

    def start(self, run: Run) -> Updating:
        """Begin to keep M."""
        return Remembering(self)


class Remembering(Updating):
    """Outer momentum during one run."""

    remembered = ("memory",)

    def __init__(self, part: OuterMomentum) -> None:
        self.part = part
        self.memory: Tensor | None = None

    def direction(self, noisy_sum: Tensor, facts: StepFacts) -> Tensor:
        """M_t, `[d]`."""
        memory = noisy_sum if self.memory is None else noisy_sum + (1 - self.part.outer_momentum) * self.memory
        self.memory = memory
        return memory


class PSASCMomentum(PSASC):
    """Settings of DP-PSASC with inner and outer momentum."""

    inner_momentum: Fraction = 0.1
    """γ_0: the weight of a record's gradient at the iterate before."""
    outer_momentum: Fraction = 0.2
    """γ_1: 1 − γ_1 of the last direction is kept."""
    momentum_length: Length = 1
    """K_0: at how many past iterates a record's gradient is taken (not printed in the paper: a starting point of
    ours)."""

    def build(self) -> Algorithm:
        """Adaptive scaling of inner momenta, outer momentum on the noisy sum."""
        return Algorithm(
            name="psasc_momentum",
            weights=self.rule(),
            initial={"clip_norm": self.clip_norm},
            contribution=InnerMomentum(inner_momentum=self.inner_momentum, momentum_length=self.momentum_length),
            update=OuterMomentum(outer_momentum=self.outer_momentum),
            optimizer="sgd",  # the paper's; a second momentum would make the steps oscillate
        )
