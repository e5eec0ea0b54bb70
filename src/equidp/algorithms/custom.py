"""Custom: any combination of parts. Its bound and its ε follow from the parts, as for a named algorithm.

    custom:
      weights: {name: psasc, scale: 0.8}
      side_release: {name: group_clip_counts}
      schedule: {name: phases, clip_decay: 1}
      initial: {clip_norm: 0.5}

A part that is not named is the plain one of its kind. Parts that do not go together are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError

from equidp.algorithms.asc import GroupSampler
from equidp.algorithms.auto_dpsgd import LinearFall, OwnThreshold, StepFall
from equidp.algorithms.auto_s import Normalise
from equidp.algorithms.dc_sgd import LeastError, NormHistogram
from equidp.algorithms.dp_adambc import CorrectedAdam
from equidp.algorithms.dpis import ConstantLength, ImportanceSampler
from equidp.algorithms.dpsgd_decay import ExponentialDecay
from equidp.algorithms.dpsgd_f import GroupClipCounts
from equidp.algorithms.dpsgd_f_adjusted import ClipCountsAndShares, LogitAdjusted
from equidp.algorithms.dpsgd_f_balanced import BalancedClipCounts
from equidp.algorithms.dpsgd_f_smooth import SmoothedClipCounts
from equidp.algorithms.dpsgd_global import ScaleOrClip, ScaleOrDrop, StrictBoundCount
from equidp.algorithms.dpsgd_level import SharesAndMargins
from equidp.algorithms.dpsgd_minimax import ErrorCounts, Steered
from equidp.algorithms.dpsgd_quantile import QuantileCount
from equidp.algorithms.naive import GroupSizeCounts
from equidp.algorithms.psasc import AdaptiveScaling
from equidp.algorithms.psasc_momentum import InnerMomentum, OuterMomentum
from equidp.algorithms.psasc_momentum_gd import FullBatch, RecordMomentum
from equidp.algorithms.sa_dpsgd import Annealing
from equidp.algorithms.sad_dpsgd import DecayingPhases
from equidp.algorithms.settings import AlgorithmSettings
from equidp.algorithms.slaclip import Slack
from equidp.algorithms.soft_adaclip import SoftClip
from equidp.errors import EquidpError, refuse_unknown
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import (
    KINDS,
    AlwaysAccept,
    Constant,
    Contribution,
    ExponentialAverage,
    FlatClip,
    Objective,
    Part,
    PoissonSampler,
    Positive,
    Released,
    SideRelease,
    UnitWeight,
    Update,
    WeightRule,
)
from equidp.options import not_valid
from equidp.registry import Registry

OWN_PARTS: dict[str, dict[str, type[Part]]] = {
    "sampler": {
        "poisson": PoissonSampler,
        "full_batch": FullBatch,
        "importance": ImportanceSampler,
        "groups": GroupSampler,
    },
    "objective": {"plain": Objective, "logit_adjusted": LogitAdjusted, "steered": Steered},
    "contribution": {"gradient": Contribution, "inner_momentum": InnerMomentum, "record_momentum": RecordMomentum},
    "weights": {
        "flat": FlatClip,
        "soft": SoftClip,
        "normalise": Normalise,
        "psasc": AdaptiveScaling,
        "own_threshold": OwnThreshold,
        "scale_or_drop": ScaleOrDrop,
        "scale_or_clip": ScaleOrClip,
        "constant_length": ConstantLength,
        "unit": UnitWeight,
    },
    "schedule": {
        "constant": Constant,
        "exponential": ExponentialDecay,
        "linear": LinearFall,
        "steps": StepFall,
        "phases": DecayingPhases,
    },
    "side_release": {
        "group_clip_counts": GroupClipCounts,
        "smoothed_clip_counts": SmoothedClipCounts,
        "balanced_clip_counts": BalancedClipCounts,
        "clip_counts_and_shares": ClipCountsAndShares,
        "clip_counts_and_margins": SharesAndMargins,
        "error_counts": ErrorCounts,
        "group_size_counts": GroupSizeCounts,
        "quantile": QuantileCount,
        "slack": Slack,
        "norm_histogram": NormHistogram,
        "norm_histogram_error": LeastError,
        "strict_bound": StrictBoundCount,
    },
    "update": {"plain": Update, "outer_momentum": OuterMomentum, "corrected_adam": CorrectedAdam},
    "acceptance": {"always": AlwaysAccept, "annealing": Annealing},
    "released_weights": {"trained": Released, "average": ExponentialAverage},
}
"""Parts by kind and name, as typed under `custom`."""

PARTS: dict[str, Registry[type[Part]]] = {
    kind: Registry(base.__module__, OWN_PARTS[kind], base.__name__) for kind, base in KINDS.items()
}
"""These parts and those of installed packages, by kind. The entry points' group is the module of the kind's class."""

Choice = Annotated[dict[str, Any], BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]
"""A part's name with its settings, `{name: psasc, scale: 0.8}`, or the name alone."""


def make_part(kind: str, choice: Mapping[str, Any]) -> Part:
    """Return the part that a choice names.

    Raises:
        EquidpError: the name or a setting does not exist, or a value is not valid.
    """
    settings = dict(choice)
    if "name" not in settings:
        raise EquidpError(
            f"custom.{kind} has no name: give custom.{kind}.name, one of {', '.join(sorted(PARTS[kind]))}."
        )
    name = settings.pop("name")
    refuse_unknown(f"custom.{kind}.name", [name], PARTS[kind])
    part = PARTS[kind][name]
    refuse_unknown(f"setting of custom.{kind} ({name})", settings, part.model_fields)
    try:
        return part.model_validate(settings)
    except ValidationError as error:
        raise not_valid(f"custom.{kind}", error) from error


class Custom(AlgorithmSettings):
    """A combination of parts; see `PARTS` for the names of each kind."""

    below_options: ClassVar[bool] = False

    sampler: Choice = Field(default={"name": "poisson"})
    """Which records are in the batch."""
    objective: Choice = Field(default={"name": "plain"})
    """Which loss a record has."""
    contribution: Choice = Field(default={"name": "gradient"})
    """Which vector represents a record."""
    weights: Choice = Field(default={"name": "flat"})
    """By which weight a record's vector is multiplied."""
    schedule: Choice = Field(default={"name": "constant"})
    """Noise and clip norm over the steps."""
    side_release: Choice | None = None
    """A noised statistic of the same batch, or null."""
    update: Choice = Field(default={"name": "plain"})
    """Which direction the optimiser is given."""
    acceptance: Choice = Field(default={"name": "always"})
    """Whether a candidate step is accepted."""
    released_weights: Choice = Field(default={"name": "trained"})
    """Which weights of the model are released."""
    initial: dict[str, Positive] = Field(default={})
    """Start values such as clip_norm; values that are not given are the parts' own defaults."""

    def build(self) -> Algorithm:
        """Return the combination.

        Raises:
            EquidpError: a part or value is unknown, or parts do not go together; the message says why.
        """
        chosen: dict[str, Any] = {
            kind: make_part(kind, choice) for kind in PARTS if (choice := getattr(self, kind)) is not None
        }
        return Algorithm(name="custom", initial=self._initial(chosen), **chosen)

    def _initial(self, chosen: Mapping[str, Part]) -> dict[str, float]:
        defaults: dict[str, float] = {"clip_norm": 1.0} if isinstance(chosen["sampler"], ImportanceSampler) else {}
        for part in chosen.values():
            if isinstance(part, WeightRule | SideRelease):
                defaults |= part.defaults
        refuse_unknown("value in custom.initial", self.initial, defaults)
        return defaults | self.initial


def around(kind: str, name: str) -> type[Custom]:
    """Return the settings of an algorithm with this part instead of the plain one; it has the part's name."""

    class Around(Custom):
        def build(self) -> Algorithm:
            return replace(Custom.build(self.model_copy(update={kind: {"name": name}})), name=name)

    return Around
