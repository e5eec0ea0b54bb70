"""Train one model, in this process or on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.data.records import Split
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.device import fixed_order
from equidp.mechanism.trainer import EpochCallback
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training.conclusion import Trained, conclude
from equidp.training.networks import make_model
from equidp.training.preparation import device_of, identity_of, prepare
from equidp.training.ranks.job import arguments_of


def train_model(
    algorithm: Algorithm,
    plan: Plan,
    split: Split,
    *,
    grouping: str,
    model: ModelSettings,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int,
    options: Mapping[str, Any] | None = None,
    on_epoch: EpochCallback | None = None,
    workplace: Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    progress: bool = True,
) -> Trained:
    """Train, and state what was spent.

    Args:
        grouping: the partition that group-aware algorithms use.
        options: of the algorithm, where they are not its defaults; several processes build it again from them.
        on_epoch: called after every epoch with the row so far and the model; returns more columns.
        workplace: folder of this run alone, for checkpoints and the ledger's journal, which stay until `forget`; None
            keeps nothing.
        resume: continue what an interrupted run left in `workplace`.
        checkpoint_every: epochs between checkpoints; None: only when asked to stop by Ctrl-C or SIGTERM.

    Raises:
        EquidpError: for settings that do not fit the data, or a checkpoint of other settings.
    """
    if resume and workplace is None:
        raise EquidpError(
            "resume=True needs the workplace of the interrupted run: without one this would be a new training, which "
            "costs its ε once more."
        )
    if training.devices == 1:
        with fixed_order(training.deterministic, device_of(training)):
            prepared = prepare(
                algorithm,
                plan,
                split,
                grouping=grouping,
                model=model,
                privacy=privacy,
                training=training,
                seed=seed,
                workplace=workplace,
                resume=resume,
                checkpoint_every=checkpoint_every,
            )
            return conclude(prepared, prepared.run(on_epoch, progress=progress))
    job = {
        "algorithm": algorithm.name,
        "options": dict(options or {}),
        "plan": dataclasses.asdict(plan),
        "grouping": grouping,
        "model": model.model_dump(mode="json"),
        "privacy": privacy.model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "seed": seed,
        "workplace": str(workplace.resolve()) if workplace is not None else None,
        "resume": resume,
        "checkpoint_every": checkpoint_every,
        "progress": progress,
    }
    return _train_on_ranks(algorithm, job, split, model, training, seed, on_epoch)


def _train_on_ranks(
    algorithm: Algorithm,
    job: Mapping[str, Any],
    split: Split,
    model: ModelSettings,
    training: TrainingSettings,
    seed: int,
    on_epoch: EpochCallback | None,
) -> Trained:
    """Hand the training to several processes; evaluate here."""
    device = device_of(training)
    from equidp.training.ranks.launch import train  # imports torch's launcher, which one process does not need

    again = arguments_of(job)["algorithm"]
    if identity_of(again) != identity_of(algorithm):
        raise EquidpError(
            f"training.devices={training.devices} needs the options that {algorithm.name} was built from."
        )
    network = make_model(split.train.schema, model, algorithm, seed).to(device)

    def evaluate(row: dict[str, float], weights: dict[str, Tensor]) -> Mapping[str, float]:
        network.load_state_dict(weights)
        return on_epoch(row, network) if on_epoch is not None else {}

    results = train(job, split, training.devices, evaluate if on_epoch is not None else None)
    return Trained(*results)
