"""The block of settings on the guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from equidp.data.sources import record_words
from equidp.errors import EquidpError, refuse_unknown
from equidp.options import Delta
from equidp.parameters.sections import Block, Text

if TYPE_CHECKING:
    from equidp.accounting.trials import Trials


class FiguresSettings(Block):
    """What the evaluated part's figures may cost its own records."""

    epsilon: Annotated[float, Field(gt=0)] | None = None
    """ε for which figures of the evaluated part are released with noise (`metrics_release.json`); null: none are."""
    delta: Delta | None = None
    """δ of these figures; null: `privacy.delta`."""
    bins: Annotated[int, Field(ge=2, le=200)] = 10
    """Score bins, in all predicted classes together: AUROC and calibration need many, small groups few."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            names = [f"privacy.evaluation.{name}" for name in cls.model_fields]
            refuse_unknown("setting", (f"privacy.evaluation.{name}" for name in given), names)
        return given

    @model_validator(mode="after")
    def _of_some(self) -> FiguresSettings:
        other = [name for name in ("delta", "bins") if getattr(self, name) != type(self).model_fields[name].default]
        if self.epsilon is None and other:
            raise ValueError(
                f"{other[0]} is of figures with noise, and there are none: set privacy.evaluation.epsilon, or leave "
                f"{other[0]} out"
            )
        return self


class PrivacySettings(Block):
    """The guarantee asked for: a target ε, or a noise multiplier whose ε is then reported."""

    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Target ε; the noise is solved for."""
    epsilon_as: Literal["sound", "published"] = "sound"
    """Which ε meets the target: `sound`, the guaranteed one, or `published`, as the algorithm's paper counts; the sound
    ε may then be larger."""
    noise_multiplier: Annotated[float, Field(gt=0)] | None = None
    """The noise, given directly; ε is then reported."""
    delta: Delta = 1e-5
    """δ; keep it below one over the number of training records."""
    unit: str = "record"
    """Whose influence is bounded: that of one record, or that of all records of one unit (or `lesion`, `person`, …)."""
    secure: bool = False
    """Noise and sampling from a cryptographic generator; no seed."""
    max_trials: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """The most trainings on these records, of the same events and fixed before the first; ε is that of all together."""
    trials_law: Literal["geometric", "negative_binomial", "poisson"] | None = None
    """Instead of `max_trials`: the law from which the number of trainings was drawn before the first, `geometric`,
    `negative_binomial` or `poisson`. ε is that of the choice and the chosen model, if all have the same events, and
    settings drawn at random from one list, and nothing else of them is ever shown."""
    trials_mean: Annotated[float, Field(ge=1, le=1_000_000)] | None = None
    """The mean of that law, of a number that is at least 1 (drawn again while it is 0)."""
    trials_shape: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """η of `negative_binomial` (0: logarithmic, 1: geometric); null: 0.5."""
    total_epsilon: Annotated[float, Field(gt=0)] | None = None
    """Largest total ε of all secure runs on this data set, at `delta`; a run beyond it is refused; null: no limit."""
    total_adaptive: bool = False
    """Whether that limit is a guarantee even if what earlier runs released decides on later ones; fixed by the first
    secure run."""
    ledger: Text = ""
    """A name that data sets share if the same people are in them: their runs then have one total."""
    evaluation: FiguresSettings = FiguresSettings()
    """Figures of the evaluated part."""

    @model_validator(mode="after")
    def _one_of_two(self) -> PrivacySettings:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            state = "neither is set" if self.epsilon is None else "both are set; set one to null"
            raise ValueError(f"give exactly one of privacy.epsilon and privacy.noise_multiplier ({state})")
        if self.epsilon is None and self.epsilon_as == "published":
            raise ValueError("privacy.epsilon_as=published tells how to read privacy.epsilon, which is not set")
        if self.total_adaptive and self.total_epsilon is None:
            raise ValueError("privacy.total_adaptive=true is of a limit, and there is none: set privacy.total_epsilon")
        if self.max_trials > 1 or (self.trials_law, self.trials_mean, self.trials_shape) != (None, None, None):
            try:
                _ = self.trials  # refuses what does not belong together
            except EquidpError as error:
                raise ValueError(str(error)) from error
        return self

    @property
    def trials(self) -> Trials:
        """How many trainings the guarantee is for."""
        from equidp.accounting.trials import Trials  # late: it imports dp_accounting

        return Trials(self.max_trials, self.trials_law, self.trials_mean, self.trials_shape)

    @property
    def figures_delta(self) -> float:
        """δ of figures with noise."""
        return self.evaluation.delta or self.delta

    @property
    def by_unit(self) -> bool:
        """Whether a unit spans several records."""
        return self.unit not in record_words()
