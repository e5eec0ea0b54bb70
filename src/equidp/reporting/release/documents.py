"""The files of `release/`: weights, what is needed to load them, and the documents, for machines and for readers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from equidp.reporting.markdown import markdown_text
from equidp.reporting.privacy_report import privacy_report
from equidp.reporting.release.card import model_card
from equidp.reporting.release.checklist import checklist
from equidp.reporting.release.facts import Facts
from equidp.reporting.release.lines import as_json, as_markdown, publication, to_json
from equidp.reporting.release.registry import registry_entry, together
from equidp.reporting.release.reidentification import annex


def release_files(facts: Facts, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return every file of the folder by its name, made from what may go out and the released weights by name."""
    metadata = {"config": json.dumps(config(facts)), "format": "pt"}
    weights = _in_order(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))
    model = _identity(facts, weights)
    texts = {
        "README.md": model_card(facts),
        "config.json": to_json(config(facts)),
        "privacy.json": to_json(publication(facts.warning) | dict(facts.privacy) | {"model": model}),
        "privacy.md": f"{privacy_report(facts.privacy, facts.dataset)}\n"
        f"## All runs on these records\n\n{markdown_text(together(facts))}\n\n{_of_model(model)}",
    }
    for name, write in {"registry": registry_entry, "checklist": checklist, "reidentification": annex}.items():
        texts |= {f"{name}.json": as_json(write(facts)), f"{name}.md": as_markdown(write(facts))}
    if facts.metrics:
        texts["metrics_release.json"] = to_json(publication(facts.warning) | dict(facts.metrics))
    return {"model.safetensors": weights} | {name: text.encode() for name, text in texts.items()}


def _in_order(weights: bytes) -> bytes:
    """Return a safetensors file with the entries of its header sorted, because the library's order changes every time.

    Otherwise a folder that is written again would give another SHA-256 than that of the model already published.
    """
    length = int.from_bytes(weights[:8], "little")
    header = json.dumps(json.loads(weights[8 : 8 + length]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + weights[8 + length :]


def _identity(facts: Facts, weights: bytes) -> dict[str, Any]:
    """Say which model the statement is about, because it may be parted from this model or put beside another."""
    published_on = {"published_on": facts.curator["published_on"]} if facts.curator.get("published_on") else {}
    return {"sha256": hashlib.sha256(weights).hexdigest(), "software": dict(facts.software), **published_on}


def _of_model(model: Mapping[str, Any]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in model["software"].items())
    date = f" It was published on {markdown_text(model['published_on'])}." if "published_on" in model else ""
    return (
        f"## Model\n\nThis statement is of the file `model.safetensors` with the SHA-256 `{model['sha256']}`, trained "
        f"by {software}.{date}\n"
    )


def config(facts: Facts) -> dict[str, Any]:
    """Return what is needed to build the model again (name, options and schema), and how it was trained."""
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
