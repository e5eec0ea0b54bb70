"""Checkpoints: bit-identical, atomic, refused when damaged; and the ledger owes for everything that was shown."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.toy import EVENT, PLAN, WHOLE_RUN, Crash, ToyTrainer, uninterrupted

from equidp.accounting.events import Event, merged
from equidp.errors import EquidpError
from equidp.mechanism.noise import RandomSource, SeededRandom
from equidp.mechanism.secure import SecureRandom
from equidp.system import files
from equidp.system.workplace import CHECKPOINT_FILE, JOURNAL_FILE
from equidp.training import checkpoint
from equidp.training.checkpoint import (
    Checkpointer,
    StoppedError,
    charged_until_now,
    read_checkpoint,
    write_checkpoint,
)

SETTINGS = {"seed": 1, "training": {"batch_size": 10, "epochs": 4}}
EMPTY = {"state": {}, "history": [], "done": [], "ahead": [], "journal_lines": 0, "life": ""}


def seeded() -> RandomSource:
    return SeededRandom(1, "cpu")


def secure() -> RandomSource:
    return SecureRandom("cpu")


def live(
    folder: Path,
    *,
    source: Callable[[], RandomSource] = seeded,
    resume: bool = True,
    at_step: Callable[[int], None] = lambda done: None,
    every_epochs: int | None = 1,
    block: int = 8,
) -> tuple[ToyTrainer, list[dict[str, float]]]:
    """One life of a run: from whatever is in the folder to the end, a stop, or a crash."""
    keeper = Checkpointer(folder, SETTINGS, resume=resume, every_epochs=every_epochs, block=block)
    try:
        random = source()
        trainer = ToyTrainer(random, keeper.ledger(random), at_step=at_step)
        return trainer, keeper.train(trainer)
    finally:
        keeper.close()


def crash_at(step: int) -> Callable[[int], None]:
    def at_step(done: int) -> None:
        if done == step:
            raise Crash

    return at_step


def releases(events: tuple[Event, ...]) -> int:
    return sum(event.count for event in events)


class TestResume:
    """A run that dies and comes back."""

    @pytest.mark.parametrize("step", [0, 1, 9, 10, 11, 23, 39])
    def test_seeded_run_is_bit_identical_and_owes_the_same(self, tmp_path: Path, step: int) -> None:
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(step))
        trainer, history = live(tmp_path)
        whole = uninterrupted()
        assert torch.equal(trainer.theta, whole.theta)
        assert trainer.ledger.events == WHOLE_RUN
        assert [row["epoch"] for row in history] == [1.0, 2.0, 3.0, 4.0]
        assert history[-1]["theta"] == float(whole.theta.sum())

    def test_many_crashes_in_a_row(self, tmp_path: Path) -> None:
        for step in (3, 3, 5, 12, 11, 13, 31, 30, 38):
            with pytest.raises(Crash):
                live(tmp_path, at_step=crash_at(step))
        trainer, _ = live(tmp_path)
        assert torch.equal(trainer.theta, uninterrupted().theta)
        assert trainer.ledger.events == WHOLE_RUN

    def test_a_run_that_stops_before_the_old_crash_still_owes_for_it(self, tmp_path: Path) -> None:
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(27), every_epochs=None)
        keeper = Checkpointer(tmp_path, SETTINGS, resume=True, block=8)
        trainer = ToyTrainer(seeded(), keeper.ledger(seeded()))
        trainer.step()
        keeper.save(trainer)
        # 28 steps were begun, in blocks of 8: 32 are charged
        assert releases(trainer.ledger.events) == 32
        keeper.close()
        again = Checkpointer(tmp_path, SETTINGS, resume=True)
        assert releases(again.ledger(seeded()).events) == 32
        again.close()

    @pytest.mark.parametrize("epochs", [1, None])
    def test_what_a_dead_run_was_charged_is_told_before_it_goes_on(self, tmp_path: Path, epochs: int | None) -> None:
        """With a checkpoint and without one; of charges that the checkpoint carries, too."""
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(17), every_epochs=epochs)  # 18 steps are begun, in blocks of 8
        steps, charged = charged_until_now(tmp_path)
        assert (steps, releases(charged)) == ((10, 18) if epochs else (None, 24))
        keeper = Checkpointer(tmp_path, SETTINGS, resume=True, block=8)
        trainer = ToyTrainer(seeded(), keeper.ledger(seeded()))
        if epochs:
            trainer.load_state_dict(read_checkpoint(tmp_path / CHECKPOINT_FILE, None).state)
        trainer.step()
        keeper.save(trainer)  # all other charges are for steps that are yet to be repeated
        keeper.close()
        again, owed = charged_until_now(tmp_path)
        assert (again, merged(owed)) == ((steps or 0) + 1, merged(charged))

    @pytest.mark.parametrize("step", [0, 11, 39])
    def test_secure_run_pays_for_repeated_steps_again(self, tmp_path: Path, step: int) -> None:
        with pytest.raises(Crash):
            live(tmp_path, source=secure, at_step=crash_at(step))
        trainer, _ = live(tmp_path, source=secure)
        begun = step % 10 + 1  # since the checkpoint at the epoch's end
        assert trainer.steps_done == PLAN.steps
        assert PLAN.steps + begun <= releases(trainer.ledger.events) < PLAN.steps + begun + 8

    def test_another_machine_pays_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(15))
        monkeypatch.setattr(checkpoint, "life_of", lambda random: "seeded, elsewhere")
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(16))
        monkeypatch.undo()
        # back on the first machine: 6 steps begun there and 7 elsewhere since the checkpoint, all owed
        trainer, _ = live(tmp_path)
        assert releases(trainer.ledger.events) >= PLAN.steps + 6 + 7

    def test_another_machine_draws_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same noise on sums that round differently would cancel, and be paid for twice in vain."""
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(15))
        monkeypatch.setattr(checkpoint, "life_of", lambda random: "seeded, elsewhere")
        keeper, random, continued = Checkpointer(tmp_path, SETTINGS, resume=True), seeded(), seeded()
        keeper.ledger(random)
        assert keeper.saved is not None
        for one in (random, continued):
            one.load_state_dict(keeper.saved.state["random"])
        assert not torch.equal(random.normal(5), continued.normal(5))
        assert not torch.equal(random.uniform(5), continued.uniform(5))
        keeper.close()

    def test_what_another_machine_began_right_after_a_stop_is_owed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its first word is the journal's first line after the checkpoint."""
        with pytest.raises(StoppedError):
            live(tmp_path, at_step=lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == 9 else None)
        monkeypatch.setattr(checkpoint, "life_of", lambda random: "seeded, elsewhere")
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(15))
        monkeypatch.undo()
        trainer, _ = live(tmp_path)
        assert releases(trainer.ledger.events) >= PLAN.steps + 6

    def test_other_code_pays_again(self, tmp_path: Path) -> None:
        for code, owed in (("before", 0), ("after", 8), ("after", 16)):
            keeper = Checkpointer(tmp_path, SETTINGS, resume=True, block=8, code=code)
            random = seeded()
            trainer = ToyTrainer(random, keeper.ledger(random))
            assert releases(trainer.ledger.events) == owed
            trainer.step()
            keeper.close()

    def test_other_instructions_of_a_processor_are_another_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = checkpoint.life_of(seeded())
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "of another processor")
        assert checkpoint.life_of(seeded()) != here

    def test_another_torch_is_another_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = checkpoint.life_of(seeded())
        monkeypatch.setattr(torch, "__version__", "another")
        assert checkpoint.life_of(seeded()) != here

    def test_products_of_another_precision_are_another_life(self) -> None:
        here = checkpoint.life_of(seeded())
        torch.set_float32_matmul_precision("medium")
        try:
            assert checkpoint.life_of(seeded()) != here
        finally:
            torch.set_float32_matmul_precision("highest")
        assert checkpoint.life_of(seeded()) == here

    def test_torchs_switches_are_another_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = checkpoint.life_of(seeded())
        with monkeypatch.context() as patched:
            patched.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
            assert checkpoint.life_of(seeded()) != here
        with monkeypatch.context() as patched:
            patched.setattr(torch.backends.mkldnn, "enabled", False)
            assert checkpoint.life_of(seeded()) != here
        try:
            if torch.set_flush_denormal(True):  # not every processor can
                assert checkpoint.life_of(seeded()) != here
        finally:
            torch.set_flush_denormal(False)
        assert checkpoint.life_of(seeded()) == here

    def test_another_number_of_threads_is_another_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = checkpoint.life_of(seeded())
        monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
        assert checkpoint.life_of(seeded()) != here

    @pytest.mark.parametrize(
        "name",
        ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_SCHEDULE", "KMP_AFFINITY", "TORCH_MKLDNN_MATMUL_MIN_SIZE",
         "TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_ENABLED", "DISABLE_ADDMM_CUDA_LT", "GLIBC_TUNABLES",
         "NPY_DISABLE_CPU_FEATURES"],
    )  # fmt: skip
    def test_libraries_told_otherwise_are_another_life(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        here = checkpoint.life_of(seeded())
        monkeypatch.setenv(name, "of another kind")
        assert checkpoint.life_of(seeded()) != here

    def test_another_c_library_is_another_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = checkpoint.life_of(seeded())
        monkeypatch.setattr(checkpoint.platform, "libc_ver", lambda: ("glibc", "of another distribution"))
        assert checkpoint.life_of(seeded()) != here

    def test_another_processor_is_another_life(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        cores = [f"processor\t: {n}\nmodel name\t: one\ncpu MHz\t\t: 2{n}00\n" for n in range(2)]
        seen = []
        for name, text in {"first": cores[0], "both": "".join(cores), "other": cores[0].replace("one", "two")}.items():
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(checkpoint, "CPUINFO", tmp_path / name)
            checkpoint.processor.cache_clear()
            seen.append(checkpoint.life_of(seeded()))
        monkeypatch.setattr(checkpoint, "CPUINFO", tmp_path / "none")
        checkpoint.processor.cache_clear()
        seen.append(checkpoint.life_of(seeded()))
        checkpoint.processor.cache_clear()
        assert seen[0] == seen[1]
        assert len(set(seen)) == 3

    def test_nothing_is_repeated_beside_other_trainings(self) -> None:
        def here() -> tuple[bool, str]:
            return checkpoint.repeats(seeded()), checkpoint.life_of(seeded())

        with ThreadPoolExecutor(1) as pool:
            repeated, life = pool.submit(here).result()
        assert not repeated
        assert here() == (True, life.removesuffix(", in a thread"))
        assert life != here()[1]

    def test_lives_of_all_ranks_count(self, tmp_path: Path) -> None:
        told = []
        for others in (["beside it"], ["beside it"], ["on another machine"]):
            keeper = Checkpointer(tmp_path, SETTINGS, resume=True, block=8)
            random = seeded()
            ToyTrainer(random, keeper.ledger(random, others)).step()
            told.append(keeper.renewed)
            keeper.close()
        assert told == [0, 0, 3]

    @pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
    def test_nobody_else_may_read_what_is_kept(self, tmp_path: Path) -> None:
        before = os.umask(0o022)
        try:
            live(tmp_path)
            live(tmp_path, resume=False)
        finally:
            os.umask(before)
        kept = [path for path in tmp_path.iterdir() if path.is_file()]
        assert len(kept) == 3  # with the journal that was put aside
        assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}

    def test_sums_in_any_order_are_not_repetitions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        random = SeededRandom(1, "cpu")
        assert checkpoint.repeats(random)
        random.device = torch.device("cuda")
        assert not checkpoint.repeats(random)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert checkpoint.repeats(random)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        assert not checkpoint.repeats(random)

    def test_a_run_that_rounds_otherwise_is_renewed_on_the_same_machine(self, tmp_path: Path) -> None:
        """So it is with recorded passes: under the same noise two sums of a step would differ by rounding alone."""
        renewed, owed = [], []
        for _ in range(2):
            keeper = Checkpointer(tmp_path, SETTINGS, resume=True, block=8, repeating=False)
            random = seeded()
            ledger = keeper.ledger(random)
            ToyTrainer(random, ledger).step()
            renewed.append(keeper.renewed)
            owed.append(releases(ledger.events))
            keeper.close()
        assert renewed == [0, 2]
        assert owed[1] > owed[0]

    def test_a_finished_run_continues_to_nothing(self, tmp_path: Path) -> None:
        first, history = live(tmp_path)
        again, same = live(tmp_path)
        assert torch.equal(first.theta, again.theta)
        assert same == history
        assert again.ledger.events == WHOLE_RUN

    def test_without_resume_it_is_a_new_run(self, tmp_path: Path) -> None:
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(25))
        trainer, history = live(tmp_path, resume=False)
        assert trainer.ledger.events == WHOLE_RUN
        assert len(history) == 4
        assert (tmp_path / "journal-abandoned-1.jsonl").exists()

    def test_a_secure_run_does_not_continue_a_seeded_one(self, tmp_path: Path) -> None:
        with pytest.raises(Crash):
            live(tmp_path, at_step=crash_at(25))
        with pytest.raises(EquidpError, match="secure mode refuses"):
            live(tmp_path, source=secure)


class TestSignals:
    """Ctrl-C and SIGTERM."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("step", [4, 9, 10])
    def test_the_step_is_finished_and_kept(self, tmp_path: Path, number: int, step: int) -> None:
        def at_step(done: int) -> None:
            if done == step:
                os.kill(os.getpid(), number)

        before = signal.getsignal(number)
        with pytest.raises(StoppedError, match=f"after step {step + 1} of 40.*resume=true") as stopped:
            live(tmp_path, at_step=at_step, every_epochs=None)
        assert stopped.value.exit_code == 128 + number
        assert signal.getsignal(number) is before
        trainer, history = live(tmp_path, every_epochs=None)
        assert torch.equal(trainer.theta, uninterrupted().theta)
        assert trainer.ledger.events == WHOLE_RUN
        assert [row["epoch"] for row in history] == [1.0, 2.0, 3.0, 4.0]

    def test_after_the_last_step_it_stops_what_would_follow(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train = ToyTrainer.train

        def asked_last(*args: object, **named: object) -> None:
            train(*args, **named)
            os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(ToyTrainer, "train", asked_last)
            with pytest.raises(StoppedError, match="after step 40 of 40"):
                live(tmp_path)
        trainer, history = live(tmp_path)
        assert torch.equal(trainer.theta, uninterrupted().theta)
        assert trainer.ledger.events == WHOLE_RUN
        assert [row["epoch"] for row in history] == [1.0, 2.0, 3.0, 4.0]

    def test_a_secure_run_that_was_asked_to_stop_owes_nothing_extra(self, tmp_path: Path) -> None:
        with pytest.raises(StoppedError):
            live(tmp_path, source=secure, at_step=lambda done: os.kill(os.getpid(), signal.SIGTERM))
        trainer, _ = live(tmp_path, source=secure)
        assert trainer.ledger.events == WHOLE_RUN

    def test_a_second_ctrl_c_stops_at_once(self, tmp_path: Path) -> None:
        def at_step(done: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            live(tmp_path, at_step=at_step)


class TestFile:
    """What is on disk."""

    STATE = {  # noqa: RUF012
        "weights": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "optimizer": {"state": {0: {"momentum": torch.ones(2), "step": 3}}, "groups": [{"params": [0], "lr": 0.1}]},
        "nothing": None,
        "flag": True,
        "pair": (1, "two", (3.0,)),
        "numbers": [math.inf, 0.1 + 0.2, 10**20],
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "scalar": torch.tensor(2**60),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
    }

    def test_everything_comes_back_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / CHECKPOINT_FILE
        write_checkpoint(path, EMPTY | {"state": self.STATE}, SETTINGS)
        state = read_checkpoint(path, SETTINGS).state
        assert state.keys() == self.STATE.keys()
        for name, value in self.STATE.items():
            if isinstance(value, torch.Tensor):
                assert state[name].dtype == value.dtype
                assert torch.equal(state[name], value)
        assert torch.equal(state["optimizer"]["state"][0].pop("momentum"), torch.ones(2))
        assert state["optimizer"] == {"state": {0: {"step": 3}}, "groups": [{"params": [0], "lr": 0.1}]}
        assert (state["pair"], state["numbers"]) == (self.STATE["pair"], self.STATE["numbers"])
        assert state["nothing"] is None
        assert state["flag"] is True

    def test_numbers_of_numpy_are_numbers(self, tmp_path: Path) -> None:
        path = tmp_path / CHECKPOINT_FILE
        row = {"a": np.float64(0.1), "b": np.float32(0.5), "c": np.int64(7)}
        write_checkpoint(path, EMPTY | {"history": [row]}, SETTINGS)
        assert read_checkpoint(path, SETTINGS).history == [{"a": 0.1, "b": 0.5, "c": 7}]

    def test_a_checkpoint_holds_no_pickle(self, tmp_path: Path) -> None:
        path = tmp_path / CHECKPOINT_FILE
        write_checkpoint(path, EMPTY | {"state": {"weights": torch.ones(2)}}, SETTINGS)
        assert torch.equal(load_file(path)["0"], torch.ones(2))  # any safetensors reader will do
        with pytest.raises(TypeError, match=r"state\.model: a Linear cannot be kept"):
            write_checkpoint(path, EMPTY | {"state": {"model": torch.nn.Linear(1, 1)}}, SETTINGS)

    def test_every_truncation_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / CHECKPOINT_FILE
        write_checkpoint(path, EMPTY | {"state": {"weights": torch.ones(50)}}, SETTINGS)
        whole = path.read_bytes()
        for length in [*range(0, len(whole), 37), len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(EquidpError, match=r"truncated|damaged|format"):
                read_checkpoint(path, SETTINGS)

    def test_every_flipped_bit_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / CHECKPOINT_FILE
        write_checkpoint(path, EMPTY | {"state": {"weights": torch.rand(40)}}, SETTINGS)
        whole = path.read_bytes()
        for position in range(0, len(whole), 11):
            damaged = bytearray(whole)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(EquidpError):
                read_checkpoint(path, SETTINGS)

    def test_an_edited_ledger_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / CHECKPOINT_FILE
        write_checkpoint(path, EMPTY | {"done": [Event(0.1, 1.0, 300).to_dict()]}, SETTINGS)
        with checkpoint.safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
        metadata["body"] = metadata["body"].replace("300", "100")
        save_file({}, path, metadata)
        with pytest.raises(EquidpError, match="damaged or was edited"):
            read_checkpoint(path, SETTINGS)

    @pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04\x95pickle", b"\xff" * 64])
    def test_something_else_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / CHECKPOINT_FILE
        path.write_bytes(content)
        with pytest.raises(EquidpError, match="is no checkpoint"):
            read_checkpoint(path, SETTINGS)

    def test_a_foreign_safetensors_file_is_refused(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(1)}, tmp_path / CHECKPOINT_FILE)
        with pytest.raises(EquidpError, match="not in the format"):
            read_checkpoint(tmp_path / CHECKPOINT_FILE, SETTINGS)

    def test_other_settings_are_refused_with_the_difference(self, tmp_path: Path) -> None:
        live(tmp_path)
        with pytest.raises(EquidpError, match=r"training\.epochs was 4 and is 5"):
            Checkpointer(tmp_path, {"seed": 1, "training": {"batch_size": 10, "epochs": 5}}, resume=True)
        with pytest.raises(EquidpError, match=r"seed was 1 and is 2"):
            read_checkpoint(tmp_path / CHECKPOINT_FILE, SETTINGS | {"seed": 2})

    def test_a_checkpoint_without_its_journal_is_refused(self, tmp_path: Path) -> None:
        live(tmp_path)
        (tmp_path / JOURNAL_FILE).unlink()
        with pytest.raises(EquidpError, match="charges are missing"):
            live(tmp_path)


class TestDisk:
    """A disk that refuses."""

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_the_old_checkpoint_survives_and_no_half_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        path = tmp_path / CHECKPOINT_FILE
        write_checkpoint(path, EMPTY | {"journal_lines": 7}, SETTINGS)

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, call, full)
        with pytest.raises(EquidpError, match="disk is full"):
            write_checkpoint(path, EMPTY | {"journal_lines": 8}, SETTINGS)
        monkeypatch.undo()
        assert os.listdir(tmp_path) == [CHECKPOINT_FILE]
        assert read_checkpoint(path, SETTINGS).journal_lines == 7

    @pytest.mark.skipif(os.name != "posix", reason="elsewhere the system does so itself")
    def test_names_are_as_durable_as_contents(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Or a power cut would take a new journal, with its charges, or bring an old checkpoint back."""
        synced: list[bool] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
        keeper = Checkpointer(tmp_path, SETTINGS)
        assert synced[-1]
        synced.clear()
        write_checkpoint(keeper.path, EMPTY, SETTINGS)
        keeper.close()
        assert synced == [False, True]

    @pytest.mark.parametrize(("number", "reason"), [(errno.EROFS, "read-only"), (errno.EACCES, "not allowed")])
    def test_a_folder_that_may_not_be_written_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
    ) -> None:
        def refuse(*args: object, **named: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", refuse)  # permissions would not stop root, who runs many a test
        with pytest.raises(EquidpError, match=reason):
            Checkpointer(tmp_path, SETTINGS)
        with pytest.raises(EquidpError, match=reason):
            write_checkpoint(tmp_path / CHECKPOINT_FILE, EMPTY, SETTINGS)

    def test_a_file_where_the_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("mine")
        for folder in (tmp_path / "runs", tmp_path / "runs" / "one"):
            with pytest.raises(EquidpError, match="a file stands where a folder should be"):
                write_checkpoint(folder / CHECKPOINT_FILE, EMPTY, SETTINGS)
        assert (tmp_path / "runs").read_text() == "mine"

    def test_a_folder_whose_names_are_not_made_durable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(folder: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(files, "sync_folder", refuse)
        with pytest.raises(EquidpError, match=r"Cannot write .*: Input/output error"):
            write_checkpoint(tmp_path / CHECKPOINT_FILE, EMPTY, SETTINGS)

    def test_a_write_that_the_system_cuts_short(self, tmp_path: Path) -> None:
        resource = pytest.importorskip("resource", reason="no limits of a process on this system")
        path, (soft, hard) = tmp_path / CHECKPOINT_FILE, resource.getrlimit(resource.RLIMIT_FSIZE)
        write_checkpoint(path, EMPTY, SETTINGS)
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, hard))
        try:
            with pytest.raises(EquidpError, match=r"Cannot write .*: File too large; raise the limit"):
                write_checkpoint(path, EMPTY, SETTINGS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path) == [CHECKPOINT_FILE]
        assert path.read_bytes() == before

    def test_what_a_killed_process_left_half_written_is_cleared(self, tmp_path: Path) -> None:
        (tmp_path / f".{CHECKPOINT_FILE}.0815.part").write_bytes(b"half")
        live(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [CHECKPOINT_FILE, JOURNAL_FILE]


def test_the_journal_is_written_before_the_step_runs(tmp_path: Path) -> None:
    seen: list[int] = []

    def at_step(done: int) -> None:
        lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
        entries = [json.loads(line.partition(" ")[2]) for line in lines]
        charged = sum(e["charge"]["count"] for e in entries if "charge" in e)
        seen.append(charged - sum(e["cancel"]["count"] for e in entries if "cancel" in e))
        assert seen[-1] >= done + 1

    live(tmp_path, at_step=at_step)
    assert len(seen) == PLAN.steps
    assert EVENT.count == 1
