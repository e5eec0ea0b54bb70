"""Trials in processes of their own: the result is that of one process, and no step is uncounted, whoever is killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.test_tuning_faults import LAW, records, settings, tuned

from equidp.accounting.dataset_ledger import DatasetLedger
from equidp.accounting.trials import Trials
from equidp.errors import EquidpError
from equidp.mechanism.secure import SecureRandom
from equidp.pipelines.tune import nodes
from equidp.sweep.apart import Apart
from equidp.training.checkpoint import StoppedError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="tune.workers is refused on Windows")
ALONE = nodes._trial_apart
SECURE = LAW | {"secure": True}


def test_two_workers_choose_what_one_chooses(tmp_path: Path) -> None:
    def of(workers: int) -> Any:
        given = settings(seed=3, tune={"workers": workers}, algorithm="dpsgd_f")
        return nodes.choose_model(
            records(), tmp_path / str(workers) / "run", given, {"dpsgd_f": given.algorithm("dpsgd_f")}, tmp_path, {}
        )

    found = [of(1), of(2)]
    count = len(list((tmp_path / "2" / "run").glob("nonprivate_trial-*")))
    assert count > 1  # else this seed tests nothing
    assert len(list((tmp_path / "2" / "run").glob(f"{nodes.LOG}-*.log"))) == count  # each had a process
    (weights, privacy, choice, *_), other = found
    assert (privacy, choice) == other[1:3]
    assert all(torch.equal(other[0].tensors[name], tensor) for name, tensor in weights.tensors.items())
    nodes.forget_trials(tmp_path / "2" / "run")
    assert not list((tmp_path / "2" / "run").iterdir())


def watched_trial(number: int, point: Any, parts: Any, folder: Path, *others: Any) -> None:
    """A trial that writes a byte for every noise before it is drawn; a process of trial 0 kills itself once."""
    witness, perturb = folder.parents[1] / f"{number}.steps", SecureRandom.perturb

    def noised(self: Any, values: Any, **how: Any) -> Any:
        with witness.open("ab") as file:
            file.write(b".")
        if number == 0 and steps(folder.parents[1])[0] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return perturb(self, values, **how)

    SecureRandom.perturb = noised  # type: ignore[method-assign]
    ALONE(number, point, parts, folder, *others)


def steps(place: Path) -> dict[int, int]:
    """Noises drawn, by trial."""
    return {int(path.stem): path.stat().st_size for path in place.glob("*.steps")}


def killed_tuning(place: Path) -> None:
    """A tuning of three trials and two workers, that dies as soon as both are at work."""
    start = Apart._start

    def starting(self: Any, number: int) -> None:
        start(self, number)
        while number == 1:
            if min(steps(place).get(n, 0) for n in (0, 1)) >= 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)

    Trials.draw = lambda self, uniform: 3  # type: ignore[method-assign]
    nodes._trial_apart, Apart._start = watched_trial, starting  # type: ignore[method-assign,assignment]
    tuned(place, settings(privacy=SECURE, tune={"workers": 2}))


@pytest.mark.slow
def test_a_tuning_of_two_workers_goes_on_when_it_or_a_worker_is_killed_and_no_step_is_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([nodes.__name__, "sklearn.datasets"])
    child = context.Process(target=killed_tuning, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    monkeypatch.setattr(nodes, "_trial_apart", watched_trial)
    given = settings(privacy=SECURE, tune={"workers": 2}, resume=True)
    _, privacy, choice, *_ = tuned(tmp_path, given)
    assert len(list((tmp_path / "run").glob("nonprivate_trial-*"))) == 3  # as many as were drawn
    entered = [one for one in DatasetLedger(tmp_path / "ledgers", "digits").entries() if one.part == "train"]
    assert len({one.run for one in entered}) == 1
    charged = [sum(event.count for event in one.events) for one in entered]
    drawn = {number: count - 1 for number, count in steps(tmp_path).items()}  # one of them is the score's
    assert charged[0] < max(drawn.values()) <= charged[-1]
    assert privacy["epsilon"] > choice["epsilon_declared"]
    assert sum(event["count"] for event in privacy["charged"]) == charged[-1]


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
@pytest.mark.parametrize("secure", [True, False])
def test_a_tuning_that_is_stopped_while_others_train_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, status: int, secure: bool
) -> None:
    """`Aborted!`, or nothing, was all that was said."""

    def stopped(*_: Any) -> None:
        raise stop

    monkeypatch.setattr(Apart, "run", stopped)
    with pytest.raises(StoppedError, match=r"is kept in .*resume=true") as told:
        tuned(tmp_path, settings(privacy=LAW | {"secure": secure}, tune={"workers": 2}))
    assert told.value.exit_code == status
    assert (tmp_path / "run" / nodes.DRAWN).is_file()


def test_a_trial_that_is_refused_ends_the_tuning_with_its_reason(tmp_path: Path) -> None:
    def log(number: int) -> Path:
        return tmp_path / str(number)

    with pytest.raises(EquidpError, match="no such thing"):
        Apart(refused, __name__, lambda number: (number,), os.open(os.devnull, os.O_RDONLY), log, 2).run([1])


def refused(number: int) -> None:
    raise EquidpError("no such thing")


def test_more_workers_do_not_make_an_unfinished_tuning_another_one(tmp_path: Path) -> None:
    kept = []
    for workers in (1, 2):
        of = settings(seed=3, tune={"workers": workers})
        held = of.data.model_copy(update={"evaluate_on": "validation"})
        parts = nodes.divide(records(), held, 0, [of.algorithm("dpsgd")])
        tuning = nodes.plan_tuning(parts.train, of)
        kept.append(nodes._drawn(tmp_path, nodes._facts(tuning, parts, of), tuning, of))
    assert kept[0] == kept[1]
