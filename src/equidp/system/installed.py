"""The code that trains, as one digest, without importing it: a sweep's workers only hand cells on to processes."""

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
"""What a trained model depends on, within the package."""

LIBRARIES = (
    "dp-accounting", "kymatio", "llvmlite", "numpy", "peft", "scipy", "timm", "torchvision", "transformers",
)  # fmt: skip
"""And beside it and torch: a model's forward pass may be theirs, llvmlite compiles sums, and DPIS chooses its noise by
dp_accounting's divergences.

A step done again with a noise that differs in its last digits would betray the sum, as both bear the same Gaussian.
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
    except PackageNotFoundError:  # llvmlite is not asked for everywhere
        return "none"


CODE_DIGEST = _code_digest()
"""Of the code that training runs: taken as it is imported, since files may be edited while a run trains."""
