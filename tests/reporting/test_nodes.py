"""What the nodes of reporting add to a page."""

from __future__ import annotations

from typing import Any

import pytest

from equidp.parameters import resolve
from equidp.pipelines.reporting.nodes import compare_algorithms, run_report

SETTINGS = resolve({"dataset": "digits", "privacy": {"epsilon": 1}})


def pages(sample: Any, settings: Any, **more: Any) -> tuple[str, str]:
    """The page of one run, and of a comparison."""
    results = (sample.documents["dpsgd"], sample.privacy["dpsgd"], sample.histories["dpsgd"])
    given = (sample.group_table, {"source": "x", **more}, settings)
    report = run_report(*given, {}, *results, algorithm="dpsgd")
    return report, compare_algorithms(*given, *results, algorithms=["dpsgd"])[0]


@pytest.mark.slow
def test_the_page_says_which_rows_are_left_out_or_clipped(sample):
    """The warning is given by the run alone that encodes the table."""
    remark = "visits.csv: 3 of 90 rows miss a feature or the label and are left out."
    for page in pages(sample, SETTINGS, remarks=[remark]):
        assert f"Of the table, before it was split: {remark}" in page
    assert all("before it was split" not in page for page in pages(sample, SETTINGS))


def test_a_page_tells_the_options_of_its_algorithms_and_of_the_baseline(sample):
    """On MNIST the baseline has a learning rate of its own: no page beside it said so."""
    given = {"sgd": {"options": {"learning_rate": 0.025}}, "dpsgd": {"options": {"clip_norm": 0.375}}}
    for page in pages(sample, resolve({"dataset": "digits", "privacy": {"epsilon": 1}, **given})):
        assert '<tr><th scope="row">sgd.options.learning_rate</th><td>0.025</td></tr>' in page
        assert '<tr><th scope="row">dpsgd.options.clip_norm</th><td>0.375</td></tr>' in page
