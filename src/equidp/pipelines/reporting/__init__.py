"""Reports: the HTML page of one run, and the comparison of several."""

from equidp.pipelines.reporting.pipeline import create_comparison as create_comparison
from equidp.pipelines.reporting.pipeline import create_pipeline as create_pipeline
from equidp.pipelines.reporting.pipeline import create_report as create_report
