"""Reporting: tables, figures, the privacy statement, the HTML page. From results to something readable."""
