"""Names of an algorithm's settings, read from its file: importing it, and torch with it, takes longer than refusing."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from equidp.algorithms import ALGORITHMS

ROOT = "equidp.algorithms.settings:AlgorithmSettings"
"""The base of all settings of algorithms; it has none of its own."""


def declared(name: str) -> tuple[frozenset[str], bool]:
    """The settings of an algorithm, and whether they stand below `options`.

    It is imported where its file does not tell them: a base from another package, or a class made by a call.
    """
    place = ALGORITHMS.place(name)
    read = _annotated(place) if place else None
    if read is None:
        kind = ALGORITHMS[name]
        return frozenset(kind.model_fields), kind.below_options
    below = read.get("below_options")
    fields = (field for field, line in read.items() if "ClassVar" not in ast.unparse(line.annotation))
    return frozenset(fields), below is None or below.value is None or bool(ast.literal_eval(below.value))


@cache
def _tree(module: str) -> ast.Module:
    found = find_spec(module)
    return ast.parse(Path(str(found and found.origin)).read_text(encoding="utf-8"))


def _annotated(place: str) -> dict[str, ast.AnnAssign] | None:
    """What a class and its bases annotate, by name; None where files of algorithms do not tell."""
    module, _, name = place.partition(":")
    if place == ROOT:
        return {}
    if not module.startswith("equidp.algorithms."):
        return None
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom):
            imported = {alias.asname or alias.name: alias.name for alias in node.names}
            if name in imported:
                return _annotated(f"{node.module}:{imported[name]}")
        elif isinstance(node, ast.ClassDef) and node.name == name:
            found: dict[str, ast.AnnAssign] = {}
            for base in reversed(node.bases):
                inherited = _annotated(f"{module}:{ast.unparse(base)}")
                if inherited is None:
                    return None
                found |= inherited
            return found | {ast.unparse(line.target): line for line in node.body if isinstance(line, ast.AnnAssign)}
    return None
