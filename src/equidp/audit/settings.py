"""Settings of an audit (`audit.<name>`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from equidp.options import Declared

Count = Annotated[int, Field(ge=0, le=10_000_000)]
Probability = Annotated[float, Field(gt=0, lt=1)]

REMEDY = (
    "Audit it at a smaller privacy.epsilon, or with more canaries and guesses (audit.gradient_canaries, audit.guesses)."
)
"""What to do about a claim that even an attack without an error could not have refuted."""


class AuditSettings(Declared):
    """What is audited and how hard. A count of 0 leaves that attack out."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    gradient_canaries: Count = 10_000
    """Canaries with a prescribed gradient each; fewer than some thousands find no ordinary fault."""
    input_canaries: Count = 1_000
    """Training records given a wrong label; at most half of the training part is taken."""
    guesses: Count | None = None
    """Canaries guessed about, half of them "in"; fixed in advance; null: one in twenty."""
    delta: Probability | None = None
    """δ at which the claim is audited; null: 0.3 per number of canaries, where the one-run bound is strongest."""
    confidence: Probability = 0.95
    """Level of every bound and interval."""
    membership: bool = True
    """Whether to attack the membership of the training records, per group."""
    reference_models: Count = 4
    """Non-private models of the reference-model attack, in pairs that halve the pool; 0: loss threshold only."""
    membership_records: Annotated[int, Field(ge=100)] = 2_000
    """At most so many members, and non-members, of each group are attacked."""
    resamples: Annotated[int, Field(ge=20)] = 200
    """Bootstrap resamples behind each interval."""

    @model_validator(mode="after")
    def _paired(self) -> AuditSettings:
        if self.reference_models % 2:
            raise ValueError("reference_models come in pairs: give an even number")
        if 1 in (self.gradient_canaries, self.input_canaries):
            raise ValueError("one canary tells nothing: give 0 to leave it out, or some thousands")
        return self

    def guesses_of(self, canaries: int) -> int:
        """r, even."""
        wanted = canaries // 20 if self.guesses is None else self.guesses
        return 2 * max(1, min(wanted, canaries) // 2)

    def delta_of(self, canaries: int) -> float:
        """δ of the audit."""
        return 0.3 / canaries if self.delta is None else self.delta
