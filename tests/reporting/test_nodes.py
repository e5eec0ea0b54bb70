"""What the nodes of reporting add to a page."""

import pytest

from equidp.pipelines.reporting.nodes import comparison_of, run_report


@pytest.mark.parametrize(("options", "told"), [({"missing": "drop"}, True), ({"missing": "error"}, False), ({}, False)])
def test_the_page_says_that_incomplete_rows_are_left_out(sample, options, told):
    """Their warning is given by the run alone that encodes the table."""
    shared = ("mine", 0, {"groups": ["class"], "options": options}, {}, {}, {})
    results = (sample.documents["dpsgd"], sample.privacy["dpsgd"], sample.histories["dpsgd"])
    facts = dict.fromkeys(("source", "raw_fingerprint", "files", "version", "fingerprint"), "x")
    page = run_report(*results, sample.group_table, facts, *shared, {}, {}, {}, algorithm="dpsgd")
    compared, _ = comparison_of(["dpsgd"])(sample.group_table, facts, *shared, *results, {}, {})
    for one in (page, compared):
        assert ("are left out (data.options.missing=drop)" in one) == told


def test_a_page_tells_the_options_of_its_algorithms_and_of_the_baseline(sample):
    """On MNIST the baseline has a learning rate of its own: no page beside it said so."""
    shared = ("mine", 0, {"groups": ["class"], "options": {}}, {}, {}, {})
    results = (sample.documents["dpsgd"], sample.privacy["dpsgd"], sample.histories["dpsgd"])
    facts = dict.fromkeys(("source", "raw_fingerprint", "files", "version", "fingerprint"), "x")
    options = ({"learning_rate": 0.025}, {"clip_norm": 0.375})
    page = run_report(*results, sample.group_table, facts, *shared, {}, *options, algorithm="dpsgd")
    compared, _ = comparison_of(["dpsgd"])(sample.group_table, facts, *shared, *results, *options)
    for one in (page, compared):
        assert '<tr><th scope="row">sgd.options.learning_rate</th><td>0.025</td></tr>' in one
        assert '<tr><th scope="row">dpsgd.options.clip_norm</th><td>0.375</td></tr>' in one
