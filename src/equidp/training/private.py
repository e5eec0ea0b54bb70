"""One call from a network and its examples to a private loop, for code without the registry's models and data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from equidp.accounting.ledger import Ledger
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.gradients.losses import Loss
from equidp.gradients.memory import room_for
from equidp.gradients.rewriting import rewritten
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.sampling import Examples, Population
from equidp.mechanism.trainer import Trainer
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.training.planning import plan_run
from equidp.training.preparation import device_of, random_source

Data = Examples | tuple[Tensor, Tensor] | Dataset[tuple[Tensor, Tensor]]
"""Features and labels: as `Examples`, as two tensors, or as a dataset that is read once, from its first item on."""

READ_AT_ONCE = 1024
"""Items of a dataset that are joined to tensors together."""


def make_private(
    model: nn.Module,
    data: Data,
    loss: Loss,
    *,
    algorithm: str | Algorithm = "dpsgd",
    options: Mapping[str, Any] | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    optimizer: str | Descent | None = None,
    average: float | None = None,
    classes: int = 0,
    groups: tuple[Tensor, int] | None = None,
    public: Data | None = None,
    ledger: Ledger | None = None,
    seed: int | None = None,
    device: str = "auto",
    physical_batch_size: int | None = None,
    precision: Literal["float32", "bf16"] = "float32",
) -> Trainer:
    """A trainer of this model: `trainer.train()`, or `trainer.run_steps(1)` in a loop of your own.

    The plan, its noise, the Poisson batches, the ledger and the random streams are made to fit each other. ε of the
    whole plan is `trainer.algorithm.epsilon(trainer.plan).value`.

    Args:
        model: any module whose records do not mix; attention and recurrence are rewritten (`rewritten`).
        data: the training part. A dataset must draw nothing at random: each item is read once. Where `Examples` have
            units, these are protected. How many there are is public.
        loss: `(outputs [b, …], labels [b, …]) -> [b]`, the loss of each record.
        algorithm: a registry name with `options`, or an algorithm of your own.
        epsilon, noise_multiplier: a target, or the noise: exactly one of them.
        delta: δ; below one over the number of records.
        epochs, batch_size: expected passes over the data, expected units in a batch.
        average: as `training.average`; `trainer.released_model()` has the averaged weights.
        classes: number of classes, where labels are `[N]` int64 from 0 on.
        groups: `[N]` int64 ids from 0 on, and how many groups there are, a number that must not be taken from the data.
            None: the classes, where their number is given, for algorithms that look at groups.
        public: records without any guarantee, for algorithms that need some.
        ledger: of the same run before it was interrupted; None: an empty one.
        seed: of a run that others may repeat, noise included; None: noise and batches of a cryptographic generator.
        device: `auto`, `cpu` or `cuda`.
        physical_batch_size: most units at once; None: all, or what a GPU's memory holds.

    Raises:
        EquidpError: as `plan_run` and `Trainer`, and for an algorithm that looks at classes without their number.
        ValueError: for a setting out of its range.
    """
    privacy = PrivacySettings(
        epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, secure=seed is None
    )  # fmt: skip
    training = TrainingSettings(
        epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, average=average, device=device,
        physical_batch_size=physical_batch_size, precision=precision,
    )  # fmt: skip
    built = algorithm if isinstance(algorithm, Algorithm) else algorithm_settings(algorithm, options or {}).build()
    chosen = built.averaged(average)
    place, examples = device_of(training), _examples(data)
    ids, number = _groups(chosen, examples.labels, classes, groups)
    train = _moved(examples, place)
    population = Population(train, ids.to(place), by_unit=train.unit is not None)
    crossed = classes if chosen.objective.crossed else 0
    plan = plan_run(
        chosen, units=population.size, groups=number, classes=crossed, privacy=privacy, training=training
    )  # fmt: skip
    network = rewritten(model).to(place)
    return Trainer(
        model=network,
        loss=loss,
        algorithm=chosen,
        plan=plan,
        population=population,
        random=random_source(privacy, seed or 0, place),
        ledger=Ledger() if ledger is None else ledger,
        learning_rate=chosen.learning_rate or learning_rate,
        optimizer=optimizer,
        physical_batch_size=physical_batch_size or room_for(network, train.features, batch_size)[1],
        precision=precision,
        public=None if public is None else _moved(_examples(public), place),
    )


def _groups(
    algorithm: Algorithm, labels: Tensor, classes: int, groups: tuple[Tensor, int] | None
) -> tuple[Tensor, int]:
    """Ids `[N]` of the groups that this algorithm looks at, and their number: classes within groups if it crosses."""
    needs = algorithm.objective
    if needs.by_class and not classes:
        raise EquidpError(f"{algorithm.name} looks at the classes: give their number, `classes`.")
    if classes:
        _refuse_other_ids("labels", labels, classes, len(labels))
    if groups is not None:
        _refuse_other_ids("groups", *groups, len(labels))
    if groups is None or (needs.by_class and not needs.crossed):
        return (labels, classes) if classes else (torch.zeros(len(labels), dtype=torch.int64), 1)
    ids, number = groups
    return (ids * classes + labels, number * classes) if needs.crossed else (ids, number)


def _refuse_other_ids(what: str, ids: Tensor, number: int, records: int) -> None:
    if ids.dtype != torch.int64 or ids.shape != (records,):
        raise EquidpError(f"The {what} are {ids.dtype} {list(ids.shape)}: give [{records}] int64.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < number:
        raise EquidpError(f"The {what} are from {ids.min()} to {ids.max()}: {number} are from 0 to {number - 1}.")


def _examples(data: Data) -> Examples:
    if isinstance(data, Examples):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors  # type: ignore[assignment]
    if isinstance(data, tuple):
        if len(data) != 2:
            raise EquidpError(f"The data have {len(data)} tensors: give features and labels.")
        return Examples(*data)
    read = list(DataLoader(data, batch_size=READ_AT_ONCE))
    if not all(isinstance(items, list) and len(items) == 2 and all(map(torch.is_tensor, items)) for items in read):
        raise EquidpError("Each item of the dataset must be features, as one tensor, and a label.")
    features, labels = zip(*read, strict=True)
    return Examples(torch.cat(features), torch.cat(labels))


def _moved(examples: Examples, place: torch.device) -> Examples:
    unit = None if examples.unit is None else examples.unit.to(place)
    return Examples(examples.features.to(place), examples.labels.to(place), unit)
