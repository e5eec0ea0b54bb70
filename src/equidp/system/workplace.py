"""Names of what an unfinished run leaves in its workplace, for those who look for it without importing what trains."""

from __future__ import annotations

CHECKPOINT_FILE = "checkpoint.safetensors"
JOURNAL_FILE = "journal.jsonl"
DRAWN = "nonprivate_trials.json"
"""What a tuning drew before its first trial: it stays inside."""
