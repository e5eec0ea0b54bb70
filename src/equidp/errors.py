"""The one error a user should ever see: a sentence that says what is wrong, where, and what to do.

`EquidpError` is a click error, so that `kedro run` prints it as one line and exits with status 1;
in a notebook it is an ordinary exception.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click


class EquidpError(click.ClickException):
    """A refused input or setting. The message names the place and the remedy."""


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> EquidpError:
    """Build the error for a name that does not exist, naming the nearest valid one.

    Args:
        kind: what the name stands for, as a user would say it ("dataset", "setting").
        name: what was given.
        valid: every name that would have been accepted.
    """
    names = sorted(map(str, valid))
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(names) if names else "none"
    return EquidpError(f"Unknown {kind} {str(name)!r}.{hint} Valid: {listed}.")
