"""What a user sees who interrupts `kedro run`, and what the resumed run comes to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import pandas as pd
import pytest
import torch
from kedro_datasets.json import json_dataset
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from safetensors.torch import load_file
from tests.end_to_end.kedro_project import QUICK, kedro_run, mlflow_runs, read_json, report_folder

from equidp.accounting.plan import Segment
from equidp.errors import EquidpError
from equidp.hooks import runs
from equidp.mechanism.trainer import Trainer
from equidp.models.weights import Weights
from equidp.pipelines.training.baseline import trained_once
from equidp.training.checkpoint import Checkpointer

PARAMS = {"training.epochs": 12, "training.batch_size": 64, "training.device": "cpu", "training.checkpoint_every": 1,
          "training.evaluate_every": 1}  # fmt: skip


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals end a process at once on Windows")


def _workplace(project: Path, label: str) -> Path:
    return next((project / "data" / "06_models" / "digits" / "dpsgd").rglob(f"{label}/workplace"))


def _interrupt(
    project: Path, label: str, once: Callable[[], bool], number: int = signal.SIGTERM
) -> subprocess.CompletedProcess[str]:
    """Start a run in a process of its own, and send it a signal once there is a reason."""
    params = ",".join(f"{name}={value}" for name, value in (PARAMS | {"run_label": label}).items())
    command = [sys.executable, "-m", "kedro", "run", "--pipeline=dpsgd", f"--params={params}"]
    run = subprocess.Popen(
        command,
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < deadline:
        if once():
            run.send_signal(number)
            break
        time.sleep(0.02)
    out, err = run.communicate(timeout=120)
    return subprocess.CompletedProcess(command, run.returncode, out, err)


@pytest.mark.slow
def test_runs_that_a_crash_left_open_are_closed_by_the_next_on_their_files(project: Path) -> None:
    kedro_run(project, "dpsgd", **QUICK)
    (first,) = mlflow_runs(project)
    client, tags = MlflowClient(), {name: first.data.tags[name] for name in ("project_path", "dataset", "seed")}

    def left_open(**more: str) -> str:
        return client.create_run(first.info.experiment_id, tags=tags | more).info.run_id

    crashed = left_open()
    child = client.create_run(first.info.experiment_id, tags={"mlflow.parentRunId": crashed}).info.run_id
    differing = {"run_label": "mine", "seed": "1", "dataset": "adult", "project_path": "/x"}
    others = [left_open(**{name: value}) for name, value in differing.items()]
    kedro_run(project, "dpsgd", **QUICK)
    status = {run.info.run_id: run.info.status for run in mlflow_runs(project)}
    assert [status.pop(run_id) for run_id in (crashed, child)] == ["KILLED"] * 2
    assert [status.pop(run_id) for run_id in others] == ["RUNNING"] * 4
    assert list(status.values()) == ["FINISHED"] * 2


@pytest.mark.slow
def test_ones_own_run_around_two_pipelines_stays_open(project: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{project / 'mlflow.db'}")
    with mlflow.start_run(experiment_id="0") as around:
        kedro_run(project, "dpsgd", **QUICK)
        with mlflow.start_run(experiment_id="0", nested=True):
            kedro_run(project, "dpsgd", **QUICK)
        before = MlflowClient().get_run(around.info.run_id)
        assert before.info.status == "RUNNING"
        for other in ({"run_label": "second"}, {"resume": True}):  # MLflow has resume=false of the first
            with pytest.raises(EquidpError, match=r"holds an earlier run of this project, and .* would be mixed"):
                kedro_run(project, "dpsgd", **QUICK, **other)
        after = MlflowClient().get_run(around.info.run_id)
        assert after.info.status == "RUNNING"
        assert after.info.run_name == before.info.run_name
    assert not list(project.glob("data/06_models/**/second/model.safetensors"))


def test_an_interrupted_run_says_so_and_resumes_to_the_same_result(project: Path) -> None:
    kedro_run(project, "dpsgd", run_label="whole", **PARAMS)
    checkpoints = (project / "data" / "06_models").rglob
    stopped = _interrupt(project, "cut", lambda: any(checkpoints("cut/workplace/checkpoint.safetensors")))
    assert stopped.returncode == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM after step" in stopped.stderr
    assert "resume=true" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED", "KILLED"]
    assert {path.name for path in _workplace(project, "cut").iterdir()} >= {"checkpoint.safetensors", "journal.jsonl"}

    with pytest.raises(EquidpError, match=r"training\.learning_rate was .* and is 0\.77"):
        kedro_run(project, "dpsgd", run_label="cut", resume=True, **PARAMS, **{"training.learning_rate": 0.77})

    # no release depends on when checkpoints are saved
    kedro_run(project, "dpsgd", run_label="cut", resume=True, **PARAMS | {"training.checkpoint_every": 5})
    whole, cut = (report_folder(project, "dpsgd") / label for label in ("whole", "cut"))
    assert read_json(cut / "metrics.json") == read_json(whole / "metrics.json")
    assert read_json(cut / "privacy.json")["ledger"] == read_json(whole / "privacy.json")["ledger"]
    assert read_json(cut / "privacy.json")["epsilon"] == read_json(whole / "privacy.json")["epsilon"]
    weights = [load_file(_weights(project, label)) for label in ("whole", "cut")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    finished = [run for run in mlflow_runs(project) if run.info.status == "FINISHED"]
    assert len(finished) == 2
    client = mlflow.MlflowClient()
    for name in ("epsilon_rdp", "noise_multiplier", "test/accuracy"):
        curves = [{(p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)} for run in finished]
        assert curves[0] == curves[1]
        assert {step for step, _ in curves[0]} >= {1, 12}


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_an_interrupted_baseline_goes_on_where_it_was(
    project: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """For another private algorithm too, and without resume=true: nothing of it is charged."""
    taken: list[int] = []
    step = Trainer.step

    def pressed(trainer: Trainer, segment: Segment) -> None:
        if trainer.algorithm.name == "sgd":
            taken.append(trainer.steps_done)
            if len(taken) == 5:
                signal.raise_signal(signal.SIGINT)
        step(trainer, segment)

    monkeypatch.setattr(Trainer, "step", pressed)
    with pytest.raises(EquidpError, match="Stopped by Ctrl-C after step 5 of") as stopped:
        kedro_run(project, "dpsgd", **QUICK)
    runs.end_interrupted()
    kept = next((project / "data" / "06_models" / "digits" / "sgd").rglob("trained"))
    assert str(kept) in stopped.value.message
    # of seeded generators secure runs know nothing
    kedro_run(project, "dpsgd_f", **QUICK, **({"privacy.secure": True} if secure else {}))
    steps = len(set(taken))
    assert taken == [*range(5), *range(0 if secure else 5, steps)]
    assert {path.suffix for path in kept.iterdir()} == {".safetensors", ".parquet"} | ({""} if secure else set())

    if not secure:
        cut = read_json(next(report_folder(project, "dpsgd_f").rglob("metrics.json")))["baseline"]
        shutil.rmtree(kept)
        kedro_run(project, "dpsgd_f", **QUICK)
        assert taken[steps:] == [*range(steps)]
        assert read_json(next(report_folder(project, "dpsgd_f").rglob("metrics.json")))["baseline"] == cut


def test_of_two_runs_that_need_one_baseline_at_once_one_keeps_checkpoints(tmp_path: Path) -> None:
    places: list[Path | None] = []

    def train(place: Path | None) -> tuple[Weights, pd.DataFrame]:
        places.append(place)
        if len(places) == 1:
            trained_once(tmp_path, "sgd", train, workplace="unfinished")
            assert places[0] is not None
            assert places[0].is_dir()
        return Weights({"w": torch.ones(2)}, {}), pd.DataFrame({"epoch": [1.0]})

    trained_once(tmp_path, "sgd", train, workplace="unfinished")
    assert places == [tmp_path / "unfinished", None]
    assert {path.name for path in tmp_path.iterdir()} == {"sgd.safetensors", "sgd.parquet"}


@pytest.mark.parametrize("epochs", [set(), {1}])
def test_an_interrupt_after_training_says_how_to_go_on(epochs: set[int], capsys: pytest.CaptureFixture[str]) -> None:
    """In the baseline, an evaluation or a page: whoever repeats the command as it is trains the model twice."""
    runs.begin(True)
    try:
        runs._current.runs["dpsgd"], runs._current.epochs["dpsgd"] = "0", epochs
        runs._end_with_process()
    finally:
        runs.begin(False)
    assert ("the same command with resume=true" in capsys.readouterr().err) is bool(epochs)


@pytest.mark.slow
def test_ctrl_c_before_training_is_not_finished_in_mlflow(project: Path) -> None:
    def begun() -> bool:
        with contextlib.closing(sqlite3.connect(project / "mlflow.db", timeout=20)) as database:
            # a row of the run alone may be seen before MLflow's client has heard of it: then nobody could end it
            return bool(database.execute("SELECT count(*) FROM tags WHERE key = 'dataset'").fetchone()[0])

    stopped = _interrupt(project, "early", begun, signal.SIGINT)

    assert stopped.returncode == 1
    assert "Traceback" not in stopped.stderr
    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"]


@pytest.mark.parametrize(
    "call", ["set_tag", *(pytest.param(name, marks=pytest.mark.slow) for name in ("log_inputs", "log_batch"))]
)  # before, between and within nodes
def test_ctrl_c_that_cuts_a_session_of_the_store_in_two_is_no_failure_of_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def cut(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:  # as SQLAlchemy's session does where a change of its state was cut off
            raise MlflowException("Method 'close()' can't be called here")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, call, cut)
        with pytest.raises(KeyboardInterrupt):
            kedro_run(project, "sgd", **QUICK)
    runs.end_interrupted()

    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"]


@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_while_a_result_is_written_leaves_no_half_of_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    write = json_dataset.json.dump

    def cut(*given: object, **named: object) -> None:
        signal.raise_signal(signal.SIGINT)
        if fails:
            raise OSError
        write(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(json_dataset.json, "dump", cut)
        with pytest.raises(KeyboardInterrupt):
            kedro_run(project, "sgd", **QUICK)
    runs.end_interrupted()

    written = list((project / "data" / "08_reporting").rglob("*.json"))
    assert written
    assert fails or all(json.loads(path.read_text(encoding="utf-8")) for path in written)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_ctrl_c_while_mlflow_ends_the_run_leaves_none_open(
    project: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    end = MlflowClient.set_terminated

    def cut(*given: object, **named: object) -> None:
        if not before:
            end(*given, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_terminated", cut)
        with pytest.raises(KeyboardInterrupt):
            kedro_run(project, "sgd", **QUICK)
    assert mlflow.active_run() is None  # MLflow has forgotten it
    runs.end_interrupted()

    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED" if before else "FINISHED"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_ctrl_c_again_while_a_stopped_run_is_ended(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    step = Trainer.step

    def pressed(*given: object, **named: object) -> None:
        signal.raise_signal(signal.SIGINT)
        step(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_terminated", cut)
        patched.setattr(Trainer, "step", pressed)
        with pytest.raises(KeyboardInterrupt):
            kedro_run(project, "dpsgd_f", **QUICK)
    runs.end_interrupted()

    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_store_answers_that_a_run_is_made_leaves_none_open(
    project: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    create = MlflowClient.create_run

    def cut(*given: object, **named: object) -> object:
        made = create(*given, **named)
        signal.raise_signal(number)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "create_run", cut)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            kedro_run(project, "dpsgd", **QUICK)
    runs.end_interrupted()

    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"]


@pytest.mark.slow
def test_ctrl_c_between_the_runs_of_several_algorithms_leaves_none_open(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, calls = MlflowClient.create_run, itertools.count(1)

    def cut(*given: object, **named: object) -> object:
        if next(calls) == 4:  # the parent, two children and one more
            raise KeyboardInterrupt
        return create(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "create_run", cut)
        with pytest.raises(KeyboardInterrupt):
            kedro_run(project, "compare", **QUICK)
    runs.end_interrupted()

    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"] * 3


PRESSED_AGAIN = """
import gc
import sys
from pathlib import Path

from mlflow import MlflowClient
from tests.end_to_end.kedro_project import QUICK, kedro_run

from equidp.mechanism.trainer import Trainer

owner, name = {"collect": (gc, "collect"), "end": (MlflowClient, "set_terminated")}[sys.argv[2]]
work = getattr(owner, name)


def pressed_again(*given, **named):
    setattr(owner, name, work)
    raise KeyboardInterrupt


def pressed(*_, **__):
    setattr(owner, name, pressed_again)
    raise KeyboardInterrupt


Trainer.train = pressed
kedro_run(Path(sys.argv[1]), "dpsgd", **QUICK)
"""


# before MLflow has forgotten the run, and after
@pytest.mark.slow
@pytest.mark.parametrize("when", ["collect", "end"])
def test_ctrl_c_again_while_the_process_ends(project: Path, when: str) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, "-c", PRESSED_AGAIN, str(project), when]
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)

    assert run.returncode == -signal.SIGINT
    assert "atexit" not in run.stderr
    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED"]


@pytest.mark.slow
def test_the_next_run_of_a_notebook_ends_what_a_signal_left_open(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        patched.setattr(Checkpointer, "_signals", contextlib.nullcontext)
        with pytest.raises(SystemExit):
            kedro_run(project, "dpsgd", **QUICK)
    kedro_run(project, "sgd", **QUICK)

    assert [run.info.status for run in mlflow_runs(project)] == ["KILLED", "FINISHED"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _weights(project: Path, label: str) -> Path:
    found = (project / "data" / "06_models").rglob(f"{label}/*.safetensors")
    return next(path for path in found if "checkpoint" not in path.name)
