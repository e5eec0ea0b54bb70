"""What a finished training leaves: weights, history and privacy statement."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from equidp.mechanism.trainer import Trainer
from equidp.models import weights_of
from equidp.system.files import remove_kept
from equidp.system.workplace import CHECKPOINT_FILE, JOURNAL_FILE
from equidp.training.charging import CHARGED
from equidp.training.journal import unless_in_use
from equidp.training.planning import partition
from equidp.training.preparation import Prepared, named_columns
from equidp.training.statement import privacy_statement

HISTOGRAM = "released_histogram.json"
"""File with a run's noised figures as they were first drawn, beside its checkpoints until all results are written."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """What a training run leaves: weights by name, one history row per epoch, the privacy statement."""

    weights: dict[str, Tensor]
    history: pd.DataFrame
    privacy: dict[str, Any]

    def __repr__(self) -> str:
        of = self.privacy
        spent = f"ε ≤ {of['epsilon'] + 5e-4:.3f} at δ={of['delta']:g}" if of["private"] else "not private"  # rounded up
        return f"<Trained by {of['algorithm']}, {len(self.history)} epochs: {spent}>"


def conclude(prepared: Prepared, rows: Sequence[Mapping[str, float]]) -> Trained:
    """Return weights, history and statement of a finished training."""
    trainer, algorithm = prepared.trainer, prepared.trainer.algorithm
    if trainer.sampling.exhausted and trainer.steps_done < trainer.plan.steps:
        logger.warning(
            "%s: the privacy budget was spent after step %d of %d, and training ended there. Steps that an interrupted "
            "run had shown are paid for, whether or not it had saved them.",
            algorithm.name,
            trainer.steps_done,
            trainer.plan.steps,
        )
    history = pd.DataFrame(named_columns(row, prepared.group_names) for row in rows)
    statement = privacy_statement(
        algorithm,
        trainer.plan,
        trainer.outcome(),
        privacy=prepared.request.privacy,
        training=prepared.request.training,
        seed=prepared.request.seed,
        public=prepared.public,
        membership=prepared.membership,
        grouping=partition(algorithm, prepared.request.grouping),
    )
    statement["trainable_parameters"] = trainer.engine.dimension
    if algorithm.private:
        history.insert(1, "epsilon", _epsilon_path(trainer, statement, history))
        history["epsilon_rdp"] = _ending_in(statement["epsilon_rdp"], history["epsilon_rdp"])
    return Trained(weights_of(trainer.released_model()), history, statement)


def _epsilon_path(trainer: Trainer, statement: Mapping[str, Any], history: pd.DataFrame) -> Sequence[float]:
    """ε after every epoch: the plan's, or that of the ledger at the time if a crash made it charge more.

    The last value is the statement's ε, also if the run has stopped early: that it stopped there is an output, too.
    """
    if trainer.algorithm.covers(trainer.plan, trainer.outcome().events, trainer.steps_done):
        return [*trainer.algorithm.epsilon_path(trainer.plan)[: len(history) - 1], statement["epsilon"]]
    return _ending_in(statement["epsilon"], history["epsilon_rdp"])


def _ending_in(stated: float, live: pd.Series) -> list[float]:
    """The live figures, which are bounds by integer orders alone, ending in the stated one, and none above it."""
    return [min(value, stated) for value in live[:-1]] + [stated]


def forget(workplace: Path) -> None:
    """Remove the files by which a run could be resumed, once its results are written.

    They are as sensitive as the training data. Nothing is removed if another run is at work there, because the charges
    in the journal are then that run's.
    """
    if not workplace.is_dir():
        return
    checkpoint, journal = workplace / CHECKPOINT_FILE, workplace / JOURNAL_FILE
    windows = sys.platform == "win32"  # Windows removes no open file, and so no journal of a run that has begun since
    with unless_in_use(journal) as free:
        if free:
            remove_kept(checkpoint)
            for kept in (CHARGED, HISTOGRAM):  # what is left must not look like a run that was charged
                remove_kept(workplace / kept)  # half-written ones, too: their figures are not those released
            if not windows:
                journal.unlink(missing_ok=True)
    if free and windows:
        with suppress(PermissionError):
            journal.unlink(missing_ok=True)
