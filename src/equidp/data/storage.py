"""Storage: Records in one safetensors file, schema and checksum in its metadata. Nothing is ever unpickled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equidp.data.records import OPTIONAL, Membership, Records, Schema
from equidp.errors import EquidpError
from equidp.system.files import private, replacing

FORMAT = "equidp-records-1"
GROUP = "group:"
MEMBERSHIP, REMARKS = "membership", "remarks"


def save(records: Records, path: Path) -> None:
    """Write atomically: a crash leaves the old file or the new one, never half a file. Only its owner can read it.

    Raises:
        EquidpError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    tensors = _tensors(records)
    schema = json.dumps(records.schema.to_dict(), ensure_ascii=False)
    drawn = "" if records.membership is None else json.dumps(dataclasses.asdict(records.membership))
    remarks = json.dumps(records.remarks, ensure_ascii=False) if records.remarks else ""
    said = {"schema": schema, MEMBERSHIP: drawn, REMARKS: remarks}
    metadata = {"format": FORMAT, **said, "sha256": _checksum(tensors, "".join(said.values()))}
    with replacing(path) as part:
        os.close(private(str(part), os.O_CREAT | os.O_WRONLY))  # first, because `save_file` may let everybody read it
        save_file(tensors, part, metadata=metadata)


def load(path: Path) -> Records:
    """Read records that `save` wrote.

    Raises:
        EquidpError: the file is missing, truncated, of another kind, or was changed after it was written.
    """
    path = Path(path)
    if not path.is_file():
        raise EquidpError(f"{path} is missing; run the pipeline `ingestion` to write it.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise EquidpError(f"{path} is damaged ({error}); delete it and run the pipeline `ingestion` again.") from error
    if metadata.get("format") != FORMAT:
        raise EquidpError(f"{path} does not hold Records of this version; run the pipeline `ingestion` again.")
    drawn, remarks = metadata.get(MEMBERSHIP, ""), metadata.get(REMARKS, "")
    if metadata.get("sha256") != _checksum(tensors, metadata["schema"] + drawn + remarks):
        raise EquidpError(f"{path} was changed after it was written; run the pipeline `ingestion` again.")
    schema = Schema.from_dict(json.loads(metadata["schema"]))
    return Records(
        features=tensors["features"],
        labels=tensors["labels"],
        groups={name: tensors[f"{GROUP}{name}"] for name in schema.groupings},
        schema=schema,
        membership=_membership(json.loads(drawn)) if drawn else None,
        remarks=tuple(json.loads(remarks)) if remarks else (),
        **{name: tensors[name] for name in OPTIONAL if name in tensors},
    )


def _membership(drawn: dict[str, Any]) -> Membership:
    return Membership(**drawn | {"class_sizes": tuple(drawn.get("class_sizes", ()))})  # JSON has only lists


def _tensors(records: Records) -> dict[str, Tensor]:
    columns = {"features": records.features, "labels": records.labels}
    columns |= records.optional | {f"{GROUP}{name}": ids for name, ids in records.groups.items()}
    columns = {name: column.detach().cpu().contiguous() for name, column in columns.items()}
    # Labels and the grouping `class` may be one tensor, and safetensors stores no shared memory.
    return {name: column if name == "features" else column.clone() for name, column in columns.items()}


def _checksum(tensors: dict[str, Tensor], schema: str) -> str:
    sha = hashlib.sha256(schema.encode())
    for name in sorted(tensors):
        sha.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        sha.update(tensors[name].numpy().reshape(-1).data)
    return sha.hexdigest()
