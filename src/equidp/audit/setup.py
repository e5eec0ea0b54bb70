"""How an audit trains a model: everything except its data and its random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.data.records import Records, Schema
from equidp.gradients.losses import Loss
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.training.networks import scored_at_once


@dataclass(frozen=True)
class TrainingSetup:
    """One way to train.

    Attributes:
        build_model: makes a freshly initialised model for a schema, the same model every time.
        algorithm: what is trained and audited.
        plan: the training's public facts, with its noise.
        loss: per-record losses of `(outputs, labels)`.
        learning_rate, optimizer, physical_batch_size, precision, device, augmentation: as for a training run.
        grouping: the partition that group-aware algorithms use.
        by_unit: whether units of privacy have several records.
        public: records without guarantee, for an algorithm that needs them.
        baseline: the algorithm "before privacy".
    """

    build_model: Callable[[Schema], nn.Module]
    algorithm: Algorithm
    plan: Plan
    loss: Loss
    learning_rate: float
    optimizer: str | Descent | None = None
    grouping: str = "class"
    by_unit: bool = False
    physical_batch_size: int | None = None
    precision: Literal["float32", "bf16"] = "float32"
    device: torch.device | str = "cpu"
    public: Records | None = None
    augmentation: Augmentation | None = None
    baseline: Algorithm = Algorithm(name="sgd", weights=None)  # noqa: RUF009 (frozen)

    def train(
        self,
        records: Records,
        random: RandomSource,
        *,
        model: nn.Module | None = None,
        loss: Loss | None = None,
        public: Records | None = None,
        augmentation: Augmentation | None = None,
        before: Callable[[Trainer], None] = lambda trainer: None,
        progress: bool = False,
    ) -> nn.Module:
        """Train on `records` and return the released model, in evaluation mode.

        Args:
            records: may be more or fewer than declared.
            random: source of all random numbers.
            model, loss, public, augmentation: used instead of the setup's own.
            before: is called with the trainer before every step.
            progress: whether a bar is shown.
        """
        network = (self.build_model(records.schema) if model is None else model).to(self.device)
        records = records.to(self.device)
        given = self.public if public is None else public
        trainer = Trainer(
            model=network,
            loss=self.loss if loss is None else loss,
            algorithm=self.algorithm,
            plan=self.plan,
            population=Population(records, records.grouping(self.grouping)[0], by_unit=self.by_unit),
            random=random,
            ledger=Ledger(),
            learning_rate=self.algorithm.learning_rate or self.learning_rate,
            optimizer=self.optimizer,
            physical_batch_size=self.physical_batch_size,
            precision=self.precision,
            public=None if given is None else given.to(self.device),
            augmentation=augmentation or self.augmentation,
        )
        before(trainer)
        trainer.train(on_step=lambda: before(trainer), progress=progress)
        return trainer.released_model().eval()


@torch.no_grad()
def losses(model: nn.Module, records: Records, loss: Loss) -> Tensor:
    """Return each record's loss under a trained model, `[N]`, on the CPU."""
    device = next(model.parameters()).device
    size = scored_at_once(model, records.features)
    chunks = zip(records.features.split(size), records.labels.split(size), strict=True)
    return torch.cat([loss(model(x.to(device)).float(), y.to(device)).cpu() for x, y in chunks])
