"""Fixtures for all tests: real files where they are at hand, and a project of its own for every Kedro run."""

from __future__ import annotations

import functools
import gc
import importlib.util
import io
import os
import pickle
import shutil
import signal
import sqlite3
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, get_type_hints

import pytest
from filelock import FileLock
from hypothesis import settings
from omegaconf import OmegaConf, grammar_parser
from sqlalchemy import Engine, event

# the thread count decides the order of sums, and runs in here are compared with runs in processes of their own; and
# pytest's own processes share the cores: threads on top of them nearly double the time of the whole
os.environ.setdefault("OMP_NUM_THREADS", "1")
# and a thread that waits for others must not keep them from a core: with several threads it took most of the time
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Triton asks when it is first imported, whoever does that: without a GPU its kernels are tried in its interpreter
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# what a shell starts in the background is deaf to Ctrl-C, which some tests try, here and in processes of their own
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a property is true or false; how long an example takes depends on what else the machine does
settings.register_profile("equidp", deadline=None)
settings.load_profile("equidp")

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays to the end: the garbage collector passes over a million objects from here on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # and less often over what tests leave: that took a tenth of the whole
        gc.enable()


@pytest.fixture(scope="session")
def raw_dir() -> Path:
    """The folder with real raw files; tests that need it skip where it is not there."""
    named = os.environ.get("EQUIDP_RAW_DIR")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real files: set EQUIDP_RAW_DIR to a folder laid out like data/01_raw")
    return folder


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """Settings are parsed once for each content: Kedro parses every file anew for every session, in pure Python."""
    load, known = OmegaConf.load, {}  # pickled: copy.deepcopy takes as long as half the parsing

    def found(file: str | Path | IO[Any]) -> Any:
        if isinstance(file, str | Path):
            return load(file)
        text = file.read()
        if text not in known:
            known[text] = pickle.dumps(load(io.StringIO(text)))
        return pickle.loads(known[text])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OmegaConf, "load", staticmethod(found))
        patched.setattr("omegaconf.base.parse", functools.cache(grammar_parser.parse))  # of `${…}`: in pure Python, too
        yield


@pytest.fixture(scope="session", autouse=True)
def prepared_once() -> Iterator[None]:
    """What Kedro asks anew of every session, whose answer stays: the types of all nodes, and whether there is Ibis.

    A third of a session's beginning.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kedro.validation.type_extractor.get_type_hints", functools.cache(get_type_hints))
        if importlib.util.find_spec("ibis") is None:
            patched.setitem(sys.modules, "ibis", None)  # it is looked for on the disk for every parameter
        yield


@pytest.fixture(scope="session", autouse=True)
def not_flushed() -> Iterator[None]:
    """A store of runs is written as ever, but the disk is not waited for: no test cuts the machine's power."""

    def begun(connection: Any, _: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", begun)
    yield
    event.remove(Engine, "connect", begun)


@pytest.fixture(scope="session", autouse=True)
def seeded_here_alone() -> Iterator[None]:
    """`torch.manual_seed` seeds no GPU where there is none: it would write down the whole stack for each kind of them.

    A test that trains a small model would take a tenth longer.
    """
    import torch  # late: the process that only hands out tests needs none

    with pytest.MonkeyPatch.context() as patched:
        for kind in (torch.cuda, torch.xpu):
            if not kind.is_available():
                patched.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="module")
def coarse() -> Iterator[None]:
    """For modules of tests that train, and do not ask for the last digit of ε."""
    from tests.coarse import coarsely  # late: not every worker needs an accountant

    with coarsely():
        yield


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without runs, its MLflow store made once: creating the database takes longer than most tests."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own  # by all workers of one call
    folder, made = shared / "template", shared / "template.made"
    with FileLock(shared / "template.lock"):
        if not made.exists():
            _make_template(folder)
            made.touch()
    return folder


def _make_template(folder: Path) -> None:
    from mlflow import MlflowClient

    folder.mkdir()
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "conf", folder / "conf", ignore=shutil.ignore_patterns("local"))
    (folder / "conf" / "local").mkdir()
    (folder / "src").mkdir()  # the package is the installed one
    (folder / "data" / "01_raw").mkdir(parents=True)
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    client.search_experiments()
    client._tracking_client.store.engine.dispose()


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh project of this test alone, and the working directory in it."""
    folder = tmp_path / "project"
    shutil.copytree(template, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("EQUIDP_RAW_DIR", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads of torch's."""
    import torch  # not for tests that need none

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
