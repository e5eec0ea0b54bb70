"""One call from a network and its examples to a private training loop, without the registry's models and data sets."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.gradients.losses import Loss
from equidp.gradients.memory import room_for
from equidp.gradients.misfit import refuse_odd_records
from equidp.gradients.packing import Packed, Packing
from equidp.gradients.rewriting import rewritten
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.noise import SeededRandom, derived_seed
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.sampling import Examples, Population
from equidp.mechanism.trainer import Trainer
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.system.threads import GLOBAL_RANDOM
from equidp.training.planning import declares_records, plan_run
from equidp.training.preparation import bytes_each, device_of, random_source
from equidp.training.reading import Data, examples_of
from equidp.training.statement import accounted_for, privacy_statement

OWN_LOOP = (
    "Training ran in a loop of its author's own. ε is of what the trainer released. What else the loop computed from "
    "the records, showed or decided by, is not in it."
)


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
    augmentation: Augmentation | None = None,
    ledger: Ledger | None = None,
    seed: int | None = None,
    device: str = "auto",
    physical_batch_size: int | None = None,
    precision: Literal["float32", "bf16"] = "float32",
) -> Trainer:
    """Make a trainer of this model: call `trainer.train()`, or `trainer.run_steps(1)` in a loop of your own.

    The plan, its noise, the Poisson batches, the ledger and the random streams are made to fit each other; ε is
    `spent(trainer)`. Torch's global generator, from which dropout draws, is seeded anew. Do not seed it within an
    epoch: if dropout's masks can be foretold, one record more shifts the known masks of others.

    Args:
        model: any module whose records do not mix; attention and recurrence are rewritten (`rewritten`). If two
            trainers train one model, one after the other, it has cost the ε of both.
        data: the training part. Features may be several tensors: a dict by the names of the model's arguments, or a
            tuple. `trainer.model` is then a `Packed`, which takes them as they are. Each item of a dataset is read
            once, so it must draw nothing at random. If `Examples` have units, units are protected. Otherwise each row
            is protected alone, and a record that is there twice counts twice. How many there are is public.
        loss: `(outputs [b, …], labels [b, …]) -> [b]`, the loss of each record. A module goes to the model's device.
        algorithm: a registry name with `options`, or an algorithm of your own; a private one, for your model.
        epsilon: a target, for which the noise is solved; give this or `noise_multiplier`.
        noise_multiplier: σ, the noise.
        delta: δ; must be below one over the number of records.
        epochs: expected passes over the data.
        batch_size: expected units in a batch.
        learning_rate: of the update, if the algorithm has none of its own.
        optimizer: a name, or a `Descent`; set `trainer.optimizer` to use one of torch's instead.
        average: as `training.average`; `trainer.released_model()` has the averaged weights.
        classes: number of classes, if labels are `[N]` int64 from 0 on; it must not be taken from the data.
        groups: `[N]` int64 ids from 0 on, and how many groups there are, a number that must not be taken from the data.
            None: for algorithms that look at groups the classes, if `classes` is given. A unit is in the group of its
            first record.
        public: records without any guarantee, for algorithms that need some.
        augmentation: a record's gradient is the mean over its random views (De et al. 2022), before its norm is taken.
        ledger: the same run's before it was interrupted; None: an empty one.
        seed: makes a run that others may repeat, noise included. None: noise and batches of a cryptographic generator.
        device: `auto`, `cpu` or `cuda`.
        physical_batch_size: most units at once, on a CPU without a seed in multiples of 32; None: all, or as many as a
            GPU's memory holds.
        precision: `bf16` runs the model under autocast, on a GPU; norms and sums stay in float32.

    Raises:
        EquidpError: as `plan_run` and `Trainer`; for an algorithm that is not private, that brings a model of the
            registry, or that looks at groups or classes which are not given; for a δ that is too large, for data or
            groups of other kinds, and for a setting out of its range.
    """
    privacy = PrivacySettings(
        epsilon=epsilon, noise_multiplier=noise_multiplier, delta=delta, secure=seed is None
    )  # fmt: skip
    training = TrainingSettings(
        epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, average=average, device=device,
        physical_batch_size=physical_batch_size, precision=precision,
    )  # fmt: skip
    _refuse_other_kinds(model, loss, algorithm, options, optimizer, ledger)
    built = algorithm if isinstance(algorithm, Algorithm) else algorithm_settings(algorithm, options or {}).build()
    _refuse_other_uses(built)
    chosen = built.averaged(average)
    place, examples = device_of(training), examples_of(data)
    _refuse_other_views(augmentation, examples.features)
    ids, number = _groups(chosen, examples.labels, classes, groups)
    train = examples.to(place)
    population = Population(train, ids.to(place), by_unit=train.unit is not None)
    _refuse_large(privacy.delta, population.size)  # before the noise is solved for, which takes seconds
    crossed = classes if chosen.objective.crossed else 0
    plan = plan_run(
        chosen, units=population.size, groups=number, classes=crossed, privacy=privacy, training=training
    )  # fmt: skip
    _refuse_large(privacy.delta, plan.records)  # an algorithm may declare more
    network = rewritten(model if train.packing is None else Packed(model, train.packing))
    refuse_odd_records(network, loss, train.features, train.labels)
    network = network.to(place)
    if isinstance(loss, nn.Module):  # it may hold weights of classes
        loss = loss.to(place)
    views = 1 if augmentation is None else augmentation.views
    declared = declares_records(chosen, plan) and train.unit is None  # then the true number must not show
    resident = plan.records * bytes_each([train.features, train.labels, ids]) if declared else None
    with GLOBAL_RANDOM:
        torch.manual_seed(secrets.randbits(63) if seed is None else derived_seed(seed, "dropout"))
    return Trainer(
        model=network,
        loss=loss,
        algorithm=chosen,
        plan=plan,
        population=population,
        random=random_source(privacy, seed or 0, place),
        ledger=Ledger() if ledger is None else ledger,
        learning_rate=chosen.learning_rate or training.rate(plan.steps),
        optimizer=optimizer,
        physical_batch_size=physical_batch_size
        or room_for(network, train.features, plan.batch_size, views, resident=resident)[1],
        precision=precision,
        public=None if public is None else _public_of(public, train.packing).to(place),
        augmentation=augmentation,
    )


def spent(trainer: Trainer) -> float:
    """Return ε of a loop, wherever it stopped: of its whole plan, and of steps that were charged again after a break.

    If noise or length follow from what was released, the events of the ledger alone give no ε. Infinite if the
    trainer's algorithm is not private.

    Raises:
        EquidpError: if the ledger exceeds the budget that ε stands for, or holds other events than the plan; for
            example those of another run, or of your own algorithm whose noise does not follow from the plan.
    """
    if not trainer.algorithm.private:
        return math.inf
    return accounted_for(trainer.algorithm, trainer.plan, trainer.outcome(), left=True).epsilon().value


def statement(trainer: Trainer, *, unit: str | None = None) -> dict[str, Any]:
    """The privacy statement of a loop, as privacy.json has it; `reporting.privacy_report.privacy_report` words it.

    Args:
        unit: what one unit of the examples is called, for example a patient. None: "unit", or "record" if the examples
            have no units.

    Raises:
        EquidpError: as `spent`; for another name than `record` if the examples have no units, or for that name if they
            have.
    """
    alone, plan = trainer.population.of_records, trainer.plan
    name = unit or ("record" if alone else "unit")
    if alone != (name == "record"):
        raise EquidpError(
            f"unit={name!r}: " + ("each record is protected alone, as `Examples(…, unit=…)` had none."
            if alone else "the examples' units are protected, of several records each: give their name.")
        )  # fmt: skip
    random = trainer.random
    privacy = PrivacySettings(
        epsilon=plan.epsilon, noise_multiplier=plan.noise_multiplier if plan.epsilon is None else None,
        delta=plan.delta, unit=name, secure=not random.repeatable,
    )  # fmt: skip
    made = privacy_statement(
        trainer.algorithm, plan, trainer.outcome(), privacy=privacy, left=True,
        training=TrainingSettings(diagnostics=trainer.diagnostics is not None),
        seed=random.seed if isinstance(random, SeededRandom) else 0,
        public=0 if trainer.public_part is None else len(trainer.public_part.labels),
    )  # fmt: skip
    return made | {"notes": [*made["notes"], OWN_LOOP]} if trainer.algorithm.private else made


def _public_of(data: Data, packing: Packing | None) -> Examples:
    examples, one = examples_of(data), "one tensor"
    if (other := examples.packing) != packing:
        raise EquidpError(f"The features of the public records are {other or one}: give {packing or one}, as in data.")
    return examples


def _refuse_other_kinds(
    model: object, loss: object, algorithm: object, options: object, optimizer: object, ledger: object
) -> None:
    for what, given in (("model", model), ("loss", loss)):
        if isinstance(given, type):
            raise EquidpError(f"The {what} is the class {given.__name__}: make one of it, {given.__name__}(…).")
    wrong = [
        (isinstance(model, nn.Module), "model", model, "a module of torch's, torch.nn.Module"),
        (callable(loss), "loss", loss, "a module or a function of outputs and labels, which gives [b] numbers"),
        (options is None or isinstance(options, Mapping), "options", options, "a dict of the algorithm's settings"),
        (ledger is None or isinstance(ledger, Ledger), "ledger", ledger, "a Ledger, such as Ledger(events)"),
    ]
    for fits, what, value, wanted in wrong:
        if not fits:
            raise EquidpError(f"What is given as {what} is a {type(value).__name__}: give {wanted}.")
    if not isinstance(algorithm, str | Algorithm):
        raise EquidpError(
            f"{algorithm!r} is no algorithm: give its name and `options`, or build one, such as "
            "algorithm_settings('dpsgd', {'clip_norm': 1.0}).build()."
        )
    if isinstance(algorithm, Algorithm) and options:
        raise EquidpError(f"{algorithm.name} is built already: build it with these options, or give its name.")
    if isinstance(optimizer, type | torch.optim.Optimizer):
        raise EquidpError(
            "optimizer is a name, or a Descent: leave it out, and set trainer.optimizer to one of torch's, of "
            "trainer.engine.parameters."
        )


def _refuse_large(delta: float, records: int) -> None:
    if delta >= 1 / records:
        raise EquidpError(
            f"delta={delta:g} is not below one over the {records} training records (or units of them): publishing one "
            f"of them outright would meet it. Take {0.1 / records:.0e} or less."
        )


def _refuse_other_views(augmentation: Augmentation | None, features: Tensor) -> None:
    if augmentation is None:
        return
    shape, head = tuple(augmentation.shape), augmentation.head
    if tuple(features.shape[1:]) != ((head + math.prod(shape),) if head else shape):
        raise EquidpError(
            f"The augmentation is of records {list(shape)}, and the features are {list(features.shape[1:])}: give "
            "Augmentation the shape of one record's features."
        )
    if "noise" in augmentation.kinds and not features.is_floating_point():
        raise EquidpError(f"The augmentation adds noise to features of {features.dtype}: give it features.float().")


def _refuse_other_uses(algorithm: Algorithm) -> None:
    if not algorithm.private:
        raise EquidpError(
            f"{algorithm.name} is not private: train without noise in a loop of torch's, or by train_model."
        )
    if algorithm.model is not None or algorithm.model_options:
        raise EquidpError(
            f"{algorithm.name} is for models of the registry, which it changes: put its features or activations into "
            "your model, and take dpsgd."
        )
    if algorithm.acceptance.on_test:
        raise EquidpError(f"{algorithm.name}: energy=test asks for test records: take energy=public or private.")


def _groups(
    algorithm: Algorithm, labels: Tensor, classes: int, groups: tuple[Tensor, int] | None
) -> tuple[Tensor, int]:
    """Ids `[N]` of the groups that this algorithm looks at, and their number.

    If its objective is `crossed`, these are the classes within the groups.
    """
    needs = algorithm.objective
    if needs.by_class and not classes:
        raise EquidpError(f"{algorithm.name} looks at the classes: give their number, `classes`.")
    if algorithm.of_groups and groups is None and not classes:
        raise EquidpError(
            f"{algorithm.name} looks at groups: give `groups`, ids and how many there are, or `classes`, their number."
        )
    if classes:
        _refuse_other_ids("labels", labels, classes, len(labels))
    if groups is not None:
        if not isinstance(groups, tuple) or len(groups) != 2:
            raise EquidpError("The groups are a pair: ids of the records, and how many groups there are.")
        _refuse_other_ids("groups", *groups, len(labels))
    if groups is None or (needs.by_class and not needs.crossed):
        return (labels, classes) if classes else (torch.zeros(len(labels), dtype=torch.int64), 1)
    ids, number = groups
    return (ids * classes + labels, number * classes) if needs.crossed else (ids, number)


def _refuse_other_ids(what: str, ids: Tensor, number: int, records: int) -> None:
    if not isinstance(number, int):
        raise EquidpError(f"How many kinds of {what} there are is an int, not a {type(number).__name__}.")
    if not torch.is_tensor(ids):
        raise EquidpError(f"The {what} are a {type(ids).__name__}: give a tensor, such as torch.as_tensor makes.")
    if ids.dtype != torch.int64 or ids.shape != (records,):
        raise EquidpError(f"The {what} are {ids.dtype} {list(ids.shape)}: give [{records}] int64.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < number:
        raise EquidpError(f"The {what} are from {ids.min()} to {ids.max()}: {number} are from 0 to {number - 1}.")
