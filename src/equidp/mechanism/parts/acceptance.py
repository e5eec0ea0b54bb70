"""Whether a step is taken."""

from __future__ import annotations

from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.mechanism.parts.base import Part, Run, Running


class Acceptance(Part):
    """Whether a candidate step is taken: here, always."""

    @property
    def always(self) -> bool:
        """True where no candidate is ever refused, so that nothing needs to be kept for a rollback."""
        return True

    @property
    def public_records(self) -> int:
        """How many public records it asks for."""
        return 0

    @property
    def on_test(self) -> bool:
        """Whether test records decide; for reproduction alone, because the model is then chosen on its test records."""
        return False

    def candidate_events(self, plan: Plan) -> tuple[Event, ...]:
        """Its own releases for every candidate, taken or not."""
        return ()

    def cap(self, plan: Plan, sampling_rate: float) -> int:
        """The most candidates there can be, fixed in advance: T, unless it may stop earlier.

        Args:
            plan: the run's.
            sampling_rate: of a step.
        """
        return plan.steps

    @property
    def may_stop(self) -> bool:
        """Whether the number of candidates depends on outputs."""
        return False

    def start(self, run: Run) -> Accepting:
        """The acceptance at work."""
        return Accepting()


class AlwaysAccept(Acceptance):
    """Take every step."""


class Accepting(Running):
    """An acceptance during one run."""

    finished: bool = False
    """True once no further candidate is wanted."""

    accepted: int | None = None
    """Steps taken so far; None where it does not count them."""

    def begin(self) -> None:
        """Called at the parameters θ, before the candidate θ' is made."""

    def accept(self) -> bool:
        """Called at θ'; False rolls the step back."""
        return True
