"""Files that the package carries besides its code."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

TEMPLATE = HERE / "template"
"""The folder of files from which `equidp new` makes a project."""


def conf() -> Path:
    """The folder of settings below every project's own: in the package, or in the checkout it is imported from."""
    inside = HERE / "conf"
    return inside if inside.is_dir() else HERE.parents[1] / "conf"


def contract() -> Path:
    """The folder that has `tests/algorithms`, which `equidp check` runs: in the package, or in the checkout."""
    inside = HERE / "contract"
    return inside if inside.is_dir() else HERE.parents[1]
