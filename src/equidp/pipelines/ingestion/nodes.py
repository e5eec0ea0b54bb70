"""Nodes of ingestion: encode, split, count groups."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from equidp import __version__
from equidp.algorithms import algorithm_settings
from equidp.data.labelling import group_table
from equidp.data.records import Records, Split
from equidp.data.sources import Source, source
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.mechanism.trainer import choose_device
from equidp.models import features, model_features
from equidp.models.features import is_raw_image
from equidp.parameters import DataSettings
from equidp.pipelines import tracking
from equidp.pipelines.datasets import Recipe
from equidp.reporting.figures import group_counts

logger = logging.getLogger(__name__)

ENCODING = 5
"""Raised with every change of what all sources share: records that were kept are then encoded anew."""

PUBLIC_FRACTION = 0.05
"""Share of the training part set aside where an algorithm needs public records."""


def encode_records(raw_folder: Path, data: dict[str, Any], dataset: str) -> tuple[Recipe, dict[str, Any]]:
    """Find the raw files and say how to encode them by the declared schema; also where they came from."""
    settings = DataSettings(**data)
    chosen = source(settings.source, settings.options)
    files = chosen.locate(raw_folder)
    facts = {"dataset": dataset, "source": settings.source, "options": settings.options, "version": __version__}
    # unsorted: the order of declared columns is that of the features
    text = json.dumps({**facts, "encoding": [ENCODING, _code_digest(chosen)], "raw": files.fingerprint})
    key = hashlib.sha256(text.encode()).hexdigest()
    provenance = {**facts, "raw_fingerprint": files.fingerprint, "files": sorted(files.paths), "fingerprint": key}
    for algorithm in tracking.tracked():
        tracking.log_tags(algorithm, {"raw_fingerprint": files.fingerprint})
        tracking.log_dataset(algorithm, dataset, files.fingerprint, raw_folder)
    return Recipe(key, lambda: _finite(_called(dataset, chosen.records(files)))), provenance


def _called(dataset: str, records: Records) -> Records:
    """The records under the name that the user gave them: a source such as `csv` may have many datasets."""
    return replace(records, schema=replace(records.schema, name=dataset))


def _finite(records: Records) -> Records:
    """The records. One with a feature that is not finite has no finite gradient: it would silently weigh nothing."""
    if records.features.is_floating_point():
        finite = records.features.flatten(1).isfinite().all(1)
        if not finite.all():
            raise EquidpError(
                f"Record {int(finite.int().argmin())} of dataset {records.schema.name!r}, counted from 0, has a "
                "feature that is no finite number; mend the file or its source."
            )
    return records


def _code_digest(chosen: Source) -> str:
    """Of the modules that a source's class is written in: whoever edits one wants its records encoded anew."""
    kinds = [kind for kind in type(chosen).__mro__ if issubclass(kind, Source)]
    return hashlib.sha256(b"".join(map(_module_code, kinds))).hexdigest()


def _module_code(kind: type) -> bytes:
    try:
        return Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):  # written in a notebook: nobody can tell whether it was edited
        return secrets.token_bytes()


def extract_features(
    records: Records, provenance: dict[str, Any], model: dict[str, Any], training: dict[str, Any]
) -> Recipe | Records:
    """Features of a model that trains on a fixed map of the records (a frozen backbone, say); else the records."""
    wanted = model_features(model["name"], model["options"])
    return records if wanted is None else features_recipe(records, provenance, *wanted, training)


def features_recipe(
    records: Records, provenance: dict[str, Any], name: str, options: dict[str, Any], training: dict[str, Any]
) -> Recipe | Records:
    """How to extract features, once per (raw files, encoding, map, weights); records that have no such map stay."""
    if not is_raw_image(records.schema):
        return records
    key = hashlib.sha256(f"{provenance['fingerprint']}/{features.fingerprint(name, options)}".encode()).hexdigest()
    return Recipe(key, lambda: features.extract(records, name, options, choose_device(training["device"])))


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
        membership=settings.membership,
        key=settings.key,
    )
    return parts.train, parts.test, parts.public


def label_groups(train: Records, test: Records, public: Records, data: dict[str, Any]) -> pd.DataFrame:
    """Count every group of every grouping in the three parts; groups too small to evaluate are marked."""
    return group_table(Split(train, test, public), DataSettings(**data).groups)


def draw_group_counts(groups: pd.DataFrame, data: dict[str, Any]) -> go.Figure:
    """Sizes of the groups of the training partition, drawn before any training."""
    return group_counts(groups, DataSettings(**data).groups[0])
