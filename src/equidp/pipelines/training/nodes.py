"""Nodes of training: fix the plan, train, score the test part."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.data.records import Records, Split
from equidp.evaluation.live import live_metrics
from equidp.evaluation.metrics import Groups
from equidp.mechanism.algorithm import Outcome
from equidp.models import card_options
from equidp.models.weights import Weights, network_of
from equidp.parameters import Settings
from equidp.pipelines.ingestion.nodes import mapped
from equidp.pipelines.training.baseline import digest, trained_once
from equidp.training import groups_of, plan_run, predict, privacy_statement, train_model, units_in
from equidp.training.charging import enter, enter_more, planned
from equidp.training.networks import imposed
from equidp.training.statement import figures_entry

RECORDED = {"epochs", "batch_size", "learning_rate", "optimizer", "precision", "class_weights"}
"""Settings that the model's file records, for the documents that go out with it."""

logger = logging.getLogger(__name__)

OnEpoch = Callable[[str, Mapping[str, float]], None]
"""Called after every epoch with the algorithm's name and the epoch's figures."""

Trained = tuple[Weights, pd.DataFrame, dict[str, Any]]
"""Weights, one history row per epoch, and the privacy statement."""


def extract_own_features(
    records: Records, cache: Path, provenance: dict[str, Any], settings: Settings, *, name: str
) -> Records:
    """The fixed map that this algorithm trains on."""
    return mapped(records, cache, provenance, settings, name, {})


def plan_training(train: Records, settings: Settings, *, algorithm: str) -> dict[str, Any]:
    """Fix everything public before training: N, B, T, K, δ, and the noise that meets the target."""
    chosen = settings.algorithm(algorithm)
    plan = plan_run(
        chosen,
        units=units_in(train, settings.privacy),
        groups=len(groups_of(chosen, train, settings.data.groups[0])[1]),
        privacy=settings.privacy,
        training=settings.training,
    )
    if chosen.private:
        _warn_of_weak_promises(algorithm, plan, train, by_unit=settings.privacy.by_unit)
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
    *,
    algorithm: str,
) -> Trained:
    """Train one algorithm; a private one is entered in the data set's ledger before it begins.

    The non-private baseline is trained once per records, settings, seed and code, and reused after that.
    """
    arrays = group_arrays(test, settings.data.groups)
    follow = partial(_after_epoch, test=test, arrays=arrays, settings=settings, told=partial(on_epoch, algorithm))
    fresh = partial(_trained, algorithm, Plan(**plan), Split(train, test, public), settings, workplace, follow)
    chosen = settings.algorithm(algorithm)
    if chosen.private:
        due = planned(chosen, Plan(**plan))
        run = enter(ledgers, workplace, settings, train.membership, {("training", "train"): due}, algorithm=algorithm)
        trained = fresh()
        if "events" in due:
            spent = [Event.from_dict(event) for event in trained[2]["ledger"]]
            enter_more(ledgers, settings, run, spent, already=due["events"])
        return trained
    kept = trained_once(workplace, digest(train, _baseline_facts(algorithm, plan, settings)), lambda: fresh()[:2])
    return *kept, _statement_without_noise(algorithm, Plan(**plan), settings)


def score_test(weights: Weights, test: Records) -> np.ndarray:
    """Class probabilities `[n, classes]` of the test part. Kept in memory only: per-record data are not published."""
    return predict(network_of(weights), test.features).numpy()


def group_arrays(records: Records, groups: tuple[str, ...]) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """Group ids and names per grouping, as the metrics want them."""
    ids = {name: records.grouping(name) for name in groups}
    return {name: (values.numpy(), names) for name, (values, names) in ids.items()}


def _trained(
    algorithm: str,
    plan: Plan,
    split: Split,
    settings: Settings,
    workplace: Path,
    follow: Callable[[dict[str, float], nn.Module], Mapping[str, float]],
) -> Trained:
    trained = train_model(
        settings.algorithm(algorithm),
        plan,
        split,
        grouping=settings.data.groups[0],
        model=settings.model,
        privacy=settings.privacy,
        training=settings.training,
        seed=settings.seed,
        options=settings.options(algorithm),
        on_epoch=follow,
        workplace=workplace,
        resume=settings.resume,
        checkpoint_every=settings.operation.checkpoint_every,
    )
    card = model_card(algorithm, split.train, settings)
    return (
        Weights(trained.weights, card),
        trained.history,
        trained.privacy | figures_entry(settings.privacy, settings.data),
    )


def model_card(algorithm: str, train: Records, settings: Settings) -> dict[str, Any]:
    """What is needed to build the model again, and to encode records for it (JSON types)."""
    built = imposed(settings.model, settings.algorithm(algorithm), train.schema)
    return {
        "model": built.name,
        "options": card_options(built.name, built.options),
        "schema": train.schema.to_dict(),
        "algorithm": algorithm,
        "training": settings.training.model_dump(mode="json", include=RECORDED)
        | {"options": settings.options(algorithm)},
        "source": settings.data.source,
        "source_options": settings.data.options,
    }


def _after_epoch(
    row: dict[str, float],
    network: nn.Module,
    *,
    test: Records,
    arrays: Groups,
    settings: Settings,
    told: Callable[[Mapping[str, float]], None],
) -> Mapping[str, float]:
    """Figures on the test part, every so many epochs, and after the last."""
    due = row["epoch"] % settings.operation.evaluate_every == 0 or row["epoch"] == settings.training.epochs
    figures = live_metrics(predict(network, test.features).numpy(), test.labels.numpy(), arrays) if due else {}
    told(row | figures)
    return figures


def _baseline_facts(algorithm: str, plan: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """All that a baseline depends on besides its records and the code."""
    return {
        "plan": plan,
        "data": settings.data.model_dump(mode="json"),
        "model": settings.model.model_dump(mode="json"),
        "training": settings.training.model_dump(mode="json"),
        "evaluate_every": settings.operation.evaluate_every,
        "options": settings.options(algorithm),
        "unit": settings.privacy.unit,
        "seed": settings.seed,
    }


def _statement_without_noise(algorithm: str, plan: Plan, settings: Settings) -> dict[str, Any]:
    outcome = Outcome((), plan.steps, plan.steps)
    return privacy_statement(
        settings.algorithm(algorithm),
        plan,
        outcome,
        privacy=settings.privacy,
        training=settings.training,
        seed=settings.seed,
    )


def _warn_of_weak_promises(algorithm: str, plan: Plan, train: Records, *, by_unit: bool) -> None:
    if plan.delta >= 1 / plan.records:
        logger.warning(
            "%s: δ = %g is not below one over the %d training %s: publishing one of them outright would meet it. "
            "Set privacy.delta to %.0e or less.",
            algorithm,
            plan.delta,
            plan.records,
            "units" if by_unit else "records",
            0.1 / plan.records,
        )
    if train.unit is not None and not by_unit:
        logger.warning(
            "%s: ε will be for one record. These data tell which records belong together (one person's, say), and for "
            "all of them at once it is larger: to protect them together set privacy.unit=unit and data.split_by=unit.",
            algorithm,
        )
