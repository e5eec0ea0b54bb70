"""Notebooks: avoid importing IPython outside notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def without_ipython() -> Iterator[None]:
    """During the block IPython seems not to be installed, unless this process has imported it, as every notebook has.

    If it is installed, Plotly imports it to show figures, and MLflow to ask whether this is Databricks. That costs
    every run a third of a second.
    """
    modules = cast("dict[str, Any]", sys.modules)
    if "IPython" in modules:
        yield
        return
    modules["IPython"] = None
    try:
        yield
    finally:
        del modules["IPython"]
