"""Nodes of training: fix the plan, train, score the test part."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from equidp.accounting.plan import Plan
from equidp.data.records import Records, Schema, Split
from equidp.evaluation.live import live_metrics
from equidp.mechanism.algorithm import Outcome
from equidp.models import build_model, card_options
from equidp.parameters import Settings
from equidp.pipelines import tracking
from equidp.pipelines.datasets import Recipe, Weights
from equidp.pipelines.ingestion.nodes import features_recipe
from equidp.pipelines.training.baseline import digest, trained_once
from equidp.training import groups_of, plan_run, predict, privacy_statement, train_model, units_in
from equidp.training.networks import imposed

RECORDED = {"epochs", "batch_size", "learning_rate", "optimizer", "precision", "class_weights"}
"""Settings that the model's file records, for the documents that go out with it."""

logger = logging.getLogger(__name__)


def extract_own_features(
    records: Records, provenance: dict[str, Any], training: dict[str, Any], *, name: str
) -> Recipe | Records:
    """The fixed map that this algorithm trains on."""
    return features_recipe(records, provenance, name, {}, training)


def plan_training(
    train: Records,
    settings: Settings,
    *,
    algorithm: str,
) -> dict[str, Any]:
    """Fix everything public before training: N, B, T, K, δ, and the noise that meets the target."""
    wanted, chosen = settings.privacy, settings.algorithm(algorithm)
    _, names = groups_of(chosen, train, settings.data.groups[0])
    plan = plan_run(
        chosen,
        units=units_in(train, wanted),
        groups=len(names),
        privacy=wanted,
        training=settings.training,
    )
    if chosen.private and plan.delta >= 1 / plan.records:
        logger.warning(
            "%s: δ = %g is not below one over the %d training %s: publishing one of them outright would meet it. "
            "Set privacy.delta to %.0e or less.",
            algorithm,
            plan.delta,
            plan.records,
            "units" if wanted.by_unit else "records",
            0.1 / plan.records,
        )
    if chosen.private and train.unit is not None and not wanted.by_unit:
        logger.warning(
            "%s: ε will be for one record. These data tell which records belong together (one person's, say), and for "
            "all of them at once it is larger: to protect them together set privacy.unit=unit and data.split_by=unit.",
            algorithm,
        )
    tracking.log_params(
        algorithm,
        {
            "resolved.noise_multiplier": plan.noise_multiplier,
            "resolved.sampling_rate": plan.sampling_rate,
            "resolved.steps": plan.steps,
            "resolved.records": plan.records,
        },
    )
    return dataclasses.asdict(plan)


def train_network(
    train: Records,
    test: Records,
    public: Records,
    plan: dict[str, Any],
    workplace: Path,
    settings: Settings,
    *,
    algorithm: str,
) -> tuple[Weights, pd.DataFrame, dict[str, Any]]:
    """Train; returns the weights, one history row per epoch, and the privacy statement.

    The non-private baseline is trained once per records, settings, seed and code, and reused after that.
    """
    groups, every = settings.data.groups, settings.operation.evaluate_every
    chosen = settings.algorithm(algorithm)

    def on_epoch(row: dict[str, float], network: nn.Module) -> Mapping[str, float]:
        due = row["epoch"] % every == 0 or row["epoch"] == settings.training.epochs
        figures = live_metrics(predict(network, test.features).numpy(), test.labels.numpy(), arrays) if due else {}
        tracking.log_epoch(algorithm, row | figures)
        told.add(row["epoch"])
        return figures

    def fresh() -> tuple[Weights, pd.DataFrame, dict[str, Any]]:
        trained = train_model(
            chosen,
            planned,
            Split(train, test, public),
            grouping=groups[0],
            model=settings.model,
            privacy=settings.privacy,
            training=settings.training,
            seed=settings.seed,
            options=settings.options(algorithm),
            on_epoch=on_epoch,
            workplace=workplace,
            resume=settings.resume,
            checkpoint_every=settings.operation.checkpoint_every,
        )
        return Weights(trained.weights, card), trained.history, trained.privacy

    planned = Plan(**plan)
    arrays, told = group_arrays(test, groups), set[float]()
    built = imposed(settings.model, chosen, train.schema)
    card = {
        "model": built.name,
        "options": card_options(built.name, built.options),
        "schema": train.schema.to_dict(),
        "algorithm": algorithm,
        "training": settings.training.model_dump(mode="json", include=RECORDED)
        | {"options": settings.options(algorithm)},
        "source": settings.data.source,
        "source_options": settings.data.options,
    }
    if chosen.private:
        found = fresh()
    else:
        everything = {
            "plan": plan,
            "data": settings.data.model_dump(mode="json"),
            "model": settings.model.model_dump(mode="json"),
            "training": settings.training.model_dump(mode="json"),
            "evaluate_every": every,
            "options": settings.options(algorithm),
            "unit": settings.privacy.unit,
            "seed": settings.seed,
        }
        shelved = trained_once(workplace, digest(train, everything), lambda: fresh()[:2])
        outcome = Outcome((), planned.steps, planned.steps)
        statement = privacy_statement(
            chosen, planned, outcome, privacy=settings.privacy, training=settings.training, seed=settings.seed
        )
        found = *shelved, statement
    for row in found[1].to_dict("records"):
        # what an earlier process trained; ε of an epoch is known at the end only, and no run's curves have it
        if row["epoch"] not in told:
            tracking.log_epoch(algorithm, {str(k): v for k, v in row.items() if pd.notna(v) and k != "epsilon"})
    return found


def score_test(weights: Weights, test: Records) -> np.ndarray:
    """Class probabilities `[n, classes]` of the test part. Kept in memory only: per-record data are not published."""
    return predict(load_network(weights), test.features).numpy()


def load_network(weights: Weights) -> nn.Module:
    """Rebuild the model from its card and load its weights."""
    schema = Schema.from_dict(weights.card["schema"])
    network = build_model(weights.card["model"], schema, options=weights.card["options"], seed=0, files=False)
    network.load_state_dict(weights.tensors)
    return network.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def group_arrays(records: Records, groups: tuple[str, ...]) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """Group ids and names per grouping, as the metrics want them."""
    ids = {name: records.grouping(name) for name in groups}
    return {name: (values.numpy(), names) for name, (values, names) in ids.items()}
