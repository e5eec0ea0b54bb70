"""Notebooks: sparing processes that are none of them what libraries import for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def without_ipython() -> Iterator[None]:
    """For a while, let IPython seem not to be installed, unless this process has it already, as every notebook has.

    Plotly imports it in order to show figures, and MLflow to ask whether this is Databricks, wherever it is installed:
    a third of a second for every run.
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
