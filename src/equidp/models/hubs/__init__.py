"""Pretrained networks by name, without their last layer: `timm:<name>`, `torchvision:<name>` or `hf:<folder>`.

- `open_network`: returns the network with its weights. `identity`: what features depend on besides the records.
- `network`: turns each record into one row of features. `files`: reads weights from safetensors, and says whether they
  fit.
- `named`: the libraries that know networks by name. `folder`: a folder in Hugging Face's format.
- `trainable`: which parameters of a network are trained.

Weights are never silently random, and come from the internet only where `weights: download` asks for it. Nothing is
unpickled. It imports `equidp.data` and `equidp.system`. Begin with `open_network`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from equidp.data.records import Schema
from equidp.errors import EquidpError, unknown_name
from equidp.models.hubs import folder, named
from equidp.models.hubs.folder import config_of
from equidp.models.hubs.network import Network, Precision, Views

__all__ = ["Network", "Precision", "Views", "check_name", "config_of", "identity", "open_network"]


class Asked(Protocol):
    """The options by which a network is asked for."""

    @property
    def network(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def views(self) -> Views: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


OPENERS: dict[str, Callable[[str, Asked, Schema, bool], Network]] = {
    "timm": named.from_timm,
    "torchvision": named.from_torchvision,
    "hf": folder.from_folder,
}
IDENTITIES: dict[str, Callable[[str, Asked], str]] = {
    "timm": named.identity_in_timm,
    "torchvision": named.identity_in_torchvision,
    "hf": folder.identity,
}


def check_name(network: str) -> tuple[str, str]:
    """Return library and name. Raises EquidpError for another form, or another library."""
    library, sign, name = network.partition(":")
    if sign and library not in OPENERS:
        raise unknown_name("library in model.options.network", library, OPENERS)
    if not sign or not name:
        raise EquidpError(
            f"model.options.network={network!r}: write timm:<name>, torchvision:<name> or hf:<folder>, such as "
            "timm:tf_efficientnet_lite0."
        )
    return library, name


def open_network(asked: Asked, schema: Schema, *, files: bool = True) -> Network:
    """Return the frozen network for a dataset's raw images, or for texts in the tokens of the network's own tokenizer.

    Args:
        files: False for a network that gets trained weights: the files may be missing.

    Raises:
        EquidpError: the library or a file is missing, the weights do not fit, or the network takes no such records.
    """
    library, name = check_name(asked.network)
    network = OPENERS[library](name, asked, schema, files)
    network.compute(asked.precision, asked.views)
    network.measure(schema, asked.network)
    return network.requires_grad_(False).eval()


def identity(asked: Asked) -> str:
    """Return what features depend on besides records and options: the weights' digest, the library's version.

    Raises:
        EquidpError: the library or a file is missing.
    """
    library, name = check_name(asked.network)
    return IDENTITIES[library](name, asked)
