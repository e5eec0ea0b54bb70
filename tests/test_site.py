"""The documentation site builds without a warning; its pages are short, and each algorithm has its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equidp.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LONG = {"results.md", "settings-algorithms.md", "worst_group_tables.md"}
"""Pages that a script writes."""

HEADINGS = ("The step", "When to use it", "Settings", "ε")


@pytest.mark.slow
def test_the_site_builds_with_every_warning_an_error(tmp_path: Path) -> None:
    """Links within the site and to its sections are checked by this, and docstrings of the API."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "tables/index", "algorithms/dpsgd_f/index", "api/training/index", "changelog/index"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    assert "train_model" in (tmp_path / "site/api/training/index.html").read_text(encoding="utf-8")
    hosts = re.findall(
        r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', (tmp_path / "site/index.html").read_text()
    )
    assert hosts == []  # a reader's visit is told to nobody


ASKED = {
    "What is my ε": ("privacy.md", "at most a factor e^ε"),
    "My csv has missing values": ("declare.md#what-values-mean", "the constant for a missing number"),
    "Which algorithm?": ("choosing.md", "| your data | begin with |"),
    "Can I publish the table": ("privacy.md#what-may-go-out", "tables (`table.csv`) as they are"),
    "My network from timm": ("pretrained.md", 'network: "hf:'),
}
"""What a stranger asks, where the start page's row leads, and the answer that is read there."""


@pytest.mark.parametrize("question", ASKED)
def test_the_start_page_leads_to_the_answer_in_one_click(question: str) -> None:
    place, answer = ASKED[question]
    (row,) = [line for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines() if question in line]
    assert f"]({place})" in row
    page, _, section = place.partition("#")
    text = (DOCS / page).read_text(encoding="utf-8")
    of_section = [part for part in re.split(r"^## ", text, flags=re.M) if _anchor(part) == section]
    assert answer in (of_section[0] if section else text)


def _anchor(part: str) -> str:
    """The address of a section within its page, from its heading."""
    return re.sub(r"[^\w-]", "", part.splitlines()[0].lower().replace(" ", "-"))


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
def test_a_page_is_short(page: str) -> None:
    if page not in LONG:
        assert len((DOCS / page).read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "custom"])
def test_an_algorithm_has_a_page_that_the_overview_leads_to(name: str) -> None:
    overview = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    places = re.findall(rf"\[`{name}`\]\((algorithms/\w+\.md)\)", overview)
    assert len(places) == 1, f"docs/algorithms.md has {len(places)} rows that begin with {name}: give it one"
    assert (DOCS / places[0]).is_file(), f"write the page docs/{places[0]}"
    page = (DOCS / places[0]).read_text(encoding="utf-8")
    assert f"`{name}`" in page.splitlines()[0]
    assert [title for title in HEADINGS if f"\n## {title}\n" not in page] == []
    # the settings that the page names are the algorithm's, with the names and the numbers that its class has
    section = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    value = r"-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\d|\.\d|[·/])|\"\d+x\""
    named = re.findall(rf"`(\w+)`\s(?:\([^)]*\)\s)?=(?:\s`?({value}))?", section)
    known = {field for other in ALGORITHMS.values() for field in other.model_fields} | {"adaptive_clip"}
    assert {field for field, _ in named} <= known
    of_page = [kind for other, kind in ALGORITHMS.items() if f"`{other}`" in page.splitlines()[0]]
    for field, told in named:
        defaults = {kind.model_fields[field].default for kind in of_page if field in kind.model_fields}
        given = told.strip('"') if told.endswith('"') else float(told or 0)
        assert not told or not defaults or given in defaults, f"{field} is {defaults} by default"
