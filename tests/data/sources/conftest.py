"""Where the real files are, for the tests that need one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def raw_dir() -> Path:
    """The folder of real raw files; the test is skipped where there is none."""
    beside = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("EQUIDP_RAW_DIR", beside))
    if not folder.is_dir():
        pytest.skip(f"no real raw files: {folder} does not exist (set EQUIDP_RAW_DIR)")
    return folder
