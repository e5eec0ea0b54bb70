"""A learning rate and a clip norm to start from, found on a made-up table of the same shape.

The made-up table has the declared columns. Categories are all equally frequent, and numbers are evenly spread over
their bounds. Classes follow from random weights, with some chance. A few private trainings with the run's own noise and
number of steps try rates, and then a tighter bound. The user's table is not used, except for its number of rows or
units where no sizes are declared, which a statement of ε then takes as public. So the search costs no privacy. The pair
is a start, not the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from equidp.accounting.ledger import Ledger
from equidp.algorithms import algorithm_settings
from equidp.data.columns import Named, Numeric
from equidp.data.records import Schema
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.sampling import Examples, Population
from equidp.mechanism.trainer import Trainer
from equidp.models import build_model
from equidp.parameters import Settings
from equidp.system.progress import frames
from equidp.tasks import task_of
from equidp.training import plan_run

RATES = (0.1, 0.3, 1.0, 3.0)
"""Rates tried at a clip norm of 1. At larger rates the seed decides whether a model learns, which made-up rows do not
show."""

TIGHTER = 0.3
"""The other clip norm. It is tried at the best rate, and at that rate divided by this clip norm."""

ROWS, HELD_OUT = 20_000, 4_000
"""ROWS: the most rows to train on; noise and steps are still the run's. HELD_OUT: rows to measure on."""

CERTAINTY = 4.0
"""Spread of the scores from which the made-up classes are drawn; 0 would be chance alone."""


def made_up(columns: Mapping[str, Named | Numeric], count: int, seed: int) -> Tensor:
    """Features of made-up rows, float32 `[count, d]`."""
    generator, parts = torch.Generator().manual_seed(seed), list[Tensor]()
    for column in columns.values():
        if isinstance(column, Numeric):
            parts.append(torch.rand(count, 1, generator=generator))
            if column.missing is not None:
                parts.append(torch.zeros(count, 1))
        else:
            ids = torch.randint(len(column.names), (count,), generator=generator)
            parts.append(torch.nn.functional.one_hot(ids, len(column.names)).float())
    return torch.cat(parts, dim=1)


def _labels(features: Tensor, classes: int) -> Tensor:
    """Classes of made-up rows `[count]`, by random weights and some chance."""
    weights = torch.randn(features.shape[1], classes, generator=torch.Generator().manual_seed(1))
    scores = (features - features.mean(0)) @ weights
    shares = torch.softmax(CERTAINTY * scores / scores.std(), dim=1)
    return torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(2)).squeeze(1)


def starting_rate(
    settings: Settings, schema: Schema, columns: Mapping[str, Named | Numeric], units: int
) -> tuple[float, float]:
    """Return the learning rate and clip norm with which `dpsgd` has the lowest loss on held-out made-up rows.

    Model, noise, steps and batch are the run's. `units`, the number of rows or of protected units, is public.
    """
    units = max(settings.training.batch_size, round(units * (1 - settings.data.test_fraction)))
    algorithm = algorithm_settings("dpsgd", {}).build()
    real = plan_run(algorithm, units=units, groups=1, privacy=settings.privacy, training=settings.training)
    count = min(units, ROWS)
    plan = replace(real, records=count, epochs=max(1, round(real.steps * real.batch_size / count)))
    features = made_up(columns, count + HELD_OUT, seed=0)
    labels = _labels(features, len(schema.classes))
    task = task_of(schema)
    loss = task.loss(task.loss_named(None), "cpu")
    population = Population(Examples(features[:count], labels[:count]), labels.new_zeros(count))

    def measured(rate: float, bound: float) -> float:
        progress.update()
        trainer = Trainer(
            model=build_model(settings.model.name, schema, options=settings.model.options, seed=0),
            loss=loss,
            algorithm=algorithm_settings("dpsgd", {"clip_norm": bound}).build(),
            plan=plan,
            population=population,
            random=SeededRandom(0, "cpu"),
            ledger=Ledger(),
            learning_rate=rate,
            optimizer=settings.training.descent,
        )
        trainer.run_steps(plan.steps)
        trainer.model.eval()
        with torch.no_grad():
            outputs = trainer.model(features[count:])
        return float(loss(outputs, labels[count:]).nan_to_num(torch.inf).mean())

    with tqdm(total=len(RATES) + 2, desc="rates on made-up rows", leave=False, **frames()) as progress:
        losses = {(rate, 1.0): measured(rate, 1.0) for rate in RATES}
        best, _ = min(losses, key=losses.__getitem__)
        losses |= {(rate, TIGHTER): measured(rate, TIGHTER) for rate in (best, round(best / TIGHTER, 1))}
    return min(losses, key=losses.__getitem__)
