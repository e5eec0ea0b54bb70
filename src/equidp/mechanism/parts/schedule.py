"""How noise and clip norm change over the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod

from equidp.accounting.plan import Plan, Segment
from equidp.mechanism.parts.base import Part


class Schedule(Part, ABC):
    """How noise and clip norm change over the steps; fixed before training."""

    @abstractmethod
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """Segments whose steps sum to T. Their factors multiply `noise_multiplier` and `clip_norm`."""


class Constant(Schedule):
    """The same noise and clip norm at every step."""

    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        """One segment of T steps."""
        return (Segment(plan.steps),)
