"""Tables of several labels: every label's figures, over all records and in every group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from equidp.evaluation.multilabel import LABEL_METRICS
from equidp.reporting.tables import groupings_of, marked, with_baseline
from equidp.reporting.titles import METRIC_TITLES


def labels_tables(documents: Mapping[str, Mapping]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Captions and frames, one over all records and one per grouping; none where there are no labels.

    Columns: `label`, `group` and `tested` of a grouping, then each metric of each algorithm.
    """
    every = {name: document["labels"] for name, document in with_baseline(documents).items() if "labels" in document}
    if not every:
        return
    names = list(dict.fromkeys(label for labels in every.values() for label in labels))
    rows = [
        {"label": label} | _figures({n: labels[label]["overall"] for n, labels in every.items()}) for label in names
    ]
    yield "By label", pd.DataFrame(rows)
    for grouping in groupings_of(documents):
        rows = []
        for label in names:
            of = {name: labels[label]["groups"][grouping] for name, labels in every.items()}
            sizes = {group: figures["count"] for group, figures in next(iter(of.values())).items()}
            for group, shown in marked(sizes).items():
                figures = _figures({name: groups[group] for name, groups in of.items()})
                rows.append({"label": label, "group": shown, "tested": sizes[group]} | figures)
        yield f"By label and {grouping}", pd.DataFrame(rows)


def _figures(of: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    return {
        f"{METRIC_TITLES[metric]} {name}": figures[metric] for metric in LABEL_METRICS for name, figures in of.items()
    }
