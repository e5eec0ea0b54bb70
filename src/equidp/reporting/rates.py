"""Tables of the positive class's rates in every group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from equidp.evaluation.rates import RATES
from equidp.reporting.tables import groupings_of, marked, with_baseline

ENDS, SPACE = "95 % of {}", "\N{NO-BREAK SPACE}"


def rates_tables(documents: Mapping[str, Mapping]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield a caption and a frame for each grouping; nothing if no class is positive.

    A frame has one row per group and algorithm. If some row has an interval of a rate, the intervals' column follows
    the rate's column.
    """
    every = {name: document for name, document in with_baseline(documents).items() if "rates" in document}
    for grouping in groupings_of(every):
        rows = [row for name, document in every.items() for row in _rows(name, document, grouping)]
        if rows:
            order = {group: i for i, group in enumerate(dict.fromkeys(str(row["group"]) for row in rows))}
            rows.sort(key=lambda row: order[str(row["group"])])
            yield f"Rates by {grouping}", pd.DataFrame(rows).dropna(axis="columns", how="all")


def _rows(algorithm: str, document: Mapping, grouping: str) -> Iterator[dict[str, object]]:
    """One algorithm's rates in every group."""
    ends = document.get("intervals", {}).get("rates", {}).get(grouping, {})
    shown = marked({group: of["count"] for group, of in document["groups"][grouping].items()})
    for group, rates in document["rates"].get(grouping, {}).items():
        row: dict[str, object] = {"group": shown[group], "algorithm": algorithm}
        for rate in RATES:
            title, pair = rate.replace("_", " "), ends.get(group, {}).get(rate)
            text = f"{pair[0]:.3f}{SPACE}to{SPACE}{pair[1]:.3f}" if pair else None
            row |= {title: rates[rate], ENDS.format(title): text}
        yield row
