"""What the asking process and the ranks leave for each other in a job's folder."""

from __future__ import annotations

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
