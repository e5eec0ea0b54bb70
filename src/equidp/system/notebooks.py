"""Notebooks: avoid importing IPython outside notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def without_ipython() -> Iterator[None]:
    """Within this context IPython seems not to be installed, unless the process has imported it, as notebooks have.

    If it is installed, Plotly imports it to show figures, and MLflow to find out whether this is Databricks. That costs
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
