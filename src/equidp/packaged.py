"""Files that the package carries besides its code."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

TEMPLATE = HERE / "template"
"""What `equidp new` makes a project from."""


def conf() -> Path:
    """The settings that lie below every project's own: in the package, or in the checkout that it is imported from."""
    inside = HERE / "conf"
    return inside if inside.is_dir() else HERE.parents[1] / "conf"


def contract() -> Path:
    """The folder of `tests/algorithms` that `equidp check` runs, likewise."""
    inside = HERE / "contract"
    return inside if inside.is_dir() else HERE.parents[1]
