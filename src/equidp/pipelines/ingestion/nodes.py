"""Nodes of ingestion: encode, split, count groups."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.data import encoding
from equidp.data.labelling import group_table
from equidp.data.records import Records, Schema, Split
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.evaluation.rates import positive_label
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.device import choose_device
from equidp.models import MODELS, build_model, features, model_features
from equidp.parameters import DataSettings, Settings
from equidp.reporting.figures import group_counts
from equidp.reporting.style import noted

logger = logging.getLogger(__name__)

PUBLIC_FRACTION = 0.05
"""Share of the training part set aside where an algorithm needs public records."""


def encode_records(
    raw_folder: Path, cache: Path, tables: Callable[[str], Any], settings: Settings
) -> tuple[Records, dict[str, Any]]:
    """Return the records by the declared schema, which are encoded only once, and where they came from."""
    data = settings.data
    return encoding.encode(
        settings.dataset,
        data.source,
        data.options,
        raw_folder=raw_folder,
        cache=cache,
        catalog=tables,
        before=partial(_refuse_unfitting, settings),
    )


def _refuse_unfitting(settings: Settings) -> None:
    """Refuse a network whose files are missing or do not fit the declared records.

    This is done before records are read, which may take an hour.
    """
    model, chosen = settings.model, source(settings.data.source, settings.data.options)
    declared: Schema | None = getattr(chosen, "schema", None)
    if not MODELS[model.name].Options.paths or declared is None or (declared.kind == "text" and not declared.tokenizer):
        return  # such a model has no files to check, or can be checked only once the words are known
    build_model(model.name, replace(declared, name=settings.dataset), options=model.options)


def extract_features(records: Records, cache: Path, provenance: dict[str, Any], settings: Settings) -> Records:
    """Return the records' features if the model trains on a fixed map of them (a frozen backbone), else the records."""
    wanted = model_features(settings.model.name, settings.model.options)
    return records if wanted is None else mapped(records, cache, provenance, settings, *wanted)


def mapped(
    records: Records, cache: Path, provenance: dict[str, Any], settings: Settings, name: str, options: Mapping[str, Any]
) -> Records:
    """Return features by a fixed map, extracted once for the same raw files, encoding, map and weights.

    Records that the map does not take are returned as they are.
    """
    if not features.maps(name, records.schema):
        return records
    key = hashlib.sha256(f"{provenance['fingerprint']}/{features.fingerprint(name, options)}".encode()).hexdigest()
    device = choose_device(settings.training.device)
    return encoding.kept(cache, key, lambda: features.extract(records, name, options, device))


def split_records(
    records: Records, settings: Settings, algorithms: Mapping[str, Algorithm]
) -> tuple[Records, Records, Records]:
    """Training, test and public part."""
    positive_label(records.schema.classes, settings.data.positive_class)  # refused now, and not after training
    if records.unit is not None and records.part is None and settings.data.split_unit == "record":
        logger.warning(
            "data.split_by=%s: records that belong together (one person's, say) may both train and test, and figures "
            "of the test part are then too good. Set data.split_by=unit.",
            settings.data.split_by,
        )
    parts = divide(records, settings.data, settings.seed, algorithms.values())
    return parts.train, parts.test, parts.public


def divide(records: Records, data: DataSettings, seed: int, algorithms: Iterable[Algorithm]) -> Split:
    """Divide the records into the parts of a run.

    Unless `data.public_fraction` is set, a public part is set aside only if one of the algorithms needs it.
    """
    needed = any(algorithm.needs_public for algorithm in algorithms)
    return split(
        records,
        seed=seed,
        keep=data.keep,
        split_by=data.split_unit,
        public_fraction=data.public_fraction if data.public_fraction is not None else needed * PUBLIC_FRACTION,
        test_fraction=data.test_fraction,
        evaluate_on=data.evaluate_on,
        membership=data.membership,
        key=data.key,
    )


def label_groups(train: Records, test: Records, public: Records, settings: Settings) -> pd.DataFrame:
    """Count every group of every grouping in the three parts; groups too small to evaluate are marked."""
    return group_table(Split(train, test, public), settings.data.groups)


def draw_group_counts(groups: pd.DataFrame, settings: Settings) -> go.Figure:
    """Sizes of the groups of the training partition, drawn before any training."""
    return noted(group_counts(groups, settings.data.groups[0]), "Exact numbers: outside the guarantee")
