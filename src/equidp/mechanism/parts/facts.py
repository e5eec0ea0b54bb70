"""The public facts of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equidp.accounting.plan import Plan


@dataclass(frozen=True)
class StepFacts:
    """Public facts of one step, for parts that work with its noised values.

    Attributes:
        plan: the run's.
        step: t, from 0.
        noise_multiplier: σ of this step's noise; 0 without privacy.
        sensitivity: `()`, Δ of this step; 0 without privacy. The noise has the standard deviation σ·Δ. A side release
            is given the Δ of the public values before it, or an infinite one if these do not give Δ.
        dimension: d, the number of trained parameters.
        sampling_rate: q, with which this step is charged.
    """

    plan: Plan
    step: int
    noise_multiplier: float
    sensitivity: Tensor
    dimension: int
    sampling_rate: float
