"""The baseline, trained once: its weights and history are kept under a digest of everything they depend on.

The digest covers the records themselves, all settings that matter, the seed and the code. So a stale baseline is not
found, because any change gives another name. The files of an interrupted training are found by the same name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from equidp.data.records import Records
from equidp.errors import EquidpError, first_line
from equidp.models.weights import Weights, load_weights, save_weights
from equidp.system.files import locked, private, replacing, storage_error
from equidp.system.installed import CODE_DIGEST
from equidp.system.workplace import CHECKPOINT_FILE, JOURNAL_FILE
from equidp.training.digests import fingerprint

LOCK = "lock"


def digest(train: Records, settings: Mapping[str, Any]) -> str:
    """Return a baseline's name: a digest of its training records, its settings and the code."""
    content = hashlib.sha256(f"{CODE_DIGEST}/{fingerprint(train)}".encode())
    content.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return content.hexdigest()[:16]


def trained_once(
    folder: Path, name: str, train: Callable[[Path | None], tuple[Weights, pd.DataFrame]], *, workplace: str
) -> tuple[Weights, pd.DataFrame]:
    """Return the baseline of that name from `folder`, or a freshly trained one that is kept there.

    Args:
        folder: where baselines are kept.
        name: the baseline's `digest`.
        train: trains the baseline, with checkpoints in the given folder. It is given None, for no checkpoints, if
            another run is training in that folder.
        workplace: the name of the folder of checkpoints in `folder`; it is removed once the baseline is kept.

    Raises:
        EquidpError: the kept baseline is damaged, or the disk refuses.
    """
    weights, history = folder / f"{name}.safetensors", folder / f"{name}.parquet"

    def kept() -> bool:
        return weights.is_file() and history.exists()

    if not kept():
        with _alone_in(folder / workplace) as place:
            if not kept():  # another run may have finished it just now
                fresh = train(place)
                with replacing(history) as part:
                    fresh[1].to_parquet(part)
                save_weights(fresh[0], weights)  # last: both files are there once this one is
    return load_weights(weights), _read(history)


@contextmanager
def _alone_in(place: Path) -> Iterator[Path | None]:
    """Yield `place`, or None if another process is in it.

    At the end the folder is removed, unless it has the checkpoint of an unfinished training.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        file = open(place / LOCK, "ab", opener=private)  # noqa: SIM115 (closed before the folder goes, for Windows)
    except OSError as error:
        raise storage_error(place, error) from error
    mine, finished = locked(file), False
    try:
        if mine and not (place / CHECKPOINT_FILE).exists():  # a training that was killed before its first checkpoint
            (place / JOURNAL_FILE).unlink(missing_ok=True)
        yield place if mine else None
        finished = True
    finally:
        file.close()
        if mine and (finished or not (place / CHECKPOINT_FILE).exists()):
            shutil.rmtree(place, ignore_errors=True)


def _read(history: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(history)
    except (OSError, ValueError) as error:  # pyarrow's errors are of the one kind or the other
        raise EquidpError(f"{history} is damaged ({first_line(error)}): delete it, and train again.") from error
