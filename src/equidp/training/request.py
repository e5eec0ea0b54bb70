"""The request for one training: all that it is asked for, except the records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.parameters import ModelSettings, PrivacySettings, Settings, TrainingSettings


@dataclass(frozen=True)
class TrainingRequest:
    """All that a training is asked for, except its records. It is frozen, and the same for each rank.

    Attributes:
        grouping: the partition that group-aware algorithms use.
        options: the algorithm's, if they are not its defaults; several processes build it again from them.
        workplace: a folder for this run alone, with checkpoints and the ledger's journal, which stay until `forget`;
            with None nothing is kept.
        resume: continue what an interrupted run left in `workplace`.
        checkpoint_every: epochs between checkpoints; None: only when asked to stop by Ctrl-C or SIGTERM.

    Raises:
        EquidpError: for a resumption without a workplace.
    """

    algorithm: Algorithm
    plan: Plan
    grouping: str
    model: ModelSettings
    privacy: PrivacySettings
    training: TrainingSettings
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    workplace: Path | None = None
    resume: bool = False
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if self.resume and self.workplace is None:
            raise EquidpError(
                "resume=True needs the workplace of the interrupted run: without one this would be a new training, "
                "which costs its ε once more."
            )

    @classmethod
    def of(cls, settings: Settings, algorithm: str, plan: Plan, workplace: Path) -> TrainingRequest:
        """The request that a run's settings make for one algorithm."""
        return cls(
            algorithm=settings.algorithm(algorithm),
            plan=plan,
            grouping=settings.data.groups[0],
            model=settings.model,
            privacy=settings.privacy,
            training=settings.training,
            seed=settings.seed,
            options=settings.options(algorithm),
            workplace=workplace,
            resume=settings.resume,
            checkpoint_every=settings.operation.checkpoint_every,
        )

    def facts(self) -> dict[str, Any]:
        """Everything that a checkpoint must agree with, in JSON types.

        Whatever changes a release belongs here, even if only in the last digit. Steps done again have the same noise,
        so the difference of two releases under two settings would be exact. `OperationSettings` change no release.
        """
        return {
            "algorithm": identity_of(self.algorithm),
            "plan": dataclasses.asdict(self.plan),
            **{name: getattr(self, name).model_dump(mode="json") for name in ("model", "privacy", "training")},
            "grouping": self.grouping,
            "seed": self.seed,
        }

    def to_dict(self) -> dict[str, Any]:
        """In JSON types, for another process. Raises EquidpError if the options do not build the algorithm."""
        if identity_of(algorithm_settings(self.algorithm.name, self.options).build()) != identity_of(self.algorithm):
            raise EquidpError(
                f"training.devices={self.training.devices} needs the options that {self.algorithm.name} was built from."
            )
        return self.facts() | {
            "algorithm": self.algorithm.name,
            "options": dict(self.options),
            "workplace": str(self.workplace.resolve()) if self.workplace is not None else None,
            "resume": self.resume,
            "checkpoint_every": self.checkpoint_every,
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> TrainingRequest:
        """Read `to_dict`. Settings go from one process to another here and nowhere else."""
        return cls(
            **{name: facts[name] for name in ("grouping", "seed", "options", "resume", "checkpoint_every")},
            algorithm=algorithm_settings(facts["algorithm"], facts["options"]).build(),
            plan=Plan(**facts["plan"]),
            model=ModelSettings(**facts["model"]),
            privacy=PrivacySettings(**facts["privacy"]),
            training=TrainingSettings(**facts["training"]),
            workplace=Path(facts["workplace"]) if facts["workplace"] else None,
        )


def identity_of(algorithm: Algorithm) -> dict[str, Any]:
    """Everything about an algorithm by which two of one name may differ."""
    return {
        "name": algorithm.name,
        "parts": [repr(part) for part in algorithm.parts],
        "initial": dict(algorithm.initial),  # clip norms and the like, which are no fields of a part
        "model": algorithm.model,
        "model_options": dict(algorithm.model_options),
        "learning_rate": algorithm.learning_rate,
        "optimizer": getattr(algorithm.optimizer, "__qualname__", algorithm.optimizer),
    }
