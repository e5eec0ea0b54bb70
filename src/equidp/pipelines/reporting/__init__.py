"""Reports: the HTML page of one run, and the comparison of several."""

from equidp.pipelines.reporting.pipeline import create_comparison, create_ledger, create_pipeline, create_report
