"""Settings of `--params` that are taken as typed, not as YAML reads them. Kept light, because `kedro` imports it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

TEXTS = ("dataset", "run_label", "algorithm", "data.key", "data.id", "data.source", "data.split_by", "privacy.unit")
"""Settings of `--params` that are taken as typed: as numbers, `01` and `1`, or `4e999` and `7e999`, would be equal."""

BELOW = ("report.tags.", "data.options.")
"""Beginnings of settings that are kept as typed if YAML reads a number that is written otherwise: `010` is not 10."""


def keep_as_typed(settings: Mapping[str, str], params: dict[str, Any]) -> None:
    """Put texts of `--params` back as they were typed.

    `settings` has them by dotted name, as typed. `params` has them nested, as YAML read them, and is changed.
    """
    for name, value in settings.items():
        if name in TEXTS or name.startswith(BELOW):
            *above, last = name.split(".")
            block = reduce(dict.__getitem__, above, params)
            kept = name in TEXTS or (type(block[last]) in (int, float) and str(block[last]) != value)
            block[last] = value if kept else block[last]
