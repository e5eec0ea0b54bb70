"""The one error a user should ever see: a sentence that says what is wrong, where, and what to do.

`EquidpError` is a click error, so that `kedro run` prints it as one line and exits with status 1;
in a notebook it is an ordinary exception.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

MOST_NAMES, SHOWN_NAMES = 100, 10
"""If there are more names than MOST_NAMES, only SHOWN_NAMES are shown: those most like the given one."""

UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Signs that end lines, control terminals or reverse the text after them; but not the marks that scripts need."""

LONGEST = 500
"""The most signs of a name or value that are shown and compared. If it has a million, nobody reads the rest, and
comparing it takes seconds."""

REMARK = "(raised as a result of Query-invoked autoflush"
"""Beginning of a line that SQLAlchemy puts before some reasons."""


class EquidpError(click.ClickException):
    """A refused input or setting. The message names the place and the remedy."""


def refuse_unknown(kind: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raise `unknown_name` for the first of `given` that is not among `valid`."""
    valid = tuple(valid)
    for name in given:
        if name not in valid:
            raise unknown_name(kind, name, valid)


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> EquidpError:
    """Build the error for a name that does not exist, naming the nearest valid one.

    `kind` is what the name stands for, as a user would say it ("dataset", "setting").
    """
    between = ": " if kind.endswith("'") else " "  # not two quoted names in a row
    return EquidpError(f"Unknown {kind}{between}{shortened(str(name))!r}.{_nearest(name, valid)}")


def missing_column(where: str, name: object, present: Iterable[str], more: Iterable[str] = ()) -> EquidpError:
    """Build the error for a table that lacks a column and those of `more`; it names the nearest column of the table.

    `where` is the table: its file, or the user's word for it.
    """
    others = "".join(f", nor {shortened(str(other))!r}" for other in more)
    found = _nearest(name, present, "It has")
    return EquidpError(f"No column {shortened(str(name))!r} in {where}{others}.{found}")


def shortened(text: str) -> str:
    """A text for a message; only the beginning of a long text."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} signs)"


def listed_names(names: Iterable[str]) -> str:
    """Names in a row. A name with a comma, which would read as two, or with unshown signs is put in quotes."""
    return ", ".join(repr(name) if "," in name or UNSHOWN.search(name) else name for name in map(shortened, names))


def nearest(name: object, valid: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the valid name that is most like `name`; None if no name is like it. `cutoff` is difflib's."""
    found = _most_like(name, list(valid), 1, cutoff)
    return found[0] if found else None


def _most_like(name: object, names: list[str], most: int, cutoff: float) -> list[str]:
    """Return the `names` that are like `name`, the most alike first. Capital letters do not matter."""
    spelt = {folded.casefold(): folded for folded in reversed(names)}
    found = difflib.get_close_matches(str(name)[:LONGEST].casefold(), spelt, n=most, cutoff=cutoff)
    return [spelt[folded] for folded in found]


def _nearest(name: object, valid: Iterable[str], heading: str = "Valid") -> str:
    names = sorted(map(str, valid))
    near = nearest(name, names, cutoff=0.4)
    hint = f" Did you mean {near!r}?" if near else ""
    shown, more = names, ""
    if len(names) > MOST_NAMES:
        shown = _most_like(name, names, SHOWN_NAMES, 0.0)
        more = f" and {len(names) - SHOWN_NAMES:,} more"
    return f"{hint} {heading}: {listed_names(shown) or 'none'}{more}."


def without_password(text: str) -> str:
    """Hide the password of each address in a text, such as `http://me:secret@host`, because logs are passed on.

    The name before the password may have an `@`, as Azure's names have. Drivers of databases take a password after `?`
    too.
    """
    text = re.sub(r"(://[^/:\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"(?i)((?:password|passwd|pwd)(?:=|%3d))(?:(?!%3b)[^&;\s])+", r"\1***", text)


def first_line(error: BaseException) -> str:
    """Return the name of an exception's type and the first line of its message; without a message, only the name.

    Passwords in addresses are hidden, because libraries name the whole address that failed.
    """
    text = [line for line in without_password(str(error)).strip().splitlines() if not line.startswith(REMARK)]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextmanager
def credentials_told() -> Iterator[None]:
    """Within, Kedro's KeyError on credentials that an entry of the catalog names and no file has becomes a sentence."""
    try:
        yield
    except KeyError as error:
        found = re.match(r"Unable to find credentials '(.*?)':", str(error.args[0] if error.args else ""))
        if found is None:
            raise
        raise EquidpError(
            f"An entry of the catalog names the credentials {found[1]!r}, which no file of settings has: write them "
            f"into conf/local/credentials.yml, such as `{found[1]}: {{con: sqlite:///data/01_raw/clinic.sqlite}}`, or "
            "take the entry out."
        ) from error
