"""The journal: durable before the step, whole or refused afterwards, never too little."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from equidp.accounting.events import Event, merged
from equidp.errors import EquidpError
from equidp.system import files
from equidp.system.files import storage_error
from equidp.training import conclusion
from equidp.training.journal import Journal, JournaledLedger, unless_in_use

SETTINGS = {"seed": 1, "training": {"batch_size": 64}}
GRADIENT, COUNT = Event(0.01, 1.0), Event(1.0, 20.0)
LOUDER = Event(0.01, 1.0 - 1e-9)
"""The next step of a schedule that falls by next to nothing: another event, which no charge for GRADIENT pays for."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    opened = Journal(path, SETTINGS, block=4)
    yield opened
    opened.close()


def _times(event: Event, count: int) -> Event:
    return Event(event.sampling_rate, event.noise_multiplier, count)


def _reopened(path: Path) -> tuple[Event, ...]:
    again = Journal(path, SETTINGS, block=4)
    charged = again.charged_since(0)
    again.close()
    return charged


def test_a_block_is_on_disk_before_its_first_step(journal: Journal, path: Path) -> None:
    journal.charge(GRADIENT)
    journal.close()  # as a crash would, in the middle of the first step
    assert _reopened(path) == (_times(GRADIENT, 4),)


def test_one_line_per_block(journal: Journal) -> None:
    before = journal.lines
    for _ in range(8):
        journal.charge(GRADIENT)
    assert journal.lines - before == 2


def test_settling_leaves_what_was_used(journal: Journal, path: Path) -> None:
    for _ in range(6):
        journal.charge(GRADIENT)
    journal.settle()
    journal.settle()
    journal.close()
    assert _reopened(path) == (_times(GRADIENT, 6),)


def test_a_change_of_events_settles_the_block_before(journal: Journal, path: Path) -> None:
    for event in (COUNT, GRADIENT, GRADIENT, COUNT):
        journal.charge(event)
    journal.settle()
    journal.close()
    assert _reopened(path) == (COUNT, _times(GRADIENT, 2), COUNT)


def test_what_was_charged_ahead_pays_for_no_other_noise(journal: Journal, path: Path) -> None:
    for event in (GRADIENT, LOUDER, LOUDER, GRADIENT):
        journal.charge(event)
    journal.close()  # as a crash would
    assert _reopened(path) == (GRADIENT, _times(LOUDER, 2), _times(GRADIENT, 4))


def test_an_event_larger_than_a_block(journal: Journal, path: Path) -> None:
    journal.charge(GRADIENT)
    journal.charge(_times(GRADIENT, 10))
    journal.settle()
    journal.close()
    assert _reopened(path) == (_times(GRADIENT, 11),)


def test_charges_since_a_position(journal: Journal) -> None:
    journal.charge(COUNT)
    journal.settle()
    position = journal.lines
    journal.charge(GRADIENT)
    journal.settle()
    assert journal.charged_since(position) == (GRADIENT,)
    assert journal.charged_since(position, carried=[COUNT]) == (COUNT, GRADIENT)


def test_lives_since_a_position(journal: Journal) -> None:
    journal.begin("one")
    position = journal.lines
    journal.begin("two")
    assert journal.lives_since(0) == {"one", "two"}
    assert journal.lives_since(position) == {"two"}


def test_never_less_than_what_was_used_wherever_it_ends(tmp_path: Path) -> None:
    # 60 random histories of charges and settlements, each cut at a random moment without any goodbye
    chance = random.Random(7)
    for case in range(60):
        path = tmp_path / f"{case}.jsonl"
        journal, used = Journal(path, SETTINGS, block=chance.choice([1, 3, 16])), {GRADIENT: 0, COUNT: 0}
        for _ in range(chance.randrange(25)):
            event = chance.choice([GRADIENT, GRADIENT, GRADIENT, COUNT])
            journal.charge(event)
            used[event] += 1
            if chance.random() < 0.2:
                journal.settle()
        block = journal.block
        journal.close()
        charged = _reopened(path)
        for event, count in used.items():
            found = sum(e.count for e in charged if e.noise_multiplier == event.noise_multiplier)
            assert count <= found < count + block


def test_a_torn_last_line_is_a_charge_that_never_was(journal: Journal, path: Path) -> None:
    journal.charge(GRADIENT)
    journal.settle()
    journal.charge(COUNT)
    journal.close()
    whole = path.read_bytes()
    last = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
    for cut in range(len(last), len(whole)):
        path.write_bytes(whole[:cut])
        assert _reopened(path) == (GRADIENT,)
        assert path.read_bytes() == last  # and the next line will begin at a line's beginning


def test_a_continued_journal_goes_on_checking(journal: Journal, path: Path) -> None:
    journal.charge(COUNT)
    journal.close()
    again = Journal(path, SETTINGS)
    again.charge(GRADIENT)
    again.settle()
    again.close()
    assert _reopened(path) == (_times(COUNT, 4), GRADIENT)


@pytest.mark.parametrize("edit", [(b'"count": 4', b'"count": 1'), (b"0.01", b"0.02"), (b"charge", b"cancel")])
def test_an_edited_line_is_refused(journal: Journal, path: Path, edit: tuple[bytes, bytes]) -> None:
    journal.charge(GRADIENT)
    journal.charge(COUNT)
    journal.close()
    path.write_bytes(path.read_bytes().replace(*edit, 1))
    with pytest.raises(EquidpError, match=r"line 2.*damaged or was edited"):
        Journal(path, SETTINGS)


def test_a_removed_or_swapped_line_is_refused(journal: Journal, path: Path) -> None:
    for event in (GRADIENT, COUNT, GRADIENT):
        journal.charge(event)
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (lines[:1] + lines[2:], [lines[0], lines[2], lines[1], *lines[3:]]):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(EquidpError, match="damaged or was edited"):
            Journal(path, SETTINGS)


def test_a_shortened_journal_does_not_satisfy_its_checkpoint(journal: Journal) -> None:
    with pytest.raises(EquidpError, match="charges are missing"):
        journal.charged_since(journal.lines + 1)


def test_more_is_not_taken_back_than_was_charged(journal: Journal) -> None:
    journal.charge(GRADIENT)
    journal.settle()
    journal.cancel([_times(GRADIENT, 2)])
    with pytest.raises(EquidpError, match="cancels more than it charged"):
        journal.charged_since(0)


def test_what_is_taken_back_is_of_the_same_noise_wherever_it_was_charged(journal: Journal, path: Path) -> None:
    """The last charge is another one: taken back in its place, a release would be paid by one of more noise."""
    for event in (_times(GRADIENT, 4), LOUDER, _times(COUNT, 4)):
        journal.charge(event)
    journal.settle()
    journal.cancel([_times(GRADIENT, 3), _times(COUNT, 1)])
    journal.close()
    assert _reopened(path) == (GRADIENT, LOUDER, _times(COUNT, 3))


def test_other_settings_are_refused_with_the_difference(journal: Journal, path: Path) -> None:
    journal.close()
    with pytest.raises(EquidpError, match=r"training\.batch_size was 64 and is 128; training\.epochs was 'not set'"):
        Journal(path, {"seed": 1, "training": {"batch_size": 128, "epochs": 3}})


def test_a_fresh_start_keeps_the_old_charges_under_another_name(journal: Journal, path: Path) -> None:
    journal.charge(GRADIENT)
    journal.close()
    for number in (1, 2):
        Journal(path, SETTINGS, fresh=True).close()
        assert (path.parent / f"journal-abandoned-{number}.jsonl").exists()
    assert _reopened(path) == ()
    assert _reopened(path.parent / "journal-abandoned-1.jsonl") == (_times(GRADIENT, 4),)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere the system makes names durable itself")
def test_a_fresh_start_has_the_old_charges_on_disk_before_it_forgets_them(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.charge(GRADIENT)
    journal.close()
    old, synced = path.read_bytes(), list[tuple[bool, bool]]()

    def listen(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.read_bytes() == old))

    for module in ("training.journal", "system.files"):  # the second makes names durable
        monkeypatch.setattr(f"equidp.{module}.durable", listen)
    Journal(path, SETTINGS, fresh=True).close()
    assert synced[:2] == [(False, True), (True, True)]  # their new file, then its name


def test_two_runs_do_not_share_a_folder(journal: Journal, path: Path) -> None:
    with pytest.raises(EquidpError, match="in use by another run"):
        Journal(path, SETTINGS)


def test_no_run_begins_in_a_folder_while_it_is_forgotten_whether_or_not_it_has_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    conclusion.forget(path.parent)  # there is nothing yet
    assert not path.parent.exists()
    path.parent.mkdir()
    refused = []

    def meanwhile(_: Path) -> None:
        with pytest.raises(EquidpError, match="in use by another run"):
            Journal(path, SETTINGS)
        refused.append(True)

    monkeypatch.setattr(conclusion, "remove_kept", meanwhile)
    conclusion.forget(path.parent)
    assert refused
    assert not path.exists()
    with contextlib.closing(Journal(path, SETTINGS, block=1)) as begun:
        begun.charge(GRADIENT)
        conclusion.forget(path.parent)  # another run is at work there
    assert _reopened(path) == (GRADIENT,)


def test_a_folder_may_be_forgotten_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal that one made to lock was removed by the other, and the run ended in an error."""
    path = tmp_path / "journal.jsonl"
    begun = unless_in_use

    def meanwhile(journal: Path) -> contextlib.AbstractContextManager[bool]:
        monkeypatch.setattr(conclusion, "unless_in_use", begun)
        conclusion.forget(tmp_path)
        return begun(journal)

    monkeypatch.setattr(conclusion, "unless_in_use", meanwhile)
    conclusion.forget(tmp_path)
    assert not path.exists()


def test_a_journal_in_use_is_told_from_one_that_is_not(journal: Journal, path: Path) -> None:
    with unless_in_use(path) as free:
        assert not free
    journal.close()
    with unless_in_use(path) as free:
        assert free
        with pytest.raises(EquidpError, match="in use"):
            Journal(path, SETTINGS)  # none begins while somebody tidies up


def test_a_journal_that_is_removed_as_it_is_opened_is_no_place_for_charges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before, which tidies up: a lock on a file without a name would keep nobody out."""
    pytest.importorskip("fcntl")
    path, flock = tmp_path / "journal.jsonl", files.fcntl.flock

    def removed_first(file: IO[bytes], how: int) -> None:
        path.unlink()
        flock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", removed_first)
    with pytest.raises(EquidpError, match="in use"):
        Journal(path, SETTINGS)


def test_a_full_disk_stops_the_step(journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.charge(GRADIENT)
    journal.settle()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ledger = JournaledLedger(journal)
    with pytest.raises(EquidpError, match="disk is full; free some space"):
        ledger.append(COUNT)
    assert ledger.events == ()


@contextlib.contextmanager
def no_room(path: Path) -> Iterator[None]:
    """No file may grow beyond the length of this journal; what is written above it is refused, as by a full disk.

    For a block and not for a test, after which pytest writes: to a file, where its output goes to one.
    """
    resource = pytest.importorskip("resource", reason="limits are a matter of POSIX")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size - 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_really_full_is_told_in_a_sentence(journal: Journal, path: Path) -> None:
    """Closing writes what is left in a buffer, once more in vain, and that error would hide the sentence."""
    with no_room(path), pytest.raises(EquidpError, match="Cannot write"), contextlib.closing(journal):
        journal.charge(GRADIENT)


def test_without_room_for_the_old_charges_they_stay_where_they_are(journal: Journal, path: Path) -> None:
    journal.close()
    before = path.read_bytes()
    with no_room(path), pytest.raises(EquidpError, match="Cannot write"):
        Journal(path, SETTINGS, fresh=True)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EquidpError, match="Cannot write"):
        Journal(tmp_path / "file" / "journal.jsonl", SETTINGS)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EROFS, "read-only"), (errno.EACCES, "not allowed"), (errno.EDQUOT, "quota"), (errno.EIO, "output error")],
)
def test_every_refusal_of_the_disk_has_its_remedy(number: int, remedy: str) -> None:
    assert remedy in storage_error(Path("x"), OSError(number, os.strerror(number))).message


class TestJournaledLedger:
    """What repeated steps owe."""

    def test_repeated_steps_use_up_what_is_charged(self, journal: Journal) -> None:
        ledger = JournaledLedger(journal, spent=[_times(GRADIENT, 5)], ahead=[_times(GRADIENT, 3), COUNT])
        lines = journal.lines
        assert ledger.events == (_times(GRADIENT, 8), COUNT)
        for _ in range(2):
            ledger.append(GRADIENT)
        assert ledger.events == (_times(GRADIENT, 8), COUNT)
        assert (ledger.done, ledger.ahead) == ((_times(GRADIENT, 7),), (GRADIENT, COUNT))
        for event in (GRADIENT, COUNT, GRADIENT):
            ledger.append(event)
        assert ledger.events == (_times(GRADIENT, 8), COUNT, GRADIENT)
        assert journal.lines == lines + 1

    @pytest.mark.parametrize(
        "event", [LOUDER, Event(0.02, 1.0), _times(GRADIENT, 6)], ids=["noise", "rate", "more at once"]
    )
    def test_repeated_steps_use_up_nothing_that_was_charged_for_another_event(
        self, journal: Journal, event: Event
    ) -> None:
        ledger = JournaledLedger(journal, ahead=[_times(GRADIENT, 4)])
        ledger.append(event)
        assert ledger.events == merged((_times(GRADIENT, 4), event))

    @pytest.mark.parametrize("ahead", [[_times(GRADIENT, 4)], [GRADIENT, _times(COUNT, 2)]])
    def test_another_event_is_charged_on_top(self, journal: Journal, ahead: list[Event]) -> None:
        # a whole block, or two different events: no identical life could have left those
        ledger = JournaledLedger(journal, ahead=ahead)
        ledger.append(COUNT)
        ledger.append(GRADIENT)
        assert ledger.events == (*ahead[:-1], *merged([ahead[-1], COUNT]), GRADIENT)

    def test_the_unused_rest_of_a_block_is_given_back(self, journal: Journal, path: Path) -> None:
        journal.charge(GRADIENT)
        journal.close()  # the run dies in this step, or before the next event: a block of 4 is charged
        again = Journal(path, SETTINGS, block=4)
        ledger = JournaledLedger(again, ahead=again.charged_since(0))
        assert ledger.events == (_times(GRADIENT, 4),)
        ledger.append(GRADIENT)
        ledger.append(COUNT)
        assert ledger.events == (GRADIENT, COUNT)
        again.settle()
        again.close()
        assert _reopened(path) == (GRADIENT, COUNT)

    def test_a_finished_run_gives_back_what_cannot_have_happened(self, journal: Journal, path: Path) -> None:
        journal.charge(_times(GRADIENT, 7))
        journal.settle()
        ledger = JournaledLedger(journal, ahead=journal.charged_since(0))
        for _ in range(5):
            ledger.append(GRADIENT)
        ledger.finish()
        assert ledger.events == (_times(GRADIENT, 5),)
        journal.close()
        assert _reopened(path) == (_times(GRADIENT, 5),)


def test_a_run_of_another_version_is_not_said_to_have_other_settings_alone(path: Path) -> None:
    """After an upgrade settings differ that no user has touched, and nobody could restore them."""
    begun = Journal(path, SETTINGS, code="older")
    begun.begin("seeded, older")
    begun.close()
    asked = SETTINGS | {"classes": 0}
    with pytest.raises(
        EquidpError, match=r"of another version of equidp .* classes was 'not set' and is 0\. Go on with"
    ):
        Journal(path, asked, code="newer")
    with pytest.raises(EquidpError, match=r"run with other settings: .* Restore them, .* a cell of a sweep") as refused:
        Journal(path, asked, code="older")
    assert str(path.parent) in str(refused.value)
