"""Both reports in a real browser, from disk: they render, sort, fit, and ask the network for nothing."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from equidp.reporting.page import html_report

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this system (apt-get install chromium)")


@dataclass
class Visit:
    """An opened page and what went wrong on it."""

    page: sync_api.Page
    url: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def reports(sample, hostile, tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("reports")
    pages = {"run": sample.only("dpsgd_f"), "comparison": sample, "hostile": hostile}

    @functools.cache
    def written(name: str) -> Path:
        path = folder / f"{name}.html"
        path.write_text(html_report(**pages[name].arguments()), encoding="utf-8")
        return path

    return written


def visit(browser: sync_api.Browser, path: Path, width: int) -> Visit:
    seen = Visit(browser.new_page(viewport={"width": width, "height": 900}), path.as_uri())
    seen.page.on("console", lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None)
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.on("dialog", lambda dialog: (seen.complaints.append(dialog.message), dialog.dismiss()))
    seen.page.on("request", lambda request: seen.requests.append(request.url))
    seen.page.goto(seen.url)
    # not `wait_for_function`, which evaluates a string: the page's own policy forbids that after the first try, so
    # that a chart which was drawn late failed the test
    sync_api.expect(seen.page.locator(".chart:not(:has(.main-svg))")).to_have_count(0, timeout=30_000)
    return seen


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("run", 1280),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("run", 400), *((name, width) for name in ("hostile", "comparison") for width in (1280, 400))]
        ),
    ],
)
def test_report_renders_without_complaint_or_request(browser, reports, name, width):
    seen = visit(browser, reports(name), width)
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith(("data:", "blob:"))] == [seen.url]
    charts = seen.page.locator(".chart")
    assert charts.count() >= 10
    shapes = "e.querySelectorAll('.overplot path, .overplot image')"
    drawn = f"e => [...{shapes}].some(p => p.getBoundingClientRect().width > 1)"
    for index in range(charts.count()):
        chart = charts.nth(index)
        assert chart.evaluate(drawn), chart.get_attribute("aria-label")
        box = chart.bounding_box()
        assert box["width"] > 250
        assert box["x"] + box["width"] <= width
    # the page itself never scrolls sideways; wide tables scroll inside their own box
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    seen.page.close()


def column(page: sync_api.Page, index: int) -> list[str]:
    return page.locator("#groups table").first.locator(f"tbody tr > :nth-child({index + 1})").all_inner_texts()


@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.slow)])
def test_table_sorts_by_number_and_by_name_undefined_last(browser, reports, width):
    seen = visit(browser, reports("comparison"), width)
    table = seen.page.locator("#groups table").first
    headings = table.locator("th").all_inner_texts()
    index = next(i for i, text in enumerate(headings) if text == "cost in accuracy dpsgd")
    before = column(seen.page, index)
    button = table.locator("th button").nth(index)
    button.click()
    assert column(seen.page, index) == sorted(before, key=float)
    assert table.locator("th").nth(index).get_attribute("aria-sort") == "ascending"
    button.click()
    assert column(seen.page, index) == sorted(before, key=float, reverse=True)
    assert len(set(before)) > 3
    table.locator("th button").first.click()
    assert column(seen.page, 0) == [str(k) for k in range(10)]
    by_sex = seen.page.locator("#groups table").nth(1)
    for _ in range(2):  # the group without a test record stays last in both directions
        by_sex.locator("th button").nth(3).click()
        assert by_sex.locator("tbody th").all_inner_texts()[-1] == "Not stated †"
    assert seen.complaints == []
    seen.page.close()


@pytest.mark.slow
def test_without_javascript_the_page_says_what_is_missing_and_leaves_no_holes(browser, reports):
    page = browser.new_page(java_script_enabled=False)
    page.goto(reports("run").as_uri())
    assert page.get_by_text("JavaScript draws them, and is off here").is_visible()
    assert page.locator(".chart").first.evaluate("chart => chart.offsetHeight") == 0
    page.close()
    seen = visit(browser, reports("run"), 1280)
    assert seen.page.get_by_text("JavaScript draws them").count() == 0
    seen.page.close()


@pytest.mark.slow
def test_statements_open_and_print(browser, reports):
    seen = visit(browser, reports("comparison"), 1280)
    assert not seen.page.get_by_text("Who is protected").first.is_visible()
    seen.page.locator("summary", has_text="dpsgd_f").click()
    assert seen.page.get_by_text("Who is protected").last.is_visible()
    seen.page.emulate_media(media="print")
    assert not seen.page.locator("nav").is_visible()
    assert len(seen.page.pdf()) > 50_000
    assert seen.complaints == []
    seen.page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "comparison"])
def test_no_column_is_cut_off_where_a_page_is_printed(browser, reports, name):
    seen = visit(browser, reports(name), 717)  # A4 between margins of a centimetre
    seen.page.emulate_media(media="print")
    tables = "[...document.querySelectorAll('table')].filter(table => table.offsetWidth)"
    assert seen.page.evaluate(f"{tables}.length") > 2
    wide = (
        f"{tables}.filter(table => table.offsetWidth > table.parentElement.clientWidth).map(table => table.innerText)"
    )
    assert seen.page.evaluate(wide) == []
    seen.page.close()


@pytest.mark.slow
def test_a_long_name_of_a_grouping_stays_in_its_card(browser, sample, tmp_path):
    """A product of two columns of a table's own ran into the card beside it."""
    long = "employment_status*highest_education"
    documents = copy.deepcopy({"dpsgd": sample.documents["dpsgd"]})
    for of in (documents["dpsgd"], documents["dpsgd"]["baseline"]):
        for figures in (each for each in of.values() if isinstance(each, dict) and "sex" in each):
            figures[long] = figures.pop("sex")
    place = tmp_path / "report.html"
    place.write_text(html_report(**sample.only("dpsgd").arguments() | {"documents": documents}), encoding="utf-8")
    page = visit(browser, place, 1400).page
    assert long in page.locator(".cards").inner_text()
    cut = "[...document.querySelectorAll('.cards div')].filter(card => card.scrollWidth > card.clientWidth).length"
    assert page.evaluate(cut) == 0
    page.close()


@pytest.mark.slow
def test_groups_called_like_a_part_of_javascript_keep_their_places(browser, sample, tmp_path):
    """Plotly dropped `__proto__` and `constructor`, and every group behind them had its neighbour's name."""
    names = ("__proto__", "constructor", "Not stated")
    documents = copy.deepcopy({"dpsgd": sample.documents["dpsgd"]})
    for of in (documents["dpsgd"], documents["dpsgd"]["baseline"]):
        of["groups"] = {"sex": dict(zip(names, of["groups"]["sex"].values(), strict=True))}
    place = tmp_path / "report.html"
    place.write_text(html_report(**sample.only("dpsgd").arguments() | {"documents": documents}), encoding="utf-8")
    page = visit(browser, place, 1280).page
    drawn = page.evaluate("document.querySelector('.chart')._fullLayout.xaxis._categories")
    assert [name.strip("\N{ZERO WIDTH SPACE}") for name in drawn] == ["__proto__", "constructor", "Not stated †"]
    page.close()
