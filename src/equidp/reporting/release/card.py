"""The model card: README.md with the header that model hubs read, and a text for people (`assets/card.md.j2`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import yaml

from equidp.data.records import MIN_TEST_RECORDS
from equidp.data.sources import unit_named, unit_noun
from equidp.options import as_typed
from equidp.reporting.attack import recognised, share_text
from equidp.reporting.markdown import markdown_table, markdown_text
from equidp.reporting.release.facts import EXACT_TELL, Facts
from equidp.reporting.rendering import asset
from equidp.reporting.statement_sections import delta_text, epsilon_text, evaluated, noise_text, steps_text
from equidp.reporting.titles import METRIC_TITLES
from equidp.tasks import CLASSIFICATION

MOST_NAMES = 20
"""The most classes, groups or features that are named; config.json has them all."""


def model_card(facts: Facts) -> str:
    """README.md."""
    templates = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    templates.filters["md"] = markdown_text
    schema, metrics = facts.schema, facts.metrics or facts.exact_metrics
    of = "classes" if schema["classes"] else "targets"
    declared = [("declared", "values"), (of, _names(schema[of]))]
    declared += [(f"groups by {name}", _names(groups)) for name, groups in schema["groupings"].items()]
    if schema.get("feature_names"):
        declared.append(("features", _names(schema["feature_names"])))
    return templates.from_string(asset("card.md.j2")).render(
        header=yaml.safe_dump(header(facts), sort_keys=False, allow_unicode=True),
        facts=facts,
        schema=schema,
        privacy=facts.privacy,
        curator={name: facts.curator.get(name) for name in ("curator", "purpose", "data_origin")},
        recognised=share_text(recognised(facts.privacy, 0.01)),
        declared=declared,
        settings=_settings(facts),
        figure_tables=figure_tables(metrics) if metrics else [],
        most_frequent=most_frequent(facts.metrics or {}),
        names=_names(schema[of]),
        words=facts.words,
        evaluated=evaluated(facts.privacy),
        exact_tell=EXACT_TELL,
        epsilon_text=epsilon_text,
        delta_text=delta_text,
        unit_named=unit_named,
        unit_noun=unit_noun,
        table=markdown_table,
    )


def header(facts: Facts) -> dict[str, Any]:
    """The YAML block on top, with the keys that model hubs know."""
    number = facts.schema.get("task", CLASSIFICATION) in ("regression", "counts")
    task = f"{facts.schema['kind']}-{'regression' if number else CLASSIFICATION}"  # the hubs' name of the task
    found: dict[str, Any] = {
        "license": facts.curator.get("license", "unknown"),
        "library_name": "equidp",
        "pipeline_tag": task,
        "tags": ["differential-privacy", "dp-sgd", facts.algorithm, facts.network["name"]],
    }
    # figures with noise if there are any, else the exact figures that the user asked for
    overall = (facts.metrics or facts.exact_metrics or {}).get("overall", {})
    if figures := {name: value for name, value in overall.items() if value is not None and name != "records"}:
        found["metrics"] = list(figures)
        values = [{"type": name, "value": value} for name, value in figures.items()]
        dataset = {"name": facts.dataset, "type": facts.dataset}
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": values}]
        found["model-index"] = [{"name": f"{facts.algorithm} on {facts.dataset}", "results": results}]
    claim = {name: facts.privacy[name] for name in ("epsilon", "delta", "unit")}
    found["differential_privacy"] = claim | {"for_publication": facts.warning is None}
    return found


def _settings(facts: Facts) -> list[tuple[str, str]]:
    privacy, settings = facts.privacy, facts.training
    rows = [("setting", "value"), ("algorithm", facts.algorithm), ("sampling", privacy["sampling"])]
    rows += [("steps", steps_text(privacy)), ("epochs", str(privacy["epochs"]))]
    rows += [("expected batch size", f"{privacy['expected_batch_size']:,}")]
    rows += [("noise multiplier of the gradients' sum", noise_text(privacy))]
    known = {"epochs", "batch_size", "options"}
    chosen = {name.replace("_", " "): value for name, value in settings.items() if name not in known}
    chosen |= {f"{facts.algorithm}.{name}": value for name, value in (settings.get("options") or {}).items()}
    network = facts.network["options"].items()  # blocks, such as the network's configuration, are in config.json alone
    chosen |= {f"model.{name}": value for name, value in network if not isinstance(value, Mapping)}
    rows += [(name, as_typed(value)) for name, value in {**chosen, **facts.software}.items() if value is not None]
    return rows


def most_frequent(metrics: Mapping[str, Any]) -> str:
    """Say the accuracy of always answering the most frequent class, by the noised counts; empty if they do not tell it.

    Exact figures go out without counts, so this is not said beside them.
    """
    counts = {name: of["records"] for name, of in metrics.get("groups", {}).get("class", {}).items() if "records" in of}
    total = sum(counts.values())
    if total <= 0 or "accuracy" not in metrics["overall"]:
        return ""
    name = max(counts, key=counts.__getitem__)
    return (
        f"By the counts with noise the most frequent class is {name}: a model that always answers it has an accuracy "
        f"of about {counts[name] / total:.3f}."
    )


def figure_tables(metrics: Any) -> list[str]:
    """Tables of figures, overall and of every grouping's groups, with 95 % intervals where they were released."""
    names = [name for name in METRIC_TITLES if name in metrics["overall"]]
    header = tuple(METRIC_TITLES[name] for name in names)
    intervals = metrics.get("intervals") or {"overall": {}, "groups": {}}

    def row(figures: Mapping[str, Any], ends: Mapping[str, Any]) -> list[str]:
        return [_number(figures.get(name), ends.get(name)) for name in names]

    found = [markdown_table([header, row(metrics["overall"], intervals["overall"])])]
    units = markdown_text(f"{unit_noun(metrics.get('unit', 'record'))}s")
    for grouping, groups in metrics["groups"].items():
        known = intervals["groups"].get(grouping, {})
        rows = [[group, *row(figures, known.get(group, {}))] for group, figures in groups.items()]
        found.append(markdown_table([(grouping, *header), *rows]))
        if few := metrics.get("left_out", {}).get(grouping):
            found.append(
                f"Not known to have {MIN_TEST_RECORDS} {units} or more, so a figure of theirs says little: "
                f"{', '.join(map(markdown_text, few))}."
            )
    return found


def _number(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def _names(names: Any) -> str:
    names = list(map(str, names))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
