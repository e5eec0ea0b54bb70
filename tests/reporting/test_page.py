"""The page is one file that loads nothing, runs only its own scripts, and shows names as text."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from equidp.evaluation.metrics import metrics_document
from equidp.reporting import rendering, tables
from equidp.reporting.page import EXACT_SIZES, html_report
from equidp.reporting.released import released_page
from equidp.reporting.rendering import flat_texts, linked, whole
from equidp.reporting.titles import figure_text

from .conftest import HOSTILE


class Reader(HTMLParser):
    """Collects tags, attributes, text and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.text = ""
        self._inside: tuple[str, dict] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = (tag, dict(attrs))
            if tag == "script":
                self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag == self._inside[0]:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        elif self._inside[0] == "script":
            attrs, before = self.scripts[-1]
            self.scripts[-1] = (attrs, before + data)

    def charts(self) -> list[dict]:
        return [json.loads(text) for attrs, text in self.scripts if "data-chart" in attrs]


@pytest.fixture(scope="module")
def comparison(sample) -> str:
    return html_report(**sample.arguments())


@pytest.fixture(scope="module")
def page(comparison) -> Reader:
    return Reader(comparison)


def code_of(page: Reader) -> list[str]:
    """The scripts that run; Plotly's library is unpacked."""
    code = [(attrs, text) for attrs, text in page.scripts if "data-chart" not in attrs]
    packed = [attrs.get("id") == "library" for attrs, _ in code]
    return [
        gzip.decompress(base64.b64decode(text)).decode() if zipped else text
        for (_, text), zipped in zip(code, packed, strict=True)
    ]


def test_plotly_is_inlined_once_and_nothing_is_loaded(page):
    code = code_of(page)
    assert sum("plotly.js v" in text for text in code) == 1
    assert len(code) == 2
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert "src" not in attrs
        assert str(attrs.get("href", "#")).startswith("#")


def test_only_the_pages_own_scripts_are_allowed_to_run(page):
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "content-security-policy" in str(a).lower())
    assert "default-src 'none'" in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    code = code_of(page)
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code} == allowed
    assert "unsafe" not in policy.split("script-src")[1].split(";")[0]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_pages_of_one_folder_share_a_copy_of_plotly_and_can_be_made_whole_again(comparison, tmp_path):
    place = tmp_path / "100 % digits" / "seed=0" / "report.html"
    page = linked(comparison, place, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plotly.min.js"]
    assert len(page) < len(comparison) - 1_000_000
    (script,) = [attrs for attrs, _ in Reader(page).scripts if attrs.get("id") == "library"]
    assert script["src"] == "../../plotly.min.js"
    assert "script-src 'self' file: " in page
    assert whole(page) == comparison


def test_the_page_has_every_section_and_figure(page, sample):
    sections = {attrs.get("id") for tag, attrs in page.tags if tag == "section"}
    assert sections == {"overview", "groups", "figures", "privacy", "settings", "provenance"}
    titles = [a["aria-label"] for t, a in page.tags if a.get("class") == "chart"]
    for wanted in (
        "Accuracy by class",
        "Cost of privacy by sex",
        "Records by class",
        "Test accuracy over training",
        "Test accuracy over ε",
        "Schedules of σ",
        "Clip norm over training: dpsgd_f",
        "ε over training at δ = 1e-05: dpsgd",
        "Mean scaling weight (not private)",
    ):
        assert wanted in titles
    assert len(page.charts()) == len(titles)
    assert f"{sample.documents['dpsgd']['overall']['accuracy']:.4f}" in page.text
    assert "0123abc" in page.text
    assert "seed's worst" not in page.text
    assert "data.keep.8" in page.text


def test_small_groups_are_marked_and_the_mark_explained_wherever_they_are_shown(sample):
    arguments = sample.arguments()
    arguments["documents"] = {
        name: document | {"groups": {"sex": document["groups"]["sex"]}} for name, document in sample.documents.items()
    }
    page = Reader(html_report(**arguments))
    overview = page.text[page.text.rindex("Overview") : page.text.index("Choose a heading")]
    assert "sex:Not stated †" in overview
    assert tables.FEW_MEANS in overview
    assert "over groups of ten test records or more" in overview
    for chart in page.charts()[:3]:  # accuracy, cost, records
        assert "Not stated †" in chart["data"][0]["x"]
    # groups, the three figures and the overview
    assert page.text.count(tables.FEW_MEANS) == 5


def test_sizes_of_the_training_part_are_told_as_outside_the_guarantee_wherever_they_are_shown(sample, page):
    drawn = [a["aria-label"] for _, a in page.tags if a.get("aria-label") in ("Records by class", "Records by sex")]
    assert page.text.count(EXACT_SIZES) == 1 + len(drawn)  # the tables and each figure
    assert drawn
    without = sample.arguments() | {"group_table": sample.group_table.iloc[:0]}
    assert EXACT_SIZES not in Reader(html_report(**without)).text


@pytest.mark.slow
def test_notes_explain_what_the_tables_show(sample, page):
    assert "as Fairlearn defines them" in page.text
    assert "Of 10 groups the 4 that paid most are shown." in page.text
    by = {}
    for grouping in ("class", "sex"):
        document = sample.documents["sgd"]
        parts = {k: {g: of for g, of in document[k].items() if g == grouping} for k in ("groups", "disparity")}
        arguments = sample.arguments() | {"documents": {"sgd": document | parts}}
        by[grouping] = Reader(html_report(**arguments)).text
    assert "Differences between groups" in by["class"]
    assert "Fairlearn" not in by["class"]
    assert "that paid most" not in by["sex"]


@pytest.mark.slow
def test_captions_of_maps_say_where_the_intervals_are(sample, monkeypatch):
    monkeypatch.setattr("equidp.reporting.figures.groups.MOST_BARS", 1)
    arguments = sample.arguments()
    text = Reader(html_report(**arguments)).text
    assert "On hovering: 95 % intervals over test records." in text
    arguments["documents"] = {name: one | {"intervals": {}} for name, one in arguments["documents"].items()}
    text = Reader(html_report(**arguments)).text
    assert "On hovering" not in text
    assert "Lines are" not in text


@pytest.mark.slow
def test_captions_speak_of_the_lines_that_are_drawn(sample):
    def captions(**changes: object) -> str:
        arguments = sample.arguments()
        arguments["documents"] = {name: one | changes.get(name, {}) for name, one in sample.documents.items()}
        return Reader(html_report(**arguments)).text

    several = {"seeds": 2}
    assert "Lines are 95 % intervals over test records." in captions()
    assert "over seeds, of a single seed over test records, cut at 0 and 1." in captions(dpsgd=several)
    cost = sample.documents["dpsgd"]["cost_of_privacy"] | {"intervals": {"groups": {"sex": {"Male": [-2, 1]}}}}
    every = captions(sgd=several, dpsgd=several | {"cost_of_privacy": cost}, dpsgd_f=several)
    assert "Lines are 95 % intervals over seeds, cut at 0 and 1." in every
    assert "Lines are 95 % intervals over seeds, cut at −1 and 1." in every
    assert "an interval over seeds leaves out how much other people would change a figure." in every
    assert "other people" not in captions()
    none = {"intervals": {}}
    assert "Lines are" not in captions(sgd=none, dpsgd=none, dpsgd_f=none)


def test_where_no_seed_has_a_cost_its_interval_has_no_column_either(sample):
    arguments = sample.arguments()
    free = {"cost_of_privacy": {"overall": {"accuracy": None}, "groups": {}, "gap": {}}, "seeds": 2}
    arguments["documents"] = {name: one | (free if name != "sgd" else {}) for name, one in sample.documents.items()}
    page = html_report(**arguments)
    assert "cost±" not in page
    assert "gap±" not in page


def test_one_run_shows_its_baseline_and_its_headline(sample):
    page = Reader(html_report(**sample.only("dpsgd_f").arguments()))
    cards = page.text[page.text.rindex("Overview") : page.text.index("Choose a heading")]
    assert "ε = 2.9866" in cards
    assert "how much worse the accuracy is than the non-private baseline's" in cards
    group = sample.documents["dpsgd_f"]["worst"]["sex"]["group"]
    tested = sample.documents["dpsgd_f"]["groups"]["sex"][group]["count"]
    assert f"{group}, {tested:,} test records" in cards
    bars = next(chart for chart in page.charts() if chart["data"][0]["type"] == "bar")
    assert [trace["name"] for trace in bars["data"]] == ["sgd", "dpsgd_f"]


def test_a_page_without_privacy_says_so_first_and_speaks_of_no_cost(sample, page):
    text = Reader(html_report(**sample.only("sgd").arguments())).text
    overview = text[text.rindex("Overview") : text.index("Choose a heading")]
    assert "trained without differential privacy" in text[: text.rindex("Overview")]
    assert "trained without differential privacy" not in page.text[: page.text.rindex("Overview")]
    assert not {"ε", "cost of privacy", "gap"} & set(overview.split("\n"))
    assert "Cost of privacy" not in overview
    assert "the 4 of the lowest accuracy are shown" in overview


def test_the_headline_carries_its_intervals(sample):
    document = copy.deepcopy(sample.documents["dpsgd_f"])
    document["intervals"]["overall"] = [0.7254, 0.812]
    document["cost_of_privacy"]["intervals"] = {"overall": [0.0443, 0.1023]}
    text = Reader(html_report(**sample.only("dpsgd_f").arguments() | {"documents": {"dpsgd_f": document}})).text
    assert "0.725 to 0.812 at 95 %" in text
    assert "in accuracy; +0.044 to +0.102 at 95 %" in text


def test_a_baseline_that_guesses_is_said_as_privacy_looks_free_beside_it(sample, page):
    assert "has learnt nothing" not in page.text
    guessing = sample.documents["sgd"] | {"overall": sample.documents["sgd"]["overall"] | {"mcc": 0.0, "auroc": 0.5}}
    documents = sample.documents | {"dpsgd": sample.documents["dpsgd"] | {"baseline": guessing}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "The non-private baseline of dpsgd has learnt nothing" in text


def test_a_baseline_that_is_outdone_is_said(sample, page):
    assert "did better than the non-private baseline" not in page.text
    cost = sample.documents["dpsgd"]["cost_of_privacy"]
    better = cost | {"intervals": cost.get("intervals", {}) | {"overall": [-0.2, -0.1]}}
    documents = sample.documents | {"dpsgd": sample.documents["dpsgd"] | {"cost_of_privacy": better}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "dpsgd did better than the non-private baseline, by more than chance" in text


def test_a_model_that_diverged_is_said_and_costs_nothing_that_is_shown(sample, page):
    assert "diverged" not in page.text
    lost = copy.deepcopy(sample.documents["sgd"])
    lost["overall"] |= {"loss": None, "accuracy": 0.0, "mcc": 0.0}
    document = metrics_document({k: v for k, v in sample.documents["dpsgd"].items() if k != "cost_of_privacy"}, lost)
    text = Reader(html_report(**sample.only("dpsgd").arguments() | {"documents": {"dpsgd": document}})).text
    assert "The non-private baseline of dpsgd diverged" in text[: text.index("Choose a heading")]
    assert "how much worse the accuracy is than" not in text[: text.index("Choose a heading")]
    text = Reader(html_report(**sample.arguments() | {"documents": {"sgd": lost}})).text
    assert "The model of sgd diverged" in text[: text.index("Choose a heading")]


def test_a_baseline_that_overshot_is_said(sample, page):
    assert "equal probabilities" not in page.text
    baseline = sample.documents["dpsgd"]["baseline"]
    far = baseline | {"overall": baseline["overall"] | {"loss": 13.81}}
    documents = sample.documents | {"dpsgd": sample.documents["dpsgd"] | {"baseline": far}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert (
        "The non-private baseline of dpsgd has a test loss of 13.81, above the"
        in text[: text.index("Choose a heading")]
    )


def test_private_models_that_overshot_are_said_together(sample, page):
    """Losses of 3.4 to 11.9 at a rate ten times too large, and the page told of the baseline's alone."""
    names = [name for name in sample.documents if name != "sgd"]
    documents = {
        name: of | ({"overall": of["overall"] | {"loss": 13.81}} if name in names else {})
        for name, of in sample.documents.items()
    }
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert f"The test loss of {', '.join(names)} is above that of equal probabilities. Steps may be too long" in text


def test_a_private_model_that_guesses_is_said(sample):
    guessing = sample.documents["dpsgd"]["overall"] | {"mcc": 0.0, "auroc": 0.5}
    documents = sample.documents | {"dpsgd": sample.documents["dpsgd"] | {"overall": guessing}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "The model of dpsgd has learnt nothing" in text
    assert "The non-private baseline" not in text[: text.index("Choose a heading")]


def test_what_one_baseline_is_told_for_several_models_is_told_once(sample):
    guessing = {"overall": sample.documents["dpsgd"]["baseline"]["overall"] | {"mcc": 0.0, "auroc": 0.5}}
    documents = {
        name: of | ({"baseline": of["baseline"] | guessing} if of.get("baseline") else {})
        for name, of in sample.documents.items()
    }
    several = ", ".join(name for name, of in documents.items() if of.get("baseline"))
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "," in several
    assert text.count("The non-private baseline of") == 1
    assert f"The non-private baseline of {several} has learnt nothing: its MCC is not above 0" in text


def test_models_without_any_error_are_said(sample):
    right = sample.documents["dpsgd"]["overall"] | {"accuracy": 1.0, "count": 1601}
    documents = sample.documents | {"dpsgd": sample.documents["dpsgd"] | {"overall": right}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "dpsgd got all 1,601 records right, as where a feature tells the label" in text


def test_a_model_that_chance_explains_is_said(sample):
    lucky = sample.documents["dpsgd"]["overall"] | {"mcc": 0.01, "auroc": 0.5}
    documents = sample.documents | {"dpsgd": sample.documents["dpsgd"] | {"overall": lucky}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "dpsgd may be no better than guesses: MCC 0.01" in text


@pytest.mark.slow
def test_a_long_table_is_folded_under_its_caption_and_long_names_may_break(sample, monkeypatch):
    page = html_report(**sample.arguments())
    assert '<details class="folded">' not in page
    assert re.search(r"class:\d<", page)
    monkeypatch.setattr(rendering, "FOLDED_FROM", 8)
    monkeypatch.setattr(rendering, "SHORT", 5)
    page = html_report(**sample.arguments())
    assert re.search(r'<details class="folded">\s*<summary>By class \(10 rows\)</summary>', page)
    assert page.count("<details") == page.count("</details>")
    assert re.search(r"class:<wbr>\d<", page)


def test_a_class_without_test_records_is_said(sample, page):
    assert "No test record is of class" not in page.text
    one = sample.documents["sgd"]
    classes = one["groups"]["class"] | {"3": one["groups"]["class"]["3"] | {"count": 0}}
    documents = sample.documents | {"sgd": one | {"groups": one["groups"] | {"class": classes}}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "No test record is of class 3: the figures say nothing about it." in text


def test_research_mode_is_announced_once_and_secure_mode_is_not(sample, page):
    notes = [attrs for tag, attrs in page.tags if attrs.get("class") == "warning"]
    assert len(notes) == 2  # one seed for both algorithms; and one published figure that understates
    assert "dpsgd_f: the published formula gives" in page.text
    assert "Research mode: sampling and noise were drawn from the fixed seed 0" in page.text
    secure = {name: {**facts, "secure": True, "seed": None} for name, facts in sample.privacy.items()}
    text = Reader(html_report(**(sample.arguments() | {"privacy": secure}))).text
    assert "Research mode" not in text
    assert "This page stays inside: figures of test records" in text[: text.index("Choose a heading")]
    assert "This page stays inside" not in page.text


def test_several_doubtful_figures_are_told_in_one_sentence(sample):
    facts = {"value": 99.0, "formula": "x", "guarantee": False}
    privacy = {name: {**one, "epsilon_published": facts} for name, one in sample.privacy.items()}
    page = Reader(html_report(**(sample.arguments() | {"privacy": privacy})))
    assert len([attrs for tag, attrs in page.tags if attrs.get("class") == "warning"]) == 2  # the seed's is the other
    assert "Quote ε, not ε as published, which is no guarantee in dpsgd, dpsgd_f." in page.text


def test_a_validation_part_is_announced(sample):
    assert "figures of the validation part" not in Reader(html_report(**vars(sample))).text
    documents = {name: {**one, "evaluated_on": "validation"} for name, one in sample.documents.items()}
    text = Reader(html_report(**vars(sample) | {"documents": documents})).text
    assert text.count("These are figures of the validation part") == 1


def test_the_test_part_counts_as_looked_at_where_only_some_rows_are_of_the_validation_part(sample):
    documents = sample.documents | {"dpsgd": {**sample.documents["dpsgd"], "evaluated_on": "validation"}}
    text = Reader(html_report(**sample.arguments() | {"documents": documents})).text
    assert "The test part was not used" not in text
    assert "The figures of dpsgd are of the validation part" in text


def test_costs_against_another_baseline_are_pointed_out(sample, page):
    assert "another baseline" not in page.text
    other = {**sample.documents["sgd"], "overall": {**sample.documents["sgd"]["overall"], "accuracy": 0.5}}
    mixed = Reader(html_report(**(sample.arguments() | {"documents": {**sample.documents, "sgd": other}})))
    assert "Costs of privacy of dpsgd, dpsgd_f refer to another baseline" in mixed.text


def test_settings_of_several_rows_are_told_once_where_they_are_shared(sample):
    """Every setting had its row's whole name before it, and values were squeezed to a letter per line."""
    settings = {name: {"dataset": "digits", "privacy": {"epsilon": k}} for k, name in enumerate(sample.documents)}
    settings["dpsgd"]["dpsgd.options"] = {"clip_norm": 0.25}
    page = html_report(**sample.arguments() | {"settings": settings})
    told = page[page.index('<section id="settings">') : page.index('<section id="provenance">')]
    tables = [re.findall(r">([^<>\s][^<>]*)</", table) for table in told.split("<table")[1:]]
    assert tables == [
        ["In every row", "dataset", "digits"],
        ["sgd", "privacy.epsilon", "0"],
        ["dpsgd", "privacy.epsilon", "1", "dpsgd.options.clip_norm", "0.25"],
        ["dpsgd_f", "privacy.epsilon", "2"],
    ]


def test_settings_that_all_private_rows_share_are_told_once(sample):
    """Of 33 algorithms each said the same ε, δ and mode again: a third of a page of 24,000 pixels."""
    settings = {name: {"dataset": "digits", "algorithm": name} for name in sample.documents}
    for name in ("dpsgd", "dpsgd_f"):
        settings[name]["privacy"] = {"epsilon": 3.0, "delta": 1e-5 if name == "dpsgd" else 1e-6}
    page = html_report(**sample.arguments() | {"settings": settings})
    told = page[page.index('<section id="settings">') : page.index('<section id="provenance">')]
    assert [re.findall(r">([^<>\s][^<>]*)</", table) for table in told.split("<table")[1:]] == [
        ["In every row", "dataset", "digits"],
        ["In every private row", "privacy.epsilon", "3.0"],
        ["dpsgd", "privacy.delta", "1e-05"],
        ["dpsgd_f", "privacy.delta", "1e-06"],
    ]


def test_values_in_a_list_are_told_as_they_are_typed() -> None:
    """Of a grid with a value that is not set the page had Python's None, and its lists."""
    assert flat_texts({"grid": {"a": [None, True, [1, 2]], "b": None}}) == {"grid.a": "null, true, 1+2", "grid.b": "–"}


def test_settings_without_a_value_are_only_named(sample):
    """They were a third of the list, and what was set was hard to find among them."""
    data = {"groups": ["sex", "race"], "id": "", "keep": {}, "secure": False, "fraction": None, "tracked": "None"}
    page = html_report(**sample.arguments() | {"settings": {"data": data, "seed": 0}})
    told = page[page.index('<section id="settings">') : page.index('<section id="provenance">')]
    pairs = re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td>', told)
    assert pairs == [("data.groups", "sex, race"), ("data.secure", "false"), ("seed", "0")]
    assert "Without a value: data.id, data.keep, data.fraction, data.tracked." in told


def test_hostile_names_stay_text_everywhere(hostile, page):
    arguments = hostile.arguments()
    arguments |= {"title": HOSTILE, "settings": {HOSTILE: {"k": HOSTILE}}, "provenance": {"commit": HOSTILE}}
    text = html_report(**arguments)
    read = Reader(text)
    assert [tag for tag, _ in read.tags].count("script") == [tag for tag, _ in page.tags].count("script")
    assert "alert(1)</script>" not in text
    assert read.text.count(HOSTILE) >= 5  # shown as it is, and {{ 7 * 7 }} not evaluated
    for chart in read.charts():
        assert "<script" not in json.dumps(chart)


def test_a_page_without_histories_groups_or_privacy_still_opens(sample):
    bare = {"sgd": {"overall": sample.documents["sgd"]["overall"], "groups": {}}}
    page = Reader(html_report("bare", bare, {}, {}, {}, {}, pd.DataFrame(columns=["grouping", "group"])))
    assert "without differential privacy" in page.text
    assert page.charts() == []


def test_undefined_values_are_dashes_and_sort_last(page):
    cells = [attrs for tag, attrs in page.tags if tag == "td"]
    assert any("data-key" not in attrs and attrs.get("class") == "number" for attrs in cells)
    assert not re.findall(r"\bnan\b|\bNone\b(?! were)", page.text)


def test_the_dash_of_an_undefined_interval_stands_below_its_heading(sample):
    """Intervals are words, which stand on the left."""
    document = copy.deepcopy(sample.documents["dpsgd"])
    document["cost_of_privacy"]["intervals"] = {"groups": {"sex": {"Female": [-0.004, 0.52], "Not stated": None}}}
    text = html_report("one", {"dpsgd": document}, sample.privacy, {}, {}, {}, sample.group_table)
    header, rows = re.search(r"<caption>By sex</caption>(.*?)</thead>(.*?)</table>", text, re.DOTALL).groups()
    at = [re.sub("<.*?>", "", one) for one in re.findall("<th.*?</th>", header)].index("95 % of cost")
    cells = [re.findall(r"<t[dh].*?</t[dh]>", row)[at] for row in re.findall("<tr>.*?</tr>", rows, re.DOTALL)]
    assert any(">–<" in cell for cell in cells)
    assert not any("number" in cell for cell in cells)


@pytest.mark.parametrize(("unit", "counted"), [("record", "records"), ("patient", "patients")])
def test_noised_figures_count_what_is_protected(unit, counted):
    """A patient with several records counts once in the histogram that all of them follow from."""
    figures = {"records": 40.0, "accuracy": 0.5}
    ends = {"records": [30.0, 50.0], "accuracy": [0.4, 0.6]}
    document = {"part": "test", "epsilon": 1.0, "delta": 1e-5, "unit": unit, "notes": [], "overall": figures}
    document |= {"groups": {}, "intervals": {"overall": ends, "groups": {}}, "worst": {}}
    sentences, (table,) = released_page(document)
    assert f"10 {counted} or more" in sentences[0]
    assert table.caption == f"All {counted}"
    assert [title for title, _ in table.header] == ["", counted, "accuracy"]


@pytest.mark.parametrize(
    ("value", "beside", "shown"),
    [
        (0.84530, 0, "0.845"),
        (-9.99951, 0, "-10.000"),
        (84.1242, 0, "84.12"),
        (1598.904, 206.47, "1599"),
        (1.5, 120, "1.5"),
    ],
)
def test_a_large_figure_has_no_more_digits_than_a_small_one(value: float, beside: float, shown: str):
    """Errors in euros had seven digits, and a sweep's table one letter of a run's name in a line."""
    assert figure_text(value, 3, beside=beside) == shown
    assert figure_text(-1428.3876, 4, "+,") == "-1,428.4"
    assert figure_text(math.inf, 3) == "inf"
