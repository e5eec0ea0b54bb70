"""The files of `release/`: weights, what loads them, and the documents, each for machines and for readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from equidp.reporting.privacy_report import privacy_report
from equidp.reporting.release.card import model_card
from equidp.reporting.release.checklist import checklist
from equidp.reporting.release.facts import Facts
from equidp.reporting.release.lines import as_json, as_markdown, publication, to_json
from equidp.reporting.release.registry import registry_entry
from equidp.reporting.release.reidentification import annex


def release_files(facts: Facts, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Every file of the folder by its name.

    Args:
        facts: what may go out.
        tensors: the released weights by name.
    """
    texts = {
        "README.md": model_card(facts),
        "config.json": to_json(config(facts)),
        "privacy.json": to_json(publication(facts.warning) | dict(facts.privacy)),
        "privacy.md": privacy_report(facts.privacy, facts.dataset),
    }
    for name, write in {"registry": registry_entry, "checklist": checklist, "reidentification": annex}.items():
        texts |= {f"{name}.json": as_json(write(facts)), f"{name}.md": as_markdown(write(facts))}
    if facts.metrics:
        texts["metrics_release.json"] = to_json(publication(facts.warning) | dict(facts.metrics))
    metadata = {"config": json.dumps(config(facts)), "format": "pt"}
    weights = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    return {"model.safetensors": weights} | {name: text.encode() for name, text in texts.items()}


def config(facts: Facts) -> dict[str, Any]:
    """What rebuilds the model: its name and options, and the schema; and how it was trained."""
    return {
        **publication(facts.warning),
        "model": facts.network["name"],
        "options": dict(facts.network["options"]),
        "schema": dict(facts.schema),
        "encoding": dict(facts.encoding),
        "algorithm": facts.algorithm,
        "training": dict(facts.training),
        "software": dict(facts.software),
    }
