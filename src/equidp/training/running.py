"""Train one model, in this process or on several ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from torch import Tensor

from equidp.data.records import Split
from equidp.mechanism.device import fixed_order
from equidp.mechanism.trainer import EpochCallback
from equidp.training.conclusion import Trained, conclude
from equidp.training.networks import make_model
from equidp.training.preparation import device_of, prepare
from equidp.training.ranks.job import NODES
from equidp.training.request import TrainingRequest

logger = logging.getLogger(__name__)


def train_model(
    request: TrainingRequest, split: Split, *, on_epoch: EpochCallback | None = None, progress: bool = True
) -> Trained:
    """Train, and state what was spent.

    Args:
        request: all that the training is asked for.
        split: the records.
        on_epoch: called after every epoch with the row so far and the model; returns more columns.
        progress: whether to show a progress bar.

    Raises:
        EquidpError: for settings that do not fit the data, or a checkpoint of other settings.
    """
    training = request.training
    if training.devices == 1:
        if os.environ.get(NODES, "1") != "1":
            logger.warning("%s is set, and training.devices is 1: this machine trains alone, and others wait.", NODES)
        with fixed_order(training.deterministic, device_of(training)):
            prepared = prepare(request, split)
            return conclude(prepared, prepared.run(on_epoch, progress=progress))
    return _train_on_ranks(request, split, on_epoch, progress)


def _train_on_ranks(request: TrainingRequest, split: Split, on_epoch: EpochCallback | None, progress: bool) -> Trained:
    """Let several processes train; evaluate in this one."""
    device = device_of(request.training)
    from equidp.training.ranks.launch import train  # imports torch's launcher, which one process does not need

    job = request.to_dict() | {"progress": progress}
    network = make_model(split.train.schema, request.model, request.algorithm, request.seed).to(device)

    def evaluate(row: dict[str, float], weights: dict[str, Tensor]) -> Mapping[str, float]:
        network.load_state_dict(weights)
        return (on_epoch(row, network) if on_epoch is not None else None) or {}

    return Trained(*train(job, split, request.training.devices, evaluate if on_epoch is not None else None))
