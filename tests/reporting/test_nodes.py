"""What the nodes of reporting add to a page."""

import pytest

from equidp.pipelines.reporting.nodes import comparison_of, run_report


@pytest.mark.parametrize(("options", "told"), [({"missing": "drop"}, True), ({"missing": "error"}, False), ({}, False)])
def test_the_page_says_that_incomplete_rows_are_left_out(sample, options, told):
    """Their warning is given by the run alone that encodes the table."""
    shared = ("mine", 0, {"groups": ["class"], "options": options}, {}, {}, {})
    results = (sample.documents["dpsgd"], sample.privacy["dpsgd"], sample.histories["dpsgd"])
    facts = dict.fromkeys(("source", "raw_fingerprint", "files", "version", "fingerprint"), "x")
    page = run_report(*results, sample.group_table, facts, *shared, {}, algorithm="dpsgd")
    compared, _ = comparison_of(["dpsgd"])(sample.group_table, facts, *shared, *results)
    for one in (page, compared):
        assert ("are left out (data.options.missing=drop)" in one) == told
