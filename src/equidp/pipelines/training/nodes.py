"""Nodes of training: fix the plan, train, score the test part."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from equidp.accounting.plan import Plan
from equidp.data.records import Records, Split
from equidp.data.sources import published_options
from equidp.errors import EquidpError
from equidp.evaluation.metrics import Groups
from equidp.mechanism.algorithm import Outcome
from equidp.mechanism.device import choose_device
from equidp.models import MODELS, card_options
from equidp.models.weights import Weights, network_of
from equidp.parameters import Settings, TrainingSettings
from equidp.parameters.sections import DESCENT
from equidp.pipelines.training.baseline import digest, trained_once
from equidp.reporting.release.facts import SOFTWARE, packages
from equidp.tasks import task_of
from equidp.training import TrainingRequest, predict, privacy_statement, train_model
from equidp.training.charging import enter, enter_more, planned, repeated, stated_beyond
from equidp.training.digests import code_of_others
from equidp.training.networks import class_weights, imposed
from equidp.training.planning import large_delta, plan_of
from equidp.training.preparation import refuse_unfit
from equidp.training.statement import figures_entry

RECORDED = {"epochs", "batch_size", "learning_rate", "optimizer", "precision"}
"""Settings that the model's file records, for the documents that go out with the model."""

RECORDED_IF_SET = DESCENT | {
    "average",
    "loss",
    "huber_delta",
    *(name for name in TrainingSettings.model_fields if "augmentation" in name),
}
"""Other settings that the file records where they are not the defaults."""

logger = logging.getLogger(__name__)

OnEpoch = Callable[[str, Mapping[str, float]], None]
"""Called after every epoch with the algorithm's name and the epoch's figures."""

Trained = tuple[Weights, pd.DataFrame, dict[str, Any]]
"""Weights, one history row per epoch, and the privacy statement."""


def plan_training(train: Records, settings: Settings, *, algorithm: str) -> dict[str, Any]:
    """Fix everything public before training: N, B, T, K, δ, and the noise that meets the target."""
    plan = plan_of(algorithm, train, settings)
    if settings.algorithm(algorithm).private:
        warn_of_weak_promises(algorithm, plan, train, settings)
        if not plan.trials.single and (reason := _moving_test_part(train, settings)):
            # secure trials may share the project's seed; research trials may not, or they share batches and noise
            if plan.trials.law is not None and not settings.privacy.secure:
                raise EquidpError(f"privacy.trials_law={plan.trials.law} does not hold here: {reason}")
            logger.warning("%s: %s", algorithm, reason)
    return dataclasses.asdict(plan)


def train_network(
    train: Records,
    test: Records,
    public: Records,
    plan: dict[str, Any],
    workplace: Path,
    settings: Settings,
    on_epoch: OnEpoch,
    ledgers: Path,
    provenance: dict[str, Any],
    *,
    algorithm: str,
) -> Trained:
    """Train one algorithm; a private one is entered in the data set's ledger before it begins.

    The non-private baseline is trained once for the same records, settings, seed and code, and reused after that. If
    its training was interrupted, it goes on even without `resume`, because it costs no ε.
    """
    arrays = group_arrays(test, settings.data.groups)
    follow = partial(_after_epoch, test=test, arrays=arrays, settings=settings, report=partial(on_epoch, algorithm))
    made, chosen = Plan(**plan), settings.algorithm(algorithm)
    request, split = TrainingRequest.of(settings, algorithm, made, workplace), Split(train, test, public)
    if chosen.private:
        refuse_unfit(request, train)
        due = planned(chosen, made)
        every = {("training", "train"): due}
        entered = partial(enter, ledgers, workplace, settings, provenance, train.membership, every, algorithm=algorithm)
        run = entered()
        if "events" in due and settings.resume and settings.privacy.secure:
            enter_more(ledgers, settings, run, repeated(workplace, chosen, made), ahead=True)
        trained = _trained(request, split, settings, follow)
        entered(run=run)
        if "events" in due:
            enter_more(ledgers, settings, run, stated_beyond(trained[2], made.trials, due["events"]))
        return trained

    def fresh(place: Path | None) -> tuple[Weights, pd.DataFrame]:
        here = dataclasses.replace(request, workplace=place, resume=place is not None)
        return _trained(here, split, settings, follow)[:2]

    name = digest(train, _baseline_facts(algorithm, plan, settings))
    # a secure run has its own workplace, because it must not continue from a seeded generator
    kept = trained_once(workplace, name, fresh, workplace=f"{name}-secure" if settings.privacy.secure else name)
    outcome = Outcome((), made.steps, made.steps)
    given: dict[str, Any] = {"privacy": settings.privacy, "training": settings.training, "seed": settings.seed}
    return *kept, privacy_statement(chosen, made, outcome, **given)


def score_test(weights: Weights, test: Records, settings: Settings) -> np.ndarray:
    """Predictions `[n, outputs]` of the test part, on the device that trained.

    They are kept in memory only, because data of single records are not published.
    """
    network = network_of(weights, choose_device(settings.training.device))
    protected = settings.privacy.secure and settings.privacy.evaluation.epsilon is not None
    return predict(network, test.features, test.schema, alike=protected).numpy()


def group_arrays(records: Records, groups: tuple[str, ...]) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """Group ids and names by grouping, as the metrics take them."""
    ids = {name: records.grouping(name) for name in groups}
    return {name: (values.numpy(), names) for name, (values, names) in ids.items()}


def _trained(
    request: TrainingRequest,
    split: Split,
    settings: Settings,
    follow: Callable[[dict[str, float], nn.Module], Mapping[str, float]],
) -> Trained:
    trained = train_model(request, split, on_epoch=follow)
    card = model_card(request.algorithm.name, split.train, settings)
    card["trainable_parameters"] = trained.privacy["trainable_parameters"]
    statement = trained.privacy | figures_entry(settings.privacy, settings.data)
    return Weights(trained.weights, card), trained.history, statement


def model_card(algorithm: str, train: Records, settings: Settings) -> dict[str, Any]:
    """What is needed to build the model again, and to encode records for it (JSON types)."""
    chosen = settings.algorithm(algorithm)
    built = imposed(settings.model, chosen, train.schema)
    own = algorithm if callable(chosen.optimizer) else chosen.optimizer or "sgd"
    weights = class_weights(settings.training, train)
    # as numbers, because `balanced` depends on declared sizes and data.keep, which are not published
    numbers = None if weights is None else [float(f"{weight:.6g}") for weight in weights]
    return {
        "model": built.name,
        "options": card_options(built.name, built.options),
        "schema": train.schema.to_dict(),
        "algorithm": algorithm,
        "adjusted": chosen.objective.by_class or len(set(weights or ())) > 1,
        "training": settings.training.model_dump(mode="json", include=set(RECORDED_IF_SET), exclude_defaults=True)
        | settings.training.model_dump(mode="json", include=RECORDED)
        | {
            "optimizer": settings.training.optimizer or own,
            "class_weights": numbers,
            "options": settings.options(algorithm),
        },
        "source": settings.data.source,
        "source_options": published_options(settings.data.source, settings.data.options),
        "software": {
            name: importlib.metadata.version(name)
            for name in (*SOFTWARE, *packages(algorithm, built.name, settings.options(algorithm)))
        },
    }


def _after_epoch(
    row: dict[str, float],
    network: nn.Module,
    *,
    test: Records,
    arrays: Groups,
    settings: Settings,
    report: Callable[[Mapping[str, float]], None],
) -> Mapping[str, float]:
    """Return figures on the test part, if due in this epoch or after the last one, and report the epoch with them."""
    due = row["epoch"] % settings.operation.evaluate_every == 0 or row["epoch"] == settings.training.epochs
    figures: dict[str, float] = {}
    if due:
        predictions = predict(network, test.features, test.schema).numpy()
        figures = task_of(test.schema).live(predictions, test.labels.numpy(), arrays)
    report(row | figures)
    return figures


def _baseline_facts(algorithm: str, plan: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """All that a baseline depends on besides its records and our code."""
    added = code_of_others([MODELS[settings.model.name]])
    return ({"code": added} if added else {}) | {
        "plan": plan,
        "data": settings.data.model_dump(mode="json", exclude={"positive_class"}),  # which changes figures alone
        "model": settings.model.model_dump(mode="json"),
        "training": settings.training.model_dump(mode="json"),
        "evaluate_every": settings.operation.evaluate_every,
        "options": settings.options(algorithm),
        "unit": settings.privacy.unit,
        "seed": settings.seed,
    }


def _moving_test_part(train: Records, settings: Settings) -> str:
    """Return why trials do not all have the same test records, and what to do about it; empty where they have."""
    drawn, data = train.membership, settings.data
    given = train.part is not None and data.evaluate_on != "validation"  # the provider's test part, whatever is drawn
    if drawn is None or given or (drawn.how == "hash" and not drawn.key.startswith("seed=")):
        return ""
    mend = "" if drawn.how == "hash" else "data.membership=hash and "
    return (
        "trials of other seeds have other test records, and exact figures of these reveal records that this "
        f"trial trains on and protects. Set {mend}one data.key for all trials."
    )


def warn_of_weak_promises(
    algorithm: str, plan: Plan, train: Records, settings: Settings, *, tuned: bool = False
) -> None:
    """Warn of a guarantee that says little.

    Raises:
        EquidpError: a secure run has too large a δ, because its guarantee may be published.
    """
    if weak := large_delta(algorithm, plan, settings, train.membership, tuned=tuned):
        if settings.privacy.secure:
            raise EquidpError(weak)
        logger.warning("%s", weak)
    if train.unit is not None and not settings.privacy.by_unit:
        logger.warning(
            "%s: ε will be for one record. These data tell which records belong together (one person's, say), and for "
            "all of them at once it is larger: to protect them together set privacy.unit=unit and data.split_by=unit.",
            algorithm,
        )
