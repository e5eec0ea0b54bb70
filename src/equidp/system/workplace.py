"""Workplace: names of files that an unfinished run leaves, for modules that do not import the code that trains."""

from __future__ import annotations

CHECKPOINT_FILE = "checkpoint.safetensors"
JOURNAL_FILE = "journal.jsonl"
DRAWN = "nonprivate_trials.json"
"""The trials that a tuning drew before its first one. This file must not be published."""
