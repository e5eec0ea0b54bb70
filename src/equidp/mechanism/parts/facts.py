"""What a step is, in public figures."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equidp.accounting.plan import Plan


@dataclass(frozen=True)
class StepFacts:
    """Public facts of one step, for what is made of its noised values.

    Attributes:
        plan: of the run.
        step: t, from 0.
        noise_multiplier: σ of this step's noise; 0 without privacy.
        sensitivity: `()`, Δ of this step: the noise has the standard deviation σ·Δ; 0 without privacy. A side release
            is given the Δ that follows from the values before it; infinite where these give none.
        dimension: d, the number of trained parameters.
        sampling_rate: q that this step is charged at.
    """

    plan: Plan
    step: int
    noise_multiplier: float
    sensitivity: Tensor
    dimension: int
    sampling_rate: float
