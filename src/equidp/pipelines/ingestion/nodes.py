"""Nodes of ingestion: encode, split, count groups."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp.algorithms import algorithm_settings
from equidp.data import encoding
from equidp.data.labelling import group_table
from equidp.data.records import Records, Split
from equidp.data.splitting import split
from equidp.mechanism.trainer import choose_device
from equidp.models import features, model_features
from equidp.models.features import is_raw_image
from equidp.parameters import DataSettings
from equidp.reporting.figures import group_counts

logger = logging.getLogger(__name__)

PUBLIC_FRACTION = 0.05
"""Share of the training part set aside where an algorithm needs public records."""


def encode_records(
    raw_folder: Path, cache: Path, data: dict[str, Any], dataset: str
) -> tuple[Records, dict[str, Any]]:
    """The records by the declared schema, encoded once, and where they came from."""
    return encoding.encode(dataset, data["source"], data["options"], raw_folder=raw_folder, cache=cache)


def extract_features(
    records: Records, cache: Path, provenance: dict[str, Any], model: dict[str, Any], training: dict[str, Any]
) -> Records:
    """Features of a model that trains on a fixed map of the records (a frozen backbone, say); else the records."""
    wanted = model_features(model["name"], model["options"])
    return records if wanted is None else mapped(records, cache, provenance, *wanted, training)


def mapped(
    records: Records,
    cache: Path,
    provenance: dict[str, Any],
    name: str,
    options: dict[str, Any],
    training: dict[str, Any],
) -> Records:
    """Features by a fixed map, extracted once per raw files, encoding, map and weights; tables and texts stay."""
    if not is_raw_image(records.schema):
        return records
    key = hashlib.sha256(f"{provenance['fingerprint']}/{features.fingerprint(name, options)}".encode()).hexdigest()
    device = choose_device(training["device"])
    return encoding.kept(cache, key, lambda: features.extract(records, name, options, device))


def split_records(
    records: Records, data: dict[str, Any], seed: int, algorithms: dict[str, Any]
) -> tuple[Records, Records, Records]:
    """Training, test and public part. A public part is set aside only if an algorithm of this run needs one."""
    settings = DataSettings(**data)
    needed = any(algorithm_settings(name, options).build().needs_public for name, options in algorithms.items())
    public = settings.public_fraction if settings.public_fraction is not None else needed * PUBLIC_FRACTION
    if records.unit is not None and records.part is None and settings.split_unit == "record":
        logger.warning(
            "data.split_by=%s: records that belong together (one person's, say) may both train and test, and figures "
            "of the test part are then too good. Set data.split_by=unit.",
            settings.split_by,
        )
    parts = split(
        records,
        seed=seed,
        keep=settings.keep,
        split_by=settings.split_unit,
        public_fraction=public,
        test_fraction=settings.test_fraction,
        evaluate_on=settings.evaluate_on,
    )
    return parts.train, parts.test, parts.public


def label_groups(train: Records, test: Records, public: Records, data: dict[str, Any]) -> pd.DataFrame:
    """Count every group of every grouping in the three parts; groups too small to evaluate are marked."""
    return group_table(Split(train, test, public), DataSettings(**data).groups)


def draw_group_counts(groups: pd.DataFrame, data: dict[str, Any]) -> go.Figure:
    """Sizes of the groups of the training partition, drawn before any training."""
    return group_counts(groups, DataSettings(**data).groups[0])
