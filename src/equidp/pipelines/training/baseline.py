"""The baseline, trained once: weights and history kept by a digest of everything they depend on.

The digest covers the records themselves, all settings that matter, the seed and the code, so a stale baseline cannot be
found: whatever changes, changes the name it would have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from equidp.data.records import Records
from equidp.errors import EquidpError
from equidp.models.weights import Weights, load_weights, save_weights
from equidp.system.files import replacing
from equidp.system.network import first_line
from equidp.training.digests import CODE_DIGEST, fingerprint


def digest(train: Records, settings: Mapping[str, Any]) -> str:
    """Names a baseline: a digest of its training records, its settings and the code."""
    content = hashlib.sha256(f"{CODE_DIGEST}/{fingerprint(train)}".encode())
    content.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return content.hexdigest()[:16]


def trained_once(
    folder: Path, name: str, train: Callable[[], tuple[Weights, pd.DataFrame]]
) -> tuple[Weights, pd.DataFrame]:
    """The baseline of that name from `folder`, or a freshly trained one that is kept there.

    Raises:
        EquidpError: what is kept there is damaged.
    """
    weights, history = folder / f"{name}.safetensors", folder / f"{name}.parquet"
    if weights.is_file() and history.exists():
        return load_weights(weights), _read(history)
    fresh = train()
    with replacing(history) as part:
        fresh[1].to_parquet(part)
    save_weights(fresh[0], weights)  # last: both files are there once this one is
    return fresh


def _read(history: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(history)
    except (OSError, ValueError) as error:  # pyarrow's errors are of the one kind or the other
        raise EquidpError(f"{history} is damaged ({first_line(error)}): delete it, and train again.") from error
