"""Installed: one digest of the code that trains, without importing it: workers of a sweep only start processes."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import equidp

CODE = (
    "parameters",
    "options.py",
    "data/records.py",
    "accounting",
    "gradients",
    "mechanism",
    "models",
    "algorithms",
    "tasks",
    "training",
)
"""Parts of the package on which a trained model depends."""

LIBRARIES = (
    "dp-accounting", "kymatio", "llvmlite", "numpy", "peft", "scipy", "timm", "torchvision", "transformers",
)  # fmt: skip
"""Libraries on which a trained model depends, besides torch. A model's forward pass may be theirs, llvmlite compiles
sums, and DPIS chooses its noise by dp_accounting's divergences.

If a step were repeated with a noise that differs in its last digits, the two results would reveal the sum, because both
use the same Gaussian numbers.
"""


def _code_digest() -> str:
    root = Path(equidp.__file__).parent
    files = sorted(
        file for part in CODE for file in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    )
    versions = " ".join(map(_version, LIBRARIES))
    return hashlib.sha256(b"".join([*(file.read_bytes() for file in files), versions.encode()])).hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # some libraries are optional, and llvmlite is not required on every system
        return "none"


CODE_DIGEST = _code_digest()
"""The digest of the code that trains. It is taken at the import, because files may be edited while a run trains."""
