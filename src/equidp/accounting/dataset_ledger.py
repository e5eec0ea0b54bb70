"""Data-set ledger: what all runs together cost one person, and a limit that no run may exceed.

The ledger has one JSON line for each release: a training, a tuning, or figures of a part. A line is written, durably,
before the training begins, so every training that has begun is counted. A file lock lets only one process at a time
read, decide and write. Nothing is ever removed. Each line has a check over itself and all lines before it, so a changed
or missing entry is noticed. Entries that are missing at the end, or a file that is missing, cannot be noticed. Runs in
research mode are listed and do not count, because whoever knows their seed can remove their noise.

*Which entries are of one data set.* One file holds the entries of all data sets, because two names may turn out later
to mean the same data. Every entry has several names of its data: the preset's name, the place of the raw data, a digest
of them, and the user's name for them. Entries that share any of these names are of one data set, and so are entries
that a third one connects. So a second preset, a copy of the file elsewhere, and next year's file in the same place all
count together. A file that was moved, changed and given another preset is not recognised, unless the user names it.

*The total.* A hash puts each record into one part of a split. So of the entries of one split a record pays only for
those of one part. Over splits with other keys or shares it may be in any parts, and the worst ones add up. With R_p the
Rényi divergence of everything charged to part p, the total is Σ_splits max_p R_p at every order. If all entries are
lists of events, and splits are few, every combination of parts is also composed by privacy loss distributions, and the
total is the smaller of the two figures. If records of a data set change over the years, the total is that of a person
who is in all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import dp_accounting as dp
from dp_accounting.rdp import RdpAccountant
from filelock import FileLock, Timeout

from equidp.accounting.budget import SLACK
from equidp.accounting.calibration import divergences
from equidp.accounting.epsilon import epsilon, epsilon_of
from equidp.accounting.events import Event, canonical
from equidp.accounting.limit import Limit
from equidp.accounting.trials import Trials, selected
from equidp.errors import EquidpError
from equidp.system.files import durable, private, storage_error, sync_folder

FILE = "ledger.jsonl"

NAMES = "names"
"""`what` of an entry without a release. It adds other names that a run's data have been given since the run began."""

CHECK = b', "check": "'
"""The text before an entry's check. Entries of older versions have no check."""

SECONDS = 60
"""How long a process waits for another process that holds the file."""

MOST_COMBINATIONS = 27
"""The most combinations of parts, over all splits, that are composed one by one."""


@dataclass(frozen=True)
class Entry:
    """One release from one part of one split.

    Attributes:
        run: the run's id, which all its entries share.
        what: `training`, `tuning`, `scores` or `figures`; or `NAMES`.
        algorithm: its name.
        split: name of the split; parts of one split are disjoint.
        part: `train`, `test` or `validation`.
        unit: what is protected: `record`, or a dataset's own word for a unit, which for a table is the column.
        secure: whether the entry counts.
        data: names of its data set, the preset's first; `DatasetLedger` fills them in.
        limit: the limit that the data set's runs keep; `DatasetLedger` fills it in.
        events: everything charged; under a law, the events of one trial.
        law, mean, shape, orders: as of `Trials`, if the release is the best of a random number of trials.
        order, total: a Rényi budget instead of events.

    Raises:
        ValueError: a number is NaN, which no comparison with a limit would notice.
    """

    run: str
    what: str
    algorithm: str
    split: str
    part: str
    unit: str
    secure: bool
    events: tuple[Event, ...] = ()
    law: str | None = None
    mean: float | None = None
    shape: float | None = None
    orders: tuple[float, ...] | None = None
    order: float | None = None
    total: float | None = None
    data: tuple[str, ...] = field(default=(), compare=False)
    limit: Limit | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for number in (self.mean, self.shape, self.order, self.total, *(self.orders or ())):
            if number is not None and math.isnan(number):
                raise ValueError("An entry has a NaN, which bounds nothing.")

    def to_json(self) -> str:
        """Return the entry as one JSON line."""
        facts = asdict(self) | {"events": [event.to_dict() for event in self.events]}
        if self.limit is None:  # older versions know of none
            del facts["limit"]
        return json.dumps(facts, sort_keys=True)

    @classmethod
    def from_json(cls, line: bytes) -> Entry:
        """Read a line of `to_json`."""
        facts = json.loads(line)
        facts.pop("check", None)
        orders = None if facts["orders"] is None else tuple(facts["orders"])
        events, data = tuple(map(Event.from_dict, facts["events"])), tuple(facts["data"])
        limit = Limit(**facts["limit"]) if "limit" in facts else None
        return cls(**{**facts, "events": events, "orders": orders, "data": data, "limit": limit})

    @property
    def plain(self) -> bool:
        """Whether the entry is a list of events, without a law or a budget."""
        return self.law is None and self.order is None

    def divergences(self) -> tuple[float, ...]:
        """Return Rényi divergences at all of the accountant's orders."""
        if self.order is not None:
            assert self.total is not None
            # a divergence grows with its order: below the budget's order it is no larger, above it nothing is known
            return tuple(self.total if order <= self.order else math.inf for order in _orders())
        if self.law is None:
            return divergences(self.events)
        trials = Trials(1, self.law, self.mean, self.shape, self.orders)  # type: ignore[arg-type]
        event = dp.ComposedDpEvent(tuple(one.as_dp_event() for one in canonical(self.events)))
        found = selected(event, trials)
        known = [(float(order), float(of)) for order, of in zip(found.orders, found.rdp, strict=True)]
        # for the same reason: at every order, the smallest divergence that is known at this order or a larger one
        return tuple(min((of for at, of in known if at >= order), default=math.inf) for order in _orders())


class DatasetLedger:
    """The entries of one data set, and the file that all data sets share.

    Args:
        folder: the file's folder.
        names: names of the data set, the preset's first.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self.path, self.names = folder / FILE, names

    def entries(self) -> tuple[Entry, ...]:
        """Return every entry of the data set, in order.

        Raises:
            EquidpError: a line cannot be read, or was changed.
        """
        if not self.path.is_file():
            return ()
        found, before, checked = list[Entry](), b"", False
        for number, line in enumerate(_whole(self.path.read_bytes()).splitlines(), start=1):
            try:
                body = line.rpartition(CHECK)[0] or line[:-1]
                if (checked or CHECK in line) and line != _checked(before, body):
                    raise ValueError("another line, or another line before it")
                found.append(Entry.from_json(line))
            except (ValueError, TypeError, KeyError) as error:
                raise EquidpError(
                    f"{self.path}, line {number}: the entry, or one before it, is damaged or was changed, so what was "
                    "spent cannot be told; put back a copy of the file."
                ) from error
            before, checked = line, checked or CHECK in line
        return _linked(found, self.names)

    def charge(
        self, entries: Sequence[Entry], *, delta: float, limit: float | None = None, adaptive: bool = False
    ) -> None:
        """Append what is about to happen, and return only when it is on disk.

        Args:
            entries: of one run.
            delta: δ of the limit.
            limit: the largest total ε of all entries that count, including these.
            adaptive: whether the limit is to hold even if earlier releases decide on later runs (`limit.py`).

        Raises:
            EquidpError: the limit would be exceeded, or is not the one that earlier runs keep; or the file is held,
                damaged, or cannot be written.
        """
        with self._held():
            before, count = self.entries(), any(entry.secure for entry in entries)
            kept = self._limit(before, entries, delta, limit if adaptive else None) if count else None
            filled = self._filled(entries, kept)
            if count and limit is not None:
                self._refuse_beyond(before, filled, kept.delta if kept else delta, limit)
            self._append(filled)

    def add(self, entries: Sequence[Entry]) -> None:
        """Append what has happened already, and is within no limit therefore; on disk when this returns.

        Raises:
            EquidpError: the file is held, damaged, or cannot be written.
        """
        with self._held():
            kept = next((entry.limit for entry in self.entries() if entry.limit), None)
            self._append(self._filled(entries, kept))

    def _filled(self, entries: Iterable[Entry], limit: Limit | None) -> list[Entry]:
        return [replace(entry, data=self.names, limit=limit if entry.secure else None) for entry in entries]

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=SECONDS):
                yield
        except Timeout as error:
            raise EquidpError(f"{self.path} is held by another run for {SECONDS} s: try again.") from error
        except OSError as error:
            raise EquidpError(
                f"{storage_error(self.path, error).message} This file counts what was made of the data set, and one in "
                "another folder would count from 0: let it be written here."
            ) from error

    def _limit(self, before: Sequence[Entry], more: Sequence[Entry], delta: float, asked: float | None) -> Limit | None:
        """Return the limit that the data set's runs keep, which its first secure run fixes."""
        counting = [entry for entry in before if entry.secure]
        kept = next((entry.limit for entry in counting if entry.limit), None)
        if kept is not None and any(entry.limit != kept for entry in counting):
            raise EquidpError(
                f"Two data sets in {self.path} have turned out to be one, and were begun apart, with a limit of "
                "privacy.total_adaptive=true on one or both. It does not hold for both together, so there are no more "
                "secure runs on them: take other records."
            )
        if kept is not None and asked != kept.epsilon:
            raise EquidpError(
                f"The secure runs on this data set keep a limit of {kept}, which the first of them has fixed "
                f"({self.path}): set privacy.total_adaptive=true and privacy.total_epsilon={kept.epsilon:g}."
            )
        if asked is not None and kept is None and counting:
            raise EquidpError(
                "privacy.total_adaptive=true fixes a limit before a data set's first secure run, and "
                f"{self.path} has secure runs without it: leave it out; privacy.total_epsilon alone counts them all."
            )
        if asked is None or kept is not None:
            return kept
        return Limit.fixed(asked, delta, _curve(_by_part(entry for entry in more if entry.secure)), more[0].run)

    def _refuse_beyond(self, before: Sequence[Entry], more: Sequence[Entry], delta: float, limit: float) -> None:
        spent, then = total_epsilon(before, delta), total_epsilon([*before, *more], delta)
        if then > limit * (1 + SLACK):
            raise EquidpError(
                f"privacy.total_epsilon={limit:g}: {self.path} has spent ε = {spent:.4g} at δ = {delta:g}, and with "
                f"this run it would be {then:.4g}. {more[0].algorithm} was not trained; ask for a smaller "
                "privacy.epsilon, or leave this run out. If this command has trained other algorithms, finish each of "
                "them by a pipeline of its own, with resume=true."
            )

    def _append(self, entries: Iterable[Entry]) -> None:
        with open(self.path, "a+b", buffering=0, opener=private) as file:  # closing would write a buffer once more
            file.seek(0)
            content = file.read()
            # an incomplete line after a crash was not durable, so its training had not begun
            whole = _whole(content)
            file.truncate(min(len(whole), len(content)))
            more = whole[len(content) :]  # the newline of the last line, if an editor has removed it
            before = (whole.splitlines() or [b""])[-1]
            for entry in entries:
                before = _checked(before, entry.to_json().encode()[:-1])
                more += before + b"\n"
            try:
                while more:  # a disk with little room writes only a part
                    more = more[file.write(more) :]
                durable(file.fileno())
            except OSError:
                with suppress(OSError):  # no training has begun, so entries that were written must not count
                    file.truncate(min(len(whole), len(content)))
                raise
        if not content:  # a new file, maybe in a new folder: both names must be on disk before the training begins
            sync_folder(self.path.parent)
            sync_folder(self.path.parent.parent)


def _linked(entries: Sequence[Entry], names: Iterable[str]) -> tuple[Entry, ...]:
    """Return the entries that have one of these names, or share a name with such an entry, and so on."""
    known, before = set(names), 0
    while len(known) > before:
        before = len(known)
        known.update(*(entry.data for entry in entries if not known.isdisjoint(entry.data)))
    return tuple(entry for entry in entries if not known.isdisjoint(entry.data))


def total_epsilon(entries: Iterable[Entry], delta: float) -> float:
    """Return ε at δ of all entries that count, for the person for whom it is largest; 0 if none counts.

    It is that of one order if they keep one limit (`limit.py`), which is then to be compared with it.

    Raises:
        EquidpError: the entries protect several units.
    """
    # there is no total over several units: a guarantee for one unit bounds nothing for another, because two columns of
    # ids may group the same rows in any way
    counting = [entry for entry in entries if entry.secure]
    if len(units := dict.fromkeys(entry.unit for entry in counting)) > 1:
        out = "" if any(entry.limit for entry in counting) else ", or leave privacy.total_epsilon out"  # a limit stays
        raise EquidpError(
            f"The data set's secure runs protect several units ({', '.join(units)}), whose ε have no common total: "
            f"keep to one privacy.unit{out}."
        )
    if not counting:
        return 0.0
    splits = _by_part(counting)
    curve = _curve(splits)
    limits = {entry.limit for entry in counting}
    if len(limits) == 1 and (kept := limits.pop()) is not None:
        return kept.spent(curve, delta)
    found = max(0.0, min(epsilon_of(divergence, order, delta) for order, divergence in curve.items() if order > 1))
    combinations = list(itertools.product(*(parts.values() for parts in splits)))
    plain = all(entry.plain for entry in counting)
    if not plain or len(combinations) > MOST_COMBINATIONS:
        return found
    together = ([event for of in one for entry in of for event in entry.events] for one in combinations)
    return min(found, max(epsilon(events, delta).value for events in together))


def kept_limit(entries: Iterable[Entry]) -> Limit | None:
    """Return the limit that is a guarantee for all entries that count, if there is one.

    There is none if some entries are of another limit, or of another unit, which no limit bounds. There is none either
    if they are beyond the limit, because entries were lost and have been added again.
    """
    counting = [entry for entry in entries if entry.secure]
    limits = {entry.limit for entry in counting}
    if len(limits) != 1 or (limit := limits.pop()) is None or len({entry.unit for entry in counting}) > 1:
        return None
    return limit if total_epsilon(counting, limit.delta) <= limit.epsilon * (1 + SLACK) else None


def spent_by_run(entries: Sequence[Entry], delta: float) -> list[tuple[str, float, bool, str]]:
    """Return for each run, in order: a title, its unit's total after it, whether it counts, and its unit."""
    rows, so_far = [], list[Entry]()
    releases = (entry for entry in entries if entry.what != NAMES)
    for run, of in itertools.groupby(releases, key=lambda entry: entry.run):
        own = list(of)
        so_far += own
        first, alike = own[0], [entry for entry in so_far if entry.unit == own[0].unit]
        title = " ".join((f"{first.what} of {first.algorithm}", *(f"on {name}" for name in first.data[:1]), f"({run})"))
        rows.append((title, total_epsilon(alike, delta), first.secure, first.unit))
    return rows


@dataclass(frozen=True)
class Spent:
    """Figures of a ledger for one data set and one unit.

    Attributes:
        secure: number of secure runs for the unit, which count.
        research: number of runs in research mode, which do not count.
        others: number of secure runs for other units, whose ε have no total with these.
        epsilon: total ε of the secure runs for the unit at `delta`.
        delta: δ.
        limit: the limit that is a guarantee for all secure runs, if there is one.
    """

    secure: int
    research: int
    others: int
    epsilon: float
    delta: float
    limit: Limit | None = None


def spent(entries: Sequence[Entry], delta: float, unit: str) -> Spent | None:
    """Return the figures of a data set's entries for one unit, as in its last row of `spent_by_run`.

    None if there are no entries, or if trials under a law are entered one by one. The ε of such trials does not hold
    for anybody who knows how many trials there were or which one was chosen, and these figures would tell that.
    """
    releases = [entry for entry in entries if entry.what != NAMES]
    if not releases or any(entry.what == "training" and entry.law is not None for entry in releases):
        return None
    research = {entry.run for entry in releases if not entry.secure}
    secure = {entry.run: entry.unit for entry in releases if entry.secure}
    own = sum(of == unit for of in secure.values())
    alike = [entry for entry in releases if entry.unit == unit]
    limit = kept_limit(releases) if own else None
    return Spent(own, len(research), len(secure) - own, total_epsilon(alike, delta), delta, limit)


def _by_part(entries: Iterable[Entry]) -> list[dict[str, list[Entry]]]:
    """Return the entries of every part, for every split."""
    splits: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        splits.setdefault(entry.split, {}).setdefault(entry.part, []).append(entry)
    return list(splits.values())


def _curve(splits: Iterable[Mapping[str, Sequence[Entry]]]) -> dict[float, float]:
    """Return the divergence of all entries at every order, for the person for whom it is largest."""
    worst = [_largest([_added(of) for of in parts.values()]) for parts in splits]
    return dict(zip(_orders(), (sum(at) for at in zip(*worst, strict=True)), strict=True))


def _added(entries: Iterable[Entry]) -> list[float]:
    """Return the divergences of all entries of one part together.

    If a run releases the best of several trials, a later entry of it replaces earlier ones, because it has all their
    events and more. The largest of these entries counts, once.
    """
    single: list[Sequence[float]] = []
    by_run: dict[tuple[str, str], list[Sequence[float]]] = {}
    for entry in entries:
        place = single if entry.law is None else by_run.setdefault((entry.run, entry.what), [])
        place.append(entry.divergences())
    return [sum(at) for at in zip(*single, *(_largest(of) for of in by_run.values()), strict=True)]


def _largest(curves: Sequence[Sequence[float]]) -> list[float]:
    return [max(at) for at in zip(*curves, strict=True)]


def _orders() -> tuple[float, ...]:
    return tuple(map(float, RdpAccountant().orders))


def _checked(before: bytes, body: bytes) -> bytes:
    """Return a line with a check over it and the line before it, and so over all lines before it."""
    return body + CHECK + hashlib.sha256(before + b"\n" + body).hexdigest()[:16].encode() + b'"}'


def _whole(content: bytes) -> bytes:
    """Return the content up to its last complete line. A line without a newline is complete if it fits its check."""
    end = content.rfind(b"\n") + 1
    before, last = (content[:end].splitlines() or [b""])[-1], content[end:]
    whole = last == _checked(before, last.rpartition(CHECK)[0])
    return content[:end] + (last + b"\n" if whole else b"")
