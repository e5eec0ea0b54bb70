"""What may import what: layers from low to high, no circle, a page at every folder's start, and short files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

LAYERS = (
    {"errors", "options", "packaged", "registry", "typed"},
    {"system"},
    {"gradients", "accounting"},
    {"mechanism"},
    {"data"},
    {"algorithms", "models", "evaluation", "tasks"},
    {"parameters"},
    {"training"},
    {"reporting"},
    {"audit", "drafting", "new_project", "starting_rate", "sweep"},
    {"pipelines", "hooks", "cli", "new_dataset", "settings", "pipeline_registry", "config_loader", "__main__"},
)
"""Names below `equidp`, from low to high; a module imports from its own layer and from those below."""

ONE_MODULE = {"sweep": "equidp.sweep.tracked"}
"""The module by which a lower layer reads MLflow."""

MOST_LINES = 450

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


def imported(name: str, *, late: bool) -> Iterator[str]:
    """Modules that a module imports at its start, and with `late` those in its functions and for type checkers too."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


def layer(name: str) -> int:
    parts = name.split(".")
    return next((i for i, names in enumerate(LAYERS) if len(parts) > 1 and parts[1] in names), -1)


def test_every_module_has_a_layer() -> None:
    assert [name for name in MODULES if layer(name) < 0] == ["equidp"]


def test_no_module_imports_from_a_higher_layer() -> None:
    arrows = {(name, other) for name in MODULES for other in imported(name, late=True) if other in MODULES}
    assert sorted((name, other) for name, other in arrows if layer(other) > layer(name) >= 0) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: {other for other in imported(name, late=False) if other in MODULES} - {name} for name in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_kedro_and_mlflow_are_imported_in_the_last_layer_alone() -> None:
    found = [
        name
        for name in MODULES
        if layer(name) < len(LAYERS) - 1
        and name not in ONE_MODULE.values()
        and {other.split(".")[0] for other in imported(name, late=True)} & {"kedro", "kedro_datasets", "mlflow"}
    ]
    assert found == []


def test_every_folder_begins_with_a_page() -> None:
    for name, path in MODULES.items():
        if path.name == "__init__.py" and name != "equidp":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), name


def test_no_file_is_too_long_to_be_read() -> None:
    files = {str(path.relative_to(SOURCE / "equidp")): path for path in MODULES.values()}
    long = {file for file, path in files.items() if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES}
    assert long == set()


def test_no_private_name_of_a_library_is_imported() -> None:
    found = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("equidp"):
                words = [*node.module.split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                words = [word for alias in node.names for word in alias.name.split(".")]
            else:
                continue
            if words[0] not in sys.stdlib_module_names:
                found += [(name, word) for word in words if word.startswith("_")]
    assert found == []
