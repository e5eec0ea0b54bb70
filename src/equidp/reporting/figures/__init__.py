"""The figures: each a function from result tables to a Plotly figure, all in the style of `style.py`.

The figures read:

- documents: `metrics.json` by algorithm;
- histories: `history.parquet` by algorithm, one row per epoch;
- privacy: `privacy.json` of an algorithm;
- runs: one row per run, with settings and results as columns and the column `seed`. Rows that differ only in the seed
  are averaged, with 95 % intervals. Rows that differ in a further setting (a column with a dot in its name), besides
  the one that is drawn, are refused.

docs/figures.md lists which figure of which paper each one redraws.
"""

from __future__ import annotations

from equidp.reporting.figures.diagnostics import (
    GROUP_DIAGNOSTICS,
    diagnostic_curve,
    diagnostic_distribution,
    diagnostics_in,
    group_diagnostic,
)
from equidp.reporting.figures.gains import gains
from equidp.reporting.figures.groups import cost_per_group, group_counts, metric_per_group
from equidp.reporting.figures.runs import cost_against, metric_against, privacy_utility
from equidp.reporting.figures.training import (
    clip_norms,
    epsilon_by_algorithm,
    epsilon_over_epochs,
    group_curves,
    learning_curve,
    schedule_figure,
    schedules,
    trade_off_figure,
    trajectories,
)
