"""What the asking process and the ranks leave for each other in a job's folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from equidp.errors import EquidpError

NODES, RENDEZVOUS, FOLDER = "EQUIDP_NODES", "EQUIDP_RENDEZVOUS", "EQUIDP_JOB_FOLDER"
"""Environment of the machine that is asked for a training over several: how many, where they meet, their folder."""

JOB = "job.json"
"""`TrainingRequest.to_dict`; written last by the asking process."""

TRAIN, PUBLIC = "train.safetensors", "public.safetensors"
"""Records: the folder is private, and goes at the end."""

WEIGHTS, HISTORY, STATEMENT = "weights.safetensors", "history.parquet", "privacy.json"
"""Results, written by rank 0; weights after every epoch too."""

FAILURE = "failure.json"
"""What a rank had to say before it stopped."""

SOCKET = "epochs"
"""Where rank 0 asks for an evaluation; in a folder of its own that the job names."""

MEETING, STORE = "meeting", "store"
"""Where the asking process and the ranks of one machine find each other."""

ARRIVED = "arrived-{}"
"""Left by another machine, by its number, once it has seen the job: in it how many machines it was told of."""


def report(folder: Path, error: EquidpError) -> None:
    """Leave an error for the asking process, unless another was first, or nobody asks any more."""
    with contextlib.suppress(OSError), (folder / FAILURE).open("x") as file:
        json.dump({"message": error.message, "exit_code": error.exit_code}, file)


def reported(folder: Path) -> EquidpError | None:
    """The error that was left there first."""
    if not (folder / FAILURE).exists():
        return None
    said = json.loads((folder / FAILURE).read_text())
    error = EquidpError(said["message"])
    error.exit_code = said["exit_code"]  # type: ignore[misc]
    return error
