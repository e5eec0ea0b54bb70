"""Asking for ranks: a whole training, killed and stopped on its way; refusals; machines."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save
from tests.training.ranks.ranks import RECORDS, toy

from equidp.algorithms import algorithm_settings
from equidp.data.records import Split
from equidp.errors import EquidpError
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.sweep.attended import forks
from equidp.system.files import replacing
from equidp.system.workplace import CHECKPOINT_FILE
from equidp.training import Trained, TrainingRequest, plan_run, train_model
from equidp.training.ranks import __main__ as lending
from equidp.training.ranks import launch as launching
from equidp.training.ranks.job import MEETING, STORE, TRAIN
from equidp.training.ranks.launch import Machines, _answer_one, _reason
from equidp.training.ranks.peers import stay_at_home
from equidp.training.ranks.worker import _ending_with_starter

EPOCHS = 5
OPTIONS = {"base_clip_norm": 0.7}


def train(workplace: Path, *, resume: bool = False, at_epoch: Any = None, rows: list | None = None) -> Trained:
    """Five epochs of DPSGD-F on two ranks; `at_epoch` is called with the epoch's number."""
    algorithm = algorithm_settings("dpsgd_f", OPTIONS).build()
    privacy = PrivacySettings(noise_multiplier=1.0, delta=1e-2)
    training = TrainingSettings(epochs=EPOCHS, batch_size=8, learning_rate=0.5, device="cpu", devices=2)

    def on_epoch(row: dict[str, float], network: torch.nn.Module) -> dict[str, float]:
        if rows is not None:
            rows.append(row)
        if at_epoch is not None:
            at_epoch(int(row["epoch"]))
        return {"size": float(sum(p.detach().abs().sum() for p in network.parameters()))}

    request = TrainingRequest(
        algorithm, plan_run(algorithm, units=RECORDS, groups=3, privacy=privacy, training=training), grouping="sex",
        model=ModelSettings(name="logistic"), privacy=privacy, training=training, seed=5, options=OPTIONS,
        workplace=workplace, resume=resume, checkpoint_every=1,
    )  # fmt: skip
    return train_model(request, toy(), on_epoch=on_epoch, progress=False)


def kill_a_rank(epoch: int) -> None:
    """SIGKILL to the rank started last, after epoch 2."""
    if epoch == 2:
        children = psutil.Process().children()
        ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        max(ranks, key=lambda child: child.create_time()).kill()


def stop_us(epoch: int) -> None:
    """What Ctrl-C or a scheduler does, after epoch 4."""
    if epoch == 4:
        os.kill(os.getpid(), signal.SIGTERM)


def listening() -> set[tuple[int, str, int]]:
    """Process, address and port of every socket on which this process, or one that it started, waits for others."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    lines = [(process.pid, line) for process in processes for line in process.net_connections("inet")]
    return {(pid, *line.laddr) for pid, line in lines if line.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """A training that lost a rank, was stopped after it was resumed, and then ended: what was told and seen of it."""
    place, rows, heard, records, before = tmp_path_factory.mktemp("lives"), [], [], [], listening()
    (temporary := place / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        with pytest.raises(EquidpError) as killed:
            train(place, at_epoch=kill_a_rank, rows=rows)
        kept, handler = (place / CHECKPOINT_FILE).exists(), signal.getsignal(signal.SIGTERM)
        with pytest.raises(EquidpError) as stopped:
            train(place, resume=True, at_epoch=stop_us, rows=rows)

        def look(epoch: int) -> None:
            heard.extend(listening() - before)
            records.extend(temporary.rglob(TRAIN))

        ended = train(place, resume=True, at_epoch=look, rows=rows)
    return SimpleNamespace(
        killed=killed.value, kept=kept, handler=handler, stopped=stopped.value, ended=ended, rows=rows, heard=heard,
        records=records, left=list(temporary.glob("torchelastic*")),
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_lost_a_rank_and_was_stopped_ends_as_if_nothing_had_happened(found, lives):
    whole = found[0]["whole"]
    assert re.search(r"Rank \d of 2 was killed by signal 9.*resume=true", str(lives.killed))
    assert lives.kept
    assert lives.handler == signal.SIG_DFL
    assert "Stopped by SIGTERM" in str(lives.stopped)
    assert lives.stopped.exit_code == 128 + signal.SIGTERM

    weights = torch.cat([lives.ended.weights[name].flatten() for name in ("layers.2.weight", "layers.2.bias")])
    assert weights.tolist() == whole["weights"]
    assert lives.ended.privacy["ledger"] == whole["ledger"]
    assert not lives.left
    # the asking process has evaluated every epoch, with the weights of that epoch
    assert {row["epoch"] for row in lives.rows} == set(range(1, EPOCHS + 1))
    sizes = lives.ended.history["size"]
    assert sizes.nunique() == EPOCHS
    assert sizes.iloc[-1] == pytest.approx(float(weights.abs().sum()))


@pytest.mark.slow
def test_no_copy_of_the_records_is_on_disk_while_ranks_train(lives):
    """It would outlive whoever is killed, in a folder that other machines may share."""
    assert lives.records == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "error"])
def test_ranks_that_are_told_to_stop_end_at_once_and_not_when_the_launcher_kills_them(tmp_path, how):
    stopped_at: list[float] = []

    def stop(epoch: int) -> None:
        if epoch == 4:
            stopped_at.append(time.monotonic())
            if how == "error":
                raise EquidpError("No figures.")
            stop_us(epoch)

    with pytest.raises(EquidpError, match="Stopped by SIGTERM" if how == "signal" else "No figures"):
        train(tmp_path, at_epoch=stop)

    assert time.monotonic() - stopped_at[0] < 20  # torch's launcher kills after 30
    assert (tmp_path / CHECKPOINT_FILE).exists()


@pytest.mark.slow
def test_of_a_rank_that_was_killed_the_error_tells_and_no_traceback_of_the_others(tmp_path, capfd):
    def kill_the_first(epoch: int) -> None:
        ranks = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
        min(ranks, key=lambda child: child.create_time()).kill()

    with pytest.raises(EquidpError, match="Rank 0 of 2 was killed by signal 9"):
        train(tmp_path, at_epoch=kill_the_first)

    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert "Terminating" not in printed.err + printed.out


def train_for_ever(workplace: str, temporary: str) -> None:
    """A training that its own process cannot end, as it is killed after the first epoch."""
    tempfile.tempdir, launching.MEMORY = temporary, Path(temporary)
    train(Path(workplace), at_epoch=lambda epoch: os.kill(os.getpid(), signal.SIGKILL) if epoch == 2 else None)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_asked_for_them_and_leave_no_records(tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    asking = multiprocessing.get_context("spawn").Process(target=train_for_ever, args=(str(tmp_path), str(temporary)))
    asking.start()
    started: dict[int, psutil.Process] = {}
    while asking.is_alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            started |= {child.pid: child for child in psutil.Process(asking.pid).children()}
        asking.join(0.1)
    ranks = [child for child in started.values() if child.is_running()]

    _, left = psutil.wait_procs(ranks, timeout=20)
    for process in left:
        process.kill()

    assert asking.exitcode == -signal.SIGKILL
    assert not left
    assert not list(temporary.iterdir())
    assert train(tmp_path, resume=True).privacy["ledger"][0]["count"] == RECORDS // 8 * EPOCHS


def count_signals(rank: int, place: str) -> None:
    """A rank that writes which signals it has got, a second after the first."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    seen: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: seen.append(number))
    with _ending_with_starter(Path(place) / "job"):
        (Path(place) / "ready").touch()
        until = time.monotonic() + 60
        while not seen and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)
        with replacing(Path(place) / "signals") as part:
            part.write_text(json.dumps(seen))


def start_and_die(place: str) -> None:
    """Start a rank as torch's launcher does, and be killed."""
    torch.multiprocessing.spawn(count_signals, (place,), join=False)
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    while not (Path(place) / "ready").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_whose_starter_was_killed_is_told_once_as_the_second_time_would_cut_its_checkpoint_off(tmp_path):
    asking = multiprocessing.get_context("spawn").Process(target=start_and_die, args=(str(tmp_path),))
    asking.start()
    asking.join(120)
    until = time.monotonic() + 60
    while not (tmp_path / "signals").exists() and time.monotonic() < until:
        time.sleep(0.1)

    assert asking.exitcode == -signal.SIGKILL
    assert json.loads((tmp_path / "signals").read_text()) == [signal.SIGTERM]


@pytest.mark.slow
def test_ranks_of_one_machine_open_no_port_to_others(lives):
    """Whoever reaches torch's store over TCP can have the asking process run code: it unpickles what is there."""
    assert os.getpid() not in {pid for pid, _, _ in lives.heard}
    assert {address for _, address, _ in lives.heard} == {"127.0.0.1"}  # gloo's


@pytest.mark.parametrize("options", [{"ratio_over": "counted"}, {"base_clip_norm": 0.01}])
def test_options_that_were_left_out_are_noticed(options):
    """One is a part's field, the other a value that training begins with: ranks would clip at the default instead."""
    algorithm = algorithm_settings("dpsgd_f", options).build()
    privacy, training = PrivacySettings(noise_multiplier=1.0), TrainingSettings(batch_size=8, device="cpu", devices=2)

    request = TrainingRequest(
        algorithm, plan_run(algorithm, units=RECORDS, groups=3, privacy=privacy, training=training),
        grouping="sex", model=ModelSettings(name="logistic"), privacy=privacy, training=training, seed=0,
    )  # fmt: skip
    with pytest.raises(EquidpError, match="needs the options that dpsgd_f was built from"):
        train_model(request, toy())


def test_a_rank_is_asked_for_what_the_process_that_asks_was_asked_for(tmp_path):
    algorithm, privacy = algorithm_settings("dpsgd_f", OPTIONS).build(), PrivacySettings(noise_multiplier=1.0)
    training = TrainingSettings(epochs=EPOCHS, batch_size=8, devices=2, class_weights=(1.0, 2.0))
    plan = plan_run(algorithm, units=RECORDS, groups=3, privacy=privacy, training=training)
    request = TrainingRequest(
        algorithm, plan, grouping="sex", model=ModelSettings(name="logistic"), privacy=privacy, training=training,
        seed=5, options=OPTIONS, workplace=tmp_path, resume=True, checkpoint_every=3,
    )  # fmt: skip
    there = TrainingRequest.from_dict(json.loads(json.dumps(request.to_dict())))
    assert there.facts() == request.facts()
    assert there.to_dict() == request.to_dict()
    assert (there.workplace, there.resume, there.checkpoint_every) == (tmp_path, True, 3)


def test_an_evaluation_that_fails_is_told_to_the_ranks():
    ours, theirs = Pipe()
    theirs.send_bytes(json.dumps({"epoch": 3.0}).encode())
    theirs.send_bytes(save({"w": torch.ones(2)}))

    def fails(row: dict[str, float], weights: dict[str, torch.Tensor]) -> dict[str, float]:
        raise EquidpError(f"no room for {len(weights)} weights")

    _answer_one(ours, fails)

    assert json.loads(theirs.recv_bytes()) == {"error": "After epoch 3: no room for 1 weights"}


@pytest.fixture
def deep(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files, under a longer path than a socket may have."""
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_ranks_reach_who_asked_from_a_deep_temporary_folder(deep):
    weights = {"w": torch.rand(300_000)}  # more than the system keeps of what nobody has read yet

    def compare(row: dict[str, float], told: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"seen": row["epoch"], "same": torch.equal(told["w"], weights["w"])}

    with launching._listening(compare) as address:
        with Client(address, family="AF_UNIX") as line:
            line.send_bytes(json.dumps({"epoch": 3.0}).encode())
            line.send_bytes(save(weights))
            assert json.loads(line.recv_bytes()) == {"columns": {"seen": 3.0, "same": True}}
        assert not forks()  # a server of forks has a socket too: runs of a sweep start without one
    assert not Path(address).parent.exists()


def test_ranks_of_one_machine_meet_in_memory_where_no_full_disk_holds_them_up(tmp_path, monkeypatch):
    memory, folder, other = tmp_path / "shm", tmp_path / "job", tmp_path / "other"
    for made in (memory, folder, other):
        made.mkdir()
    monkeypatch.setattr(launching, "MEMORY", memory)
    with launching._meeting_in_memory(folder, Machines()):
        for name in (MEETING, STORE):
            (folder / name).write_bytes(b"1")  # as torch makes it
            assert memory in (folder / name).resolve().parents
        (own,) = memory.iterdir()
        assert own.stat().st_mode & 0o077 == 0
    assert not list(memory.iterdir())
    for machines, place in ((Machines(2, 0, "a:1"), memory), (Machines(), tmp_path / "none")):
        monkeypatch.setattr(launching, "MEMORY", place)
        with launching._meeting_in_memory(other, machines):
            assert not list(other.iterdir())


def test_more_ranks_than_gpus_or_records_are_refused(monkeypatch):
    job = {"training": {"device": "cpu"}, "plan": {"records": 3}}  # the public N: how many there are must not show
    for there in (1, 3, 100):
        with pytest.raises(EquidpError, match="exceeds the 3 expected training records"):
            launching.train(job, SimpleNamespace(train=range(there)), 4, None)
    monkeypatch.setattr(launching, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EquidpError, match="asks for 4 GPUs here, and there are 1"):
        launching._refuse_too_many("auto", 4, Machines(), 100)


@pytest.mark.parametrize(
    ("ranks", "here", "chosen", "interface"),
    [(2, 2, None, "lo"), (2, 1, None, None), (2, 2, "eth7", "eth7")],
)
def test_sums_stay_on_the_machine_that_has_all_ranks(monkeypatch, ranks, here, chosen, interface):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(here)})
    if chosen:
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
    stay_at_home()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


@pytest.fixture
def two_machines(monkeypatch, tmp_path):
    monkeypatch.setenv("EQUIDP_NODES", "2")
    monkeypatch.setenv("EQUIDP_RENDEZVOUS", "there:1")
    monkeypatch.setenv("EQUIDP_JOB_FOLDER", str(tmp_path / "job"))


@pytest.mark.usefixtures("two_machines")
@pytest.mark.parametrize("place", ["", "there", "there:", ":1", "there:one"])
def test_several_machines_need_a_place_to_meet(monkeypatch, place):
    monkeypatch.setenv("EQUIDP_RENDEZVOUS", place)
    with pytest.raises(EquidpError, match="EQUIDP_RENDEZVOUS=host:port"):
        Machines.from_environment()


@pytest.mark.usefixtures("two_machines")
def test_several_machines_divide_the_ranks(monkeypatch, tmp_path):
    machines = Machines.from_environment()

    assert machines.launch(4, tmp_path).nproc_per_node == 2
    with pytest.raises(EquidpError, match="cannot be divided among 2 machines"):
        machines.launch(3, tmp_path)
    monkeypatch.setenv("EQUIDP_NODES", "two")
    with pytest.raises(EquidpError, match="EQUIDP_NODES=two is no number of machines"):
        Machines.from_environment()
    monkeypatch.delenv("EQUIDP_NODES")  # all ranks would be here, and the other machine wait
    with pytest.raises(EquidpError, match="EQUIDP_RENDEZVOUS is set, and EQUIDP_NODES is not"):
        Machines.from_environment()


@pytest.mark.usefixtures("two_machines")
def test_ranks_that_cannot_be_divided_are_refused_before_another_machine_is_waited_for(tmp_path):
    job = {"training": {"device": "cpu"}, "plan": {"records": 9}}
    with pytest.raises(EquidpError, match=r"training\.devices=3 cannot be divided among 2 machines: give a multiple"):
        launching.train(job, SimpleNamespace(train=range(9)), 3, None)
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
def test_one_process_beside_machines_that_wait_for_it_is_told(monkeypatch, caplog):
    monkeypatch.setenv("EQUIDP_NODES", "2")
    algorithm, privacy = algorithm_settings("dpsgd").build(), PrivacySettings(noise_multiplier=1.0)
    training = TrainingSettings(epochs=1, batch_size=8, learning_rate=0.5, device="cpu")
    plan = plan_run(algorithm, units=RECORDS, groups=3, privacy=privacy, training=training)
    model = ModelSettings(name="logistic")
    request = TrainingRequest(algorithm, plan, grouping="sex", model=model, privacy=privacy, training=training, seed=5)
    train_model(request, toy(), progress=False)
    assert "EQUIDP_NODES is set, and training.devices is 1: this machine trains alone, and others wait." in caplog.text


def test_what_has_ended_elsewhere_is_told_by_the_machine_that_asked(tmp_path):
    """Its folder has gone, and the error with it: what is above is at most a connection that was closed."""
    failed = SimpleNamespace(get_first_failure=lambda: (1, SimpleNamespace(exitcode=1)))
    job = {"training": {"devices": 2}, "workplace": None}
    assert "Rank 1 of 2 failed; its error is above" in _reason(failed, tmp_path, job).message
    assert "The machine that was asked for it says which" in _reason(failed, tmp_path / "gone", job).message


@pytest.fixture
def asked(monkeypatch, tmp_path) -> Callable[[], object]:
    """A training over two machines, which ends where the ranks would start."""
    monkeypatch.setenv("EQUIDP_NODES", "2")
    monkeypatch.setenv("EQUIDP_RENDEZVOUS", "127.0.0.1:1")
    monkeypatch.setenv("EQUIDP_JOB_FOLDER", str(tmp_path / "job"))

    def started(*given) -> None:
        raise EquidpError("The ranks start.")

    monkeypatch.setattr(launching, "launch", started)
    job = {"training": {"device": "cpu", "devices": 2}, "plan": {"records": 9}}
    return lambda: launching.train(job, Split(*[toy().train.take(torch.arange(n)) for n in (9, 0, 0)]), 2, None)


def test_a_machine_that_waits_for_another_hears_of_ctrl_c_and_leaves_no_records(asked, monkeypatch, tmp_path):
    """Torch's rendezvous waits where no signal is heard: a job that was told to end was killed, its records left."""

    def interrupted(seconds: float) -> None:
        assert (tmp_path / "job" / launching.TRAIN).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(launching.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "words"),
    [("2", "The ranks start"), ("3", "Machine 1 was started with --nodes 3, and here EQUIDP_NODES=2")],
)
def test_machines_meet_once_both_are_there_and_know_of_as_many(asked, monkeypatch, tmp_path, nodes, words):
    def lent(seconds: float) -> None:
        given = ["--nodes", nodes, "--node", "1", "--rendezvous", "127.0.0.1:1", "--folder", str(tmp_path / "job")]
        monkeypatch.setattr(sys, "argv", ["equidp.training.ranks", *given])
        monkeypatch.setattr(lending, "launch", lambda *given: None)
        with contextlib.suppress(SystemExit):  # its two ranks are for no three machines
            lending.main()

    monkeypatch.setattr(launching.time, "sleep", lent)
    with pytest.raises(EquidpError, match=words):
        asked()


def test_a_job_folder_that_is_there_already_is_refused_in_a_sentence(asked, tmp_path):
    (tmp_path / "job").mkdir()
    with pytest.raises(EquidpError, match=r"EQUIDP_JOB_FOLDER=.*job is there already: .* its records are still in it"):
        asked()
    assert (tmp_path / "job").is_dir()
