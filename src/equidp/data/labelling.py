"""Labelling: how many records each group has in each part, and which groups cannot be evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from equidp.data.records import MIN_TEST_RECORDS, Split


def group_table(split: Split, groupings: Sequence[str] = ()) -> pd.DataFrame:
    """Return counts per group and part, for these groupings or for every stored one.

    Returns:
        One row per group with columns `grouping, group, train, test, public, evaluable, note`. Groups that are too
        small, or empty, stay in the table with a note: they are reported, never hidden.

    Raises:
        EquidpError: an unknown grouping.
    """
    rows = [row for name in groupings or split.train.schema.groupings for row in _rows(split, name)]
    return pd.DataFrame(rows, columns=["grouping", "group", "train", "test", "public", "evaluable", "note"])


def _rows(split: Split, grouping: str) -> list[dict]:
    parts = {"train": split.train, "test": split.test, "public": split.public}
    _, names = split.train.grouping(grouping)
    ids = {part: records.grouping(grouping)[0] for part, records in parts.items()}
    counts = {part: torch.bincount(of, minlength=len(names)).tolist() for part, of in ids.items()}
    return [
        {
            "grouping": grouping,
            "group": name,
            **{part: counts[part][k] for part in parts},
            "evaluable": counts["test"][k] >= MIN_TEST_RECORDS,
            "note": _note(counts["train"][k], counts["test"][k]),
        }
        for k, name in enumerate(names)
    ]


def _note(train: int, test: int) -> str:
    if not train and not test:
        return "no record"
    if not test:
        return "no test record: cannot be evaluated"
    if test < MIN_TEST_RECORDS:
        return f"only {test} test record{'s' * (test > 1)}: too few to be evaluated"
    return "" if train else "no training record"
