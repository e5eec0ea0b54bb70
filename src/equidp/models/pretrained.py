"""Pretrained: torchvision's ResNets, rebuilt so that no layer mixes records or works in place, and their weights.

Weights come from torchvision (its cache or the internet), or from a local file. They are never silently random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import get_model_weights
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from equidp.errors import EquidpError, first_line
from equidp.models.resnet9 import group_norm
from equidp.system.network import attempt

TORCHVISION = "torchvision"
"""The value of `weights` for torchvision's own weights, which are downloaded once."""


class PlainBasicBlock(BasicBlock):
    """torchvision's block without its in-place sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum of two convolutions."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class PlainBottleneck(Bottleneck):
    """torchvision's bottleneck without its in-place sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum of three convolutions."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


BLOCKS: Mapping[str, tuple[type[BasicBlock] | type[Bottleneck], list[int]]] = {
    "resnet18": (PlainBasicBlock, [2, 2, 2, 2]),
    "resnet34": (PlainBasicBlock, [3, 4, 6, 3]),
    "resnet50": (PlainBottleneck, [3, 4, 6, 3]),
}


def resnet(
    architecture: str, *, norm: Literal["frozen", "group"], activation: Callable[[], nn.Module] | None = None
) -> ResNet:
    """A torchvision ResNet, one of `BLOCKS`, with 1,000 outputs.

    Args:
        norm: `frozen` BatchNorm (fixed statistics and scale), or `group` for GroupNorm.
        activation: makes each activation; ReLU, out of place, unless given.
    """
    block, layers = BLOCKS[architecture]
    model = ResNet(block, layers, norm_layer=FrozenBatchNorm2d if norm == "frozen" else group_norm)
    for module in list(model.modules()):
        if isinstance(getattr(module, "relu", None), nn.Module):
            module.relu = activation() if activation else nn.ReLU()
    return model


def load_pretrained(model: ResNet, architecture: str, weights: str) -> None:
    """Put pretrained weights into a model of 1,000 outputs. Weights must be given for all layers but GroupNorm.

    Args:
        weights: `torchvision`, or the path of a `.safetensors` or `.pth` file.

    Raises:
        EquidpError: the weights are not available or do not fit.
    """
    state = torchvision_state(architecture) if weights == TORCHVISION else file_state(Path(weights))
    fresh = {f"{name}.{key}" for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)
             for key in ("weight", "bias")}  # fmt: skip
    wanted = {key: tensor for key, tensor in model.state_dict().items() if key not in fresh}
    for key, tensor in wanted.items():
        if key not in state or state[key].shape != tensor.shape:
            found = tuple(state[key].shape) if key in state else "nothing"
            raise EquidpError(
                f"The weights {weights!r} are not those of torchvision's {architecture}: {key} has shape "
                f"{tuple(tensor.shape)} there, the file has {found}; give another file in model.options.weights."
            )
    model.load_state_dict({key: state[key] for key in wanted}, strict=False)


def torchvision_state(architecture: str) -> dict[str, Tensor]:
    """torchvision's default weights, from its cache or the internet. Raises EquidpError where neither has them."""
    published = get_model_weights(architecture).DEFAULT
    state, reason = attempt(lambda: published.get_state_dict(progress=True, check_hash=True))
    if state is None:
        raise EquidpError(
            f"Pretrained weights of {architecture} are not available ({reason}): download {published.url} on another "
            "machine and give its path in model.options.weights."
        )
    return dict(state)


def file_state(path: Path) -> dict[str, Tensor]:
    """Read weights by name from a `.safetensors` or `.pth` file; only tensors are read.

    Raises:
        EquidpError: the file is missing or holds something else.
    """
    if not path.is_file():
        raise EquidpError(
            f"model.options.weights: {path} does not exist; give the path of a .safetensors or .pth file."
        )
    try:
        safe = path.suffix == ".safetensors"
        state: Any = load_file(path) if safe else torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's restricted reader raises many kinds of errors
        raise EquidpError(f"model.options.weights: {path} holds no plain weights ({first_line(error)}).") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise EquidpError(f"model.options.weights: {path} holds no plain weights, but a {type(state).__name__}.")
    return state
