"""The command `equidp`. `equidp new my-study` makes a project, whose files an upgrade of the package leaves alone.
`equidp check NAME` tests an algorithm of another package by the contract of equidp's own algorithms.

A project holds its data, its results and the settings that differ from the package's (`equidp.packaged.conf`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import click
import yaml

from equidp import __version__
from equidp.errors import EquidpError, refuse_unknown
from equidp.packaged import TEMPLATE, conf, contract
from equidp.system.extras import extra, not_installed
from equidp.system.files import replacing_folder

FOLDERS = (
    "conf/local", "data/01_raw", "data/02_intermediate", "data/03_primary", "data/04_feature", "data/05_model_input",
    "data/06_models", "data/07_model_output", "data/08_reporting", "src",
)  # fmt: skip
"""Folders that are empty at first."""

NAMES = {
    "gitignore": ".gitignore", "telemetry": ".telemetry", "pyproject": "pyproject.toml", "preset.yml": "{dataset}.yml",
}  # fmt: skip
"""Real names of files in the template. There they have other names, because tools would take them for their own."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Differentially private training on imbalanced data. Make a project here; in it, the command is `kedro`."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Make a project in a new FOLDER. The folder's name is the project's.

    \b
    equidp new my-study && cd my-study && kedro run --pipeline=dpsgd_f
    """
    create(folder)
    entered = shlex.quote(str(folder))
    click.echo(f"{folder} is made. Now: cd {entered} && kedro run --pipeline=dpsgd_f. Then read {folder}/README.md.")


@main.command()
@click.argument("name")
def check(name: str) -> None:
    """Test an algorithm of an installed package by the contract of equidp's own.

    NAME is an algorithm, or a part for `custom`. The tests try sensitivity, noise, sampling, ledger and resumption on
    tiny data, and compare runs with and without one unit. What fails is shown.
    """
    from equidp.algorithms import ALGORITHMS
    from equidp.algorithms.custom import PARTS, around

    added = {part: kind for kind, parts in PARTS.items() for part in parts if parts.package(part)}
    refuse_unknown("algorithm", [name], {**added, **ALGORITHMS})
    if name not in ALGORITHMS:
        ALGORITHMS[name] = around(added[name], name)
    ALGORITHMS[name]().build()  # refuses an impossible algorithm in a sentence
    if find_spec("hypothesis") is None:  # not imported here: imported too early, its assertions are not pytest's
        raise not_installed("hypothesis", "equidp check")
    pytest, folder = extra("pytest", "equidp check"), contract()
    tests = [str(folder / "tests" / "algorithms" / f"test_{of}.py") for of in ("contract", "replayed")]
    # without pytest's settings of the project in which the command is called
    own = ["-c", os.devnull, "--rootdir", str(folder), "-o", f"pythonpath={folder}", "-p", "no:cacheprovider"]
    own += ["--import-mode=importlib", "-W", "ignore::pytest.PytestWarning"]
    raise SystemExit(pytest.main([*own, "-q", *tests], plugins=[_TestsOf(name)]))


class _TestsOf:
    """A plugin of pytest that keeps the tests of one algorithm, and not of others whose names contain its name."""

    def __init__(self, name: str) -> None:
        self._in_brackets = re.compile(rf"[\[-]{re.escape(name)}[\]-]")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that have the algorithm's name as a parameter."""
        items[:] = [item for item in items if self._in_brackets.search(item.name)]


def create(folder: Path) -> None:
    """Make a project in a folder that does not exist yet, whole or not at all.

    Raises:
        EquidpError: the folder exists, its name cannot be a project's, or the disk refuses.
    """
    name = folder.name
    dataset = name.lower().replace("-", "_")
    if not NAME.fullmatch(name):
        raise EquidpError(
            f"{name!r} cannot be a project's name: take letters, digits, - and _, and begin with a letter, such as "
            "my-study."
        )
    presets = yaml.safe_load((conf() / "base" / "parameters" / "presets.yml").read_text(encoding="utf-8"))["presets"]
    if dataset in presets:
        raise EquidpError(f"{dataset!r} is a data set that equidp knows: name the project otherwise, {name}-study say.")
    if os.path.lexists(folder):
        raise EquidpError(f"{folder} exists: choose another name, or remove it.")
    if not folder.absolute().parent.is_dir():
        raise EquidpError(f"{folder.parent} is no folder: make it first.")
    words = {"name": name, "dataset": dataset, "version": __version__, "kedro": version("kedro")}
    with replacing_folder(folder) as part:
        for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file()):
            place = part / source.relative_to(TEMPLATE)
            place = place.with_name(NAMES.get(place.name, place.name).format(dataset=dataset))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(Template(source.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
        shutil.copy(conf() / "logging.yml", part / "conf")
        for empty in FOLDERS:
            (part / empty).mkdir(parents=True, exist_ok=True)
            (part / empty / ".gitkeep").touch()
