"""Digests that a checkpoint has to agree with: of code from other packages, of the records, of the initial weights."""

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
"""Packages whose classes are no code of a user's own."""


def code_of_others(kinds: Iterable[type]) -> str:
    """sha256 of the other packages, or module files, that classes come from; empty if there are none.

    An algorithm's parts and a model may be a user's own code, which then decides what is released. The files are read
    each time, because a notebook may load them again. Code typed into a notebook has no file: its digest is a new one
    each time.
    """
    bases = (base.__module__.partition(".")[0] for kind in kinds for base in kind.__mro__)
    contents = [_content(name) or secrets.token_bytes() for name in sorted(set(bases) - NO_CODE_OF_A_USER)]
    return hashlib.sha256(b"".join(contents)).hexdigest() if contents else ""


def _content(package: str) -> bytes:
    """The bytes of all Python files of a package, or of a module's file; none for code typed into an interpreter."""
    module = sys.modules.get(package)
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    if not folders and (file := getattr(module, "__file__", None)):
        files = [Path(file)]
    return b"".join(file.read_bytes() for file in files if file.is_file())


def fingerprint(records: Records, *, viewed: bool = False) -> str:
    """sha256 of features, labels, groups and units, because a checkpoint of other records is refused.

    Args:
        records: the records.
        viewed: take the identities as well, from which random views of the records follow.
    """
    digest = hashlib.sha256()
    others = (records.unit, records.identity if viewed else None)
    some = (column for column in others if column is not None)
    for column in (records.features, records.labels, *records.groups.values(), *some):
        digest.update(column.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def initial_state(network: nn.Module, *, trained: bool = True) -> str:
    """sha256 of layers, initial weights and buffers, because the content of a file of weights counts as a setting.

    Without `trained`, only names, types and shapes of trained parameters are in it, and not their values.
    """
    digest = hashlib.sha256(str(network).encode())
    # tensors that are neither parameters nor buffers, too: for example the constants of the standardisation
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
