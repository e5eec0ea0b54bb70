"""Evaluation: per-group metrics, the cost of privacy, intervals over seeds. Plain functions on arrays and dicts."""
