"""Files that the asking process and the ranks leave for each other in a job's folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from equidp.errors import EquidpError

NODES, RENDEZVOUS, FOLDER = "EQUIDP_NODES", "EQUIDP_RENDEZVOUS", "EQUIDP_JOB_FOLDER"
"""Environment variables of the machine that is asked to train on several: how many, where they meet, and the folder."""

JOB = "job.json"
"""`TrainingRequest.to_dict` and more; the asking process writes it last."""

TRAIN, PUBLIC = "train.safetensors", "public.safetensors"
"""The records; the folder is private, and is removed at the end."""

WEIGHTS, HISTORY, STATEMENT = "weights.safetensors", "history.parquet", "privacy.json"
"""Results, written by rank 0 when the training has ended."""

FAILURE = "failure.json"
"""The error of the first rank that failed."""

SOCKET = "epochs"
"""The socket at which rank 0 asks for an evaluation; it is in a folder of its own that the job names."""

MEETING, STORE = "meeting", "store"
"""Files by which the ranks of one machine find each other: those of torch's launcher, and those of the ranks."""

ARRIVED = "arrived-{}"
"""File of another machine, by its number, once it has seen the job. It says how many machines that one was told of."""


def report(folder: Path, error: EquidpError) -> None:
    """Leave an error for the asking process, unless another one was left first, or the folder is gone."""
    with contextlib.suppress(OSError), (folder / FAILURE).open("x") as file:
        json.dump({"message": error.message, "exit_code": error.exit_code}, file)


def reported(folder: Path) -> EquidpError | None:
    """The error that was left there; None if there is none."""
    if not (folder / FAILURE).exists():
        return None
    said = json.loads((folder / FAILURE).read_text())
    error = EquidpError(said["message"])
    error.exit_code = said["exit_code"]  # type: ignore[misc]
    return error
