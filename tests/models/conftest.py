"""Schemas of every kind of data, stored features for them, and a weights file of the right shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from equidp.data.records import Schema
from equidp.models import MODELS

CLASSES = tuple("abcdefghij")
GROUPINGS = {"class": CLASSES}
COLOUR = {"mean": (0.49, 0.48, 0.45), "sd": (0.25, 0.24, 0.26)}
SCHEMAS = {
    "table": Schema("table", "tabular", (40,), CLASSES, GROUPINGS),
    "digits": Schema("digits", "image", (1, 8, 8), CLASSES, GROUPINGS, mean=(0.0,), sd=(1.0,)),
    "mnist": Schema("mnist", "image", (1, 28, 28), CLASSES, GROUPINGS, mean=(0.1307,), sd=(0.3081,)),
    "cifar10": Schema("cifar10", "image", (3, 32, 32), CLASSES, GROUPINGS, **COLOUR),
    "photos": Schema("photos", "image", (3, 64, 48), CLASSES, GROUPINGS, **COLOUR),
    "scattered": Schema("digits", "image", (81, 2, 2), CLASSES, GROUPINGS),
    "reviews": Schema("reviews", "text", (20,), ("no", "yes"), {"class": ("no", "yes")}, vocabulary=100),
}
PRETRAINED = ("backbone", "resnet_finetune")


def combinations() -> list[tuple[str, str]]:
    """Every model with every dataset it takes; slow pretrained networks with two of them."""
    return [
        (model, dataset)
        for model, family in MODELS.items()
        for dataset, schema in SCHEMAS.items()
        if schema.kind in family.kinds
        and not (model in PRETRAINED and dataset in ("scattered", "photos", "mnist"))
        and not (model == "backbone" and schema.kind != "image")
    ]


def batch(schema: Schema, n: int = 3) -> torch.Tensor:
    """Features as Records store them."""
    generator = torch.Generator().manual_seed(n)
    if schema.kind == "image" and not schema.mean:
        return torch.randn(n, *schema.shape, generator=generator).half()
    if schema.kind == "tabular":
        return torch.rand(n, *schema.shape, generator=generator)
    high = 256 if schema.kind == "image" else schema.vocabulary
    dtype = torch.uint8 if schema.kind == "image" else torch.int64
    return torch.randint(0, high, (n, *schema.shape), generator=generator).to(dtype)


@pytest.fixture(scope="session")
def weights_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights file with torchvision's names and shapes for resnet18; in a test its values may be random."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        state = resnet18().state_dict()
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file(state, path)
    return path


@pytest.fixture
def options(weights_file: Path) -> dict[str, dict]:
    """Options without which a model needs the network."""
    return {
        **{name: {} for name in MODELS},
        "backbone": {"network": "torchvision:resnet18", "weights": str(weights_file), "size": 32},
        "resnet_finetune": {"weights": str(weights_file)},
        "wrn16_4": {"depth": 10, "width": 1},
    }
