"""What the asking process and the ranks leave for each other in a job's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings

JOB = "job.json"
"""Plain settings; written last by the asking process."""

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


def arguments_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `prepare` takes beside records and peers, from a job's plain values.

    Settings cross the border of a process here and nowhere else: a rank builds its own from JSON.
    """
    return {
        "algorithm": algorithm_settings(job["algorithm"], job["options"]).build(),
        "plan": Plan(**job["plan"]),
        "grouping": job["grouping"],
        "model": ModelSettings(**job["model"]),
        "privacy": PrivacySettings(**job["privacy"]),
        "training": TrainingSettings(**job["training"]),
        "seed": job["seed"],
        "workplace": Path(job["workplace"]) if job["workplace"] else None,
        "resume": job["resume"],
        "checkpoint_every": job["checkpoint_every"],
    }
