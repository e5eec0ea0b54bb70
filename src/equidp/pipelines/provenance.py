"""Where results come from: the commit, the versions, the data's checksum."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

VERSIONS = ("equidp", "torch", "dp-accounting", "kedro", "mlflow", "scikit-learn", "fairlearn")


def provenance_facts(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Where the data came from, and which code made the run."""
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    known = {name: fact for name, fact in provenance.items() if name != "remarks"}  # remarks are at the top of a page
    return {**known, "commit": git_commit(), "python": platform.python_version(), **versions}


@cache
def git_commit() -> str:
    """The commit of the project, with `+` where the tree has uncommitted changes; `unknown` outside a checkout."""
    try:
        commit, changes = (_git("rev-parse", "HEAD"), _git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+" if changes else "")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
