"""The model card: README.md with the header that model hubs read, and a text for people."""

from __future__ import annotations

from typing import Any

import yaml

from equidp.reporting.attack import recognised, share_text
from equidp.reporting.markdown import markdown_table, markdown_text
from equidp.reporting.privacy_report import epsilon_text
from equidp.reporting.release.facts import Facts
from equidp.reporting.tables import METRIC_TITLES

MOST_NAMES = 20
"""So many classes, groups or features are named; config.json has them all."""

LOADING = """```python
import json

from safetensors.torch import load_file

from equidp.data.records import Schema
from equidp.models import build_model

with open("config.json", encoding="utf-8") as file:
    config = json.load(file)
model = build_model(config["model"], Schema.from_dict(config["schema"]), options=config["options"], seed=0, files=False)
model.load_state_dict(load_file("model.safetensors"))
model.eval()  # features in, one logit per class out
```"""

CONTENTS = (
    ("file", "what it is"),
    ("model.safetensors, config.json", "weights; model settings and declared schema"),
    ("privacy.json, privacy.md", "the privacy statement; ε can be recomputed from the first"),
    ("registry.json, registry.md", "entry for a registry of deployments of differential privacy"),
    ("checklist.json, checklist.md", "evaluation by the topics of NIST SP 800-226"),
    ("reidentification.json, reidentification.md", "evidence on re-identification, by EDPB Opinion 28/2024"),
)


def model_card(facts: Facts) -> str:
    """README.md."""
    parts = [f"---\n{yaml.safe_dump(header(facts), sort_keys=False, allow_unicode=True)}---"]
    parts.append(f"# {markdown_text(f'{facts.algorithm} on {facts.dataset}')}")
    if facts.warning:
        parts.append(f"**{facts.warning}**")
    parts += ["## What it is", *_model(facts)]
    parts += ["## Privacy", _privacy(facts)]
    parts += ["## Use", facts.curator.get("purpose", "") and _stated(facts.curator["purpose"])]
    parts.append(
        "Not for input outside the declared schema: the answer would be arbitrary."
        + ("" if "purpose" in facts.curator else " *Open:* the purpose (setting release.purpose).")
    )
    parts += ["## Training data", *_data(facts)]
    parts += ["## Training", _training(facts)]
    parts += ["## Evaluation", *_evaluation(facts)]
    parts += [
        "## Limits",
        "Noise and bounded contributions cost accuracy, and they cost rare groups and rare classes most: measure every "
        "group that matters before use. What the model says about a population is not protected: it may tell something "
        "about people who were not in the data.",
    ]
    parts += ["## Loading", LOADING, "## Files", markdown_table(CONTENTS)]
    return "\n\n".join(part for part in parts if part) + "\n"


def header(facts: Facts) -> dict[str, Any]:
    """The YAML block on top, with the keys that model hubs know."""
    task = f"{facts.schema['kind']}-classification"  # as the hubs call it
    found: dict[str, Any] = {
        "license": facts.curator.get("license", "unknown"),
        "library_name": "equidp",
        "pipeline_tag": task,
        "tags": ["differential-privacy", "dp-sgd", facts.algorithm, facts.network["name"]],
    }
    # those with noise where there are any, else the exact ones that the user asked for
    overall = (facts.metrics or facts.exact_metrics or {}).get("overall", {})
    if figures := {name: value for name, value in overall.items() if value is not None}:
        found["metrics"] = list(figures)
        values = [{"type": name, "value": value} for name, value in figures.items()]
        dataset = {"name": facts.dataset, "type": facts.dataset}
        results = [{"task": {"type": task}, "dataset": dataset, "metrics": values}]
        found["model-index"] = [{"name": f"{facts.algorithm} on {facts.dataset}", "results": results}]
    claim = {name: facts.privacy[name] for name in ("epsilon", "delta", "unit")}
    found["differential_privacy"] = claim | {"for_publication": facts.warning is None}
    return found


def _stated(text: str) -> str:
    return f"{markdown_text(text)} (stated by the curator)"


def _model(facts: Facts) -> list[str]:
    schema, name = facts.schema, facts.network["name"]
    shape = " × ".join(map(str, schema["shape"]))
    texts = [
        f"A classifier with {len(schema['classes'])} classes: model {markdown_text(name)}, {facts.parameters:,} "
        f"parameters. It takes {schema['kind']} features of shape {shape} and gives one logit per class: "
        f"{_names(schema['classes'])}."
    ]
    if contact := facts.curator.get("curator"):
        texts.append(f"Curator: {_stated(contact)}")
    return texts


def _privacy(facts: Facts) -> str:
    privacy = facts.privacy
    unit = privacy["unit"]
    return (
        f"Trained with differential privacy: ε = {epsilon_text(privacy['epsilon'])} at δ = {privacy['delta']:g}, for "
        f"one {markdown_text(unit)} of the training data. An attacker who knows everything else, and accuses wrongly "
        f"in 1 % of cases, recognises at most {share_text(recognised(privacy, 0.01))} of those whose "
        f"{markdown_text(unit)} was used. privacy.md states the guarantee, its limits and what is assumed; "
        "reidentification.md gives the evidence."
    )


def _data(facts: Facts) -> list[str]:
    schema, curator = facts.schema, facts.curator
    texts = [
        f"Dataset: {markdown_text(facts.dataset)}. The schema was declared in advance, and nothing in it was learnt "
        "from the records."
    ]
    if origin := curator.get("data_origin"):
        texts.append(_stated(origin))
    else:
        texts.append("*Open:* who is in the data and how they were collected (setting release.data_origin).")
    rows = [("declared", "values"), ("classes", _plain_names(schema["classes"]))]
    rows += [(f"groups by {name}", _plain_names(groups)) for name, groups in schema["groupings"].items()]
    if schema.get("feature_names"):
        rows.append(("features", _plain_names(schema["feature_names"])))
    texts.append(markdown_table(rows))
    if schema["kind"] == "tabular":
        where = (
            "config.json has their declared bounds and categories"
            if "features" in facts.encoding
            else (f"equidp's source {facts.encoding.get('source')} has their declared bounds and categories")
        )
        texts.append(f"Features are numbers from 0 to 1; {where}.")
    texts.append("How many records each group has is exact and private, and left out.")
    return texts


def _training(facts: Facts) -> str:
    privacy, settings = facts.privacy, facts.training
    rows = [("setting", "value"), ("algorithm", facts.algorithm), ("sampling", privacy["sampling"])]
    rows += [("steps", f"{privacy['steps']:,}"), ("epochs", str(privacy["epochs"]))]
    rows += [("expected batch size", f"{privacy['expected_batch_size']:,}")]
    rows += [("noise multiplier", f"{privacy['noise_multiplier']:.6g}")]
    known = {"epochs", "batch_size", "options"}
    rows += [(name.replace("_", " "), str(value)) for name, value in settings.items() if name not in known]
    rows += [(f"{facts.algorithm}.{name}", str(value)) for name, value in (settings.get("options") or {}).items()]
    rows += [(f"model.{name}", str(value)) for name, value in facts.network["options"].items()]
    rows += [(name, version) for name, version in facts.software.items()]
    return markdown_table(rows)


def _evaluation(facts: Facts) -> list[str]:
    if facts.metrics:
        cost = f"They cost ε = {epsilon_text(facts.metrics['epsilon'])} of the test records' own budget."
        return [f"Figures of the test records, released with noise. {cost}", *figure_tables(facts.metrics)]
    if facts.exact_metrics:
        return [
            "Exact figures of the test records. **No guarantee protects the test records**; the curator chose to "
            "publish these figures.",
            *figure_tables(facts.exact_metrics),
        ]
    return [
        "*Open.* Accuracy was measured on private test records. These figures are exact, and no guarantee protects "
        "test records, so they are left out. Figures released with noise would stand here; "
        "release.unprotected=test publishes the exact ones."
    ]


def figure_tables(metrics: Any) -> list[str]:
    """Tables of figures, overall and of every grouping's groups."""
    names = [name for name in METRIC_TITLES if name in metrics["overall"]]
    header = tuple(METRIC_TITLES[name] for name in names)
    found = [markdown_table([header, [_number(metrics["overall"][name]) for name in names]])]
    for grouping, groups in metrics["groups"].items():
        rows = [[group, *(_number(figures.get(name)) for name in names)] for group, figures in groups.items()]
        found.append(markdown_table([(grouping, *header), *rows]))
    return found


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _plain_names(names: Any) -> str:
    names = list(map(str, names))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _names(names: Any) -> str:
    return markdown_text(_plain_names(names))
