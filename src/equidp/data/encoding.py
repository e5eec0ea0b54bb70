"""Encoding: from raw files to Records, done once for the same raw files, options and code.

`encode` stores encoded records in a folder. The file's name is a digest of everything the records depend on. Any change
changes the name, so records of other settings are never used.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from equidp import __version__
from equidp.data import storage
from equidp.data.records import Records
from equidp.data.sources import source
from equidp.data.sources.base import Source
from equidp.errors import EquidpError

logger = logging.getLogger(__name__)

ENCODING = 6
"""Increase it with every change of the code that all sources share: stored records are then encoded again."""


def encode(
    dataset: str,
    source_name: str,
    options: Mapping[str, Any],
    *,
    raw_folder: Path,
    cache: Path,
    catalog: Callable[[str], Any] | None = None,
    before: Callable[[], None] | None = None,
) -> tuple[Records, dict[str, Any]]:
    """Return a dataset's records by its declared schema, and where they came from (JSON types).

    Args:
        dataset: the user's name of the dataset: a source such as `csv` may have many datasets.
        source_name: registry name of the source.
        options: `data.options`.
        raw_folder: where raw files are looked for.
        cache: folder where encoded records are stored.
        catalog: loads an entry of the Kedro catalog.
        before: called before raw files are read, but not if the records are stored already.

    Raises:
        EquidpError: a file is missing or not as declared, or a record has a feature that is not finite.
    """
    chosen = source(source_name, options)
    chosen.catalog = catalog
    files = chosen.locate(raw_folder)
    facts = {"dataset": dataset, "source": source_name, "options": dict(options), "version": __version__}
    # not sorted, because the order of declared columns is the order of the features
    code = _code_digest(chosen)
    text = json.dumps({**facts, "encoding": [ENCODING, code], "raw": files.fingerprint})
    key = hashlib.sha256(text.encode()).hexdigest()
    provenance = {**facts, "raw_fingerprint": files.fingerprint, "files": sorted(files.paths), "fingerprint": key}
    provenance["encoding"] = f"{ENCODING}-{code[:16]}"
    if files.records not in ("", files.fingerprint):
        provenance["records_fingerprint"] = files.records

    def made() -> Records:
        if before is not None:
            before()
        records = chosen.records(files)
        return _finite(replace(records, schema=replace(records.schema, name=dataset)))

    records = kept(cache, key, made)
    for remark in records.remarks:  # also for kept records
        logger.warning("%s", remark)
    return records, {**provenance, "remarks": list(records.remarks)}


def kept(cache: Path, key: str, make: Callable[[], Records]) -> Records:
    """Return the records stored in `cache` under a digest; if there are none, they are made and stored."""
    path = cache / f"{key[:16]}.safetensors"
    if not path.exists():
        storage.save(make(), path)
    return storage.load(path)


def _finite(records: Records) -> Records:
    """Return the records. Refuse a feature that is not finite, because its record would silently get the weight 0."""
    if records.features.is_floating_point():
        finite = records.features.flatten(1).isfinite().all(1)
        if not finite.all():
            raise EquidpError(
                f"Record {int(finite.int().argmin())} of dataset {records.schema.name!r}, counted from 0, has a "
                "feature that is not a finite number; correct the file or its source."
            )
    return records


def _code_digest(chosen: Source) -> str:
    """Digest of the modules that define a source's class, and of its `reader`; a change encodes the records anew."""
    kinds = [kind for kind in type(chosen).__mro__ if issubclass(kind, Source)]
    return hashlib.sha256(b"".join([*map(_module_code, kinds), chosen.reader.encode()])).hexdigest()


def _module_code(kind: type) -> bytes:
    try:
        return Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):  # a class of a notebook: nobody can tell whether it was edited
        return secrets.token_bytes()
