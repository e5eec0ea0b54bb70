"""A trained model as a file: weights as safetensors, and a card to build it again from. Nothing is pickled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.models import MODELS, build_model
from equidp.system.files import replacing


@dataclass(frozen=True)
class Weights:
    """A model's weights by name, with what is needed to rebuild the model (JSON types)."""

    tensors: dict[str, Tensor]
    card: dict[str, Any]

    def __repr__(self) -> str:
        numbers = sum(tensor.numel() for tensor in self.tensors.values())
        return f"<Weights: {numbers} numbers in {len(self.tensors)} tensors; card with {', '.join(self.card)}>"


def save_weights(weights: Weights, path: Path) -> None:
    """Write to a file beside the target, then replace the target, so that a reader never sees half a file."""
    with replacing(path) as part:
        save_file(weights.tensors, part, metadata={"card": json.dumps(weights.card)})


def load_weights(path: Path) -> Weights:
    """Read weights and card. Raises EquidpError for a file that is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            card = json.loads((file.metadata() or {})["card"])
            # copied, because Windows does not replace a file that is mapped
            return Weights({name: file.get_tensor(name).clone() for name in file.keys()}, card)  # noqa: SIM118
    except FileNotFoundError as error:
        raise EquidpError(f"There is no model {path}: train one first.") from error
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise EquidpError(f"{path} is damaged ({error}): delete it, and train again.") from error


def network_of(weights: Weights, device: torch.device | None = None) -> nn.Module:
    """Return the model that the card describes, with these weights; without `device`, on the GPU if there is one."""
    schema = Schema.from_dict(weights.card["schema"])
    if (name := weights.card["model"]) not in MODELS:
        raise EquidpError(f"The network {name!r} is of another package than equidp: install the one that adds it.")
    network = build_model(weights.card["model"], schema, options=weights.card["options"], seed=0, files=False)
    network.load_state_dict(weights.tensors)
    return network.to(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def parameters_of(weights: Weights) -> int:
    """Number of the model's parameters. Buffers in the file, such as the statistics of BatchNorm, do not count."""
    return sum(parameter.numel() for parameter in network_of(weights, torch.device("cpu")).parameters())
