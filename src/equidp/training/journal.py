"""The journal: events are written to disk before they happen, so that no crash can make the ledger forget one.

Each charge is a line, with a check over itself and all lines before it. A charge is made durable (flush, fsync)
*before* the step that it pays for. That takes milliseconds, so a block of equal events is charged ahead. What was
charged and not used is cancelled when the events change, at a checkpoint and at the end. After a crash in between, the
whole block stays charged: too much by less than one block, never too little.

A *life* is one process of a run, from its start to its end or crash. After a crash, what a resumed run owes for the
steps that it does again depends on whether they are *new releases*:

* Seeded randomness on the same device and software, with a fixed order of sums (`checkpoint.repeats`): the generators
  continue from the checkpoint, so each step done again draws the same batch and the same noise. It releases the very
  same values, which reveals no more than releasing them once. The journal's charges since the checkpoint are kept, and
  *used up* by those steps. They are never taken back: a run that stops again before it reaches the point of the crash
  still owes for what was shown before.
* Secure randomness, or another device or software: a step done again is another draw from the mechanism on the same
  data. Both draws may have been seen (live figures, a copied checkpoint), so both are charged. Seeded streams are then
  drawn anew: the same noise on sums that are rounded differently would cancel in their difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from equidp.accounting.events import Event, merged
from equidp.accounting.ledger import Ledger
from equidp.errors import EquidpError
from equidp.options import dotted
from equidp.system.files import durable, locked, private, storage_error, sync_folder, write_private

ABANDONED = "-abandoned-"
"""Part of the name of an older run's journal that was put aside when another run began anew in its folder. The file is
kept, but no run resumes from it."""

BLOCK, SHARE = 64, 8
"""`BLOCK` steps are charged ahead: one fsync for so many steps, and at most so many charged in vain by a crash. In a
run of few steps a block is at most one `SHARE`-th of them, because a crash would otherwise cost more than the run."""

SHOWN_DIFFERENCES = 6
"""The most differing settings that a refusal names."""

DIGEST = re.compile(r"'[0-9a-f]{64}'")
"""The form of a setting that is the sha256 of some content."""

CHECK_LENGTH = 16
"""Hexadecimal digits of a line's check."""


class OtherSettingsError(EquidpError):
    """The run in a folder was begun with other settings; `differing` says which, in words."""

    def __init__(self, message: str, differing: str) -> None:
        super().__init__(message)
        self.differing = differing


def block_of(steps: int) -> int:
    """How many steps a run of `steps` steps charges ahead."""
    return max(1, min(BLOCK, steps // SHARE))


class Journal:
    """An append-only file of charges and cancellations, used by one process at a time.

    Args:
        path: the file; its folder is created.
        settings: what the first line must say, so that a journal of other settings is not continued; None only reads.
        fresh: put an older journal aside under another name; it is kept, because what it charged was spent on the data.
        block: how many equal events are charged ahead.
        code: names the code that trains. The `life` of each process that ran this code has the same name in it.

    Raises:
        EquidpError: if the file is damaged, of other settings, in use, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any] | None,
        *,
        fresh: bool = False,
        block: int = BLOCK,
        code: str = "",
    ) -> None:
        self.path, self.block, self._code = path, block, code
        self.abandoned: Path | None = None
        """Where an older journal was put aside; None if there was none."""
        self._credit: Event | None = None
        self._check = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", opener=private)  # noqa: SIM115 (kept open, and locked)
        except OSError as error:
            raise storage_error(path, error) from error
        self._entries: list[dict[str, Any]] = []
        try:
            self._lock()
            if fresh:
                self._set_aside()
            self._open(settings)
        except BaseException:
            self.close()
            raise

    @property
    def lines(self) -> int:
        """How many lines the journal has: the position that a checkpoint remembers."""
        return len(self._entries)

    @property
    def lives(self) -> int:
        """How many processes of the run have begun."""
        return sum("life" in entry for entry in self._entries)

    def charge(self, event: Event) -> None:
        """Make the charge durable; returns only when it is, or when it already was."""
        credit = self._credit
        if credit is not None and _same(credit, event) and credit.count >= event.count:
            self._credit = _times(credit, credit.count - event.count)
            return
        self.settle()
        ahead = dataclasses.replace(event, count=max(self.block, event.count))
        self._write({"charge": ahead.to_dict()})
        self._credit = _times(ahead, ahead.count - event.count)

    def settle(self) -> None:
        """Cancel what was charged ahead and has not been used; call only between steps."""
        if self._credit is not None:
            self._write({"cancel": self._credit.to_dict()})
            self._credit = None

    def cancel(self, events: Iterable[Event]) -> None:
        """Cancel charges that are known never to have happened."""
        for event in events:
            self._write({"cancel": event.to_dict()})

    def begin(self, life: str) -> None:
        """Note that a process starts; `life` names what its random numbers and its rounding depend on."""
        self._write({"life": life})

    def lives_since(self, line: int) -> set[str]:
        """Every `life` that may have made charges after the first `line` lines."""
        return {entry["life"] for entry in self._entries[line:] if "life" in entry}

    def charged_since(self, line: int, carried: Iterable[Event] = ()) -> tuple[Event, ...]:
        """Charges after the first `line` lines, less the cancelled ones, in order.

        Args:
            line: the position that a checkpoint remembers.
            carried: charges from before that position that are not used up.

        Raises:
            EquidpError: if the journal has fewer lines: then it is not the journal of the checkpoint.
        """
        if line > len(self._entries):
            raise EquidpError(
                f"{self.path} has {len(self._entries)} lines where the checkpoint knew {line}: charges are missing, so "
                "the spent privacy cannot be told. Restore the file, or start again with resume=false."
            )
        charged = list(carried)
        for entry in self._entries[line:]:
            if "charge" in entry:
                charged.append(Event.from_dict(entry["charge"]))
            elif "cancel" in entry:
                _take_back(charged, Event.from_dict(entry["cancel"]))
        return merged(charged)

    def close(self) -> None:
        """Release the file."""
        # A line that the disk refused was reported when it was written. Python would try it once more, and raise again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _lock(self) -> None:
        # the run that it belonged to may have removed the file before the lock: charges written to it would be lost
        if not locked(self._file) or not _is_file_of(self.path, self._file):
            raise EquidpError(
                f"{self.path} is in use by another run of the same settings: wait for it, or give this one a run_label."
            )

    def _set_aside(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        if content:
            names = (self.path.with_name(f"{self.path.stem}{ABANDONED}{n}.jsonl") for n in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            write_private(aside, content)
            self._file.truncate(0)
            self.abandoned = aside

    def _open(self, settings: Mapping[str, Any] | None) -> None:
        self._entries = self._read()
        if settings is None:
            return
        if self._entries:
            lives = [entry["life"] for entry in self._entries if "life" in entry]
            same_code = not lives or any(self._code in life for life in lives)
            refuse_other_settings(self.path, self._entries[0]["settings"], settings, same_code=same_code)
            return
        self._write({"settings": dict(settings)})
        sync_folder(self.path.parent)

    def _read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            # a crash while writing: the charge was not yet durable, so its step had not begun
            self._file.truncate(len(whole))
        entries: list[dict[str, Any]] = []
        for number, line in enumerate(whole.splitlines(), start=1):
            check, _, body = line.decode(errors="replace").partition(" ")
            expected = self._next_check(body)
            if check != expected:
                raise EquidpError(
                    f"{self.path}, line {number}: the line is damaged or was edited, so the spent privacy cannot be "
                    "told. Restore the file, or start again with resume=false."
                )
            self._check = expected
            entries.append(json.loads(body))
        return entries

    def _write(self, entry: dict[str, Any]) -> None:
        body = json.dumps(entry)
        check = self._next_check(body)
        try:
            self._file.write(f"{check} {body}\n".encode())
            self._file.flush()
            durable(self._file.fileno())
        except OSError as error:
            raise storage_error(self.path, error) from error
        self._check = check
        self._entries.append(entry)

    def _next_check(self, body: str) -> str:
        return hashlib.sha256(f"{self._check} {body}".encode()).hexdigest()[:CHECK_LENGTH]


class JournaledLedger(Ledger):
    """A ledger whose events are in a journal first.

    Args:
        journal: where charges are made durable.
        spent: events of the steps that are done and will not be done again.
        ahead: events already charged for steps that are about to be repeated identically; those steps use them up.
    """

    def __init__(self, journal: Journal, spent: Iterable[Event] = (), ahead: Iterable[Event] = ()) -> None:
        super().__init__(spent, journal=journal.charge)
        self.journal = journal
        self._ahead = list(merged(ahead))

    def append(self, event: Event) -> None:
        """Charge an event, unless it repeats one that is charged already."""
        if self._ahead and _same(self._ahead[0], event) and self._ahead[0].count >= event.count:
            rest = _times(self._ahead[0], self._ahead[0].count - event.count)
            self._ahead[:1] = [] if rest is None else [rest]
            self._events = list(merged((*self._events, event)))
            return
        if self._ahead:
            self._leave_behind()
        super().append(event)

    def _leave_behind(self) -> None:
        """Settle what is charged ahead, because the event is another one than the next of these.

        If the earlier life was identical, its events were those of this life, so what is left of its last block was
        never used, and is cancelled. An identical life leaves less than one block. If more is left, the earlier life
        was not identical, and all that it charged stays charged.
        """
        unused = len(self._ahead) == 1 and self._ahead[0].count < self.journal.block
        if unused:
            self.journal.cancel(self._ahead)
        else:
            self._events = list(merged((*self._events, *self._ahead)))
        self._ahead = []

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything charged: for the steps done, and for those that a crashed run may have done beyond them."""
        return merged((*self._events, *self._ahead))

    @property
    def done(self) -> tuple[Event, ...]:
        """Events of the steps done."""
        return tuple(self._events)

    @property
    def ahead(self) -> tuple[Event, ...]:
        """Events charged for steps that have yet to be repeated."""
        return tuple(self._ahead)

    def finish(self) -> None:
        """Cancel charges ahead; call when the last step is done. No life can have taken steps after the last one."""
        self.journal.settle()
        self.journal.cancel(self._ahead)
        self._ahead = []


@contextlib.contextmanager
def unless_in_use(path: Path) -> Iterator[bool]:
    """Yield whether no run uses the journal `path`. If it is free, none can begin within the context.

    A missing file is made: without one to lock, a run could begin meanwhile.
    """
    with open(path, "ab", opener=private) as file:
        yield locked(file) and _is_file_of(path, file)


def _is_file_of(path: Path, file: IO[bytes]) -> bool:
    """Whether `path` still names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def refuse_other_settings(
    path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any], *, same_code: bool = True
) -> None:
    """Compare the settings that a file was written with to those that are asked for.

    After an upgrade, settings may differ that no user has touched; without `same_code` the refusal says so.

    Raises:
        OtherSettingsError: naming the settings that differ and both their values.
    """
    before, now = dotted(saved), dotted(asked)
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if not differing:
        return
    how = "; ".join(_change(key, before, now) for key in differing[:SHOWN_DIFFERENCES])
    more = f"; and {len(differing) - SHOWN_DIFFERENCES} more" if len(differing) > SHOWN_DIFFERENCES else ""
    whose, back = "with other settings", "Restore them"
    if not same_code:
        whose = "of another version of equidp or of its libraries, and with other settings"
        back = "Go on with that version and those settings"
    raise OtherSettingsError(
        f"{path} belongs to a run {whose}: {how}{more}. {back}, or start again with resume=false; a cell of a sweep "
        f"starts again once {path.parent} is moved away.",
        f"{how}{more}",
    )


def _change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say how a setting has changed. A digest is not shown: in a log, that of the records would tell who is in them."""
    values = [repr(some.get(key, "not set")) for some in (before, now)]
    if any(DIGEST.fullmatch(value) for value in values):
        return f"{key} was another, by its digest"
    return f"{key} was {values[0]} and is {values[1]}"


def _same(one: Event, other: Event) -> bool:
    return (one.sampling_rate, one.noise_multiplier) == (other.sampling_rate, other.noise_multiplier)


def _times(event: Event, count: int) -> Event | None:
    return dataclasses.replace(event, count=count) if count else None


def _take_back(charged: list[Event], cancelled: Event) -> None:
    """Remove the newest charges of the event `cancelled`.

    Raises:
        EquidpError: for more than was charged; then the file is at fault.
    """
    left = cancelled.count
    for index in range(len(charged) - 1, -1, -1):
        if left and _same(charged[index], cancelled):
            taken = min(left, charged[index].count)
            left -= taken
            rest = _times(charged[index], charged[index].count - taken)
            charged[index : index + 1] = [] if rest is None else [rest]
    if left:
        raise EquidpError("The journal cancels more than it charged; start again with resume=false.")
