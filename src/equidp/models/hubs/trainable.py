"""Which parameters of a pretrained network are trained: none (`head`), biases, normalisations, adapters, or all.

BatchNorm's statistics are never trained: they stay those of the pretraining.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from equidp.errors import EquidpError
from equidp.gradients.refusals import BATCH_NORMS
from equidp.gradients.rewriting import rewritten
from equidp.system.extras import extra

Trainable = Literal["head", "bias", "norm", "lora", "all"]


def choose(body: nn.Module, trainable: Trainable, *, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    """Make the chosen parameters of a frozen network trainable, and no others; `lora` adds adapters to it.

    Raises:
        EquidpError: the network has no such parameters, no layer of a target's name, or a layer too small for the rank.
    """
    if trainable == "lora":
        _add_adapters(body, rank, alpha, targets)
        return
    for module in body.modules():
        for own, parameter in module.named_parameters(recurse=False):
            if (
                trainable == "all"
                or (trainable == "bias" and own.endswith("bias"))
                or (trainable == "norm" and is_norm(module))
            ):
                parameter.requires_grad_(True)
    if trainable != "head" and not any(parameter.requires_grad for parameter in body.parameters()):
        raise EquidpError(
            f"training.trainable={trainable}: the network has no such parameters, so nothing of it would be trained; "
            "take head, lora or all."
        )


def is_norm(module: nn.Module) -> bool:
    """Whether a layer normalises: its class is torch's, or the name of its class, or of a base of it, has `norm`."""
    return isinstance(module, (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or any(
        "norm" in kind.__name__.lower() for kind in type(module).__mro__
    )


def _add_adapters(body: nn.Module, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    peft = extra("peft", "training.trainable=lora")
    rewritten(body, frozen=True)  # first, because adapters stand beside Linear layers
    layers = _layers(body)
    chosen = _asked(layers, targets) if targets else _found(layers, rank)
    for name in chosen:
        if rank > (most := min(layers[name])):
            raise EquidpError(
                f"model.options.lora_rank={rank}: layer {name!r} maps {layers[name][0]} numbers to {layers[name][1]}, "
                f"so a rank above {most} is no adapter; lower it."
            )
    transposed = any(type(body.get_submodule(name)).__name__ == "Conv1D" for name in chosen)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0, bias="none", fan_in_fan_out=transposed
    )
    peft.inject_adapter_in_model(config, body)


def _layers(body: nn.Module) -> dict[str, tuple[int, int]]:
    """Numbers of inputs and outputs of every layer that an adapter may stand beside, by name."""
    found = {}
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = module.in_features, module.out_features
        elif isinstance(module, nn.Conv2d) and module.groups == 1:
            found[name] = module.in_channels * math.prod(module.kernel_size), module.out_channels
        elif type(module).__name__ == "Conv1D":  # GPT-2's: a Linear whose weight is transposed
            found[name] = tuple(module.weight.shape)
    return found


def _asked(layers: dict[str, tuple[int, int]], targets: tuple[str, ...]) -> list[str]:
    chosen = []
    for target in targets:
        found = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in layers})
            raise EquidpError(
                f"model.options.lora_targets: no layer of the network is called {target!r}; its layers' names end in "
                f"{', '.join(ends)}."
            )
        chosen += found
    return chosen


def _found(layers: dict[str, tuple[int, int]], rank: int) -> list[str]:
    """Return the names of the attention layers; without any, of all layers wider than `rank`; without any, of all."""
    attention = [name for name in layers if "attn" in name.lower() or "attention" in name.lower()]
    if not (attention or layers):
        raise EquidpError("training.trainable=lora: the network has no layer for an adapter; take head, bias or all.")
    return attention or [name for name, sides in layers.items() if min(sides) > rank] or list(layers)
