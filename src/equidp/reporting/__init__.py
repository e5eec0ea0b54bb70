"""Reporting: tables, figures, the privacy statement, the HTML page. From results to something readable."""

from equidp.reporting.page import html_report
from equidp.reporting.privacy_report import privacy_report, tuning_epsilon
from equidp.reporting.tables import group_figures, print_table, results_table

__all__ = ["group_figures", "html_report", "print_table", "privacy_report", "results_table", "tuning_epsilon"]
