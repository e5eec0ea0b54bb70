"""What a checkpoint has to agree with, as digests: the code of others, the records, the initial weights."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from equidp.data.records import Records
from equidp.system.installed import LIBRARIES

NO_CODE_OF_A_USER = {*sys.stdlib_module_names, "equidp", "pydantic", "torch", *LIBRARIES}
"""Packages whose classes say nothing of a user's own code."""


def code_of_others(kinds: Iterable[type]) -> str:
    """sha256 of the packages that classes come from besides this one, or of their files; empty where all are its own.

    An algorithm's parts and a model may be a user's own: what they do decides what a release is, too. They are read
    each time, as a notebook may load them anew. What was typed into a notebook has no file, and never is as it was.
    """
    bases = (base.__module__.partition(".")[0] for kind in kinds for base in kind.__mro__)
    contents = [_content(name) or secrets.token_bytes() for name in sorted(set(bases) - NO_CODE_OF_A_USER)]
    return hashlib.sha256(b"".join(contents)).hexdigest() if contents else ""


def _content(package: str) -> bytes:
    """Of every file of a package, or of the one file of a module; nothing of what was typed into an interpreter."""
    module = sys.modules.get(package)
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    if not folders and (file := getattr(module, "__file__", None)):
        files = [Path(file)]
    return b"".join(file.read_bytes() for file in files if file.is_file())


def fingerprint(records: Records, *, viewed: bool = False) -> str:
    """sha256 of features, labels, groups and units: a checkpoint of other records is refused.

    Args:
        viewed: and of the identities, which random views of the records are drawn by.
    """
    digest = hashlib.sha256()
    others = (records.unit, records.identity if viewed else None)
    some = (column for column in others if column is not None)
    for column in (records.features, records.labels, *records.groups.values(), *some):
        digest.update(column.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def initial_state(network: nn.Module, *, trained: bool = True) -> str:
    """sha256 of layers, initial weights and buffers: a file of weights is a setting by its content.

    Without `trained` of trained parameters only what they are: a training may give them other values first.
    """
    digest = hashlib.sha256(str(network).encode())
    # the standardisation's constants too, and tensors that a layer keeps as none of these
    plain = [
        (f"{path}.{key}", value)
        for path, layer in network.named_modules()
        for key, value in vars(layer).items()
        if isinstance(value, Tensor)
    ]
    for name, value in (*network.named_parameters(), *network.named_buffers(), *plain):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {value.requires_grad}".encode())
        if trained or not value.requires_grad:
            digest.update(content(value))
    return digest.hexdigest()


def content(value: Tensor) -> memoryview:
    """A tensor's bytes, also of a type that NumPy does not have."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
