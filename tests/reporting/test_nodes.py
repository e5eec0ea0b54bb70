"""What the nodes of reporting add to a page."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from equidp.parameters import DataSettings, resolve
from equidp.pipelines.reporting.nodes import compare_algorithms, run_report

SETTINGS = resolve({"dataset": "digits", "privacy": {"epsilon": 1}})


def pages(sample: Any, settings: Any) -> tuple[str, str]:
    """The page of one run, and of a comparison."""
    results = (sample.documents["dpsgd"], sample.privacy["dpsgd"], sample.histories["dpsgd"])
    given = (sample.group_table, {"source": "x"}, settings, *results)
    return run_report(*given, algorithm="dpsgd"), compare_algorithms(*given, algorithms=["dpsgd"])[0]


@pytest.mark.parametrize(("options", "told"), [({"missing": "drop"}, True), ({"missing": "error"}, False), ({}, False)])
def test_the_page_says_that_incomplete_rows_are_left_out(sample, options, told):
    """Their warning is given by the run alone that encodes the table."""
    settings = dataclasses.replace(SETTINGS, data=DataSettings(options=options))
    for page in pages(sample, settings):
        assert ("are left out (data.options.missing=drop)" in page) == told


def test_a_page_tells_the_options_of_its_algorithms_and_of_the_baseline(sample):
    """On MNIST the baseline has a learning rate of its own: no page beside it said so."""
    given = {"sgd": {"options": {"learning_rate": 0.025}}, "dpsgd": {"options": {"clip_norm": 0.375}}}
    for page in pages(sample, resolve({"dataset": "digits", "privacy": {"epsilon": 1}, **given})):
        assert '<tr><th scope="row">sgd.options.learning_rate</th><td>0.025</td></tr>' in page
        assert '<tr><th scope="row">dpsgd.options.clip_norm</th><td>0.375</td></tr>' in page
