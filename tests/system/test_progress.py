"""Progress bars in a terminal and in a log."""

from __future__ import annotations

import io
import sys

import pytest
from tqdm import tqdm

from equidp.system import progress
from equidp.system.progress import frames


def written(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in tqdm(range(3), desc="features", **frames()):
        pass
    return stream.getvalue()


def test_a_log_has_no_bar_of_short_work_and_a_terminal_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, terminal=False) == ""
    assert "features" in written(monkeypatch, terminal=True)


def test_a_log_tells_that_long_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had one line and then nothing for ten minutes."""
    monkeypatch.setattr(progress, "SECONDS_IN_A_FILE", 1e-6)
    assert "features" in written(monkeypatch, terminal=False)
