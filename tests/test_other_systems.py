"""Windows and macOS, imitated on Linux: nothing here was run on either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.end_to_end.kedro_project import QUICK, bootstrapped, kedro_run, mlflow_runs, report_folder

from equidp.cli import project_at
from equidp.errors import EquidpError
from equidp.mechanism.noise import SeededRandom
from equidp.models.weights import Weights, load_weights, save_weights
from equidp.parameters import TrainingSettings
from equidp.sweep.command import run_command
from equidp.system import files, interrupts
from equidp.training import checkpoint, forget
from equidp.training.journal import Journal, unless_in_use
from equidp.training.preparation import device_of

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = """
import builtins, importlib, multiprocessing.reduction, os, pkgutil, signal, sys
import distributed, torch.distributed.launcher.api  # theirs stays theirs

POSIX_ALONE = {"fcntl", "resource", "pwd", "grp", "termios"}
load = builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    if name in POSIX_ALONE and (globals or {}).get("__name__", "").startswith("equidp"):
        raise ImportError(name)
    return load(name, globals, locals, fromlist, level)

builtins.__import__ = without
for place, names in (
    (os, ("setsid",)),
    (signal, ("SIGKILL", "SIGHUP")),
    (multiprocessing.reduction, ("DupFd",)),
):
    for name in names:
        delattr(place, name)
import equidp

for module in pkgutil.walk_packages(equidp.__path__, "equidp."):
    if not module.name.endswith(("__main__", "served_model")):
        importlib.import_module(module.name)
"""


@pytest.mark.slow
def test_every_module_is_imported_without_what_posix_alone_has() -> None:
    """A single one that is not would end every `kedro` command on Windows."""
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's name, for whoever asks."""
    monkeypatch.setattr(sys, "platform", "win32")


@pytest.fixture
def kept_while_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is removed or replaced while this process has it open or mapped."""

    def guarded(call: Any, which: int) -> Any:
        def attempt(*paths: Any, **how: Any) -> Any:
            target = os.path.realpath(paths[which])
            if os.path.isfile(target) and target in _held():
                raise PermissionError(13, "The process cannot access the file because it is being used", target)
            return call(*paths, **how)

        return attempt

    for name, which in (("unlink", 0), ("remove", 0), ("replace", 1), ("rename", 1)):
        monkeypatch.setattr(os, name, guarded(getattr(os, name), which))


def _held() -> set[str]:
    """Files that this process has open or mapped."""
    opened = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            opened.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the listing's own
            continue
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return opened | {parts[5] for parts in mapped if len(parts) == 6}


needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of open files on this system")


@needs_proc
@pytest.mark.slow
def test_a_run_leaves_nothing_open_that_it_removes(project: Path, kept_while_open: None, monkeypatch) -> None:
    monkeypatch.setattr("equidp.training.conclusion.sys", SimpleNamespace(platform="win32"))
    for _ in range(2):  # the second one replaces the first one's results
        kedro_run(project, "dpsgd", **QUICK)
    assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED", "FINISHED"]
    assert (report_folder(project, "dpsgd") / "metrics.json").is_file()
    assert not list((project / "data" / "06_models").rglob("journal*.jsonl"))
    assert not list((project / "data" / "06_models").rglob("checkpoint*"))


@needs_proc
def test_what_was_read_from_a_checkpoint_does_not_keep_its_file(tmp_path: Path, kept_while_open: None) -> None:
    path, state = tmp_path / "checkpoint.safetensors", {"weight": torch.arange(4000.0)}
    content = {"state": state, "history": [], "done": [], "ahead": [], "journal_lines": 0, "life": ""}
    checkpoint.write_checkpoint(path, content, {})
    saved = checkpoint.read_checkpoint(path, {})
    checkpoint.write_checkpoint(path, content, {})
    assert saved.state["weight"].equal(state["weight"])


@needs_proc
def test_what_was_read_from_a_models_file_does_not_keep_it(tmp_path: Path, kept_while_open: None) -> None:
    kept, weights = tmp_path / "model.safetensors", {"weight": torch.arange(4000.0)}
    save_weights(Weights(weights, {}), kept)
    loaded = load_weights(kept)
    save_weights(Weights(weights, {}), kept)
    assert loaded.tensors["weight"].equal(weights["weight"])


@needs_proc
def test_a_journal_that_another_run_has_opened_again_is_not_forgotten(
    tmp_path: Path, kept_while_open: None, windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows removes no open file: a run that begins between the lock's end and the removal keeps its charges."""
    path = tmp_path / "journal.jsonl"
    Journal(path, {}).close()
    began: list[Journal] = []
    unlink = Path.unlink

    def begun_first(self: Path, missing_ok: bool = False) -> None:
        if self == path and not began:
            began.append(Journal(path, {}))
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", begun_first)
    forget(tmp_path)
    assert path.exists()
    began[0].close()
    forget(tmp_path)
    assert not path.exists()


def test_a_file_that_is_open_elsewhere_is_told_of(tmp_path: Path, windows: None) -> None:
    with pytest.raises(EquidpError, match="another program has it open"), files.replacing(tmp_path / "table.csv"):
        raise PermissionError(13, "Permission denied")


@pytest.fixture
def locked_bytes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """`msvcrt` instead of `fcntl`: what is locked, as a file's number and the byte."""
    held: set[tuple[int, int]] = set()

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        byte = (os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR))
        assert byte[1] <= 2**31 - 2  # it counts in 32 bits
        if byte in held:
            raise PermissionError(13, "Permission denied")
        held.add(byte)

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    return held


def test_a_byte_that_nobody_reads_is_locked_where_there_is_no_flock(tmp_path: Path, locked_bytes: set) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"seed": 0})
    assert all(byte > path.stat().st_size for _, byte in locked_bytes)
    with pytest.raises(EquidpError, match="in use by another run"):
        Journal(path, {"seed": 0})
    with unless_in_use(path) as free:
        assert not free
    journal.begin("one")
    journal.close()
    locked_bytes.clear()  # as the system does once a file is closed
    with closing(Journal(path, {"seed": 0})) as again:
        assert again.lives == 1
    assert path.stat().st_size < 200  # written where it ends, not where it is locked


@pytest.mark.parametrize("mode", ["rb", "ab", "a+b"])
def test_a_lock_leaves_a_file_where_it_stands(tmp_path: Path, locked_bytes: set, mode: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc\ndef\n")
    with path.open(mode) as file:
        place = file.tell()
        assert files.locked(file)
        assert file.tell() == place
    assert path.read_bytes() == b"abc\ndef\n"


def test_a_sweep_is_refused_before_anything_is_made_but_its_commands_are_printed(
    project: Path, windows: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrapped(project)
    asked: dict[str, Any] = dict.fromkeys(("epsilons", "workers", "scheduler", "gpus_per_cell"))
    asked |= {"algorithms": "dpsgd", "datasets": "digits", "seeds": "1", "params": ""}
    asked |= {"dashboard": 0, "retries": 1, "listing": False}
    run_command(project_at(project), None, dry_run=True, **asked)
    assert "kedro run --pipeline=dpsgd" in capsys.readouterr().out
    with pytest.raises(EquidpError, match="which Windows cannot do: use WSL, or"):
        run_command(project_at(project), None, dry_run=False, **asked)
    assert not (project / "data" / "08_reporting").exists()


def test_several_processes_are_refused_on_windows(windows: None) -> None:
    device_of(TrainingSettings(devices=1, device="cpu"))
    with pytest.raises(EquidpError, match="several processes do not train together on Windows"):
        device_of(TrainingSettings(devices=2, device="cpu"))


def test_an_interrupt_that_was_lost_does_not_end_the_process_on_windows(
    windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There `os.kill` is the end, whatever the number."""
    heard = threading.Event()
    monkeypatch.setattr(os, "kill", None)
    monkeypatch.setattr(signal, "raise_signal", lambda number: number == signal.SIGINT and heard.set())
    interrupts._Again(lambda lost: None)(SimpleNamespace(exc_type=KeyboardInterrupt, exc_value=None))
    assert heard.wait(10)


def test_another_version_of_a_system_that_does_not_name_its_c_library_is_another_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint.platform, "libc_ver", lambda: ("", ""))
    lives = set()
    for version in ("Darwin Kernel Version 24.1.0", "Darwin Kernel Version 25.0.0"):
        monkeypatch.setattr(checkpoint.platform, "version", lambda version=version: version)
        lives.add(checkpoint.life_of(SeededRandom(0, "cpu")))
    assert len(lives) == 2


@pytest.mark.parametrize("known", [True, False])
def test_a_charge_reaches_apples_disks_themselves(tmp_path: Path, monkeypatch, known: bool) -> None:
    asked: list[str] = []

    def control(descriptor: int, command: int) -> None:
        asked.append(f"control {command}")
        if not known:
            raise OSError(45, "Operation not supported")

    lock = {"flock": lambda *_: None, "LOCK_EX": 2, "LOCK_NB": 4}
    monkeypatch.setattr(files, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=control, **lock))
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    with closing(Journal(tmp_path / "journal.jsonl", {})) as journal:
        asked.clear()
        journal.begin("one")
    assert asked == (["control 51"] if known else ["control 51", "fsync"])


NAMES = """
import pandas, sys, yaml
from kedro.io import DataCatalog
entries = yaml.safe_load(open("conf/base/catalog.yml", encoding="utf-8"))
tables = ((name, entry) for name, entry in entries.items() if ".csv" in str(entry))
for count, (name, entry) in enumerate(tables, start=1):
    catalog = DataCatalog.from_config({name: {**entry, "filepath": f"{sys.argv[1]}/{name}.csv"}})
    catalog.save(name, pandas.DataFrame({"grouping": ["sex"], "group": ["Männer, ≥ 50"], "note": [""]}))
    assert catalog.load(name)["group"].tolist() == ["Männer, ≥ 50"]
    assert catalog[name]._fs_open_args_save["newline"] == "", "Windows would write a blank line between any two"
print(count)
"""


def test_tables_of_groups_hold_any_letter_in_any_locale(tmp_path: Path) -> None:
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    code = "exec(open(0, encoding='utf-8').read())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], input=NAMES.encode(), capture_output=True, env=plain, cwd=ROOT
    )
    assert (done.returncode, done.stdout.decode().split()[-1:]) == (0, ["3"]), done.stderr[-2000:]


def test_a_checkout_has_the_same_line_ends_everywhere() -> None:
    asked = ["git", "check-attr", "eol", "--", "Makefile", "src/equidp/training/__init__.py", "conf/base/catalog.yml"]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("no checkout")
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()] == ["lf"] * 3
