"""Figures of an audit: the results of the attacks beside the claims of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from equidp.reporting.attack import ATTACKS
from equidp.reporting.statement_sections import delta_text
from equidp.reporting.style import categories, category, figure, label, line, looks

CANARIES = {"gradient_canaries": "gradient canaries", "input_canaries": "mislabelled records"}
MEASURES = {
    "auc": ("AUC of membership inference", 0.5),
    "tpr_at_1_percent_fpr": ("True positive rate at 1 % false positives", 0.01),
}
"""Figures of exposure: their name, and their value if nothing leaks."""


def bounds_beside_claims(findings: Mapping[str, Any]) -> go.Figure:
    """Lower bounds on ε from the canaries beside the ε claimed at the same δ. A bound above its claim refutes it."""
    chart = figure(f"Audit of {label(findings['algorithm'])}: ε claimed and ε shown", "attack", "ε")
    found = {name: findings[key] for key, name in CANARIES.items() if findings.get(key)}
    series = {"claimed": "epsilon_claimed", "lower bound": "epsilon_lower_bound"}
    for name, look in list(looks(series).items())[1:]:
        values = [verdict[series[name]] for verdict in found.values()]
        hover = [
            f"δ = {delta_text(v['delta'], 2)}, {v['correct']} of {v['guesses']} guesses right" for v in found.values()
        ]
        marker = {"symbol": look.symbol, "size": 12, "color": look.colour}
        shown = {"name": name, "mode": "markers", "marker": marker, "hovertext": hover}
        chart.add_trace(go.Scatter(x=list(found), y=values, cliponaxis=False, **shown))  # a bound of 0 lies on the axis
    chart.update_yaxes(rangemode="tozero")
    categories(chart, found)
    chart.update_xaxes(range=[-0.5, len(found) - 0.5])
    return chart


def exposure_by_group(findings: Mapping[str, Any], grouping: str, measure: str = "auc") -> go.Figure:
    """Exposure of every group to an attack, before and after privacy, with its intervals."""
    name, harmless = MEASURES[measure]
    attack = "reference" if any("reference" in attacks for attacks in findings["membership"].values()) else "loss"
    chart = figure(f"{name} by {label(grouping)} ({ATTACKS[attack]})", label(grouping), name)
    models = findings["membership"]
    reached = [harmless]
    for model, look in looks(models).items():
        groups = models[model][attack]["groups"][grouping] if model in models else {}
        known = {group: found for group, found in groups.items() if found[measure] is not None}
        if not known:
            continue
        values = [found[measure] for found in known.values()]
        ends = [found[f"{measure}_interval"] for found in known.values()]
        above = [max(0.0, high - v) for v, (_, high) in zip(values, ends, strict=True)]
        below = [max(0.0, v - low) for v, (low, _) in zip(values, ends, strict=True)]
        error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        chart.add_trace(line(look, map(category, known), values).update(mode="markers", error_y=error))
        reached += [end for pair in ends for end in pair]
    chart.add_hline(y=harmless, line={"dash": "dot", "color": "#767676"})
    everyone = next(iter(models.values()))[attack]["groups"][grouping] if models else []
    categories(chart, everyone)
    # before and after side by side, as their intervals would hide each other; this mode alone would start y at 0
    chart.update_layout(scattermode="group", scattergap=0.6)
    margin = 0.05 * (max(reached) - min(reached)) or 0.05
    chart.update_yaxes(range=[min(reached) - margin, max(reached) + margin])
    chart.update_xaxes(range=[-0.5, len(everyone) - 0.5])
    return chart
