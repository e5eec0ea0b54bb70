"""What the README and the first page of the site tell a user to type exists: commands, settings, targets, pages."""

from __future__ import annotations

import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from kedro.framework.cli.project import run
from tests.end_to_end.kedro_project import bootstrapped, resolved

from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.cli import project_at, sweep
from equidp.options import dotted
from equidp.pipeline_registry import register_pipelines
from equidp.sweep.grid import choose_grid, nested

ROOT = Path(__file__).parents[1]
README = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(program: str) -> list[str]:
    """Every call of a program in the README: lines of shell blocks, and code within a sentence; none with a `…`."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, flags=re.M | re.S)
    lines = [part.strip() for block in blocks for line in block.splitlines() for part in line.split("&&")]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))
    found = [line.split(" #")[0].strip() for line in lines + inline if line.split()[:1] == [program]]
    return list(dict.fromkeys(call for call in found if "…" not in call))


def options_of(command: click.Command, words: list[str]) -> dict[str, Any]:
    """The options as click reads them; an option that does not exist is an error."""
    with command.make_context(command.name, list(words)) as context:
        return dict(context.params)


@cache
def pipelines() -> Any:
    return register_pipelines()


def test_the_readme_shows_the_commands_this_file_checks() -> None:
    assert {call.split()[1] for call in commands("kedro")} <= {"run", "sweep", "new-dataset", "viz", "ui"}
    assert len(commands("kedro")) >= 7
    assert len(commands("make")) >= 5


@pytest.mark.parametrize("call", [call for call in commands("kedro") if call.startswith("kedro run")])
def test_a_run_names_what_exists(call: str, project: Path) -> None:
    options = options_of(run, shlex.split(call)[2:])
    asked = [options["pipeline"]] if options["pipeline"] else list(options["pipelines"] or ())
    for name in asked:
        assert pipelines()[name].nodes, name
    settings = resolved(project, **dotted(options["params"]))
    for name, value in dotted(options["params"]).items():
        assert setting(settings, name) == value, name
    for name in [*asked, settings["audited"]["algorithm"]]:
        if name in ALGORITHMS:
            assert algorithm_settings(name, settings[name]["options"]).build().name == name


def setting(settings: dict[str, Any], dotted: str) -> Any:
    """A resolved setting by its dotted name; `algorithm` is what an audit attacks."""
    if dotted == "algorithm":
        return settings["audited"]["algorithm"]
    for part in dotted.split("."):
        settings = settings[part]
    return settings


@pytest.mark.parametrize("call", [call for call in commands("kedro") if call.startswith("kedro sweep")])
def test_a_sweep_names_what_exists(call: str, project: Path) -> None:
    options = options_of(sweep, shlex.split(call)[2:])
    bootstrapped(project)
    home = project_at(project, options["env"])
    axes = {name: options[name] for name in ("algorithms", "datasets", "epsilons", "seeds")}
    given = {**axes, "params": dotted(nested(options["params"]))}
    grid = choose_grid(home.grids(), options["name"], given)
    points = list(grid.points())
    counts = [len(values.split(",")) for name, values in axes.items() if values and name != "seeds"]
    if options["name"] is None and options["seeds"]:
        assert len(points) == int(options["seeds"]) * math.prod(counts)
    # every cell's settings are validated here; seeds differ in nothing else
    assert home.cells(choose_grid(home.grids(), options["name"], {**given, "seeds": "1"}))


@pytest.mark.parametrize("call", commands("make"))
def test_a_make_target_exists(call: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, flags=re.M))
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, flags=re.M)[1].split())
    for word in call.split()[1:]:
        if "=" not in word:
            assert word in targets & phony


def links() -> list[tuple[Path, str]]:
    """Every link and image of a page that leads into the repository."""
    found = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", link)
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("page", "link"), links(), ids=lambda value: getattr(value, "name", value))
def test_a_link_leads_somewhere(page: Path, link: str) -> None:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    assert target.is_relative_to(ROOT)
    assert target.exists(), f"{page.name} links to {link}, which does not exist"
    if anchor:
        assert anchor in anchors(target), f"{page.name} links to {link}, which has no such section"


@cache
def anchors(page: Path) -> set[str]:
    """The sections of a page, as GitHub and its like name them in addresses."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
